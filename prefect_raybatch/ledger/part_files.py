"""Writes Parquet files to a store one after the other; each is first completed on local disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import StoreError
from prefect_raybatch.ledger.records import Part
from prefect_raybatch.storage import FileInfo, Store, Sums, is_remote, put_file_proved

REPEATS_ROWS = 4096  # rows that tell whether a column's values repeat


class PartFiles:
    """Writer of the files part-00000.parquet and so on in `folder`, numbered from `first` on.

    `write` adds rows to the current part, on local disk; `finish` stores the part as a whole, and
    checks that the store holds what was written. `rows` is the number of rows in the current part.
    Raises StoreError if the local disk (TMPDIR) is full, and the store's errors; call `discard`
    after any of them.
    """

    def __init__(self, store: Store, folder: str, first: int = 0) -> None:
        self.rows = 0
        self._store, self._folder = store, folder
        self._finished = first
        self._writer: Any = None
        self._local: tempfile.TemporaryDirectory[str] | None = None

    def write(self, table: pa.Table) -> None:
        """Add `table` to the part as one row group."""
        import pyarrow.parquet as pq

        def begin(path: str) -> pq.ParquetWriter:
            dictionary = dictionary_columns(table)
            return pq.ParquetWriter(
                path, table.schema, compression="zstd", use_dictionary=dictionary
            )

        with local_disk():
            self._begun(begin).write_table(table, row_group_size=max(1, table.num_rows))
        self.rows += table.num_rows

    def _begun(self, begin: Callable[[str], Any]) -> Any:
        """Return the Parquet writer of the current part; open one with `begin(path)` if needed."""
        if self._local is None:
            self._local = tempfile.TemporaryDirectory(prefix="raybatch-")
            self._writer = begin(self._path)
        return self._writer

    @property
    def _path(self) -> str:
        return f"{self._local.name}/part.parquet" if self._local else ""

    def finish(self) -> tuple[Part, FileInfo] | None:
        """Store the current part and return it; None if nothing was written since the last one."""
        if self._local is None:
            return None
        with local_disk():
            self._writer.close()
            with open(self._path, "rb") as stream:
                sums = Sums.of_stream(stream, etag=is_remote(self._store.uri))
        path = f"{self._folder}/part-{self._finished:05d}.parquet"
        checksum, info = self._land(path, self._path, sums)
        part = Part(path, self.rows, info.size, checksum, etag=info.etag)
        self._finished += 1
        self.discard()
        return part, info

    def _land(self, path: str, local_path: str, sums: Sums) -> tuple[str, FileInfo]:
        """Store the file at `local_path`, whose checksums are `sums`, as `path`.

        Return SHA-256 and info of the stored file. A subclass may keep an existing file instead.
        """
        return sums.sha256, put_file_proved(self._store, path, local_path, sums)

    def discard(self) -> None:
        """Delete the local file of the current part; do nothing if there is none."""
        if self._local is None:
            return
        if self._writer is not None:
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
        self._local.cleanup()
        self._writer, self._local, self.rows = None, None, 0


def dictionary_columns(table: pa.Table) -> bool | list[str]:
    """Return the columns to write with dictionary encoding; True for all columns.

    These are the columns whose values repeat in the first rows of `table`, a file's first row
    group. For values that hardly repeat, a dictionary costs space and a quarter of the writing
    time. A table with nested columns gives True.
    """
    import pyarrow.compute as pc

    if any(pa.types.is_nested(field.type) for field in table.schema):
        return True  # their leaves would have to be named
    head = table.slice(0, REPEATS_ROWS)
    chosen = []
    for name in dict.fromkeys(table.column_names):
        try:
            distinct = pc.count_distinct(head[name], mode="all").as_py()
        except pa.ArrowNotImplementedError:
            distinct = 0
        if distinct * 2 <= head.num_rows:
            chosen.append(name)
    return chosen


@contextmanager
def local_disk() -> Iterator[None]:
    """Turn errors of writing to TMPDIR into a StoreError that names it."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{tempfile.gettempdir()}: cannot write a Parquet file ({error.strerror or error}). "
            "Free some space, or set TMPDIR to another folder"
        ) from error
