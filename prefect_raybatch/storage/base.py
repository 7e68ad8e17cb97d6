"""The interface of every store: the few operations that the ledger needs.

Exactly-once rests on `Store.put_if_absent`; `Store.probe` checks whether a store keeps that
promise.
"""

from __future__ import annotations

import errno
import io
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, BinaryIO

from prefect_raybatch.errors import CorruptRun, RayBatchError, StoreError, UnsafeStore

PROBE_WRITERS = 8
PROBE_ROUNDS = 2
RACE_TRIES = 10  # of calls that fail only if a file is deleted at the same moment


@dataclass(frozen=True, slots=True)  # a listing may have half a million
class FileInfo:
    """Identity of one version of a file.

    `path` is relative to the store's root with "/" between parts; `size` is in bytes. In a bucket,
    `etag` (without quotes) is set and `mtime_ns` is None. In a local store, `mtime_ns` (nanoseconds
    since 1970) is set and `etag` is None. `modified` (seconds since 1970, or None) is only for
    display and ages. A local store also sets `device` and `inode`, by which the file system
    identifies the file, and `ctime_ns`, the time of its last change, which no program can set.

    `modified`, `device`, `inode` and `ctime_ns` do not count in `==`, because a new hard link or
    another mode changes `ctime_ns` too.
    """

    path: str
    size: int
    etag: str | None
    mtime_ns: int | None
    modified: float | None = field(default=None, compare=False)
    ctime_ns: int | None = field(default=None, compare=False)
    device: int | None = field(default=None, compare=False)
    inode: int | None = field(default=None, compare=False)


class Store(ABC):
    """Files under one root URI.

    `uri` is the normalized root. Paths are relative to the root and must stay inside it (else
    ConfigError). `retry_seconds` (default 60) bounds how long one call retries a remote store that
    does not answer; a local store ignores it. Every call can raise StoreError (permission, missing
    bucket, full disk) or StoreUnavailable (no answer within `retry_seconds`).

    A store is safe for threads and forks. It can be pickled, without its connection. The pickle has
    the options, secrets included; no repr, str or error message shows them.
    """

    uri: str
    retry_seconds: float = 60.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def __str__(self) -> str:
        return self.uri

    @abstractmethod
    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """Return the content of a file.

        Raises FileNotFoundError if it is missing, and CorruptRun if it has more than `max_bytes`
        bytes.
        """

    @abstractmethod
    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        """Yield the files in the folder `prefix` ("" is the root); reads the listing page by page.

        Nothing is cached. With `recursive=False`, files in deeper folders are left out. A missing
        folder yields nothing. Sorted by path locally and on S3 (except directory buckets). Locally,
        a link to a folder is listed as one file and not entered, unless the store follows links.
        """

    @abstractmethod
    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly below the root; nothing is cached.

        A link to a folder does not count, unless the store follows links.
        """

    @abstractmethod
    def stat(self, path: str) -> FileInfo:
        """Return size and etag or mtime of a file.

        Raises FileNotFoundError if it does not exist or is a folder.
        """

    def holds(self, path: str) -> bool:
        """Return whether the file exists now; the result for a folder is undefined."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    @abstractmethod
    def put(self, path: str, data: bytes) -> FileInfo:
        """Write `data`, replacing the file: all of it or nothing, durable on return."""

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` unless it exists; of any number of writers exactly one wins.

        Returns True if the file then holds exactly `data`, False if it holds other content. If
        `data` contains a unique token, True means that this caller created the file, even if the
        store's first answer was lost. After StoreUnavailable the outcome is unknown: call this
        again with the same `data`. Raises UnsafeStore if the store does not support this.
        """

    @abstractmethod
    def put_file(self, path: str, local_path: str | os.PathLike[str]) -> FileInfo:
        """Store a finished local file: all of it or nothing, durable on return.

        The caller gives up `local_path`: a local store moves the file if it can, S3 leaves it in
        place.
        """

    @abstractmethod
    def put_file_if_absent(self, path: str, local_path: str | os.PathLike[str]) -> bool:
        """Store a local file unless `path` exists; return whether it was stored.

        The local file stays. Atomic: a link on a disk, one PUT on S3 (above 5 GiB it checks, then
        writes). If the store's first answer was lost and the call was retried, the result may be
        False although this call created the file: compare the contents.
        """

    @abstractmethod
    def replace_file(
        self, path: str, local_path: str | os.PathLike[str], expected: FileInfo
    ) -> bool:
        """Store a local file as `put_file` does, in place of the version `expected` (from `stat`).

        Return False if that version was replaced meanwhile. S3 does this in one PUT conditional on
        the etag (above 5 GiB it checks, then writes). A local store holds a lock on the replaced
        file. Raises FileNotFoundError if the file is gone. Raises UnsafeStore if the store supports
        no conditional PUT, or the file system no locks.
        """

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored.

        Local folders that become empty are removed. `paths` may be a listing in progress: it is
        read in batches of at most 10,000. Raises StoreError for a local path through a link to a
        folder, before any file of the same batch is deleted.
        """

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Return a handle for random reads (close it, or use `with`).

        Raises FileNotFoundError if the file is missing. On S3 each read is one GET, on the
        condition that the etag is still that of the opening. So a read raises SourceError if the
        object has changed since.

        Let pyarrow read it in the calling thread only (`pre_buffer=False`, `use_threads=False`).
        pyarrow's own threads must call Python to release the handle. If the interpreter is ending,
        that aborts or hangs it (apache/arrow issues 34314 and 50482).
        """

    @abstractmethod
    def now(self) -> float:
        """Return seconds since 1970 on the clock that sets `FileInfo.modified`."""

    @abstractmethod
    def unfinished(self, before: float, remove: bool) -> tuple[FileInfo, ...]:
        """Return the interrupted writes under the root that are older than the time `before`.

        With `remove`, removes them as well. `before` is in seconds since 1970, on the clock of
        `now`. Interrupted writes are temporary files of killed processes and incomplete multipart
        uploads. No reader sees them, but they take space.
        """

    @abstractmethod
    def sub(self, prefix: str) -> Store:
        """Return the store rooted at `prefix`, over the same connection."""

    @abstractmethod
    def above(self) -> Store | None:
        """Return the store rooted at the parent folder; None for the root of a bucket or disk."""

    def probe(self) -> None:
        """Check at the start of a run that this store can be its output; leaves nothing behind.

        Writes, reads and lists, then lets PROBE_WRITERS writers race for one name, PROBE_ROUNDS
        times: some stores pass a sequential test of put-if-absent and fail a race. Raises
        UnsafeStore unless exactly one writer wins, and StoreError if it is not writable.
        """
        folder = f"_probe-{uuid.uuid4()}"
        names = [f"{folder}/plain", *(f"{folder}/race-{i}" for i in range(PROBE_ROUNDS))]
        try:
            self._probe_plain(names[0])
            for name in names[1:]:
                self.probe_race(name)
        except BaseException:
            with suppress(RayBatchError):  # the first error is the one to report
                self.delete(names)
            raise
        self.delete(names)

    def _probe_plain(self, name: str) -> None:
        """Raise UnsafeStore unless a written file can be read and listed at once."""
        body = uuid.uuid4().bytes
        self.put(name, body)
        listed = [info.path for info in self.list(name.rpartition("/")[0])]
        if self.read(name) != body or listed != [name]:
            raise UnsafeStore(
                f"{self.uri}: a file that was just written cannot be read or listed. Exactly-once "
                "needs a store that shows a finished write at once: choose another output"
            )

    def probe_race(self, name: str) -> None:
        """Raise UnsafeStore unless exactly one of several writers creates `name`.

        A writer after the race must fail, too.
        """
        bodies = [f"{uuid.uuid4()}".encode() for _ in range(PROBE_WRITERS)]
        start = threading.Barrier(PROBE_WRITERS)

        def write(body: bytes) -> bool:
            start.wait()
            return self.put_if_absent(name, body)

        with ThreadPoolExecutor(PROBE_WRITERS) as pool:
            won = [body for body, win in zip(bodies, pool.map(write, bodies), strict=True) if win]
        late = self.put_if_absent(name, b"late")  # a store may pass the race by luck, but not this
        if len(won) != 1 or late or self.read(name) != won[0]:
            seen = f"{len(won)} of {PROBE_WRITERS} writers created the same file"
            seen += ", and a later one replaced it" if late else ""
            raise UnsafeStore(
                f"{self.uri}: the store does not honour put-if-absent ({seen}), so rows could be "
                "lost or duplicated. Use a store with atomic If-None-Match (AWS S3, MinIO, "
                "Cloudflare R2, Ceph radosgw with a bucket that keeps no versions) or a local file "
                "system with hard links for the output"
            )


def in_batches(paths: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield lists of `size` paths; the last one may be shorter."""
    left = iter(paths)
    while some := list(islice(left, size)):
        yield some


@contextmanager
def reading_local_file(place: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors of reading a local file, which is to be stored, to StoreError.

    This applies within the `with` block. A missing file stays FileNotFoundError.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StoreError(f"{os.fspath(place)} cannot be read to store it: {reason}") from error


def local_size(place: str) -> int:
    """Return the size in bytes of a local file that is about to be stored."""
    with reading_local_file(place):
        return os.stat(place).st_size


def not_found(uri: str) -> FileNotFoundError:
    """Return the error for a missing file."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)


def too_large(uri: str, size: int, max_bytes: int) -> CorruptRun:
    """Return the error for a file of `size` bytes, if at most `max_bytes` may be read."""
    return CorruptRun(f"{uri} has {size} bytes, and at most {max_bytes} are read")


def header_time(date: str | None) -> float | None:
    """Return the time of a Date header in seconds since 1970; None if it is missing or invalid."""
    with suppress(ValueError, OverflowError):
        return parsedate_to_datetime(date).timestamp() if date else None
    return None


class SeekableReader(io.RawIOBase):
    """A raw seekable file; a subclass defines its `size` and `read_at`, which returns its bytes."""

    def __init__(self) -> None:
        self._position = 0

    @property
    @abstractmethod
    def size(self) -> int:
        """The length of the file in bytes."""

    @abstractmethod
    def read_at(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or fewer; none only at the end of the file."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}
        place = offset + (self.size if whence == io.SEEK_END else base[whence])
        if place < 0:
            raise OSError(errno.EINVAL, "seek before the start")
        self._position = place
        return place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read_at(self._position, self._position + len(view)) if len(view) else b""
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
