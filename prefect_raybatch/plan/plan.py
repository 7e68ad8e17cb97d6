"""Inventory and job to plan: shards and fingerprint. Pure; imports neither Ray nor Prefect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job import tasks
from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import RESERVED, is_web
from prefect_raybatch.job.output import LOGPROBS, PROBABILITIES, Output
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.sampling import UNWRITTEN
from prefect_raybatch.job.secrets import catalog_place, hide_argument, is_masked, recorded
from prefect_raybatch.job.size_spec import size_spec
from prefect_raybatch.ledger.many_uris import bounded_job, bounded_parts, too_many, uris_table
from prefect_raybatch.ledger.plan_tables import encode_schema, files_table, shards_table
from prefect_raybatch.ledger.records import QUARANTINE, InputFile, Plan, digest
from prefect_raybatch.plan.resolved import Resolved
from prefect_raybatch.plan.taken_by_vllm import check_taken_by_vllm
from prefect_raybatch.sizing.shards import choose_rows_per_shard
from prefect_raybatch.sizing.sizes import expected_engines

if TYPE_CHECKING:
    import pyarrow as pa

    from prefect_raybatch.source import Weights


def settled(job: BatchJob, context: Mapping[str, Any] | None) -> BatchJob:
    """The job with engine.max_model_len: auto replaced by what a plan's `context` says."""
    if job.engine.max_model_len != "auto":
        return job
    if context is None:
        raise CorruptRun("plan.json says nothing of the context length that auto came to")
    engine = job.engine.model_copy(update={"max_model_len": context["max_model_len"]})
    return job.model_copy(update={"engine": engine})


# Columns whose names give way, where they are left as they are by default, to the input's: the
# result of one job is the input of the next, and has both.
GIVE_WAY = ("row_number", "column")
UNLIKE = 1.25  # times the bytes a row of another: such shards are not taken in the input's order
MOST_FILE_MB = 4096  # a single PUT takes 5 GiB, and a file may be somewhat larger than its pieces


def with_free_names(job: BatchJob, names: Sequence[str]) -> BatchJob:
    """The job with `_row_2` (or `_row_3`, ...) in place of `_row` where the input has a column of
    that name, and likewise for `response`. A name that was chosen is left, and refused by
    `check_against_schema`."""
    update: dict[str, str] = {}
    # A function gets the answer under output.column, whatever the input has under that name.
    for field in GIVE_WAY if job.output.postprocess is None else GIVE_WAY[:1]:
        usual = Output.model_fields[field].default
        if getattr(job.output, field) == usual and usual in job.kept(names):
            free = (f"{usual}_{number}" for number in count(2))
            update[field] = next(name for name in free if name not in names)
    if not update:
        return job
    return job.model_copy(update={"output": job.output.model_copy(update=update)})


def _as_named(job: BatchJob, plan: Plan) -> BatchJob:
    """The job with the columns' names that its plan settled (`with_free_names`)."""
    kept = plan.job.get("output", {})
    update = {
        field: kept[field]
        for field in GIVE_WAY
        if getattr(job.output, field) == Output.model_fields[field].default
        and isinstance(kept.get(field), str)
    }
    if not update:
        return job
    return job.model_copy(update={"output": job.output.model_copy(update=update)})


def as_planned(job: BatchJob, plan: Plan) -> BatchJob:
    """The job with what its plan settled: the context length, names of columns, the schema of the
    answers and the chat template, whose file or class may have changed since, or not be here."""
    job = _as_named(settled(job, plan.context), plan)
    output = job.output.with_form(plan.parts.get("output.schema_model"))
    job = job if output is job.output else job.model_copy(update={"output": output})
    if job.prompt.chat_template is None:
        return job
    text = plan.parts.get("prompt.chat_template")
    if not isinstance(text, str):
        raise CorruptRun("plan.json does not hold the text of prompt.chat_template")
    prompt = job.prompt.model_copy(update={"chat_template": text})
    return job.model_copy(update={"prompt": prompt})


def shard_starts(rows: int, rows_per_shard: int) -> np.ndarray:
    """int64[shards + 1]: shard i holds input rows [starts[i], starts[i + 1])."""
    starts = np.arange(0, rows + rows_per_shard, rows_per_shard, dtype=np.int64)
    return np.minimum(starts[: math.ceil(rows / rows_per_shard) + 1], rows)


def shard_work(starts: np.ndarray, weights: Weights) -> np.ndarray | None:
    """int64[shards]: bytes of each shard's rows, by (rows, bytes) of all rows in order; None where
    that is not known, or where no shard has a quarter more than another."""
    if not weights or len(starts) < 3:
        return None
    rows, sizes = np.cumsum(np.array([(0, 0), *weights], np.int64), axis=0).T
    if rows[-1] != starts[-1]:
        return None
    work = np.diff(np.interp(starts, rows, sizes)).astype(np.int64)
    each = work / np.diff(starts)
    return work if each.max() > UNLIKE * each.min() else None


def check_against_schema(job: BatchJob, schema: pa.Schema) -> None:
    """Whether template and output fit the input's columns; `ConfigError` names field and remedy."""
    import difflib

    job = with_free_names(job, schema.names)
    if job.output.file_mb > MOST_FILE_MB:
        raise ConfigError(
            f"output.file_mb: {job.output.file_mb} is more than {MOST_FILE_MB}: a file of the "
            "result is written in one request, and stores take no larger ones; lower it"
        )
    for name in UNWRITTEN:
        if (job.sampling.model_extra or {}).get(name):
            raise ConfigError(
                f"sampling.{name} is not supported: only the answer's text is written; remove it"
            )
    check_taken_by_vllm(job)
    names = list(schema.names)
    rename = ["output.column", *job.output.parsed_columns, "output.row_number"]
    remedy = f"{', '.join(rename)} or output.schema"

    def known(name: str, field: str) -> None:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{field}: the input has no column {name!r}{hint} (columns: {', '.join(names)})"
            )

    for name, field in job.prompt.columns.items():
        known(name, field)
    _check_asked(job, names)
    check_chat_columns(job.prompt, schema)
    for name in job.prompt.images.columns:
        known(name, "prompt.images.columns")
        _check_image_column(schema.field(name))
    for name in job.output.columns or ():
        known(name, "output.columns")
    kept = job.kept(names)
    added = [job.output.row_number]
    if job.output.postprocess is None:
        form = job.output.answer_form
        several = int((job.sampling.model_extra or {}).get("n") or 1) > 1
        added += tasks.added_columns(job) if form is None or several else columns_of(form)
        added += job.output.parsed_columns.values()
    added += [*(job.output.output_schema or ()), *job.output.extras]
    added += [PROBABILITIES] if job.output.probabilities else []
    added += [LOGPROBS] if (job.sampling.model_extra or {}).get("logprobs") is not None else []
    for name in job.output.columns or ():
        if job.output.columns and job.output.columns.count(name) > 1:
            raise ConfigError(f"output.columns: {name!r} stands there twice; remove one")
    if job.output.row_number in QUARANTINE:
        raise ConfigError(
            f"output.row_number: the quarantine's files have a column {job.output.row_number!r} of "
            f"their own (as {', '.join(QUARANTINE)} are there); choose another name"
        )
    for name in added:
        if name.startswith(RESERVED):
            raise ConfigError(
                f"output: column {name!r} cannot be written: names that begin with {RESERVED} are "
                "ours; rename it with output.row_number or output.schema"
            )
        if added.count(name) > 1:
            raise ConfigError(
                f"output: column {name!r} would be written twice; rename it with {remedy}"
            )
        if name in kept:
            raise ConfigError(
                f"output: column {name!r} is already an input column; rename it with {remedy}, "
                "or leave the input's out with output.columns"
            )


def _check_asked(job: BatchJob, names: Sequence[str]) -> None:
    """`ConfigError` where all rows ask the same and get the same answer."""
    if not job.prompt.alike or _drawn_apart(job):
        return
    twice = [name for name in names if f"{{{{{name}}}}}" in (job.prompt.template or "")]
    how = f"{{{{{twice[0]}}}}} is that text in braces, and " if twice else ""
    raise ConfigError(
        f"prompt.template: has no {{Column}}, so all rows ask the same and get the same answer; "
        f"{how}{{{(twice or names)[0]}}} is the value of a row (columns: {', '.join(names)})"
    )


def alike_note(job: BatchJob) -> str | None:
    """What is said of a job whose rows all ask the same, where their answers may differ."""
    if not job.prompt.alike or not _drawn_apart(job):
        return None
    return (
        "prompt.template has no {Column}: all rows ask the same, and their answers differ by "
        "chance alone (sampling.temperature)"
    )


def _drawn_apart(job: BatchJob) -> bool:
    """Whether equal requests may get different answers."""
    drawn = job.sampling.temperature > 0 and (job.sampling.model_extra or {}).get("seed") is None
    return drawn and not tasks.pools(job.engine.task)


def _check_image_column(column: pa.Field) -> None:
    """`ConfigError` for a column that cannot hold images; what is in it shows row by row."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    data = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    named = {kind.field(i).name for i in range(kind.num_fields)} if pa.types.is_struct(kind) else ()
    if not (text or data or "bytes" in named or "path" in named):
        raise ConfigError(
            f"prompt.images.columns: column {column.name!r} is of type {column.type}; images are "
            "binary, a struct of bytes and path, text (a path or URL), or a list of these"
        )


def check_chat_columns(prompt: Prompt, schema: pa.Schema) -> None:
    """Whether the columns of conversations and documents can hold such; `ConfigError` if not."""
    import pyarrow as pa

    for field, name, texts in (
        ("prompt.messages", prompt.messages, False),
        ("prompt.documents", prompt.documents, True),
    ):
        if name is None:
            continue
        kind: Any = schema.field(name).type
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        inner = _listed(kind)
        if _is_text(kind) or (texts and inner is not None and _is_text(inner)):
            continue
        if inner is None or not (pa.types.is_struct(inner) or pa.types.is_map(inner)):
            what = "{title, text} or of texts" if texts else "{role, content}"
            raise ConfigError(
                f"{field}: column {name!r} is of type {schema.field(name).type}; it must hold "
                f"lists of {what}, or JSON text of such a list"
            )
        if pa.types.is_struct(inner) and not texts and inner.get_field_index("role") < 0:
            fields = ", ".join(inner.field(i).name for i in range(inner.num_fields))
            raise ConfigError(
                f"{field}: the messages of column {name!r} have no field role (but {fields}); "
                "rename who speaks to role and what is said to content"
            )


def _listed(kind: Any) -> Any:
    """What an Arrow list holds; None for another type."""
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return kind.value_type if any(test(kind) for test in lists) else None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in (*tests, pa.types.is_null))


def public_job(job: BatchJob) -> dict[str, Any]:
    """The job as the run directory keeps it: without store options, environment and what signs a
    URL, which may be secrets."""
    value = job.to_dict()
    for group in ("source", "output"):
        value.get(group, {}).pop("options", None)
    if any(is_web(uri) for uri in job.source.uris):
        plain = [recorded(uri) if is_web(uri) else uri for uri in job.source.uris]
        value["source"]["uri"] = plain[0] if isinstance(job.source.uri, str) else plain
    if job.output.publish:
        value["output"]["publish"] = [target.public() for target in job.output.publish]
    if job.source.catalog:
        value["source"]["catalog"] = catalog_place(job.source.catalog)
    engine = value.get("engine", {})
    engine.pop("env", None)
    for name in job.engine.model_extra or {}:
        if is_masked(hide_argument(engine.get(name), name)):
            del engine[name]
    return value


def make_plan(
    resolved: Resolved,
    run_key: str,
    files: Sequence[InputFile],
    schema: pa.Schema,
    row_bytes: float,
    snapshot: bool,
    numbers: bytes | None = None,
    engines: int | None = None,
    context: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
    increment: Mapping[str, Any] | None = None,
    weights: Weights = (),
) -> tuple[Plan, dict[str, bytes]]:
    """The plan and the tables it names, {table name: Parquet bytes}, to be stored before it.

    `numbers` is the table of row numbers of a run that retries failed rows. The shards are cut for
    `engines`, by default for those of a cluster that cannot be asked. `context` is what
    max_model_len: auto came to (`Plan.context`), `row_bytes` what a row is in memory, with its
    images prepared, `increment` what is reused, `table` which table at which version was copied,
    `weights` the bytes of rows by which shards are ordered (`Inventory.weights`).
    """
    job, retry = with_free_names(resolved.job, schema.names), resolved.retry
    rows = sum(file.rows for file in files)
    spec = size_spec(job)
    engines = engines or expected_engines(spec, None)
    size, _ = choose_rows_per_shard(spec, rows=rows, row_bytes=row_bytes, engines=engines)
    starts = shard_starts(rows, size)
    kept = public_job(job)
    uris = kept["source"]["uri"]
    made = {
        "shards": shards_table(starts, shard_work(starts, weights)),
        "files": files_table(files),
    }
    made |= {} if numbers is None else {"numbers": numbers}
    made |= {"uris": uris_table(uris)} if too_many(uris) else {}
    names = {kind: f"{kind}-{digest(data)[:16]}.parquet" for kind, data in made.items()}
    plan = Plan(
        run_key=run_key,
        job_name=job.name,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        rows=rows,
        rows_per_shard=size,
        shards=len(starts) - 1,
        fingerprint=resolved.fingerprint,
        parts=bounded_parts(resolved.parts),
        model=resolved.with_adapters(),
        input_schema=encode_schema(schema),
        shards_table=names["shards"],
        files_table=names["files"],
        snapshot=snapshot,
        job=bounded_job(kept),
        parent=retry["parent"] if retry else None,
        numbers_table=names.get("numbers"),
        uris_table=names.get("uris"),
        row_bytes=round(row_bytes, 1),
        context=context,
        table=table,
        increment=increment,
    )
    return plan, {names[kind]: data for kind, data in made.items()}
