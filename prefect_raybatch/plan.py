"""Inventory and job to plan: shards and fingerprint. Pure; imports neither Ray nor Prefect."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from prefect_raybatch.errors import ConfigError, CorruptRun, PlanMismatch
from prefect_raybatch.functions import source_digest
from prefect_raybatch.job import RESERVED, UNWRITTEN, BatchJob, template_fields
from prefect_raybatch.records import QUARANTINE, InputFile, Plan, Shard, digest, dump
from prefect_raybatch.secrets import hide_argument, is_masked, masked
from prefect_raybatch.shard_sizes import choose_rows_per_shard
from prefect_raybatch.sizing import expected_engines
from prefect_raybatch.trust import check_types

if TYPE_CHECKING:
    import pyarrow as pa

# Every job field is in exactly one of these two tables (a test proves it). The first decide what
# the answers are; the second only how, where or how fast they are made.
FINGERPRINTED = {
    "name": "part of what the run is called; a renamed job is another job",
    "source.uri": "other rows",
    "source.format": "other parsing, other values",
    "source.limit": "other rows",
    "source.columns": "other columns in the result",
    "prompt.template": "other requests",
    "prompt.system": "other requests",
    "prompt.function": "other requests; its module's source counts",
    "prompt.on_null": "decides between failing and asking",
    "prompt.on_too_long": "decides between failing and asking about less",
    "sampling": "decides the answers, every field of it",
    "engine.model": "another model",
    "engine.revision": "another model",
    "engine.max_model_len": "decides which prompts are too long",
    "engine.max_model_len_percentile": "decides it, where max_model_len is auto",
    "engine.(extra)": "any other engine argument may change the answers, unless listed as free",
    "output.column": "other result columns",
    "output.columns": "other result columns",
    "output.postprocess": "other results; its module's source counts",
    "output.output_schema": "other result types",
    "output.row_number": "other result columns",
    "output.on_cut_off": "decides which rows are good; counts where it is fail",
}
FREE = {
    "source.rows_per_shard": "the plan of a run keeps its own; rows and answers are the same",
    "source.options": "how to reach the input; may hold secrets",
    "source.credentials_block": "how to reach the input",
    "engine.device": "where it runs",
    "engine.replicas": "how many work",
    "engine.tensor_parallel_size": "how one engine is spread",
    "engine.pipeline_parallel_size": "how one engine is spread",
    "engine.engines_per_gpu": "how many work on a GPU",
    "engine.order": "speed",
    "engine.deduplicate": "speed: only requests that have the same answer are asked once",
    "engine.stage": "speed: the same model, tokens and sampling",
    "engine.max_num_seqs": "speed",
    "engine.max_num_batched_tokens": "speed",
    "engine.batch_size": "size of shards, which the plan keeps",
    "engine.max_concurrent_batches": "speed",
    "engine.accelerator_type": "where it runs",
    "engine.num_cpus": "what Ray sets aside",
    "engine.env": "how the process runs; may hold secrets",
    "output.uri": "where the run directory is",
    "output.compact": "layout of the result, not its rows",
    "output.file_mb": "layout of the result, not its rows",
    "output.options": "how to reach the output; may hold secrets",
    "output.credentials_block": "how to reach the output",
    "limits": "when to give up; may be raised to finish a run",
    "cluster": "where it runs",
}
# Columns of the file table. The second came after the first runs; who says nothing is left out.
FILES_SAY = ("uri", "size", "etag", "mtime_ns", "rows")
FILES_MAY_SAY = ("ctime_ns", "inode", "footer", "values")
FREE_ENGINE_ARGUMENTS = frozenset(  # vLLM arguments that change speed or memory, not answers
    (
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "async_scheduling",
        "block_size",
        "disable_log_stats",
        "download_dir",
        "cpu_offload_gb",
        "max_parallel_loading_workers",
        "distributed_executor_backend",
        "safetensors_load_strategy",
        "hf_token",
    )
)


def fingerprint(
    job: BatchJob,
    model: Mapping[str, Any] | None = None,
    retry: Mapping[str, Any] | None = None,
) -> tuple[str, dict]:
    """(SHA-256, what went into it) of whatever in the job changes an answer.

    The identity of a model in a local or s3:// folder counts; a Hugging Face name counts as it is
    written, since the plan pins the commit it meant when the run began. `retry` says which failed
    rows of which run are the input ({parent, errors}), and takes the source's place.
    """
    engine = job.engine.model_extra or {}
    parts: dict[str, Any] = {
        "name": job.name,
        "source.uri": job.source.uris,
        "source.format": job.source.format,
        "source.limit": job.source.limit,
        "source.columns": job.source.columns,
        "prompt": job.prompt.model_dump(mode="json"),
        "sampling": job.sampling.model_dump(mode="json"),
        "engine.model": job.engine.model,
        "engine.revision": job.engine.revision,
        "engine.max_model_len": job.engine.max_model_len,
        "engine": {k: v for k, v in sorted(engine.items()) if k not in FREE_ENGINE_ARGUMENTS},
        "output.column": job.output.column,
        "output.columns": job.output.columns,
        "output.postprocess": job.output.postprocess,
        "output.schema": job.output.output_schema,
        "output.row_number": job.output.row_number,
    }
    # What came after the first runs counts where it is used: the others keep their fingerprint.
    if job.prompt.on_too_long == "quarantine":
        del parts["prompt"]["on_too_long"]
    if job.output.on_cut_off == "fail":
        parts["output.on_cut_off"] = "fail"
    if job.engine.max_model_len == "auto":
        parts["engine.max_model_len_percentile"] = job.engine.max_model_len_percentile
    if job.prompt.function:
        parts["prompt.function.source"] = source_digest(job.prompt.function, "prompt.function")
    if job.output.postprocess:
        parts["output.postprocess.source"] = source_digest(
            job.output.postprocess, "output.postprocess"
        )
    if model is not None and "@" not in str(model["identity"]):
        parts["model.identity"] = model["identity"]
    if retry is not None:
        parts = {k: v for k, v in parts.items() if not k.startswith("source.")}
        parts["retry"] = dict(retry)
    # What stands in records and messages is without keys; what is counted is not.
    return digest(dump(parts)), {**parts, "engine": hide_argument(parts["engine"], "engine")}


def settled(job: BatchJob, context: Mapping[str, Any] | None) -> BatchJob:
    """The job with engine.max_model_len: auto replaced by what a plan's `context` says."""
    if job.engine.max_model_len != "auto":
        return job
    if context is None:
        raise CorruptRun("plan.json says nothing of the context length that auto came to")
    engine = job.engine.model_copy(update={"max_model_len": context["max_model_len"]})
    return job.model_copy(update={"engine": engine})


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line a differing field: `field: old -> new`; groups are taken apart."""
    lines = []
    flat_old, flat_new = _flat(old), _flat(new)
    for key in sorted(set(flat_old) | set(flat_new)):
        before, after = flat_old.get(key), flat_new.get(key)
        if before != after:
            lines.append(f"{key}: {_short(before)} -> {_short(after)}")
    return lines


def check_same(plan: Plan, found: str, parts: Mapping[str, Any], where: str) -> None:
    """Raises `PlanMismatch` with a readable difference when the run belongs to another job."""
    if plan.fingerprint == found:
        return
    lines = difference(plan.parts, parts)
    if not lines:  # then it is what both hide
        fields = ", ".join(masked(parts.get("engine", {}), "engine")) or "a field"
        lines = [f"{fields}: hidden, and another value than before"]
    raise PlanMismatch(
        f"{where} was made by a job that gives other answers, so it cannot be continued:\n  "
        + "\n  ".join(lines)
        + "\nRun under another --run-key, or put the job back as it was."
    )


def shard_starts(rows: int, rows_per_shard: int) -> np.ndarray:
    """int64[shards + 1]: shard i holds input rows [starts[i], starts[i + 1])."""
    starts = np.arange(0, rows + rows_per_shard, rows_per_shard, dtype=np.int64)
    return np.minimum(starts[: math.ceil(rows / rows_per_shard) + 1], rows)


class Shards:
    """The shard table: `starts` is int64[count + 1]. Indexing gives a `Shard`."""

    def __init__(self, starts: np.ndarray):
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or (np.diff(starts) <= 0).any():
            raise CorruptRun("the shard table is not a partition of the input rows")
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, shard: int) -> Shard:
        if not 0 <= shard < len(self):
            raise CorruptRun(f"shard {shard} is not in the plan (0 to {len(self) - 1})")
        start = int(self.starts[shard])
        return Shard(shard, start, int(self.starts[shard + 1]) - start)


def shards_table(starts: np.ndarray) -> bytes:
    """Parquet bytes of the shard table (columns shard int32, start int64, rows int32)."""
    import pyarrow as pa

    return to_parquet(
        pa.table(
            {
                "shard": pa.array(np.arange(len(starts) - 1, dtype=np.int32)),
                "start": pa.array(starts[:-1]),
                "rows": pa.array(np.diff(starts).astype(np.int32)),
            }
        )
    )


def read_shards(data: bytes) -> Shards:
    table = from_parquet(data, "shard table", ["shard", "start", "rows"])
    start = table["start"].to_numpy()
    rows = table["rows"].to_numpy()
    if len(start) == 0 or start.dtype.kind != "i" or rows.dtype.kind != "i":
        raise CorruptRun("the shard table is empty or not of whole numbers")
    shards = Shards(np.append(start, start[-1] + rows[-1]).astype(np.int64))
    if not np.array_equal(np.diff(shards.starts), rows):
        raise CorruptRun("the shard table's rows do not match its starts")
    return shards


def files_table(files: Sequence[InputFile]) -> bytes:
    """Parquet bytes of the inventory, one row a file.

    Columns that came after the first runs are there only where they say something.
    """
    import pyarrow as pa

    schema = pa.schema(
        [
            ("uri", pa.string()),
            ("size", pa.int64()),
            ("etag", pa.string()),
            ("mtime_ns", pa.int64()),
            ("rows", pa.int64()),
            ("ctime_ns", pa.int64()),
            ("inode", pa.uint64()),
            ("footer", pa.string()),
            ("values", pa.string()),
        ]
    )
    rows = [asdict(f) | {"values": json.dumps(f.values) if f.values else None} for f in files]
    table = pa.Table.from_pylist(rows, schema)
    empty = [name for name in FILES_MAY_SAY if table[name].null_count == len(files)]
    return to_parquet(table.drop_columns(empty))


def read_files(data: bytes) -> tuple[InputFile, ...]:
    table = from_parquet(data, "file table", FILES_SAY, FILES_MAY_SAY)
    return tuple(
        InputFile(**row | {"values": _path_values(row.get("values"))}) for row in table.to_pylist()
    )


def _path_values(text: str | None) -> tuple[tuple[str, str | None], ...]:
    if text is None:
        return ()
    try:
        pairs = tuple((name, value) for name, value in json.loads(text))
        if all(isinstance(n, str) and isinstance(v, str | None) for n, v in pairs):
            return pairs
    except (ValueError, TypeError, RecursionError):
        pass
    raise CorruptRun(f"the file table holds {text[:80]!r} for the columns of a path")


def encode_schema(schema: pa.Schema) -> str:
    """An Arrow schema as base64 of its IPC form."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def decode_schema(text: str) -> pa.Schema:
    import pyarrow as pa

    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    except (ValueError, pa.ArrowException, OSError) as error:
        raise CorruptRun(f"a recorded schema is not readable: {error}") from None
    check_types(schema, "plan.json")
    return schema


def check_against_schema(job: BatchJob, schema: pa.Schema) -> None:
    """Whether template and output fit the input's columns; `ConfigError` names field and remedy."""
    import difflib

    for name in UNWRITTEN:
        if (job.sampling.model_extra or {}).get(name):
            raise ConfigError(
                f"sampling.{name} is not supported: only the answer's text is written; remove it"
            )
    names = list(schema.names)

    def known(name: str, field: str) -> None:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{field}: the input has no column {name!r}{hint} (columns: {', '.join(names)})"
            )

    for name in template_fields(job.prompt.template) if job.prompt.template else ():
        known(name, "prompt.template")
    for name in job.output.columns or ():
        known(name, "output.columns")
    kept = names if job.output.columns is None else job.output.columns
    added = [job.output.row_number]
    if job.output.postprocess is None:
        added.append(job.output.column)
    added += list(job.output.output_schema or ())
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
                f"output: column {name!r} would be written twice; rename it with output.column, "
                "output.row_number or output.schema"
            )
        if name in kept:
            raise ConfigError(
                f"output: column {name!r} is already an input column; rename it with "
                "output.column, output.row_number or output.schema, or leave the input's out "
                "with output.columns"
            )


def public_job(job: BatchJob) -> dict[str, Any]:
    """The job as the run directory keeps it: without store options and environment, which may
    hold secrets."""
    value = job.to_dict()
    for group in ("source", "output"):
        value.get(group, {}).pop("options", None)
    engine = value.get("engine", {})
    engine.pop("env", None)
    for name in job.engine.model_extra or {}:
        if is_masked(hide_argument(engine.get(name), name)):
            del engine[name]
    return value


def make_plan(
    job: BatchJob,
    run_key: str,
    files: Sequence[InputFile],
    schema: pa.Schema,
    row_bytes: float,
    model: Mapping[str, Any],
    snapshot: bool,
    retry: Mapping[str, Any] | None = None,
    numbers: bytes | None = None,
    engines: int | None = None,
    context: Mapping[str, Any] | None = None,
) -> tuple[Plan, dict[str, bytes]]:
    """The plan and the tables it names, {table name: Parquet bytes}, to be stored before it.

    `retry` ({parent, errors}) and `numbers` (the table of row numbers) make it a child run's. The
    shards are cut for `engines`, by default for those of a cluster that cannot be asked. `context`
    is what max_model_len: auto came to (`Plan.context`).
    """
    rows = sum(file.rows for file in files)
    engines = engines or expected_engines(job, None)
    size = choose_rows_per_shard(rows, row_bytes, job, engines)[0]
    starts = shard_starts(rows, size)
    shards, listing = shards_table(starts), files_table(files)
    tables = {
        f"{kind}-{digest(data)[:16]}.parquet": data
        for kind, data in (("shards", shards), ("files", listing), ("numbers", numbers))
        if data is not None
    }
    names = [*tables, None]
    found, parts = fingerprint(job, model, retry)
    plan = Plan(
        run_key=run_key,
        job_name=job.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        rows=rows,
        rows_per_shard=size,
        shards=len(starts) - 1,
        fingerprint=found,
        parts=parts,
        model=dict(model),
        input_schema=encode_schema(schema),
        shards_table=str(names[0]),
        files_table=str(names[1]),
        snapshot=snapshot,
        job=public_job(job),
        parent=retry["parent"] if retry else None,
        numbers_table=names[2],
        row_bytes=round(row_bytes, 1),
        context=context,
    )
    return plan, tables


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


def to_parquet(table: pa.Table) -> bytes:
    """A small table as the bytes of a Parquet file."""
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def from_parquet(
    data: bytes, what: str, names: Sequence[str], optional: Sequence[str] = ()
) -> pa.Table:
    """Columns `names` of such bytes, and of `optional` those that are there; `CorruptRun` says
    that `what` is not readable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        there = pq.read_schema(pa.BufferReader(data)).names if optional else ()
        wanted = [*names, *(name for name in optional if name in there)]
        return pq.read_table(pa.BufferReader(data), columns=wanted)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:  # names may be no UTF-8
        raise CorruptRun(f"the {what} is not readable: {error}") from None
