"""The layout of a result: which shards' rows go into which file. The first finalizer decides it.

The choice follows from plan and commits, but a later version may choose differently. So it is
recorded before the first file is written, and every finalizer follows the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import KINDS, LAYOUT, RESULT_FOLDERS
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import from_parquet, to_parquet
from prefect_raybatch.ledger.record_files import (
    put_record_if_absent,
    put_table,
    read_record,
    read_table,
)
from prefect_raybatch.ledger.records import Plan, TableName, digest, dump
from prefect_raybatch.ledger.strict import Count, StrictRecord, read_json

# Numbers and checksums of a file's rows are held while it is written: about 40 bytes a row, and
# 256 MiB of narrow rows (an id and a label) are a hundred million of them.
MOST_PART_ROWS = 1 << 22
# The process that assigns the writing of a file holds the commits of the file's shards, about 2 KB
# each; where a few rows of each shard fail, a single quarantine file would cover all shards.
MOST_PART_SHARDS = 10_000
WHOLE_SHARDS = (
    "whole shards in input order, a new file before file_bytes of pieces or "
    f"{MOST_PART_ROWS} rows or {MOST_PART_SHARDS} shards are passed"
)
_COLUMNS = ("kind", "index", "start", "stop", "rows")


@dataclass(frozen=True)
class PartSpan:
    """A file of the result, with number `index` among the files of its kind (data or quarantine).

    It holds all rows of that kind in shards [start, stop); there are `rows` of them.
    """

    kind: str
    index: int
    start: int
    stop: int
    rows: int

    @property
    def path(self) -> str:
        return f"{RESULT_FOLDERS[self.kind]}/part-{self.index:05d}.parquet"


@dataclass(frozen=True)
class PartLayout(StrictRecord):
    """`_raybatch/layout.json`: the layout of a result, i.e. which shards' rows are in which file.

    `plan` is the plan's hash. `rule` says in words how the shards were divided into files,
    `file_bytes` is the size that it used. `row_number` is the name of the column with row numbers.
    `schemas` holds the schema of data and of quarantine files (by kind), without that column, as
    Arrow IPC in base64. `table` is the name, which contains a hash, of the Parquet table with one
    `PartSpan` per file.
    """

    plan: str
    rule: str
    file_bytes: Count
    row_number: str
    schemas: Mapping[str, str]
    table: TableName


@dataclass(frozen=True)
class ShardSums:
    """Numbers of rows and bytes in the pieces of each shard: {kind of piece: int64[shards]}."""

    rows: Mapping[str, np.ndarray]
    bytes: Mapping[str, np.ndarray]

    @classmethod
    def empty(cls, shards: int) -> ShardSums:
        rows, sizes = ({kind: np.zeros(shards, np.int64) for kind in KINDS} for _ in range(2))
        return cls(rows, sizes)


def choose_spans(sums: ShardSums, file_bytes: int) -> tuple[PartSpan, ...]:
    """Divide the shards into files by the rule WHOLE_SHARDS; return files of data and quarantine.

    The pieces of a file's shards have at most `file_bytes` in total, unless a single shard has
    more.
    """
    spans: list[PartSpan] = []
    for kind in KINDS:
        index = start = stop = rows = held = shards = 0
        for shard in np.flatnonzero(sums.rows[kind]).tolist():
            size = int(sums.bytes[kind][shard])
            more = int(sums.rows[kind][shard])
            full = rows + more > MOST_PART_ROWS or shards == MOST_PART_SHARDS
            if held and (held + size > file_bytes or full):
                spans.append(PartSpan(kind, index, start, stop, rows))
                index, rows, held, shards = index + 1, 0, 0, 0
            if not held:
                start = shard
            stop, held = shard + 1, held + size
            rows, shards = rows + more, shards + 1
        if rows:
            spans.append(PartSpan(kind, index, start, stop, rows))
    return tuple(spans)


def spans_table(spans: Sequence[PartSpan]) -> bytes:
    """Return the spans as Parquet bytes, one row for each file."""
    import pyarrow as pa

    types = [pa.string(), pa.int32(), pa.int32(), pa.int32(), pa.int64()]
    schema = pa.schema(list(zip(_COLUMNS, types, strict=True)))
    return to_parquet(pa.Table.from_pylist([asdict(span) for span in spans], schema))


def put_layout(ledger: Ledger, made: PartLayout, spans: Sequence[PartSpan]) -> None:
    """Write a layout unless there is one; `read_layout` then returns the stored one."""
    put_table(ledger.store, made.table, spans_table(spans))
    put_record_if_absent(ledger.store, LAYOUT, dump(asdict(made)))


def layout_table(spans: Sequence[PartSpan]) -> str:
    """Return the name of the table that `spans_table` encodes; it contains the table's hash."""
    return f"layout-{digest(spans_table(spans))[:16]}.parquet"


def read_layout(ledger: Ledger, plan: Plan) -> tuple[PartLayout, tuple[PartSpan, ...]] | None:
    """Return the layout of a run and its files; None if no layout is recorded yet.

    Raises `CorruptRun` for a file that is not a layout, or that belongs to another plan.
    """
    try:
        layout = read_json(_LAYOUT, read_record(ledger.store, LAYOUT), LAYOUT)
    except FileNotFoundError:
        return None
    if layout.plan != plan.hash:
        raise CorruptRun(f"{LAYOUT} was written for another plan ({layout.plan[:12]})")
    table = from_parquet(read_table(ledger.store, layout.table, LAYOUT), layout.table, _COLUMNS)
    return layout, tuple(PartSpan(**row) for row in table.to_pylist())


def check_spans(spans: Sequence[PartSpan], sums: ShardSums) -> None:
    """Raise `CorruptRun` unless the files hold all committed rows once, in the shards' order.

    `sums` are the committed rows of each shard.
    """
    for kind in KINDS:
        reached = total = 0
        of_kind = [span for span in spans if span.kind == kind]
        for index, span in enumerate(of_kind):
            held = int(sums.rows[kind][max(0, span.start) : span.stop].sum())
            if span.index != index or not reached <= span.start < span.stop or held != span.rows:
                raise CorruptRun(
                    f"{LAYOUT}: file {span.index} of {kind} does not match the commits"
                )
            reached, total = span.stop, total + held
        if total != int(sums.rows[kind].sum()):
            raise CorruptRun(f"{LAYOUT} leaves out committed rows of {kind}")


_LAYOUT = TypeAdapter(PartLayout)
