"""Checkpoints: copies of many commit records in few files, so that a resume reads fewer objects.

A run of 250,000 shards then resumes with hundreds of reads. Checkpoints are only a cache: commit
records alone say which shards are done. A copy is used only if it matches a fresh listing of the
store. Otherwise the commit record itself is read. So a checkpoint that is lost, old, torn or of
another run costs only time.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import re
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import IO

import numpy as np

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.ledger.layout import CHECKPOINT_NAME, CHECKPOINTS, COMMITS
from prefect_raybatch.ledger.record_files import limit_of, put_record, read_record
from prefect_raybatch.ledger.records import Commit
from prefect_raybatch.storage import FileInfo, Store, read_ahead

log = logging.getLogger(__name__)

MOST_COMMIT_BYTES = limit_of(f"{COMMITS}/")  # largest size of a commit record
FOLD = 1000  # commits per file; a resume reads the commits in no file, at 400 a second in 2.5 s
FOLD_BYTES = 16 << 20  # bytes of commits per file, because readers hold a few files in memory
LEAST_COMMITS = 200  # fewer are not worth a file at the end of an attempt
MAX_BYTES = 512 << 20  # limit of an unpacked file; written ones have at most 24 MiB
CHECKPOINT_READERS = 4
HELD_BYTES = 8 << 20  # copies held in memory; 10^9 rows in 250,000 shards have 250 MB of them
MOST_STRAYS = 20
_MD5 = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True)
class Listing:
    """The commit records that a fresh listing of commits/ shows, by shard.

    `done`: bool[shards], True for a shard with a commit record. `sizes`: int32[shards], bytes of
    the record. `md5`: 16 bytes for each shard, or b"" where the store's ETag is no MD5 (local disk,
    multipart uploads, some encryptions). `strays`: paths of files in commits/ that are not commit
    records, such as copies made by a tool; at most MOST_STRAYS.
    """

    done: np.ndarray
    sizes: np.ndarray
    md5: list[bytes]
    strays: list[str] = field(default_factory=list)

    @classmethod
    def empty(cls, shards: int) -> Listing:
        return cls(np.zeros(shards, bool), np.zeros(shards, np.int32), [b""] * shards)

    def note(self, shard: int, info: FileInfo) -> None:
        self.done[shard] = True
        self.sizes[shard] = min(info.size, MOST_COMMIT_BYTES + 1)
        if info.etag and _MD5.match(info.etag):
            self.md5[shard] = bytes.fromhex(info.etag)

    def add_unexpected(self, path: str) -> None:
        if len(self.strays) < MOST_STRAYS:
            self.strays.append(path)

    def proves(self, shard: int, body: bytes) -> bool:
        """Return whether the store's MD5 proves that `body` is the shard's stored record."""
        return self.md5[shard] == hashlib.md5(body, usedforsecurity=False).digest()

    def fits(self, shard: int, body: bytes) -> bool:
        """Return whether `body` can be the stored record of the shard.

        Compares the checksum, or only the size if the store has no checksum. A size is good
        evidence, because records never change.
        """
        if self.md5[shard]:
            return self.proves(shard, body)
        return bool(self.done[shard]) and int(self.sizes[shard]) == len(body)


class CheckpointWriter:
    """Collects commits, and writes them to a checkpoint file whenever it has 1,000 or 16 MiB."""

    def __init__(self, store: Store, plan_hash: str):
        self.store, self.plan_hash = store, plan_hash
        self._lines: list[bytes] = []
        self._bytes = 0

    def add(self, commit: Commit) -> None:
        self._lines.append(b"%d %b\n" % (commit.shard, commit.body))
        self._bytes += len(self._lines[-1])
        if len(self._lines) >= FOLD or self._bytes >= FOLD_BYTES:
            self.flush(1)

    def flush(self, least: int = LEAST_COMMITS) -> None:
        """Write the collected commits to one checkpoint file, if there are at least `least`.

        Otherwise they stay collected. A failure is only logged; these commits then get into no
        checkpoint.
        """
        if len(self._lines) < least:
            return
        data = gzip.compress(b"".join([self.plan_hash.encode() + b"\n", *self._lines]), 3, mtime=0)
        self._lines.clear()
        self._bytes = 0
        try:
            put_record(self.store, f"{CHECKPOINTS}/{uuid.uuid4().hex}.gz", data)
        except RayBatchError as error:
            log.warning("No checkpoint was written, so a resume takes longer: %s", error)


class Copies:
    """Copies of commit records from checkpoints, by shard. Take each at most once.

    `confirmed(shard, bytes)` returns whether the bytes are the stored record of the shard; copies
    on disk are confirmed again when they are read.

    The first HELD_BYTES of copies are held in memory and later ones on the local disk (TMPDIR), as
    far as it has room, so memory grows by only 12 bytes a shard.
    """

    def __init__(self, shards: int, confirmed: Callable[[int, bytes], bool]) -> None:
        self._confirmed = confirmed
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._file: IO[bytes] | None = None
        self._end, self._full = 0, False
        self._starts = np.full(shards, -1, np.int64)
        self._sizes = np.zeros(shards, np.int32)

    def __contains__(self, shard: int) -> bool:
        return shard in self._held or self._starts[shard] >= 0

    def add(self, records: Mapping[int, bytes]) -> None:
        size = sum(map(len, records.values()))
        if self._held_bytes + size <= HELD_BYTES or self._full or not self._written(records):
            self._held.update(records)
            self._held_bytes += size

    def take(self, shard: int) -> bytes | None:
        """Return the copy of a shard's record, or None if there is no intact one.

        After None the caller reads the record from the store. A copy held in memory is dropped.
        """
        body = self._held.pop(shard, None)
        if body is not None or self._file is None:
            return body
        start, size = int(self._starts[shard]), int(self._sizes[shard])
        try:
            body = os.pread(self._file.fileno(), size, start)
        except OSError as error:
            log.warning(
                "%s: cannot read checkpointed commits, so the store is read: %s",
                tempfile.gettempdir(),
                error,
            )
            return None
        return body if self._confirmed(shard, body) else None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _written(self, records: Mapping[int, bytes]) -> bool:
        """Append the records to the temporary file; return False if the local disk rejects them."""
        left, at = memoryview(b"".join(records.values())), self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="raybatch-", buffering=0)  # noqa: SIM115
            while left:
                done = os.pwrite(self._file.fileno(), left, at)
                left, at = left[done:], at + done
        except OSError as error:
            log.warning(
                "%s: cannot write checkpointed commits, so they stay in memory: %s",
                tempfile.gettempdir(),
                error,
            )
            self._full = True
            return False
        for shard, body in records.items():
            self._starts[shard], self._sizes[shard] = self._end, len(body)
            self._end += len(body)
        return True


def folded(store: Store, plan_hash: str, listing: Listing, exact: bool) -> Copies:
    """Read the checkpoint files; return the copies of commit records that match `listing`.

    `exact` requires a matching checksum; otherwise a matching size is enough where the store has no
    checksum. Close the result after use.
    """
    confirmed = listing.proves if exact else listing.fits
    planned = range(len(listing.done))
    copies = Copies(len(planned), confirmed)
    if not listing.done.any() or (exact and not any(listing.md5)):
        return copies
    names = [info.path for info in store.list(CHECKPOINTS) if CHECKPOINT_NAME.match(info.path)]
    for lines in read_ahead(
        partial(_lines, store, plan_hash), names, CHECKPOINT_READERS, CHECKPOINT_READERS
    ):
        records: dict[int, bytes] = {}
        for shard, body in lines:
            new = shard in planned and shard not in records and shard not in copies
            if new and confirmed(shard, body):
                records[shard] = body
        copies.add(records)
    return copies


def _lines(store: Store, plan_hash: str, name: str) -> list[tuple[int, bytes]]:
    """Return (shard, record) pairs of a checkpoint file.

    Returns [] if the file is damaged or belongs to another plan.
    """
    try:
        with gzip.open(io.BytesIO(read_record(store, name))) as stream:
            text = stream.read(MAX_BYTES + 1)
        if len(text) <= MAX_BYTES:
            return list(_split(text, plan_hash))
    except (FileNotFoundError, CorruptRun, OSError, EOFError, zlib.error, ValueError) as error:
        log.warning("Ignoring checkpoint %s: %s", name, error)
    return []


def _split(text: bytes, plan_hash: str) -> Iterator[tuple[int, bytes]]:
    first, *lines = text.split(b"\n")
    if first == plan_hash.encode():
        for line in lines:
            shard, _, body = line.partition(b" ")
            if body:
                yield int(shard), body
