"""Parquet files of a store, written one after the other, each made on the local disk first."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import StoreError
from prefect_raybatch.records import Part
from prefect_raybatch.storage import FileInfo, Store


class PartFiles:
    """FOLDER/part-00000.parquet ... of `store`; `rows` are those in the part being written.

    A part appears whole, when it is finished. Raises StoreError for a full local disk (TMPDIR),
    and the store's errors; `discard` cleans up after any of them.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self.rows = 0
        self._store, self._folder = store, folder
        self._finished = 0
        self._writer: Any = None
        self._local: tempfile.TemporaryDirectory[str] | None = None

    def write(self, table: pa.Table) -> None:
        """Add `table` to the part as one row group."""
        import pyarrow.parquet as pq

        with local_disk():
            if self._local is None:
                self._local = tempfile.TemporaryDirectory(prefix="raybatch-")
                self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.rows += table.num_rows

    @property
    def _path(self) -> str:
        return f"{self._local.name}/part.parquet" if self._local else ""

    def finish(self) -> tuple[Part, FileInfo] | None:
        """Store the part; None when nothing was written since the last one."""
        if self._local is None:
            return None
        with local_disk():
            self._writer.close()
            with open(self._path, "rb") as stream:
                checksum = hashlib.file_digest(stream, "sha256").hexdigest()
        path = f"{self._folder}/part-{self._finished:05d}.parquet"
        info = self._store.put_file(path, self._path)
        part = Part(path, self.rows, info.size, checksum)
        self._finished += 1
        self.discard()
        return part, info

    def discard(self) -> None:
        """Forget the part being written."""
        if self._local is None:
            return
        if self._writer is not None:
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
        self._local.cleanup()
        self._writer, self._local, self.rows = None, None, 0


@contextmanager
def local_disk() -> Iterator[None]:
    """Turns what writing to TMPDIR raises into a StoreError that names it."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{tempfile.gettempdir()}: a Parquet file cannot be written there "
            f"({error.strerror or error}); make room, or set TMPDIR to another folder"
        ) from error
