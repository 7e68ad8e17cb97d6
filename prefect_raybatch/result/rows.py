"""Reads the rows of a finished run, with their numbers, from its files or its pieces."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.ledger.family import Member
from prefect_raybatch.ledger.layout import KINDS, POSITION_COLUMN
from prefect_raybatch.ledger.part_files import local_disk
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import Commit, Part
from prefect_raybatch.ledger.row_numbers import RowNumbers
from prefect_raybatch.result.pieces import read_piece
from prefect_raybatch.source.parquet import batch_rows
from prefect_raybatch.storage.proof import CHUNK

Rows = tuple[str, str, np.ndarray]  # data, quarantine or left out; the file; numbers (int64)


def rows_of_member(member: Member) -> Iterator[Rows]:
    """Yield (kind, file, row numbers) of all rows of a run; together, the arrays have each row.

    The kind is "data", "quarantine" or "left out" (rows that postprocess left out). Only the column
    of row numbers is read from each file, and no checksums are compared. Rows left out, and all
    rows of a run without compaction, are taken from the commits. Raises `CorruptRun`, which names
    the file, for a missing or unreadable file.
    """
    ledger, plan = member.ledger, member.plan
    shards, numbers = ledger.shards(plan), ledger.numbers(plan)
    whole = _compact(member)
    for commit in ledger.commits(plan, ledger.listing(plan), exact=True):
        start = shards[commit.shard].start
        yield "left out", f"the commit of shard {commit.shard}", _of(numbers, start, commit.skipped)
        if not whole:
            yield from _committed(commit, numbers, start)
    if not whole:
        return
    for kind in KINDS:
        for part in _parts(member, kind):
            yield kind, part.path, _numbers_in(member, part)


def failed_numbers(member: Member) -> np.ndarray:
    """Return the ascending numbers of a finished run's failed rows.

    They are read as in `rows_of_member`, but no file of answered rows is read.
    """
    if _compact(member):
        failed = [_numbers_in(member, part) for part in _parts(member, "quarantine")]
    else:
        ledger, plan = member.ledger, member.plan
        shards, numbers = ledger.shards(plan), ledger.numbers(plan)
        failed = [
            _of(numbers, shards[commit.shard].start, commit.failed)
            for commit in ledger.commits(plan, ledger.listing(plan), exact=True)
        ]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *failed]))


def quarantine_of(member: Member, columns: list[str]) -> Iterator[tuple[str, np.ndarray, pa.Table]]:
    """Yield (file, row numbers, table of `columns`) of batches of a finished run's failed rows.

    The rows are in order of row number. Each file is copied to the local disk and compared with the
    checksum that finalize recorded. Memory: one batch or, without compaction, one shard. Raises
    `CorruptRun`, which names the file, for a faulty file.
    """
    if _compact(member):
        for part in _parts(member, "quarantine"):
            with _opened(member, part, check=True) as (parquet, name):
                read_columns = [name, *columns]
                for batch in parquet.iter_batches(
                    _batch_rows(parquet), columns=read_columns, use_threads=False
                ):
                    table = pa.Table.from_batches([batch])
                    rows = table[name].to_numpy().astype(np.int64)
                    yield part.path, rows, table.select(columns)
        return
    ledger, plan = member.ledger, member.plan
    shards, numbers = ledger.shards(plan), ledger.numbers(plan)
    for commit in ledger.commits(plan, ledger.listing(plan), exact=True):
        pieces = [piece for piece in commit.pieces if piece.kind == "quarantine"]
        if not pieces:
            continue
        table = pa.concat_tables([read_piece(ledger.store, commit.shard, p) for p in pieces])
        table = table.sort_by(POSITION_COLUMN)
        at = table[POSITION_COLUMN].to_numpy().astype(np.int64) + shards[commit.shard].start
        yield pieces[0].path, numbers.of(at), table.select(columns)


def numbered_rows(
    member: Member, kind: str, fault: Callable[[str], None]
) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Yield batches (row numbers, other columns) of a finished run's rows of `kind`, by row number.

    `kind` is "data" or "quarantine". Files that are missing or have changed are left out; `fault`
    is called with a message for each.
    """
    for part in _parts(member, kind):
        try:
            with _opened(member, part, check=True) as (parquet, name):
                for batch in parquet.iter_batches(_batch_rows(parquet), use_threads=False):
                    table = pa.Table.from_batches([batch])
                    yield table[name].to_numpy().astype(np.int64), table.drop_columns([name])
        except CorruptRun as error:
            fault(str(error))


def data_schema(member: Member) -> pa.Schema:
    """Return the schema of a finished run's answered rows.

    If no row is answered, it has only the column of row numbers.
    """
    for part in _parts(member, "data"):
        with _opened(member, part, check=False) as (parquet, _):
            return parquet.schema_arrow.remove_metadata()
    name = member.summary.row_number if member.summary else "_row"
    return pa.schema([(name, pa.int64())])


def data_of(member: Member) -> Iterator[pa.RecordBatch]:
    """Yield the answered rows of a finished run in order of row number.

    Raises `CorruptRun` for a file that is missing or whose checksum is not the recorded one. One
    batch is in memory at a time, and one file on the local disk.
    """
    schema = None
    for part in _parts(member, "data"):
        with _opened(member, part, check=True) as (parquet, _):
            schema = schema or parquet.schema_arrow.remove_metadata()
            for batch in parquet.iter_batches(_batch_rows(parquet), use_threads=False):
                yield from pa.Table.from_batches([batch]).cast(schema).to_batches()


def _committed(commit: Commit, numbers: RowNumbers, start: int) -> Iterator[Rows]:
    for kind, positions in (("data", commit.good), ("quarantine", commit.failed)):
        where = next((p.path for p in commit.pieces if p.kind == kind), "no piece")
        yield kind, where, _of(numbers, start, positions)


def _numbers_in(member: Member, part: Part) -> np.ndarray:
    with _opened(member, part, check=False) as (parquet, name):
        column = parquet.read([name], use_threads=False)[name]
        numbers: np.ndarray = column.to_numpy().astype(np.int64)
        return numbers


def _of(numbers: RowNumbers, start: int, positions: Positions) -> np.ndarray:
    return numbers.of(start + positions.numbers)


def _compact(member: Member) -> bool:
    return member.summary is None or member.summary.compact


def _parts(member: Member, kind: str) -> list[Part]:
    if member.summary is None:
        raise CorruptRun(f"{member.ledger.store.uri} is not finished: it has no _SUCCESS")
    return member.summary.of(kind)


@contextmanager
def _opened(member: Member, part: Part, check: bool) -> Iterator[tuple[pq.ParquetFile, str]]:
    """Within the `with` block, provide (Parquet file, name of its row number column) for a part.

    With `check`, the file is copied to the local disk and its checksum compared first. Raises
    `CorruptRun` if the part is missing, changed or unreadable.
    """
    row_number = member.summary.row_number if member.summary else "_row"
    uri = f"{member.ledger.store.uri}/{part.path}"
    with tempfile.TemporaryFile(prefix="raybatch-") as local:
        try:
            with member.ledger.store.open(part.path) as stream, reading_parquet(uri):
                source: IO[bytes] = stream
                if check:
                    _fetch(stream, local, part, uri)
                    source = local
                with pq.ParquetFile(source, pre_buffer=False) as parquet:
                    check_types(parquet.schema_arrow, uri)
                    if row_number not in parquet.schema_arrow.names:
                        raise CorruptRun(f"{uri} has no column {row_number}")
                    yield parquet, row_number
        except FileNotFoundError:
            raise CorruptRun(f"{uri}, which _SUCCESS names, is missing") from None


@contextmanager
def reading_parquet(uri: str) -> Iterator[None]:
    """Within the `with` block, convert pyarrow errors about a damaged Parquet file to `CorruptRun`.

    The error names `uri`. Errors of disk and network are raised unchanged.
    """
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # pyarrow's errors about pages and footers have no errno
        raise CorruptRun(
            f"{uri} is not readable Parquet, so it has changed since finalize wrote it: {error}"
        ) from None


def _fetch(stream: IO[bytes], local: IO[bytes], part: Part, uri: str) -> None:
    hashed = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        hashed.update(chunk)
        with local_disk():
            local.write(chunk)
    if hashed.hexdigest() != part.sha256:
        raise CorruptRun(
            f"{uri} is not what finalize wrote, so its rows cannot be trusted. Restore the file "
            "(raybatch verify lists all faults)"
        )
    local.seek(0)


def _batch_rows(parquet: pq.ParquetFile) -> int:
    metadata = parquet.metadata
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    row_bytes = max((g.total_byte_size / max(1, g.num_rows) for g in groups), default=1.0)
    return batch_rows(row_bytes)
