"""Writes one file of a result: whoever does it, where and however often, it is there once.

Two finalizers write the same rows under the same names, but another version of pyarrow writes
them as other bytes. So a file that is there with the same rows is adopted as it is; `_SUCCESS`
then names what is there, whoever wrote it.
"""

from __future__ import annotations

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
from prefect_raybatch.job.trust import check_types
from prefect_raybatch.ledger.layout import POSITION, SUCCESS, row_sums_path
from prefect_raybatch.ledger.part_files import PartFiles, local_disk
from prefect_raybatch.ledger.part_layout import PartSpan
from prefect_raybatch.ledger.records import Commit, Part, digest
from prefect_raybatch.result.part_notes import FileSeen, PartNote
from prefect_raybatch.result.pieces import read_pieces
from prefect_raybatch.result.row_sums import decode, encode, row_sums
from prefect_raybatch.storage import FileInfo, Store, Sums, holds, read_ahead
from prefect_raybatch.storage.proof import bad_upload, sha256_of

log = logging.getLogger("prefect_raybatch.result.finalize")

LOOKS = 6  # at one file: each but the last may write it
SHARDS_AHEAD = 4  # shards whose pieces are read while one is being written


@dataclass(frozen=True)
class PartTask:
    """All that it takes to write one file. `commits` are of its shards, with the pieces of its kind
    alone, and `starts` the shards' first rows; `numbers` (int64) those of all rows from the first
    start on, None where they are the positions. `schema` is without the row number's column;
    `layout` the table of the layout that a note is to name, None where none is written."""

    span: PartSpan
    path: str
    row_number: str
    schema: pa.Schema
    commits: tuple[Commit, ...]
    starts: tuple[int, ...]
    numbers: np.ndarray | None = None
    read_back: bool = False
    layout: str | None = None

    @property
    def run_format(self) -> int:
        return self.commits[0].format

    def numbers_of(self, positions: np.ndarray) -> np.ndarray:
        return positions if self.numbers is None else self.numbers[positions - self.starts[0]]


def write_part(store: Store, task: PartTask) -> Part:
    """Writes the file, or adopts the one that is there with its rows; proves that it is there.

    Raises `CorruptRun` naming a piece that is missing or another one, or when the run has ended
    meanwhile; the store's errors; StoreError for a full local disk. May be called again after
    any of them, and by several at once.
    """
    file = _PartFile(store, task)
    try:
        load = partial(_load, store)
        for start, (_, table, _) in read_ahead(
            load, zip(task.starts, task.commits, strict=True), SHARDS_AHEAD, SHARDS_AHEAD
        ):
            positions = table[POSITION].to_numpy().astype(np.int64) + start
            file.add(table.drop_columns([POSITION]), task.numbers_of(positions))
        return file.end()
    finally:
        file.discard()
        file.pool.shutdown(wait=False, cancel_futures=True)


def _load(store: Store, item: tuple[int, Commit]) -> tuple[int, tuple[str, pa.Table, int]]:
    (found,) = read_pieces(store, item[1])
    return item[0], found


def check_unfinished(store: Store) -> None:
    """`CorruptRun` once the run has ended: then nobody writes a file of its result."""
    with suppress(FileNotFoundError):
        store.stat(SUCCESS)
        raise CorruptRun(f"{store.uri} is finished; nothing is written any more")


class _PartFile(PartFiles):
    """The one file of a task, made on the local disk."""

    def __init__(self, store: Store, task: PartTask) -> None:
        super().__init__(store, task.path.rpartition("/")[0], task.span.index)
        self._task = task
        self._rows: list[np.ndarray] = []
        self._sums: list[Future[np.ndarray]] = []
        self.pool = ThreadPoolExecutor(1)  # sums are made while Parquet is written

    def add(self, table: pa.Table, numbers: np.ndarray) -> None:
        """Rows of these numbers (int64) as a row group of their own."""
        table = table.cast(self._task.schema)
        if self._sums:
            self._sums[-1].result()  # at most one table waits
        self._rows.append(numbers)
        self._sums.append(self.pool.submit(row_sums, table, self._task.run_format))
        self.write(table.append_column(self._task.row_number, pa.array(numbers)))

    def end(self) -> Part:
        """Stores the file and the sums of its rows, and notes that they are there."""
        task = self._task
        if self.rows != task.span.rows or (made := self.finish()) is None:
            raise CorruptRun(
                f"{task.path} is to hold {task.span.rows} rows, its pieces hold {self.rows}"
            )
        checksum, sums = self._put_sums(made[0])
        first, last = int(self._rows[0][0]), int(self._rows[-1][-1])
        part = replace(made[0], sums=checksum, first=first, last=last)
        if task.layout is not None:
            seen = FileSeen.of(made[1]), FileSeen.of(sums)
            PartNote(task.layout, task.span.kind, task.span.index, part, *seen).put(self._store)
        return part

    def _made(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and sums of the rows."""
        return np.concatenate(self._rows), np.concatenate([s.result() for s in self._sums])

    def _land(self, path: str, local_path: str, sums: Sums) -> tuple[str, FileInfo]:
        return _fenced(self._store, path, local_path, sums, self._same_rows, self._task.read_back)

    def _put_sums(self, part: Part) -> tuple[str, FileInfo]:
        """Stores the sums of the file's rows likewise; the SHA-256 of what is there, its info."""
        made, path = self._made(), row_sums_path(part.path)

        def same(path: str, local_path: str) -> str | None:
            try:
                data = self._store.read(path)
                same = _equal(made, decode(data, part.rows, path))
                changed = _changed(pq.read_metadata(pa.BufferReader(data)), len(data), local_path)
                return digest(data) if same and not changed else None
            except CorruptRun as error:
                log.info("%s holds no row sums: %s", path, error)
                return None

        data = encode([made[0]], [made[1]])
        with _local_file(data) as local_path:
            return _fenced(self._store, path, local_path, Sums.of(data), same)

    def _same_rows(self, path: str, local_path: str) -> str | None:
        """The SHA-256 of the stored file if it has this one's rows and schema, else None."""
        try:
            with self._store.open(path) as stream:
                checksum, size = sha256_of(stream), stream.tell()
                stream.seek(0)
                with pq.ParquetFile(stream, pre_buffer=False) as found:
                    check_types(found.schema_arrow, path)
                    if _changed(found.metadata, size, local_path):
                        return None
                    if not found.schema_arrow.equals(pq.read_schema(local_path)):
                        return None
                    same = _equal(self._made(), _numbers_and_sums(found, self._task))
        except (pa.ArrowException, OSError, ValueError, CorruptRun, SourceError) as error:
            log.info("%s is no part of the result: %s", path, error)
            return None
        return checksum if same else None


def _fenced(
    store: Store,
    path: str,
    local_path: str,
    sums: Sums,
    same: Callable[[str, str], str | None],
    read_back: bool = False,
) -> tuple[str, FileInfo]:
    """Puts a local file if nothing is at `path`, leaves one with the same rows, and replaces one
    with others, tied to what was seen: the SHA-256 of what is there then, and its info.

    `same` tells the checksum of what is there if it has the same rows.
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
    """What is there, if it is as it should be; else writes, and the next look will tell."""
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
        log.info("%s is there with the same rows, written in another way: kept", path)
        return adopted, seen
    check_unfinished(store)
    log.warning("%s/%s has other rows than the pieces; replaced", store.uri, path)
    with _spare(local_path) as copy:
        store.replace_file(path, copy, seen)
    return None


def _changed(metadata: pq.FileMetaData, size: int, local_path: str) -> bool:
    """Whether a stored file of these rows, and not of these bytes, is one that was changed.

    The same pyarrow writes the same bytes: where it wrote others of that very size they were
    changed, if only in figures beside the rows by which readers leave row groups out.
    """
    ours = pq.read_metadata(local_path).created_by
    return size == os.path.getsize(local_path) and metadata.created_by == ours


@contextmanager
def _spare(local_path: str) -> Iterator[str]:
    """A second name of a local file, which a local store may move away."""
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


def _numbers_and_sums(found: pq.ParquetFile, task: PartTask) -> tuple[np.ndarray, np.ndarray]:
    numbers, sums = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)]
    for group in range(found.num_row_groups):
        table = found.read_row_group(group, use_threads=False)
        numbers.append(table[task.row_number].to_numpy())
        sums.append(row_sums(table.drop_columns([task.row_number]), task.run_format))
    return np.concatenate(numbers), np.concatenate(sums)


def _equal(made: tuple[np.ndarray, np.ndarray], found: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(made, found, strict=True))
