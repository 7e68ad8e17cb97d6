"""What every store can do: the few operations the ledger builds on.

Everything exactly-once rests on `Store.put_if_absent`; `Store.probe` finds out whether a store
keeps that promise.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO

from prefect_raybatch.errors import CorruptRun, RayBatchError, StoreError, UnsafeStore

PROBE_WRITERS = 8
PROBE_ROUNDS = 2
RACE_TRIES = 10  # for what only a delete at the same moment can disturb


@dataclass(frozen=True, slots=True)  # a listing may have half a million
class FileInfo:
    """One file: what tells that it is still the same one.

    `path` is relative to the store's root with "/" between parts, `size` is in bytes. S3 gives
    `etag` (no quotes), a local store `mtime_ns` (nanoseconds since 1970); the other is None.
    `modified` is for people and for ages only: seconds since 1970, where a listing says it.
    A local store also gives what the file system knows a file by (`device`, `inode`) and when it
    last changed anything of it (`ctime_ns`, which nobody can set); links and modes change that
    too, so these alone do not make two files differ.
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
    """Files under one root URI. Safe for threads and forks; pickles without its connection.

    `uri` is the normalized root. `retry_seconds` (default 60) bounds how long one call goes on
    asking a remote store that does not answer; a local store does not use it. Options with
    secrets travel in the pickle, but are in no repr, str or error message. Paths are relative to
    the root and stay inside it (else ConfigError). Any call can raise StoreError (permission,
    missing bucket, full disk) or StoreUnavailable (no answer in `retry_seconds`).
    """

    uri: str
    retry_seconds: float = 60.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def __str__(self) -> str:
        return self.uri

    @abstractmethod
    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        """The whole file. FileNotFoundError; CorruptRun when it has more than `max_bytes`."""

    @abstractmethod
    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        """Files in the folder `prefix` ("" is the root), asked afresh, a page at a time.

        Folders are not files; `recursive=False` leaves out what lies in deeper ones. An absent
        folder is empty. Sorted by path locally and on S3 (directory buckets excepted). Locally a
        link to a folder is listed as one file and not entered, unless the store follows links.
        """

    @abstractmethod
    def folders(self) -> Iterator[str]:
        """Names of the folders right below the root, asked afresh. A link to a folder is none,
        unless the store follows links."""

    @abstractmethod
    def stat(self, path: str) -> FileInfo:
        """Size and etag or mtime of one file. FileNotFoundError, for a folder too."""

    def holds(self, path: str) -> bool:
        """Whether that file is there now; of a folder it is not said."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    @abstractmethod
    def put(self, path: str, data: bytes) -> FileInfo:
        """Write `data`, replacing what is there: whole or not at all, durable on return."""

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` unless it exists; of any number of writers one wins.

        True: the file holds exactly `data`, so with a unique token in it we created it, even if
        the store's first answer was lost. False: another body is there; read it and compare.
        StoreUnavailable leaves it open which: the same body can be sent again.
        UnsafeStore when the store says that it cannot do this.
        """

    @abstractmethod
    def put_file(self, path: str, local_path: str | os.PathLike[str]) -> FileInfo:
        """Store a finished local file: whole or not at all, durable on return.

        `local_path` is given up: a local store moves it where it can, S3 leaves it in place.
        """

    @abstractmethod
    def put_file_if_absent(self, path: str, local_path: str | os.PathLike[str]) -> bool:
        """`put_file` unless `path` is there, and `local_path` stays: False when nothing was done.

        Atomic: a link on a disk, one PUT on S3. Over 5 GiB, the most of a PUT, it looks and then
        writes. False may be said of our own file, after an answer that was lost: look at it.
        """

    @abstractmethod
    def replace_file(self, path: str, local_path: str | os.PathLike[str], seen: FileInfo) -> bool:
        """`put_file` in the place of `seen` (of `stat`): False when another is there by now.

        Tied to the etag in one PUT on S3 (over 5 GiB it looks and then writes); on a disk under a
        lock of the file that is replaced. FileNotFoundError when nothing is there any more, and
        `UnsafeStore` where the store can do neither.
        """

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are fine. Local folders left empty go too. `paths` may be a
        listing that is still under way: a few thousand are held at a time.

        Never through a link to a folder: StoreError before anything of those is deleted.
        """

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """A handle for random reads (close it, or use `with`). FileNotFoundError.

        On S3 each read is one GET tied to the etag seen here: SourceError if the object changes.

        pyarrow may read it in the calling thread alone (`pre_buffer=False`, `use_threads=False`):
        threads of its own need Python to let go of the handle, and abort or hang an interpreter
        that is ending (apache/arrow issues 34314 and 50482).
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds since 1970 by the clock that sets `FileInfo.modified`."""

    @abstractmethod
    def unfinished(self, before: float, remove: bool) -> tuple[FileInfo, ...]:
        """Writes under the root that were cut off and are older than `before` (see `now`).

        Temporary files of killed processes, uploads in parts that nobody completed: no reader
        sees them, but they take space. Removed as well if `remove`.
        """

    @abstractmethod
    def sub(self, prefix: str) -> Store:
        """The store rooted at `prefix`, over the same connection."""

    @abstractmethod
    def above(self) -> Store | None:
        """The store rooted at the folder around this one; None where there is none."""

    def probe(self) -> None:
        """Try at the start of a run whether this can be its output; leaves nothing behind.

        Writes, reads, lists, then lets PROBE_WRITERS writers race for one name, PROBE_ROUNDS
        times: some stores pass a sequential test of put-if-absent and fail a race.
        UnsafeStore when not exactly one writer wins; StoreError when it cannot be written.
        """
        folder = f"_probe-{uuid.uuid4()}"
        names = [f"{folder}/plain", *(f"{folder}/race-{i}" for i in range(PROBE_ROUNDS))]
        try:
            self._probe_plain(names[0])
            for name in names[1:]:
                self._probe_race(name)
        except BaseException:
            with suppress(RayBatchError):  # the first error is the one that explains
                self.delete(names)
            raise
        self.delete(names)

    def _probe_plain(self, name: str) -> None:
        """What is written must be readable and listed at once. Raises UnsafeStore."""
        body = uuid.uuid4().bytes
        self.put(name, body)
        listed = [info.path for info in self.list(name.rpartition("/")[0])]
        if self.read(name) != body or listed != [name]:
            raise UnsafeStore(
                f"{self.uri}: a file just written is not read back or not listed; exactly-once "
                "needs a store that shows a finished write at once. Choose another output."
            )

    def _probe_race(self, name: str) -> None:
        """Exactly one of several writers may create `name`, and its body must be the one kept."""
        bodies = [f"{uuid.uuid4()}".encode() for _ in range(PROBE_WRITERS)]
        start = threading.Barrier(PROBE_WRITERS)

        def write(body: bytes) -> bool:
            start.wait()
            return self.put_if_absent(name, body)

        with ThreadPoolExecutor(PROBE_WRITERS) as pool:
            won = [body for body, win in zip(bodies, pool.map(write, bodies), strict=True) if win]
        late = self.put_if_absent(name, b"late")  # catches luck in the race
        if len(won) != 1 or late or self.read(name) != won[0]:
            seen = f"{len(won)} of {PROBE_WRITERS} writers created the same file"
            seen += ", and a later one replaced it" if late else ""
            raise UnsafeStore(
                f"{self.uri}: the store does not honour put-if-absent ({seen}), so rows could be "
                "lost or doubled. Use a store with atomic If-None-Match (AWS S3, MinIO, Cloudflare "
                "R2, Ceph radosgw with a bucket that keeps no versions) or a local file system "
                "with hard links for the output."
            )


def in_batches(paths: Iterable[str], size: int) -> Iterator[list[str]]:
    """`size` of them at a time, the last ones fewer."""
    left = iter(paths)
    while some := list(islice(left, size)):
        yield some


@contextmanager
def reading_local_file(place: str | os.PathLike[str]) -> Iterator[None]:
    """Raise StoreError for what goes wrong with a local file that is about to be stored; a missing
    one stays FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StoreError(f"{os.fspath(place)}, which is to be stored: {reason}") from error


def local_size(place: str) -> int:
    """Return the bytes of a local file that is about to be stored."""
    with reading_local_file(place):
        return os.stat(place).st_size


def not_found(uri: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)


def too_large(uri: str, size: int, max_bytes: int) -> CorruptRun:
    return CorruptRun(f"{uri} has {size} bytes where at most {max_bytes} are expected")
