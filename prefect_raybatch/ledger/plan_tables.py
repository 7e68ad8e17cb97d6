"""Encode and decode the tables that a plan names, and Arrow schemas. Does no I/O."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.ledger.records import InputFile, Shard
from prefect_raybatch.storage.parquet import parquet_table

if TYPE_CHECKING:
    import pyarrow as pa


# Columns of the file table.
FILE_FIELDS = ("uri", "size", "etag", "mtime_ns", "rows", "ctime_ns", "inode", "footer", "values")


class Shards:
    """A plan's table of shards. Indexing with a shard's number gives a `Shard`.

    `starts` is int64[shards + 1]: the first input row of each shard and, at the end, the number of
    all input rows. `work` is int64[shards], the relative work of each shard; None if all shards are
    alike or their work is unknown.
    """

    def __init__(self, starts: np.ndarray, work: np.ndarray | None = None):
        if starts.ndim != 1 or len(starts) < 2 or starts[0] != 0 or (np.diff(starts) <= 0).any():
            raise CorruptRun("the shard table is not a partition of the input rows")
        if work is not None and work.shape != (len(starts) - 1,):
            raise CorruptRun("the shard table must give the work of each shard")
        self.starts, self.work = starts, work

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, shard: int) -> Shard:
        if not 0 <= shard < len(self):
            raise CorruptRun(f"shard {shard} is not in the plan (0 to {len(self) - 1})")
        start = int(self.starts[shard])
        return Shard(shard, start, int(self.starts[shard + 1]) - start)


def shards_table(starts: np.ndarray, work: np.ndarray | None = None) -> bytes:
    """Return the shard table as Parquet bytes.

    Columns: shard int32, start int64, rows int32, and work int64 if given.
    """
    import pyarrow as pa

    columns = {
        "shard": pa.array(np.arange(len(starts) - 1, dtype=np.int32)),
        "start": pa.array(starts[:-1]),
        "rows": pa.array(np.diff(starts).astype(np.int32)),
    }
    if work is not None:
        columns["work"] = pa.array(work, pa.int64())
    return to_parquet(pa.table(columns))


def read_shards(data: bytes) -> Shards:
    """Decode the table that `shards_table` encoded; raise `CorruptRun` if it is malformed."""
    table = from_parquet(data, "shard table", ["shard", "start", "rows"], ["work"])
    start = table["start"].to_numpy()
    rows = table["rows"].to_numpy()
    if len(start) == 0 or start.dtype.kind != "i" or rows.dtype.kind != "i":
        raise CorruptRun("the shard table is empty, or its columns are not integers")
    work = table["work"].to_numpy() if "work" in table.column_names else None
    if work is not None and (work.dtype.kind != "i" or (work < 0).any()):
        raise CorruptRun("column work of the shard table must hold integers of at least 0")
    shards = Shards(np.append(start, start[-1] + rows[-1]).astype(np.int64), work)
    if not np.array_equal(np.diff(shards.starts), rows):
        raise CorruptRun("the shard table's rows do not match its starts")
    return shards


def files_table(files: Sequence[InputFile]) -> bytes:
    """Return the file table as Parquet bytes, one row for each input file."""
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
    return to_parquet(pa.Table.from_pylist(rows, schema))


def read_files(data: bytes) -> tuple[InputFile, ...]:
    """Decode the table that `files_table` encoded; raise `CorruptRun` if it is malformed."""
    table = from_parquet(data, "file table", FILE_FIELDS)
    return tuple(
        InputFile(**row | {"values": _path_values(row["values"])}) for row in table.to_pylist()
    )


def classifier_table(data: bytes) -> bytes:
    """Return the bytes of a Parquet table whose one row holds a classifier's file, `data`."""
    import pyarrow as pa

    return to_parquet(pa.table({"content": pa.array([data], pa.large_binary())}))


def read_classifier(data: bytes) -> bytes:
    """Return the classifier's file from a table that `classifier_table` encoded."""
    content = from_parquet(data, "classifier table", ["content"])["content"].to_pylist()
    if len(content) != 1 or not isinstance(content[0], bytes):
        raise CorruptRun("the classifier table must hold one row of bytes")
    return content[0]


def _path_values(text: str | None) -> tuple[tuple[str, str | None], ...]:
    if text is None:
        return ()
    try:
        pairs = tuple((name, value) for name, value in json.loads(text))
        if all(isinstance(n, str) and isinstance(v, str | None) for n, v in pairs):
            return pairs
    except (ValueError, TypeError, RecursionError):
        pass
    raise CorruptRun(f"the file table has {text[:80]!r} as path columns, not [name, value] pairs")


def encode_schema(schema: pa.Schema) -> str:
    """Encode an Arrow schema as base64 of its IPC form, from which `decode_schema` reads it."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def decode_schema(text: str) -> pa.Schema:
    """Return the Arrow schema that `encode_schema` encoded; raise `CorruptRun` if malformed."""
    import pyarrow as pa

    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    except (ValueError, pa.ArrowException, OSError) as error:
        raise CorruptRun(f"a recorded Arrow schema cannot be read: {error}") from None
    check_types(schema, "plan.json")
    return schema


def to_parquet(table: pa.Table) -> bytes:
    """Return a small table as the bytes of a Parquet file."""
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def from_parquet(
    data: bytes, what: str, names: Sequence[str], optional: Sequence[str] = ()
) -> pa.Table:
    """Read the columns `names`, and those of `optional` that exist, from a Parquet file's bytes.

    Raises `CorruptRun`, which calls the table `what`, if it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        there = pq.read_schema(pa.BufferReader(data)).names if optional else ()
        wanted = [*names, *(name for name in optional if name in there)]
        table = parquet_table(data, wanted)
        table.validate(full=True)  # else text that is not UTF-8 raises only when it is used
        return table
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:  # names may be no UTF-8
        raise CorruptRun(f"the {what} cannot be read: {error}") from None
