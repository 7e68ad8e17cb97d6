"""The base of stores in a bucket: conditional writes of bytes and files, and ranged reads."""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from contextlib import suppress
from typing import Any, BinaryIO, ClassVar, Self

from prefect_raybatch.errors import SourceError, StoreUnavailable
from prefect_raybatch.storage.base import (
    RACE_TRIES,
    FileInfo,
    SeekableReader,
    Store,
    local_size,
    reading_local_file,
)
from prefect_raybatch.storage.uri import checked, join

SINGLE_PUT_BYTES = 64 * 2**20  # larger files are uploaded in parts, unless conditionally
PART_BYTES = 32 * 2**20
_MOST_PARTS = 10_000  # in an upload; Azure allows more
PARALLEL_PARTS = 4  # parts that are in memory at a time
SLOWEST = 2**20  # bytes a second: the slowest upload that is not ended
READ_BUFFER_BYTES = 2**20  # read-ahead of `open`: neighbouring small column chunks in one GET
LISTING_PAGE = 1000  # files in one answer to a listing, and in one delete: S3's limit of both
MIN_TRIES = 3  # even when one slow try used up `retry_seconds`
FIRST_PAUSE = 0.2  # seconds before the second try; doubled for each further one ...
LONGEST_PAUSE = 8.0  # ... up to this


class BucketStore(Store):
    """Objects below `root`, such as s3://bucket/prefix, over one connection.

    `most_put_bytes` is the largest object that one PUT can write.
    """

    most_put_bytes: ClassVar[int]  # the store's limit of one PUT

    def __init__(
        self, root: str, connection: Any, retry_seconds: float = Store.retry_seconds
    ) -> None:
        self.uri, self.connection, self.retry_seconds = root, connection, retry_seconds
        self._bucket, _, self._prefix = root.partition("://")[2].partition("/")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.uri, self.connection, self.retry_seconds))

    def sub(self, prefix: str) -> Self:
        return type(self)(join(self.uri, prefix), self.connection, self.retry_seconds)

    def above(self) -> Self | None:
        folder = self.uri.rpartition("/")[0]
        return type(self)(folder, self.connection, self.retry_seconds) if self._prefix else None

    def put_if_absent(self, path: str, data: bytes) -> bool:
        for _ in range(RACE_TRIES):
            if self._create(path, data):
                return True
            # The object can be ours, even after a first refusal: aiohttp itself repeats a PUT if a
            # kept connection breaks, and an answer to a try of ours can have been lost.
            with suppress(FileNotFoundError):  # created, and deleted since: try again
                return self.read(path) == data
        raise StoreUnavailable(
            f"{join(self.uri, path)} was created and deleted again and again. Check what else "
            "writes there"
        )

    def put_file(self, path: str, local_path: str | os.PathLike[str]) -> FileInfo:
        source = os.fspath(local_path)
        size = local_size(source)
        if size <= SINGLE_PUT_BYTES:
            return self.put(path, content(source))
        self._upload(path, source, size)
        return self.stat(path)

    def put_file_if_absent(self, path: str, local_path: str | os.PathLike[str]) -> bool:
        source = os.fspath(local_path)
        size = local_size(source)
        if size <= SINGLE_PUT_BYTES:
            return self.put_if_absent(path, content(source))
        if size <= self.most_put_bytes:
            return self._create_from_file(path, source)
        if self.holds(path):
            return False
        self._upload(path, source, size)
        return True

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(_RangeReader(self, self.stat(path)), READ_BUFFER_BYTES)

    def read_range(self, info: FileInfo, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the object that `info` describes.

        Raises SourceError if the object has changed since `info` was read.
        """
        found = self._range(info, start, stop)
        if found is None:
            raise SourceError(
                f"{join(self.uri, info.path)} changed while it was being read. Start again when it "
                "is complete"
            )
        return found

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{checked(path)}" if self._prefix else checked(path)

    @abstractmethod
    def _create(self, path: str, data: bytes) -> bool:
        """PUT `data` on condition that `path` does not exist; return False if it exists."""

    @abstractmethod
    def _create_from_file(self, path: str, source: str) -> bool:
        """PUT a local file as `_create` does, without holding it in memory."""

    @abstractmethod
    def _upload(self, path: str, source: str, size: int) -> None:
        """Upload a local file in parts; the object appears whole or not at all."""

    @abstractmethod
    def _range(self, info: FileInfo, start: int, stop: int) -> bytes | None:
        """Return bytes [start, stop) of the object that `info` describes.

        Return None if the object's ETag has changed.
        """


def part_size(size: int) -> int:
    """Return the bytes per part of an upload of `size` bytes."""
    return max(PART_BYTES, -(-size // _MOST_PARTS))


def content(source: str) -> bytes:
    """Return the bytes of a local file that is about to be stored."""
    with reading_local_file(source), open(source, "rb") as handle:
        return handle.read()


class _RangeReader(SeekableReader):
    """An object as a seekable raw file: each read is one ranged GET, retried as all calls are."""

    def __init__(self, store: BucketStore, info: FileInfo) -> None:
        super().__init__()
        self._store, self._info = store, info

    @property
    def size(self) -> int:
        return self._info.size

    def readall(self) -> bytes:
        return self.read(max(self.size - self.tell(), 0)) or b""  # one GET, not many

    def read_at(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        return self._store.read_range(self._info, start, stop) if start < stop else b""
