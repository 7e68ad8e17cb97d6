"""Whether a store keeps what it was sent: a 200 alone says only that it answered.

By size and ETag where the ETag is the MD5 of the bytes, as it is after a single PUT without
SSE-KMS or SSE-C. Everywhere else (parts `-N`, those encryptions, a disk) the file is read back.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.errors import BadUpload, SourceError
from prefect_raybatch.storage.base import FileInfo, Store

log = logging.getLogger("prefect_raybatch.storage")

PROBE_TRIES = 3  # writes of one file before its store counts as broken
CHUNK = 8 << 20  # bytes read at a time, on S3 one GET


@dataclass(frozen=True)
class Sums:
    """What tells one content from another: bytes, and MD5 and SHA-256 in hex."""

    size: int
    md5: str
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Sums:
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return cls(len(data), md5, hashlib.sha256(data).hexdigest())

    @classmethod
    def of_stream(cls, stream: Any, etag: bool = True) -> Sums:
        """Of all bytes from where `stream` stands; raises what reading does. Without `etag`, for a
        disk, which has none, no MD5 is made: it takes twice the time of the rest."""
        size, md5, sha256 = 0, hashlib.md5(usedforsecurity=False), hashlib.sha256()
        while chunk := stream.read(CHUNK):
            size += len(chunk)
            if etag:
                md5.update(chunk)
            sha256.update(chunk)
        return cls(size, md5.hexdigest() if etag else "", sha256.hexdigest())


def sha256_of(stream: Any) -> str:
    """Of all bytes from where `stream` stands; raises what reading does."""
    found = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        found.update(chunk)
    return found.hexdigest()


def holds(store: Store, info: FileInfo, sums: Sums, read_back: bool = False) -> bool:
    """Whether the file of `info` (by `stat` or a listing) is the content of `sums`; with
    `read_back` an ETag is not taken for it."""
    if info.size != sums.size:
        return False
    if info.etag == sums.md5 and not read_back:
        return True
    try:
        with store.open(info.path) as stream:
            return sha256_of(stream) == sums.sha256
    except SourceError:  # replaced while it was read, so it is not that file any more
        return False


def put_proved(store: Store, path: str, data: bytes) -> FileInfo:
    """`store.put`, again while the store keeps other bytes; BadUpload after TRIES of them."""
    return _proved(store, path, Sums.of(data), lambda: store.put(path, data))


def put_same_proved(store: Store, path: str, data: bytes) -> FileInfo:
    """As `put_proved`, of a file of which the name tells the content: one that is there with it is
    left alone. Others may read it by now, and a store could keep it badly this time."""
    sums = Sums.of(data)
    for _ in range(2):
        with suppress(FileNotFoundError):
            if holds(store, found := store.stat(path), sums):
                return found
            break
        store.put_if_absent(path, data)
    return put_proved(store, path, data)


def put_file_proved(
    store: Store, path: str, local_path: str | os.PathLike[str], sums: Sums
) -> FileInfo:
    """`store.put_file` likewise; one try where the store moves the local file."""

    def put() -> object:
        return store.put_file(path, local_path)

    return _proved(store, path, sums, put, again=lambda: os.path.exists(local_path))


def _proved(
    store: Store,
    path: str,
    sums: Sums,
    put: Callable[[], object],
    again: Callable[[], bool] = lambda: True,
) -> FileInfo:
    """The file that `put` wrote and that is the content of `sums`; `again` says whether `put` can
    be called once more."""
    for _ in range(PROBE_TRIES):
        put()
        info = store.stat(path)
        if holds(store, info, sums):
            return info
        log.warning("%s/%s is not what was sent; writing it again", store.uri, path)
        if not again():
            break
    raise bad_upload(store, path)


def bad_upload(store: Store, path: str) -> BadUpload:
    return BadUpload(
        f"{store.uri}/{path}: the store answered that it wrote this file, and keeps other bytes "
        "than it was sent. Nothing was deleted: run the same command again, and if this comes "
        "back, choose another output and look at the store's disks or the proxy before it"
    )
