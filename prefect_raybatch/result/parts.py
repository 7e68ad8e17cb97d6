"""Writes one file of a result exactly once, from any process and with any number of tries.

Two finalizers write the same rows under the same names, but with another version of pyarrow the
bytes differ. So an existing file with the same rows is kept as it is, and `_SUCCESS` names the
files that exist, whoever wrote them.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun, SourceError
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.ledger.layout import POSITION_COLUMN, SUCCESS, row_sums_path
from prefect_raybatch.ledger.part_files import PartFiles, local_disk
from prefect_raybatch.ledger.part_layout import PartSpan
from prefect_raybatch.ledger.records import Commit, Part, digest
from prefect_raybatch.result.parquet_footer import (
    GroupFigures,
    footer_at_end,
    footer_figures,
    footer_of,
)
from prefect_raybatch.result.part_notes import FileSeen, PartNote
from prefect_raybatch.result.pieces import read_pieces
from prefect_raybatch.result.row_groups import Columns, RowGroupFile, encoded_columns
from prefect_raybatch.result.row_sums import decode, encode, row_sums
from prefect_raybatch.storage import FileInfo, Store, Sums, holds, read_ahead
from prefect_raybatch.storage.proof import bad_upload, sha256_of

log = logging.getLogger("prefect_raybatch.result.finalize")

UNREADABLE = (
    *(pa.ArrowException, OSError, ValueError, LookupError, TypeError),
    RecursionError,
    *(CorruptRun, SourceError),
)  # errors of reading a file that is not valid Parquet
LOOKS = 6  # checks of one stored file; each may write it, for the next one to check
SHARDS_AHEAD = 4  # shards whose pieces are read while one is being written
# Shards of fewer rows share a row group: each group costs a reader 0.3 to 1 KB per column, and if
# one row in a thousand fails, a shard has only 4 rows in quarantine.
LEAST_GROUP_ROWS = 1_000
GATHERED = np.array([10_000, 16 << 20])  # rows or bytes at which a shared group is closed


@dataclass(frozen=True)
class PartTask:
    """Everything that is needed to write one file of the result.

    `commits` are the commits of the file's shards. They have only the pieces of the file's kind.
    `starts` are the input rows at which these shards begin. `numbers` (int64) are the row numbers
    of all input rows from `starts[0]` to the end of the last shard; None if row numbers equal
    positions in the run's input. `row_number` is the name of the column of row numbers. `schema`
    has the other columns of the file. With `read_back`, a written file's ETag is not accepted as
    proof of its content. `layout` is the name of the layout's table, for the note about the file;
    None to write no note.
    """

    span: PartSpan
    path: str
    row_number: str
    schema: pa.Schema
    commits: tuple[Commit, ...]
    starts: tuple[int, ...]
    numbers: np.ndarray | None = None
    read_back: bool = False
    layout: str | None = None

    def numbers_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the row numbers (int64) of the rows at `positions` in the run's input."""
        return positions if self.numbers is None else self.numbers[positions - self.starts[0]]


def write_part(store: Store, task: PartTask) -> Part:
    """Write the file of `task`, or keep an existing one with the same rows; check what is stored.

    Raises `CorruptRun`, which names the piece, if a piece is missing or changed. Raises it also if
    the run is finished by another process while this file is still to be written. Raises StoreError
    if the local disk is full, and the store's errors. It is safe to call this again after any of
    these errors, and to call it concurrently for the same file.
    """
    file = _PartFile(store, task)
    try:
        load = partial(_load, store)
        for start, (_, table, piece) in read_ahead(
            load, zip(task.starts, task.commits, strict=True), SHARDS_AHEAD, SHARDS_AHEAD
        ):
            positions = table[POSITION_COLUMN].to_numpy().astype(np.int64) + start
            file.add(table, task.numbers_of(positions), piece)
        return file.end()
    finally:
        file.discard()
        file.pool.shutdown(wait=False, cancel_futures=True)


def _load(store: Store, item: tuple[int, Commit]) -> tuple[int, tuple[str, pa.Table, bytes | None]]:
    (piece,) = read_pieces(store, item[1])
    return item[0], piece


def check_unfinished(store: Store) -> None:
    """Raise `CorruptRun` if the run is finished, because its result must not change any more."""
    with suppress(FileNotFoundError):
        store.stat(SUCCESS)
        raise CorruptRun(f"{store.uri} is finished by another process; its result is complete")


class _PartFile(PartFiles):
    """Writes the file of a `PartTask`, first to the local disk.

    Call `add` for each shard in order, then `end`.
    """

    def __init__(self, store: Store, task: PartTask) -> None:
        super().__init__(store, task.path.rpartition("/")[0], task.span.index)
        self._task = task
        self._rows: list[np.ndarray] = []
        self._sums: list[Future[np.ndarray]] = []
        self._gathered: list[tuple[pa.Table, np.ndarray, bytes | None]] = []
        self._held = np.zeros(2, np.int64)  # rows and bytes of the gathered tables
        self.pool = ThreadPoolExecutor(1)  # computes checksums while Parquet is written

    def add(self, table: pa.Table, numbers: np.ndarray, piece: bytes | None) -> None:
        """Add the rows of a shard: `table`, with positions in its first column, and row `numbers`.

        A shard with many rows becomes a row group; small neighbouring shards share one. `piece` has
        the bytes of a Parquet file with exactly this table, None if there is none.
        """
        schema = self._task.schema
        if table.column_names[0] != POSITION_COLUMN or not table.schema.remove(0).equals(schema):
            piece = None
        table = table.drop_columns([POSITION_COLUMN]).cast(schema)
        self.rows += table.num_rows
        if table.num_rows >= LEAST_GROUP_ROWS:
            self._close_gathered()
            self._add_group(table, numbers, piece)
            return
        self._gathered.append((table, numbers, piece))
        self._held += np.array([table.num_rows, table.nbytes])
        if (self._held >= GATHERED).any():
            self._close_gathered()

    def _close_gathered(self) -> None:
        """Write the gathered small shards as one row group."""
        gathered, self._gathered = self._gathered, []
        self._held[:] = 0
        if len(gathered) == 1:
            self._add_group(*gathered[0])
        elif gathered:
            tables, numbers, _ = zip(*gathered, strict=True)
            self._add_group(pa.concat_tables(tables), np.concatenate(numbers), None)

    def _add_group(self, table: pa.Table, numbers: np.ndarray, piece: bytes | None) -> None:
        if self._sums:
            self._sums[-1].result()  # at most one table waits
        self._rows.append(numbers)
        self._sums.append(self.pool.submit(row_sums, table))
        numbered = encoded_columns(pa.table({self._task.row_number: pa.array(numbers)}))
        with local_disk():
            file: RowGroupFile = self._begun(self._begin)
            if piece is None or not file.append([Columns(piece, after_first=True), numbered]):
                self._encode(file, table, numbered)

    def _begin(self, path: str) -> RowGroupFile:
        row_number = pa.field(self._task.row_number, pa.int64())
        return RowGroupFile(path, self._task.schema.append(row_number))

    def _encode(self, file: RowGroupFile, table: pa.Table, numbered: Columns) -> None:
        if not file.append([encoded_columns(table), numbered]):
            raise CorruptRun(f"{self._task.path}: the types of its rows differ from the layout's")

    def end(self) -> Part:
        """Store the file and its row checksums, and return the record of the file.

        Also writes a `PartNote` if the task names a layout. Raises `CorruptRun` if the pieces have
        another number of rows than the file needs.
        """
        task = self._task
        self._close_gathered()
        if self.rows != task.span.rows or (made := self.finish()) is None:
            raise CorruptRun(
                f"{task.path} needs {task.span.rows} rows, but its pieces have {self.rows}"
            )
        checksum, sums = self._put_sums(made[0])
        first, last = int(self._rows[0][0]), int(self._rows[-1][-1])
        part = replace(made[0], sums=checksum, first=first, last=last)
        if task.layout is not None:
            seen = FileSeen.of(made[1]), FileSeen.of(sums)
            PartNote(task.layout, task.span.kind, task.span.index, part, *seen).put(self._store)
        return part

    def _made(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (row numbers as int64, checksums as uint32) of the rows added, in order."""
        return np.concatenate(self._rows), np.concatenate([s.result() for s in self._sums])

    def _land(self, path: str, local_path: str, sums: Sums) -> tuple[str, FileInfo]:
        return _put_unless_there(
            self._store, path, local_path, sums, self._same_rows, self._task.read_back
        )

    def _put_sums(self, part: Part) -> tuple[str, FileInfo]:
        """Store the file's row checksums; return (SHA-256, info) of the stored checksum file."""
        made, path = self._made(), row_sums_path(part.path)

        def same(path: str, local_path: str) -> str | None:
            try:
                data = self._store.read(path)
                if not _equal(made, decode(data, part.rows, path)):
                    return None
                with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as found:
                    told = footer_figures(footer_of(data))
                    misled = any(_misleads(one, rows) for one, rows in _groups(found, told))
                    return None if misled else digest(data)
            except UNREADABLE as error:
                log.info("%s does not hold row checksums: %s", path, error)
                return None

        data = encode([made[0]], [made[1]])
        with _local_file(data) as local_path:
            return _put_unless_there(self._store, path, local_path, Sums.of(data), same)

    def _same_rows(self, path: str, local_path: str) -> str | None:
        """Return the SHA-256 of the file stored at `path` if it has the same rows; else None.

        It must have the rows that were added here and the schema of the file at `local_path`.
        Returns None also if it is not valid Parquet or has misleading statistics.
        """
        try:
            with self._store.open(path) as stream:
                checksum = sha256_of(stream)
                stream.seek(0)
                with pq.ParquetFile(stream, pre_buffer=False) as found:
                    check_types(found.schema_arrow, path)
                    if not found.schema_arrow.equals(pq.read_schema(local_path)):
                        return None
                    told = footer_figures(footer_at_end(stream))
                    has_rows = _equal(self._made(), _numbers_and_sums(found, told, self._task))
        except UNREADABLE as error:
            log.info("%s is not a valid part of the result: %s", path, error)
            return None
        return checksum if has_rows else None


def _put_unless_there(
    store: Store,
    path: str,
    local_path: str,
    sums: Sums,
    same: Callable[[str, str], str | None],
    read_back: bool = False,
) -> tuple[str, FileInfo]:
    """Put a local file at `path` unless one with the same rows is stored there.

    Returns (SHA-256, info) of the file that is then at `path`. A file with other rows is replaced,
    if it is still the version that was read. `same(path, local_path)` returns the SHA-256 of the
    file at `path` if it has the same rows, else None. `sums` are the checksums of the local file.
    Raises `BadUpload` if the file at `path` is still missing or has other rows after LOOKS checks.
    """
    for _ in range(LOOKS):
        with suppress(FileNotFoundError):  # deleted since it was seen: look again
            if found := _look(store, path, local_path, sums, same, read_back):
                return found
    raise bad_upload(store, path)


def _look(
    store: Store,
    path: str,
    local_path: str,
    sums: Sums,
    same: Callable[[str, str], str | None],
    read_back: bool,
) -> tuple[str, FileInfo] | None:
    """Return (SHA-256, info) of the stored file if it has the expected rows, else None.

    Before returning None, it writes the file if it is missing, and replaces it if it has other
    rows; the caller then calls again to check what was stored. Parameters are those of
    `_put_unless_there`.
    """
    try:
        seen = store.stat(path)
    except FileNotFoundError:
        check_unfinished(store)
        store.put_file_if_absent(path, local_path)
        return None
    if holds(store, seen, sums, read_back):
        return sums.sha256, seen
    adopted = same(path, local_path)
    if store.stat(path) != seen:  # another writer replaced it while it was read
        return None
    if adopted is not None:
        log.info("%s already has the same rows in another encoding: kept", path)
        return adopted, seen
    check_unfinished(store)
    log.warning("%s/%s had other rows than the pieces: replaced", store.uri, path)
    with _spare(local_path) as copy:
        store.replace_file(path, copy, seen)
    return None


def _groups(
    found: pq.ParquetFile, told: list[GroupFigures]
) -> Iterator[tuple[GroupFigures, pa.Table]]:
    """Yield each row group of a file with its figures in the footer, one group at a time.

    `told` are the figures from `footer_figures`. Read them before the file is opened by pyarrow:
    `footer_figures` raises for malformed footers, on some of which pyarrow ends the process.
    """
    for group, figures in enumerate(told):
        yield figures, found.read_row_group(group, use_threads=False)


def _misleads(figures: GroupFigures, rows: pa.Table) -> bool:
    """Return whether the footer's figures of a row group contradict its rows.

    If they do, readers would wrongly skip the row group. Only figures are compared that both the
    footer and the installed pyarrow have. So finalizers with different versions of pyarrow agree.
    """
    rewritten = io.BytesIO()
    pq.write_table(rows, rewritten, row_group_size=max(1, rows.num_rows))
    (true,) = footer_figures(footer_of(rewritten.getbuffer()))
    if figures.rows != true.rows or len(figures.columns) != len(true.columns):
        return True
    return any(
        stated[name] != actual[name]  # each may lack figures that the other has
        for stated, actual in zip(figures.columns, true.columns, strict=True)
        for name in stated.keys() & actual.keys()
    )


@contextmanager
def _spare(local_path: str) -> Iterator[str]:
    """Within the `with` block, provide a second hard link to a local file; yield its path.

    Some stores move the file that they are given. With such a store, give it the link to keep the
    file.
    """
    spare = f"{local_path}.spare"
    with local_disk():
        os.link(local_path, spare)
    try:
        yield spare
    finally:
        with suppress(FileNotFoundError):
            os.unlink(spare)


@contextmanager
def _local_file(data: bytes) -> Iterator[str]:
    with local_disk():
        folder = tempfile.TemporaryDirectory(prefix="raybatch-")
    with folder:
        path = f"{folder.name}/file"
        with local_disk(), open(path, "wb") as handle:
            handle.write(data)
        yield path


def _numbers_and_sums(
    found: pq.ParquetFile, told: list[GroupFigures], task: PartTask
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (row numbers, checksums) of all rows in the file `found`.

    None if the rows contradict `told`, the figures in the file's footer.
    """
    numbers, sums = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)]
    for figures, table in _groups(found, told):
        if _misleads(figures, table):
            return None
        numbers.append(table[task.row_number].to_numpy())
        sums.append(row_sums(table.drop_columns([task.row_number])))
    return np.concatenate(numbers), np.concatenate(sums)


def _equal(
    made: tuple[np.ndarray, np.ndarray], found: tuple[np.ndarray, np.ndarray] | None
) -> bool:
    return found is not None and all(np.array_equal(a, b) for a, b in zip(made, found, strict=True))
