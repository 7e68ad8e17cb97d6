"""Asks a model about each row of a DataFrame; a call is a run in a cache folder."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import ConfigError, RayBatchError
from prefect_raybatch.frames.convert import read_data
from prefect_raybatch.frames.running import KEEP_SECONDS, run_call
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import template_fields
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.output import Output
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.open_run import open_run
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.stages.result_columns import result_columns
from prefect_raybatch.storage import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pydantic import BaseModel

    from prefect_raybatch.job.tasks import TaskName

ANSWERS_VARIABLE = "RAYBATCH_ANSWERS"  # variable that names the folder for runs of `ask`
REASON = "error"  # column with the reason why a row has no answer
FILLED = ("source", "prompt", "sampling", "engine", "output")  # job groups that a call sets
FOLDER_LENGTH = 16  # hex digits of the hash (prompt, sampling, engine) that names a runs folder
LABEL_TOKENS, TEXT_TOKENS = 16, 256  # default length of an answer, with and without `choice`
# Option names of other libraries (in order: Daft and Marvin; instructor; Daft) and ours.
FAMILIAR = {"labels": "choice", "response_model": "schema", "return_format": "schema"}
Data = TypeVar("Data")
Schema = Mapping[str, Any] | str | type["BaseModel"]


class RowsFailed(RayBatchError):
    """Some rows have no answer, and the call has `errors="raise"`.

    The answers to the other rows are stored; the same call reuses them.
    """


class CallOptions(TypedDict, total=False):
    """Options of `ask`, `embed`, `classify` and `score`; the help of `ask` describes them."""

    settings: Mapping[str, object]
    errors: Literal["column", "raise"]
    cache: str | os.PathLike[str]
    progress: bool | None
    keep_seconds: float
    engine: type


class AskOptions(CallOptions, total=False):
    """Options of `ask`; its help describes them."""

    choice: Sequence[str] | None
    labels: Sequence[str] | None
    schema: Schema | None
    response_model: Schema | None
    return_format: Schema | None
    system: str | None
    column: str
    max_tokens: int | None
    temperature: float


@dataclass(frozen=True)
class Answered:
    """The caller's data with the answer columns (`data`), and the run that answered.

    `run` is the run directory, for `open_run` and `raybatch report`. If the data has no rows, there
    is no run: `report` is None and `run` is "".
    """

    data: Any
    report: RunReport | None = field(repr=False)
    run: str

    def _repr_html_(self) -> str:
        from prefect_raybatch.report.html import fragment

        return fragment(self.report) if self.report is not None else "no rows"


@overload
def ask(
    data: list[str], prompt: str, *, model: str, **options: Unpack[AskOptions]
) -> list[dict[str, Any]]: ...
@overload
def ask(data: Data, prompt: str, *, model: str, **options: Unpack[AskOptions]) -> Data: ...
def ask(data: Any, prompt: str, *, model: str, **options: Unpack[AskOptions]) -> Any:
    """Ask a model about each row; return the data with the answers as new columns.

    `data` is a pandas or Polars DataFrame, a pyarrow Table or a list of dicts. It may also be a
    list of texts, which comes back as a list of dicts, or a pandas Series, which comes back as a
    DataFrame; their column is `text` unless the Series has a name. In `prompt` {Column} stands for
    the row's value. Index and order are kept; a row without an answer has nulls.

    model         Hugging Face name, folder, s3:// folder, or `demo`
    choice        labels; each answer is exactly one of them. May be called `labels`
    schema        pydantic class, JSON Schema or `package.module:Class`; its properties become typed
                  columns in place of the answer column. May be called `response_model` or
                  `return_format`
    system        system message
    column        name of the answer column; default `answer`
    max_tokens    longest answer in tokens; default 16 with `choice`, else 256
    temperature   from 0 (default: always the most probable token) to 2
    settings      further fields of the job, such as {"prompt.on_null": "empty"}; they win over the
                  options above
    errors        "column" (default): a row without an answer has the reason in a column `error`,
                  which exists only if a row failed; "raise": raise `RowsFailed` after the last row
    cache         folder or s3:// for the runs; default $RAYBATCH_ANSWERS, else
                  $XDG_CACHE_HOME/prefect_raybatch/answers
    progress      True: show a bar, and lines where there is neither a notebook nor a terminal;
                  False: nothing; default: only a bar
    keep_seconds  time that the engine waits for the next call of this process with the same model
                  and kind of answer; default 600, 0 ends it with the call. In a block
                  `with warm_engines():` it ends with the block instead
    engine        replaces the engine stage in tests

    Each call is a run in the cache. A call with the same values, prompt and options continues after
    a crash, an interrupt or a restart. Once complete, it returns the stored answers, and asks again
    only about rows that failed in the engine, unless the answer would be cut off again. A call with
    other data sends only requests that no complete call has sent. With temperature 0, equal rows
    are asked about once.

    Raises `ConfigError` for wrong data or options before an engine starts, and the errors of a run;
    the next call reuses the committed answers.
    """
    return ask_run(data, prompt, model=model, **options).data


async def ask_async(data: Any, prompt: str, *, model: str, **options: Unpack[AskOptions]) -> Any:
    """Call `ask` in a thread, which leaves the event loop free."""
    return await asyncio.to_thread(partial(ask, data, prompt, model=model, **options))


def ask_run(data: Any, prompt: str, *, model: str, **options: Unpack[AskOptions]) -> Answered:
    """Ask a model about each row; return the data, the report and the run directory.

    Parameters and errors are those of `ask`.
    """
    named = _by_our_names(options)
    choice, schema = named.pop("choice", None), named.pop("schema", None)
    system, column = named.pop("system", None), named.pop("column", "answer")
    temperature, max_tokens = named.pop("temperature", 0.0), named.pop("max_tokens", None)
    if choice is not None and schema is not None:
        raise ConfigError("choice and schema exclude each other. Give one of them")
    if isinstance(choice, str):
        raise ConfigError(f"choice is the text {choice!r}. Give a list of labels")
    if max_tokens is None:
        max_tokens = TEXT_TOKENS if choice is None else LABEL_TOKENS
    sampling: dict[str, object] = {"temperature": temperature, "max_tokens": max_tokens}
    if choice is not None:
        sampling["choice"] = list(choice)
    fields: dict[str, Any] = {
        "prompt": {"template": prompt} | ({} if system is None else {"system": system}),
        "sampling": sampling,
        "engine": {"model": model, "order": "run" if temperature == 0 else "auto"},
        "output": {"column": column} | ({} if schema is None else {"schema_model": _json(schema)}),
    }
    return _asked(data, "ask", fields, named)


def _by_our_names(options: AskOptions) -> Any:
    """Return the options, with other libraries' names (FAMILIAR) such as `labels` replaced by ours.

    Raises `ConfigError` if an option is given under both names.
    """
    named: dict[str, object] = dict(options)
    for familiar, ours in FAMILIAR.items():
        if familiar in named:
            if ours in named:
                raise ConfigError(f"{familiar} and {ours} are the same option. Give one of them")
            named[ours] = named.pop(familiar)
    return named


def embed(
    data: Data, text: str, *, model: str, column: str = "vector", **options: Unpack[CallOptions]
) -> Data:
    """Embed a text of each row; return the data with a column of vectors.

    `text` is a template such as "{title}. {abstract}". Vectors have the Euclidean length 1.
    """
    answers: Data = _pooled(data, "embed", text, model, column, options).data
    return answers


def classify(
    data: Data, text: str, *, model: str, column: str = "label", **options: Unpack[CallOptions]
) -> Data:
    """Label a text of each row with a classification model; return the data with a label column.

    `text` is a template such as "{title}. {abstract}". The probability of each label is in a second
    column, whose name is `column` followed by `_probabilities`.
    """
    answers: Data = _pooled(data, "classify", text, model, column, options).data
    return answers


def score(
    data: Data,
    text: str,
    second: str,
    *,
    model: str,
    column: str = "score",
    **options: Unpack[CallOptions],
) -> Data:
    """Score the two texts of each row with a model; return the data with a column of scores.

    `text` and `second` are templates such as "{query}" and "{passage}".
    """
    settings = {"prompt.second": second, **(options.get("settings") or {})}
    answers: Data = _pooled(
        data, "score", text, model, column, {**options, "settings": settings}
    ).data
    return answers


def _pooled(
    data: object, task: TaskName, text: str, model: str, column: str, options: CallOptions
) -> Answered:
    fields: dict[str, Any] = {
        "prompt": {"template": text},
        "engine": {"model": model, "task": task},
        "output": {"column": column},
    }
    return _asked(data, task, fields, options)


def _json(schema: Schema) -> Mapping[str, Any] | str:
    if isinstance(schema, Mapping | str):
        return schema
    make = getattr(schema, "model_json_schema", None)
    if make is None:
        raise ConfigError(
            f"schema is {schema!r}. Give a pydantic class, a JSON Schema or package.module:Class"
        )
    described: Mapping[str, Any] = make()
    return described


def _asked(data: object, name: str, fields: dict[str, Any], options: CallOptions) -> Answered:
    import pyarrow as pa

    _check_options(name, options)
    errors = options.get("errors", "column")
    place = _place(options.get("cache"))
    job = _job(name, fields, options.get("settings", {}), place)
    wanted = _columns_of(job)
    if not wanted:
        raise ConfigError(
            f"{name}(): the text {job.prompt.template!r} names no column, so each row would be the "
            "same. Write the name of a column in braces, such as {text} for a list of texts"
        )
    table, add, names = read_data(data, wanted)
    columns = _answer_columns(job, table.column_names)
    if errors == "column" and REASON in columns:
        raise ConfigError(
            f"an answer column has the name {REASON!r}, as the column of reasons has. Rename it "
            '(column= or a property of the schema), or set errors="raise"'
        )
    _check_names([*columns, *([REASON] if errors == "column" else [])], names)
    if table.num_rows == 0:
        return Answered(add(pa.table(columns)), None, "")
    stored = _stored(table, place, job.source.options)
    job = edited(job, {"source.uri": stored}, f"the job of {name}()")
    keep, progress = options.get("keep_seconds", KEEP_SECONDS), options.get("progress")
    try:
        report = run_call(resolve(job), keep, progress, options.get("engine"))
    except KeyboardInterrupt:
        # `from None`: the traceback of the waiting loop would hide the line that helps.
        raise KeyboardInterrupt(
            f"{name}() was stopped. The same call continues with the answers that it has"
        ) from None
    answers, reasons = _answers(report, job.output, columns)
    if reasons is not None:
        if errors == "raise":
            raise _failed(report, reasons.to_pylist())
        answers = answers.append_column(REASON, reasons)
    return Answered(add(answers), report, report.run)


def _check_options(name: str, options: CallOptions) -> None:
    """Raise `TypeError` for an unknown option, as Python does, and `ConfigError` for a bad value.

    `name` is the called function, such as `ask`.
    """
    for option in options:
        if option not in CallOptions.__annotations__:
            near = get_close_matches(option, AskOptions.__annotations__, 1)
            if name != "ask" and FAMILIAR.get(option, option) in ("choice", "schema"):
                hint = f". For labels or types of your own, use ask(..., {option}=...)"
            else:
                hint = f". Did you mean {near[0]!r}?" if near else ""
                hint = hint or '. Fields of a job go into settings={"sampling.top_p": 0.5}'
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}{hint}")
    for key, value in (options.get("settings") or {}).items():
        if isinstance(value, Mapping) and key in FILLED:
            inner = next(iter(value), "FIELD")
            raise ConfigError(
                f"settings: {key!r} would replace the whole group. Name its fields, such as "
                f'settings={{"{key}.{inner}": ...}}'
            )
    errors, keep = options.get("errors", "column"), options.get("keep_seconds", KEEP_SECONDS)
    if errors not in ("column", "raise"):
        raise ConfigError(f'errors is {errors!r}. Give "column" or "raise"')
    if not isinstance(keep, int | float) or keep < 0:
        raise ConfigError(f"keep_seconds is {keep!r}. Give a number of seconds, 0 for none")


def _place(cache: str | os.PathLike[str] | None) -> str:
    """Return the folder or URI for the runs and inputs of calls; None is the default cache.

    Creates a missing local folder, readable by its owner only.
    """
    if cache is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache = os.environ.get(ANSWERS_VARIABLE) or Path(home) / "prefect_raybatch" / "answers"
    place = str(cache)
    if "://" not in place:
        Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def _job(
    name: str, fields: dict[str, Any], settings: Mapping[str, object] | None, place: str
) -> BatchJob:
    """Return the job of a call of the function `name`; the caller must still set `source.uri`.

    `settings` ({"group.field": value}) override `fields`. Unless they set `output.uri`, runs with
    the same prompt, sampling and engine share a folder of the cache `place`, so that each can reuse
    the answers of the others.
    """
    runs, where = f"{place}/runs", f"the job of {name}()"
    made = {
        "name": name,
        "source": {"uri": f"{place}/inputs/unknown.parquet"},
        "limits": {"max_failed_fraction": 1.0},
        "reuse": "all",
        **fields,
    }
    made["output"] = {"uri": runs, "columns": [], **made["output"]}
    job = edited(BatchJob.from_dict(made, where), settings or {}, where)
    if job.output.uri != runs:
        return job
    asked = job.model_dump(mode="json", include={"name", "prompt", "sampling", "engine"})
    question = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return edited(job, {"output.uri": f"{runs}/{question[:FOLDER_LENGTH]}"}, where)


def _columns_of(job: BatchJob) -> list[str]:
    """Return the input columns that the job needs."""
    prompt = job.prompt
    wanted = [*template_fields(prompt.template or ""), *template_fields(prompt.second or "")]
    wanted += [one for one in (prompt.messages, prompt.documents, prompt.adapter_column) if one]
    wanted += [*prompt.images.columns, *(job.output.columns or ())]
    return list(dict.fromkeys(wanted))


def _stored(table: pa.Table, place: str, options: StoreOptions) -> str:
    """Write the input to `place`/inputs as a Parquet file named by its hash; return the file's URI.

    `options` are those of the store, with which the run reads the file. Does nothing if the file
    exists.
    """
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    name = f"{hashlib.sha256(buffer.getbuffer()).hexdigest()}.parquet"
    store = open_store(f"{place}/inputs", options or None)
    store.put_if_absent(name, buffer.getvalue())
    return f"{store.uri}/{name}"


def _answers(
    report: RunReport, output: Output, expected: Mapping[str, pa.Array]
) -> tuple[pa.Table, pa.ChunkedArray | None]:
    """Return (answer columns, reasons), both with one value for each input row.

    A row without an answer has nulls and a reason; the reason of any other row is null. The second
    value is None if no row failed. `output` is the job's. `expected` is {answer column: empty array
    of its type}; columns that the result lacks, because all rows failed, are added as nulls.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    run = open_run(report.run, output.options or None)
    rows = pa.array(range(report.rows))
    good, failed = run.dataset().to_table(), run.quarantine().to_table()

    def spread(column: pa.ChunkedArray, of: pa.Table) -> pa.ChunkedArray:
        return column.take(pc.index_in(rows, value_set=of[number].combine_chunks()))

    number = output.row_number
    columns = {name: spread(good[name], good) for name in good.column_names if name != number}
    for name, array in expected.items():
        if name not in columns:
            columns[name] = pa.nulls(report.rows, array.type)
    if not report.failed:
        return pa.table(columns), None
    reason = pc.binary_join_element_wise(failed["error"], failed["message"], ": ")
    return pa.table(columns), spread(reason, failed)


def _answer_columns(job: BatchJob, given: Sequence[str]) -> dict[str, pa.Array]:
    """Return the job's answer columns as empty arrays.

    `given` are the names of the input columns. A column whose Arrow type is not certain before a
    run has type null.
    """
    import pyarrow as pa

    spec = compile_job(job, given)
    made = result_columns(spec.finish, spec.sampling, spec.engine.model.task)
    columns = {}
    for name, kind in made:
        try:
            columns[name] = pa.array([], pa.type_for_alias(kind.partition(" ")[0]))
        except ValueError:
            columns[name] = pa.array([], pa.null())
    columns.pop(job.output.row_number, None)
    return columns


def _check_names(added: Sequence[str], names: Sequence[str]) -> None:
    for name in added:
        if name not in names:
            continue
        if name == REASON:
            remedy = 'Rename it, or set errors="raise"'
        else:
            remedy = "Rename one of them (column= names the answer)"
        raise ConfigError(f"the data has a column {name!r}, as the answers have. {remedy}")


def _failed(report: RunReport, reasons: Sequence[str | None]) -> RowsFailed:
    first = next(i for i, reason in enumerate(reasons) if reason is not None)
    return RowsFailed(
        f"{report.failed:,} of {report.rows:,} rows have no answer. Row {first}: {reasons[first]}. "
        f'The others are kept; errors="column" returns them with the reasons. Run: {report.run}'
    )
