"""Writes the parts of a result: each once, and nothing any more when `_SUCCESS` is there.

Two finalizers write the same rows under the same names, but another version of pyarrow writes
them as other bytes. So a part that is there with the same rows is adopted as it is; `_SUCCESS`
then names what is there, whoever wrote it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun, SourceError
from prefect_raybatch.job.trust import check_types
from prefect_raybatch.ledger.layout import row_sums_path
from prefect_raybatch.ledger.part_files import PartFiles
from prefect_raybatch.ledger.records import Part, digest
from prefect_raybatch.result.row_sums import decode, encode, row_sums
from prefect_raybatch.storage import FileInfo, Store, Sums, holds, put_proved
from prefect_raybatch.storage.proof import bad_upload, sha256_of

log = logging.getLogger("prefect_raybatch.result.finalize")

LOOKS = 6  # at one part: each but the last may write it

Guard = Callable[[], None]


class ResultParts:
    """Writes tables to FOLDER/part-00000.parquet ..., a new one once `file_bytes` are in it.

    `guard` is called before each write and raises when the run has ended meanwhile.
    """

    def __init__(
        self, store: Store, folder: str, row_number: str, file_bytes: int, guard: Guard
    ) -> None:
        self.row_number, self.file_bytes = row_number, file_bytes
        self.files: list[Part] = []
        self._store, self._guard = store, guard
        self._parts = _Fenced(store, folder, self._same_rows, guard)
        self._held = 0
        self._schema: pa.Schema | None = None
        self._rows: list[np.ndarray] = []
        self._sums: list[Future[np.ndarray]] = []
        self._pool = ThreadPoolExecutor(1)  # sums are made while Parquet is written

    def write(self, table: pa.Table, numbers: np.ndarray, size: int) -> None:
        """Adds rows of these numbers (int64); `size` is that of their pieces."""
        if self._held and self._held + size > self.file_bytes:
            self._finish()
        if self._schema is None:
            self._schema = table.schema
        table = table.cast(self._schema)
        if self._sums:
            self._sums[-1].result()  # at most one table waits
        self._rows.append(numbers)
        self._sums.append(self._pool.submit(row_sums, table))
        self._parts.write(table.append_column(self.row_number, pa.array(numbers)))
        self._held += size

    def close(self) -> list[Part]:
        self._finish()
        self._pool.shutdown()
        return self.files

    def _finish(self) -> None:
        made = self._parts.finish()
        if made is not None:
            part = made[0]
            sums = self._write_sums(part)
            first, last = int(self._rows[0][0]), int(self._rows[-1][-1])
            self.files.append(replace(part, first=first, last=last, sums=sums))
        self._held, self._rows, self._sums = 0, [], []

    def _made(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and sums of the rows of this part."""
        return np.concatenate(self._rows), np.concatenate([s.result() for s in self._sums])

    def _write_sums(self, part: Part) -> str:
        """Stores the sums of the part's rows unless they are there; the SHA-256 of that file."""
        path, made = row_sums_path(part.path), self._made()
        with suppress(FileNotFoundError, CorruptRun):
            data = self._store.read(path)
            if _equal(made, decode(data, part.rows, path)):
                return digest(data)
        self._guard()
        data = encode([made[0]], [made[1]])
        put_proved(self._store, path, data)
        return digest(data)

    def _same_rows(self, path: str, local_path: str) -> str | None:
        """The SHA-256 of the stored part if it has this one's rows and schema, else None.

        The same pyarrow writes the same bytes: where it wrote others of that very size they were
        changed, if only in figures beside the rows by which readers leave row groups out.
        """
        try:
            with self._store.open(path) as stream:
                checksum, size = sha256_of(stream), stream.tell()
                stream.seek(0)
                with pq.ParquetFile(stream, pre_buffer=False) as found:
                    check_types(found.schema_arrow, path)
                    ours = pq.read_metadata(local_path).created_by
                    if size == os.path.getsize(local_path) and found.metadata.created_by == ours:
                        return None
                    if not found.schema_arrow.equals(pq.read_schema(local_path)):
                        return None
                    same = _equal(self._made(), _numbers_and_sums(found, self.row_number))
        except (pa.ArrowException, OSError, ValueError, CorruptRun, SourceError) as error:
            log.info("%s is no part of the result: %s", path, error)
            return None
        return checksum if same else None


class _Fenced(PartFiles):
    """Looks before it writes: a part is made if absent, adopted if it has the same rows, and
    replaced, tied to what was seen, if it has others."""

    def __init__(
        self, store: Store, folder: str, same: Callable[[str, str], str | None], guard: Guard
    ) -> None:
        super().__init__(store, folder)
        self._same, self._guard = same, guard

    def _land(self, path: str, local_path: str, sums: Sums) -> tuple[str, FileInfo]:
        for _ in range(LOOKS):
            with suppress(FileNotFoundError):  # deleted since it was listed: list again
                if found := self._look(path, local_path, sums):
                    return found
        raise bad_upload(self._store, path)

    def _look(self, path: str, local_path: str, sums: Sums) -> tuple[str, FileInfo] | None:
        """What is there, if it is as it should be; else writes, and the next look will tell."""
        try:
            seen = self._store.stat(path)
        except FileNotFoundError:
            self._guard()
            self._store.put_file_if_absent(path, local_path)
            return None
        if holds(self._store, seen, sums):
            return sums.sha256, seen
        adopted = self._same(path, local_path)
        if self._store.stat(path) != seen:  # another writer replaced it while it was read
            return None
        if adopted is not None:
            log.info("%s is there with the same rows, written in another way: kept", path)
            return adopted, seen
        self._guard()
        log.warning("%s/%s has other rows than the pieces; replaced", self._store.uri, path)
        self._store.replace_file(path, local_path, seen)
        return None


def _numbers_and_sums(found: pq.ParquetFile, row_number: str) -> tuple[np.ndarray, np.ndarray]:
    numbers, sums = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)]
    for group in range(found.num_row_groups):
        table = found.read_row_group(group, use_threads=False)
        numbers.append(table[row_number].to_numpy())
        sums.append(row_sums(table.drop_columns([row_number])))
    return np.concatenate(numbers), np.concatenate(sums)


def _equal(made: tuple[np.ndarray, np.ndarray], found: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(made, found, strict=True))
