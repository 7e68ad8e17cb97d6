"""Reads and writes files of raw answers: as the engine returned them, before any parsing.

Later runs reuse them, so they hold everything that the finish stage needs of an engine's block, and
nothing of the row except the key (content hash) of its request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cachetools import LRUCache

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CHANCES,
    ENDS,
    FINISH,
    FORMED,
    KEY,
    PROMPT_TOKENS,
    REASONING_OPEN,
    STEPS,
    TEXTS,
    TRUNCATED,
    VECTOR,
)
from prefect_raybatch.storage import Store, read_ahead
from prefect_raybatch.storage.checked import BlockSums, block_sums, open_checked

NUMBER = "_row"  # column with the request's number in the requests phase
KEY_COLUMN, VECTOR_COLUMN, ORIGIN = "key", "vector", "origin"
# The columns of a block that are kept, each with its name and type in a file of raw answers.
RAW_COLUMNS = {
    KEY: (KEY_COLUMN, KEY.type),
    ANSWERS: ("token_ids", ANSWERS.type),
    TEXTS: ("texts", TEXTS.type),
    FINISH: ("finish_reason", FINISH.type),
    ENDS: ("finish_reasons", ENDS.type),
    PROMPT_TOKENS: ("prompt_tokens", PROMPT_TOKENS.type),
    FORMED: ("formed", FORMED.type),
    REASONING_OPEN: ("reasoning_open", REASONING_OPEN.type),
    TRUNCATED: ("truncated", TRUNCATED.type),
    CHANCES: ("probabilities", CHANCES.type),
    STEPS: ("logprobs", STEPS.type),
}
POOLED_COLUMNS = {**RAW_COLUMNS, VECTOR: (VECTOR_COLUMN, pa.list_(pa.float32()))}
RAW = pa.schema(list(RAW_COLUMNS.values()))
POOLED = pa.schema(list(POOLED_COLUMNS.values()))  # for a pooling task
CHECKED_AT_ONCE = 4  # files that are checked at the same time
KEPT_BYTES = 128 << 20  # size of a worker's cache of row groups: distant rows may share an answer


def _size(table: pa.Table) -> int:
    return min(int(table.nbytes), KEPT_BYTES)  # so that any row group fits into the cache


_lock = Lock()  # several runs of one process may use the caches at the same time
# Cached row groups by the SHA-256 of their file, so that a replaced file has another key.
_kept: LRUCache[tuple[str, tuple[str, ...], int], pa.Table] = LRUCache(KEPT_BYTES, _size)


def raw_columns(table: pa.Table) -> pa.Table:
    """Return the columns of an engine's block that a file of raw answers holds.

    They have the names and types of that file: POOLED_COLUMNS if the block has vectors, else
    RAW_COLUMNS. Columns that the block lacks are null.
    """
    pooled = VECTOR in table.column_names
    columns = [
        table[name].combine_chunks().cast(kind)
        if name in table.column_names
        else pa.nulls(table.num_rows, kind)
        for name, (_, kind) in (POOLED_COLUMNS if pooled else RAW_COLUMNS).items()
    ]
    return pa.Table.from_arrays(columns, schema=POOLED if pooled else RAW)


@dataclass(frozen=True)
class AnswerFile:
    """A Parquet file of answers; its first row has the number `first`.

    Its rows are numbered consecutively, or by its column `_row` if `numbered` is true. `path` is
    relative to the store that it is read from; every read is compared with the checksums `sums`.
    """

    path: str
    first: int
    sums: BlockSums
    numbered: bool = False


@dataclass(frozen=True)
class AnswerFiles:
    """Looks up the `columns` of rows by row number in `files`, which are sorted by `first`."""

    store: Store
    files: tuple[AnswerFile, ...]
    columns: tuple[str, ...]

    def take(self, numbers: np.ndarray) -> tuple[np.ndarray, pa.Table | None]:
        """Return (bool[len(numbers)]: whether a row has this number, table of the existing rows).

        The table is in the order of `numbers`; it is None if no row exists.
        """
        there = np.zeros(len(numbers), bool)
        order = np.argsort(numbers, kind="stable")
        wanted = numbers[order]
        found: list[pa.Table] = []
        starts = [file.first for file in self.files]
        at = 0
        while at < len(wanted):
            number = bisect_right(starts, int(wanted[at])) - 1
            stop = len(wanted)
            if number + 1 < len(starts):
                stop = int(np.searchsorted(wanted, starts[number + 1]))
            if number >= 0:
                rows, table = self._of_file(self.files[number], wanted[at:stop])
                there[order[at:stop]] = rows
                found += table
            at = stop
        if not found:
            return there, None
        rows = pa.concat_tables(found)
        back = np.argsort(order[there[order]], kind="stable")
        return there, rows.take(pa.array(back)).combine_chunks()

    def _of_file(self, file: AnswerFile, wanted: np.ndarray) -> tuple[np.ndarray, list[pa.Table]]:
        there, tables = np.zeros(len(wanted), bool), []
        for group, low, high in _footer_of(self.store, file).groups:
            a, b = np.searchsorted(wanted, [low, high])
            if a == b:
                continue
            table = self._group(file, group)
            if file.numbered:
                numbers = table[NUMBER].to_numpy()
                places = np.searchsorted(numbers, wanted[a:b])
                inside = np.minimum(places, len(numbers) - 1)
                good = numbers[inside] == wanted[a:b]
            else:
                inside, good = wanted[a:b] - low, np.ones(b - a, bool)
            there[a:b] = good
            tables.append(table.select(self.columns).take(pa.array(inside[good])))
        return there, tables

    def _group(self, file: AnswerFile, group: int) -> pa.Table:
        """Return row group number `group` of a file, from a cache if it was read recently."""
        names = (*self.columns, *([NUMBER] if file.numbered else []))
        key = (file.sums.sha256, names, group)
        with _lock:
            kept = _kept.get(key)
        if kept is not None:
            return kept
        metadata = _footer_of(self.store, file).metadata
        with open_checked(self.store, file.path, file.sums) as stream:
            parquet = pq.ParquetFile(stream, metadata=metadata, pre_buffer=False)
            table = parquet.read_row_group(group, columns=names, use_threads=False)
        with _lock:
            _kept[key] = table
        return table


@dataclass(frozen=True)
class _AnswerFooter:
    """A file's footer; `groups` has (row group, number of its first row, number after its last)."""

    metadata: pq.FileMetaData
    groups: list[tuple[int, int, int]]


_files: LRUCache[tuple[str, int, bool], _AnswerFooter] = LRUCache(4096)


def _footer_of(store: Store, file: AnswerFile) -> _AnswerFooter:
    """Return the footer of a file, cached by the file's SHA-256."""
    key = (file.sums.sha256, file.first, file.numbered)
    with _lock:
        known = _files.get(key)
    if known is None:
        with open_checked(store, file.path, file.sums) as stream:
            parquet = pq.ParquetFile(stream, pre_buffer=False)
        check_types(parquet.schema_arrow, file.path)
        known = _AnswerFooter(parquet.metadata, _spans(parquet.metadata, file))
        with _lock:
            _files[key] = known
    return known


def _spans(metadata: pq.FileMetaData, file: AnswerFile) -> list[tuple[int, int, int]]:
    spans, at = [], file.first
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not group.num_rows:
            continue
        low, high = at, at + group.num_rows
        if file.numbered:
            columns = (group.column(i) for i in range(group.num_columns))
            named = [c.statistics for c in columns if c.path_in_schema == NUMBER]
            if not named or named[0] is None or not named[0].has_min_max:
                raise CorruptRun(
                    f"{file.path} has no statistics of its row numbers, so its rows cannot be found"
                )
            low, high = int(named[0].min), int(named[0].max) + 1
        spans.append((number, low, high))
        at += group.num_rows
    return spans


@dataclass(frozen=True)
class NamedFile:
    """A file of answers as recorded: path, rows, and SHA-256 in hex, or its first digits."""

    path: str
    rows: int
    sha256: str


def in_order(store: Store, files: Sequence[NamedFile]) -> tuple[AnswerFile, ...]:
    """Return `files` with their rows numbered consecutively from 0, in the order of the files.

    The numbers follow from the recorded row counts. Raises `CorruptRun` for a file that is missing
    or whose SHA-256 differs from its record.
    """
    made, first = [], 0
    for file, sums in zip(files, _every_sum(store, files), strict=True):
        made.append(AnswerFile(file.path, first, sums))
        first += file.rows
    return tuple(made)


def numbered(store: Store, files: Sequence[tuple[int, NamedFile]]) -> tuple[AnswerFile, ...]:
    """Return files whose rows are numbered by their column `_row`.

    `files` are (number of the file's first row, file). Raises `CorruptRun` for a file that is
    missing or whose SHA-256 differs from its record.
    """
    every = _every_sum(store, [file for _, file in files])
    return tuple(
        AnswerFile(file.path, first, sums, numbered=True)
        for (first, file), sums in zip(files, every, strict=True)
    )


def _every_sum(store: Store, files: Sequence[NamedFile]) -> Iterator[BlockSums]:
    def read(file: NamedFile) -> BlockSums:
        return block_sums(store, file.path, file.sha256)

    return read_ahead(read, files, CHECKED_AT_ONCE, CHECKED_AT_ONCE)
