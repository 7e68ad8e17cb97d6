"""Makes a run's plan, with shards and fingerprint, from its input files and a compiled job.

Pure; imports neither Ray nor Prefect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.checks import RESERVED
from prefect_raybatch.job.escalate import ANSWERED_BY, larger_named
from prefect_raybatch.job.judge import judge_fields
from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES
from prefect_raybatch.job.sampling import UNWRITTEN
from prefect_raybatch.job.vllm.engine_values import wrong_values
from prefect_raybatch.job.vllm.structured_outputs import (
    check_backend,
    check_form_parses,
    check_form_shape,
    check_labels_enforced,
)
from prefect_raybatch.ledger.many_uris import bounded_job, bounded_parts, too_many, uris_table
from prefect_raybatch.ledger.plan_tables import (
    classifier_table,
    encode_schema,
    files_table,
    shards_table,
)
from prefect_raybatch.ledger.records import QUARANTINE, InputFile, JsonObject, Plan, digest
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.sizing.shards import choose_rows_per_shard
from prefect_raybatch.sizing.sizes import check_step, expected_engines
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.request import PromptSpec, SamplingSpec
from prefect_raybatch.spec.result import FinishSpec, ParsingSpec
from prefect_raybatch.spec.run import Identity, RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.stages.result_columns import answer_columns
from prefect_raybatch.words import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

    from prefect_raybatch.source import Weights


UNLIKE = 1.25  # ratio of bytes per row from which shards are ordered by size
MOST_FILE_MB = 4096  # a single PUT takes 5 GiB, and a file may be somewhat larger than its pieces


def shard_starts(rows: int, rows_per_shard: int) -> np.ndarray:
    """Return int64[shards + 1]: shard i holds input rows [starts[i], starts[i + 1])."""
    starts = np.arange(0, rows + rows_per_shard, rows_per_shard, dtype=np.int64)
    return np.minimum(starts[: math.ceil(rows / rows_per_shard) + 1], rows)


def shard_work(starts: np.ndarray, weights: Weights) -> np.ndarray | None:
    """Return the bytes of each shard's rows (int64[shards]), to start the largest shards first.

    `weights` are (rows, bytes) of consecutive ranges of the input. Returns None if the order does
    not matter: for a single shard, for weights that are empty or do not cover all rows, or if the
    bytes per row of no two shards differ by more than a quarter.
    """
    if not weights or len(starts) < 3:
        return None
    rows, sizes = np.cumsum(np.array([(0, 0), *weights], np.int64), axis=0).T
    if rows[-1] != starts[-1]:
        return None
    work = np.diff(np.interp(starts, rows, sizes)).astype(np.int64)
    each = work / np.diff(starts)
    return work if each.max() > UNLIKE * each.min() else None


def check_against_schema(spec: RunSpec, schema: pa.Schema, judge: RunSpec | None) -> None:
    """Raise `ConfigError` if the job does not fit the input's columns, or can never succeed.

    Checks prompt and result columns, the size of result files and the settings for vLLM. In a
    cascade, both models are checked. The message names the field and what to do. `spec` must be
    compiled for these columns. `judge` is the result of `compile_judge`. It is None if the run is
    not judged.
    """
    if judge is not None:
        try:
            check_accepted_by_vllm(judge)
        except ConfigError as error:
            raise ConfigError(judge_fields(str(error))) from None
    if spec.first is not None:
        check_against_schema(spec.first, schema, judge=None)
    with larger_named(spec.first is not None):
        _check_own_model(spec, schema)


def _check_own_model(spec: RunSpec, schema: pa.Schema) -> None:
    """Check a run as `check_against_schema` does, without its judge and a cascade's first model."""
    names = list(schema.names)
    _check_writable(spec.output.layout.file_bytes, spec.sampling)
    check_accepted_by_vllm(spec)
    for name, field in spec.prompt.columns.items():
        _check_known(name, field, names)
    if not _answers_may_differ(spec.sampling, spec.engine.model):
        _check_fields_used(spec.prompt, names)
    check_chat_columns(spec.prompt, schema)
    for name in spec.prompt.image_columns:
        _check_known(name, "prompt.images.columns", names)
        _check_image_column(schema.field(name))
    for name in spec.finish.columns or ():
        _check_known(name, "output.columns", names)
    _check_result_columns(spec.finish, names, _added_columns(spec))


def _check_writable(file_bytes: int, sampling: SamplingSpec) -> None:
    """Raise `ConfigError` for settings whose result could not be written to the result files.

    These are a file size (output.file_mb) above MOST_FILE_MB and the sampling fields in
    `UNWRITTEN`. vLLM would compute what these fields ask for, but no column of the result holds it.
    """
    file_mb = file_bytes >> 20
    if file_mb > MOST_FILE_MB:
        raise ConfigError(
            f"output.file_mb: {file_mb} is more than {MOST_FILE_MB}. Result files are written in "
            "one request, which stores limit. Lower it"
        )
    for name in UNWRITTEN:
        if sampling.fields.get(name):
            raise ConfigError(
                f"sampling.{name} is not supported: only the answer's text is written. Remove it"
            )


def check_accepted_by_vllm(spec: RunSpec) -> None:
    """Raise `ConfigError` for settings with which no engine could start or every row would fail."""
    engine, sampling = spec.engine.model.vllm_arguments, spec.sampling
    if (wrong := wrong_values(engine)) is not None:
        raise ConfigError(wrong)
    check_step(spec.sizes, spec.sizes.context)
    if sampling.fields.get("thinking_token_budget") is not None:
        _check_thinking(spec.finish.parsing, engine)
    form, forms = sampling.form, engine.get("structured_outputs_config")
    try:
        check_backend(forms)
    except ValueError as error:
        raise ConfigError(f"engine.{error}") from None
    try:
        check_form_shape(form)
        check_form_parses(form, forms)
        where = "choice" if sampling.fields.get("choice") else "structured_outputs.choice"
        check_labels_enforced(sampling.choices, where, forms)
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from None


def _check_thinking(parsing: ParsingSpec | None, engine: JsonObject) -> None:
    parsers = [parsing and parsing.reasoning]
    for told in (engine, engine.get("reasoning_config"), engine.get("structured_outputs_config")):
        if isinstance(told, Mapping):
            parsers += [told.get("reasoning_parser"), told.get("reasoning_start_str")]
    if not any(parsers):
        raise ConfigError(
            "sampling.thinking_token_budget needs a reasoning parser. Name one in "
            "output.reasoning_parser, or remove thinking_token_budget"
        )


def _check_known(name: str, field: str, names: Sequence[str]) -> None:
    """Raise `ConfigError` if the input, with columns `names`, has no column `name`.

    `field` is the job field that names the column.
    """
    if name not in names:
        hint = did_you_mean(name, names)
        if {"custom_id", "body"} <= {*names}:
            hint += "; to answer an OpenAI batch file, set source.format: openai_batch"
        raise ConfigError(
            f"{field}: the input has no column {name!r}{hint} (columns: {', '.join(names)})"
        )


def _added_columns(spec: RunSpec) -> list[str]:
    """Return the columns that the result adds to the input's; a name may occur twice."""
    finish, sampling = spec.finish, spec.sampling
    added = [finish.row_number]
    if finish.postprocess is None:
        free = finish.schema is None or sampling.several
        own = answer_columns(finish.column, spec.engine.model.task)
        added += own if free else columns_of(finish.schema or "")
        added += () if finish.parsing is None else finish.parsing.columns.values()
    added += [*(finish.types or ()), *finish.extras]
    added += [PROBABILITIES] if finish.probabilities else []
    added += [ANSWERED_BY] if finish.answered_by else []
    added += [LOGPROBS] if sampling.logprobs is not None else []
    return added


def _check_result_columns(finish: FinishSpec, names: list[str], added: Sequence[str]) -> None:
    """Raise `ConfigError` if the result would have a column twice, or one with a reserved name."""
    kept = finish.kept(names)
    parsed = () if finish.parsing is None else finish.parsing.columns
    remedy = f"{', '.join(['output.column', *parsed, 'output.row_number'])} or output.schema"
    for name in finish.columns or ():
        if kept.count(name) > 1:
            raise ConfigError(f"output.columns: duplicate column {name!r}. Remove one")
    if finish.row_number in QUARANTINE:
        raise ConfigError(
            f"output.row_number: {finish.row_number!r} is a column of the quarantine files (they "
            f"have {', '.join(QUARANTINE)}). Choose another name"
        )
    for name in added:
        if name.startswith(RESERVED):
            raise ConfigError(
                f"output: column {name!r} cannot be written: names that begin with {RESERVED} are "
                "reserved. Rename it with output.row_number or output.schema"
            )
        if added.count(name) > 1:
            raise ConfigError(
                f"output: column {name!r} would be written twice. Rename it with {remedy}"
            )
        if name in kept:
            raise ConfigError(
                f"output: column {name!r} is also an input column. Rename it with {remedy}, "
                "or leave the input column out with output.columns"
            )


def _check_fields_used(prompt: PromptSpec, names: Sequence[str]) -> None:
    """Raise `ConfigError` if the template uses no column, so all rows make the same request."""
    if not prompt.alike:
        return
    twice = [name for name in names if f"{{{{{name}}}}}" in (prompt.template or "")]
    literal = f"{{{{{twice[0]}}}}} is literal text. " if twice else ""
    raise ConfigError(
        "prompt.template: no {Column}, so all rows make the same request and get the same answer. "
        f"{literal}Write {{{(twice or names)[0]}}} for the value of a row (columns: "
        f"{', '.join(names)})"
    )


def equal_requests_warning(spec: RunSpec) -> str | None:
    """Return a warning if all rows make the same request and their answers differ only by chance.

    Returns None if rows make different requests, or if equal requests get equal answers.
    """
    if not spec.prompt.alike or not _answers_may_differ(spec.sampling, spec.engine.model):
        return None
    return (
        "prompt.template has no {Column}, so all rows make the same request, and their answers "
        "differ only by chance (sampling.temperature)"
    )


def _answers_may_differ(sampling: SamplingSpec, request: ModelRequest) -> bool:
    """Return whether equal requests may get different answers: they are sampled without a seed."""
    return sampling.answers_may_differ and not request.pools


def _check_image_column(column: pa.Field) -> None:
    """Raise `ConfigError` if the type of a column cannot hold images; values are not checked."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    data = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    named = {kind.field(i).name for i in range(kind.num_fields)} if pa.types.is_struct(kind) else ()
    if not (text or data or "bytes" in named or "path" in named):
        raise ConfigError(
            f"prompt.images.columns: column {column.name!r} is of type {column.type}. Images are "
            "binary, a struct of bytes and path, text (a path or URL), or a list of these"
        )


def check_chat_columns(prompt: PromptSpec, schema: pa.Schema) -> None:
    """Raise `ConfigError` if the type of a column for messages or documents cannot hold them."""
    import pyarrow as pa

    for field, name, texts in (
        ("prompt.messages", prompt.messages, False),
        ("prompt.documents", prompt.documents, True),
    ):
        if name is None:
            continue
        kind: pa.DataType = schema.field(name).type
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        inner = _listed(kind)
        if _is_text(kind) or (texts and inner is not None and _is_text(inner)):
            continue
        if inner is None or not (pa.types.is_struct(inner) or pa.types.is_map(inner)):
            what = "{title, text} or texts" if texts else "{role, content}"
            raise ConfigError(
                f"{field}: column {name!r} is of type {schema.field(name).type}, but must hold "
                f"lists of {what}, or JSON text of such a list"
            )
        if pa.types.is_struct(inner) and not texts and inner.get_field_index("role") < 0:
            fields = ", ".join(inner.field(i).name for i in range(inner.num_fields))
            raise ConfigError(
                f"{field}: the messages in column {name!r} have no field role (fields: {fields}). "
                "Rename the speaker to role and the text to content"
            )


def _listed(kind: Any) -> Any:
    """Return the value type of an Arrow list type; None for another type."""
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return kind.value_type if any(test(kind) for test in lists) else None


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in (*tests, pa.types.is_null))


def _cut(
    sizes: SizeSpec, rows: int, row_bytes: float, engines: int | None
) -> tuple[int, np.ndarray]:
    """Return (rows per shard, row at which each shard starts, see `shard_starts`).

    `row_bytes` is the mean size of a row. `engines` is the number of engines, estimated if None.
    """
    engines = engines or expected_engines(sizes, None)
    size, _ = choose_rows_per_shard(sizes, rows=rows, row_bytes=row_bytes, engines=engines)
    return size, shard_starts(rows, size)


def make_plan(
    spec: RunSpec,
    identity: Identity,
    model: PinnedModel,
    job: JsonObject,
    run_key: str,
    files: Sequence[InputFile],
    schema: pa.Schema,
    row_bytes: float,
    snapshot: bool,
    numbers: bytes | None = None,
    engines: int | None = None,
    context: JsonObject | None = None,
    table: JsonObject | None = None,
    increment: JsonObject | None = None,
    weights: Weights = (),
    classifier: bytes | None = None,
) -> tuple[Plan, dict[str, bytes]]:
    """Return a run's plan and the tables that it names, as {table name: Parquet bytes}.

    Write the tables to the store before the plan. `model` is the pinned model with its adapters,
    `job` the job as it is recorded. `numbers` is the table of a retry's row numbers, as Parquet
    bytes. `classifier` has the bytes of the job's classifier file. `row_bytes` is the mean size of
    a row. `engines` is the number of engines (estimated if None). `weights` (see `shard_work`)
    order the shards. `snapshot` says that `files` are copies made at planning. For `context`,
    `table` and `increment` see the fields of `Plan`.
    """
    rows, retry = sum(file.rows for file in files), identity.retry
    size, starts = _cut(spec.sizes, rows, row_bytes, engines)
    names, tables = _plan_tables(starts, weights, files, numbers, job["source"]["uri"], classifier)
    plan = Plan(
        run_key=run_key,
        job_name=spec.name,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        rows=rows,
        rows_per_shard=size,
        shards=len(starts) - 1,
        fingerprint=identity.fingerprint,
        parts=bounded_parts(identity.parts),
        model=dict(model),
        input_schema=encode_schema(schema),
        shards_table=names["shards"],
        files_table=names["files"],
        snapshot=snapshot,
        job=bounded_job(job),
        parent=retry["parent"] if retry else None,
        numbers_table=names.get("numbers"),
        uris_table=names.get("uris"),
        classifier_table=names.get("classifier"),
        row_bytes=round(row_bytes, 1),
        context=context,
        table=table,
        increment=increment,
    )
    return plan, tables


def _plan_tables(
    starts: np.ndarray,
    weights: Weights,
    files: Sequence[InputFile],
    numbers: bytes | None,
    uris: Any,
    classifier: bytes | None,
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Encode the tables of a plan; return {kind: table name} and {table name: Parquet bytes}.

    The kinds "shards" and "files" always exist. "numbers" exists for a retry of failed rows: it has
    the rows' numbers in the original input, and the parameter `numbers` is this table as Parquet
    bytes. "uris" exists if the job lists too many source URIs (`uris`) to keep them in the plan
    itself. "classifier" exists if `classifier`, the bytes of a classifier file, is not None.
    """
    data = {
        "shards": shards_table(starts, shard_work(starts, weights)),
        "files": files_table(files),
    }
    data |= {} if numbers is None else {"numbers": numbers}
    data |= {"uris": uris_table(uris)} if too_many(uris) else {}
    data |= {} if classifier is None else {"classifier": classifier_table(classifier)}
    names = {kind: f"{kind}-{digest(table)[:16]}.parquet" for kind, table in data.items()}
    return names, {names[kind]: table for kind, table in data.items()}
