"""Verifies that a store kept what it was sent: status 200 only says that it answered.

Compares the size and, where it can, the ETag: after a single PUT without SSE-KMS or SSE-C, it is
the MD5 of the bytes. In all other cases, such as a multipart upload (ETag `...-N`) or a local disk,
it reads the file back.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from prefect_raybatch.errors import BadUpload, SourceError
from prefect_raybatch.storage.base import FileInfo, Store

log = logging.getLogger("prefect_raybatch.storage")

PROBE_TRIES = 3  # writes of one file before an upload counts as bad
CHUNK = 8 << 20  # bytes read at a time, on S3 one GET
FOOTER_END = 8  # bytes: the length of a Parquet footer's metadata, and the magic word
FOOTER_DIGITS = 32  # of its hash in hex: 128 bits


@dataclass(frozen=True)
class Sums:
    """Size in bytes, MD5 and SHA-256 in hex of a file's content."""

    size: int
    md5: str
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Sums:
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return cls(len(data), md5, hashlib.sha256(data).hexdigest())

    @classmethod
    def of_stream(cls, stream: BinaryIO, etag: bool = True) -> Sums:
        """Compute the sums of `stream` from its position to its end; errors of reading propagate.

        With `etag` False, the MD5 stays empty. Use this for a disk, which has no ETags: the MD5
        takes twice as long as the SHA-256.
        """
        size, md5, sha256 = 0, hashlib.md5(usedforsecurity=False), hashlib.sha256()
        while chunk := stream.read(CHUNK):
            size += len(chunk)
            if etag:
                md5.update(chunk)
            sha256.update(chunk)
        return cls(size, md5.hexdigest() if etag else "", sha256.hexdigest())


def sha256_of(stream: BinaryIO) -> str:
    """Return the SHA-256 of `stream` from its position to its end; errors of reading propagate."""
    found = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        found.update(chunk)
    return found.hexdigest()


def holds(store: Store, info: FileInfo, sums: Sums, read_back: bool = False) -> bool:
    """Return whether the file that `info` describes has the checksums `sums`.

    Compares the sizes, then the ETag with the MD5. If the ETag differs, or with `read_back`, reads
    the file and compares its SHA-256. Returns False if the file was replaced while it was read.
    """
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
    """Write a file and check what the store holds; write it again if that differs.

    Raises BadUpload if it still differs after PROBE_TRIES writes.
    """
    return _proved(store, path, Sums.of(data), lambda: store.put(path, data))


def put_same_proved(store: Store, path: str, data: bytes) -> FileInfo:
    """Write a file whose name identifies its content, and check it as `put_proved` does.

    If the file exists with this content, it is not written again: others may be reading it, and a
    new upload could get damaged.
    """
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
    """Store a local file with checksums `sums`, and check it as `put_proved` does.

    If the store moves the local file, there is only one attempt.
    """

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
    """Call `put`, which writes the file, until the file has checksums `sums`; return its info.

    `again` returns whether `put` can be called once more. Raises BadUpload after PROBE_TRIES calls,
    or earlier if `again` returns False.
    """
    for _ in range(PROBE_TRIES):
        put()
        info = store.stat(path)
        if holds(store, info, sums):
            return info
        log.warning("%s/%s differs from what was sent. Writing it again", store.uri, path)
        if not again():
            break
    raise bad_upload(store, path)


def bad_upload(store: Store, path: str) -> BadUpload:
    """Return the error for a file whose content differs from the bytes sent to the store."""
    return BadUpload(
        f"{store.uri}/{path}: the store reported a successful write, but keeps other bytes than it "
        "was sent. Nothing was deleted: run the same command again. If this comes back, choose "
        "another output, and check the disks of the store or the proxy before it"
    )


def footer_digest(handle: BinaryIO) -> str:
    """Return a hash of the metadata at the end of a Parquet file, to see if it was rewritten.

    It covers offsets, sizes and statistics of all column chunks. Raises ValueError if there is no
    footer.
    """
    size = handle.seek(0, os.SEEK_END)
    handle.seek(max(0, size - FOOTER_END))
    end = handle.read(FOOTER_END)
    length = int.from_bytes(end[:4], "little") + FOOTER_END
    if end[4:] not in (b"PAR1", b"PARE") or length > size:
        raise ValueError("no Parquet footer")
    handle.seek(size - length)
    return hashlib.sha256(handle.read(length)).hexdigest()[:FOOTER_DIGITS]
