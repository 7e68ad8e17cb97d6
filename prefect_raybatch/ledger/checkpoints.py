"""Commit records folded into few files, so that a resume needs hundreds of reads and not 250,000.

Only a cache: a commit record alone says what is done. A folded copy is believed when it is the
record that the store's fresh listing shows, else the record is read; so a checkpoint that is
lost, old, torn or another's costs time and nothing else.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import re
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.ledger.layout import CHECKPOINT_NAME, CHECKPOINTS
from prefect_raybatch.ledger.record_files import EARLIER_COMMIT, put_record, read_record
from prefect_raybatch.ledger.records import Commit
from prefect_raybatch.storage import FileInfo, Store, read_ahead

log = logging.getLogger(__name__)

FOLD = 1000  # commits a file: at 400 reads a second what is not folded yet costs 2.5 s
FOLD_BYTES = 16 << 20  # ... or so much of them: readers hold a few such files
LEAST_COMMITS = 200  # fewer than these are not worth a file at the end of an attempt
MAX_BYTES = 512 << 20  # of a file, unpacked; ours have 80 MB where a record has 64
CHECKPOINT_READERS = 4
MOST_STRAYS = 20
_MD5 = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True)
class Listing:
    """What a fresh listing of commits/ says of each shard.

    `done`: bool[shards]. `sizes`: int32[shards], bytes of the record. `md5`: for each shard 16
    bytes, or b"" where the store's etag is none (a local disk, parts, some encryptions). `strays`
    are the first files there that are no records of ours, such as copies that a tool made.
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
        self.sizes[shard] = min(info.size, EARLIER_COMMIT + 1)
        if info.etag and _MD5.match(info.etag):
            self.md5[shard] = bytes.fromhex(info.etag)

    def stray(self, path: str) -> None:
        if len(self.strays) < MOST_STRAYS:
            self.strays.append(path)

    def proves(self, shard: int, body: bytes) -> bool:
        """Whether `body` is the stored record, going by the store's own checksum of it."""
        return self.md5[shard] == hashlib.md5(body, usedforsecurity=False).digest()

    def fits(self, shard: int, body: bytes) -> bool:
        """As `proves`; by size where the store gives no checksum, since records never change."""
        if self.md5[shard]:
            return self.proves(shard, body)
        return bool(self.done[shard]) and int(self.sizes[shard]) == len(body)


class Folder:
    """Collects commits and writes a file for each FOLD of them, or FOLD_BYTES."""

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
        """Writes what is collected if that is at least `least`; a failure is only logged."""
        if len(self._lines) < least:
            return
        data = gzip.compress(b"".join([self.plan_hash.encode() + b"\n", *self._lines]), 3, mtime=0)
        self._lines.clear()
        self._bytes = 0
        try:
            put_record(self.store, f"{CHECKPOINTS}/{uuid.uuid4().hex}.gz", data)
        except RayBatchError as error:
            log.warning("commits were not folded, so a resume takes longer: %s", error)


def folded(store: Store, plan_hash: str, listing: Listing, exact: bool) -> dict[int, bytes]:
    """Shard to record, as far as checkpoints hold records that the listing confirms.

    `exact` asks for proof by checksum; without it the same size will do where there is no other
    mark. Memory is that of the records, about 1 KB a shard.
    """
    confirmed = listing.proves if exact else listing.fits
    found: dict[int, bytes] = {}
    if not listing.done.any() or (exact and not any(listing.md5)):
        return found
    names = [info.path for info in store.list(CHECKPOINTS) if CHECKPOINT_NAME.match(info.path)]
    for lines in read_ahead(
        partial(_lines, store, plan_hash), names, CHECKPOINT_READERS, CHECKPOINT_READERS
    ):
        for shard, body in lines:
            if shard < len(listing.done) and shard not in found and confirmed(shard, body):
                found[shard] = body
    return found


def _lines(store: Store, plan_hash: str, name: str) -> list[tuple[int, bytes]]:
    """(shard, record) of a file; nothing of one that is not whole or another plan's."""
    try:
        with gzip.open(io.BytesIO(read_record(store, name))) as stream:
            text = stream.read(MAX_BYTES + 1)
        if len(text) <= MAX_BYTES:
            return list(_split(text, plan_hash))
    except (FileNotFoundError, CorruptRun, OSError, EOFError, zlib.error, ValueError) as error:
        log.warning("%s is not used: %s", name, error)
    return []


def _split(text: bytes, plan_hash: str) -> Iterator[tuple[int, bytes]]:
    first, *lines = text.split(b"\n")
    if first == plan_hash.encode():
        for line in lines:
            shard, _, body = line.partition(b" ")
            if body:
                yield int(shard), body
