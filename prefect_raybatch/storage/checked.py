"""Reads parts of a file and checks each part against checksums.

A SHA-256 covers a whole file, so a reader of a few row groups cannot check it without reading
everything. Therefore the process that distributes the reading first reads the file once, compares
its SHA-256 with the record and computes a checksum of each block. Readers elsewhere check every
block that they read, at 16 bytes of checksum for each 256 KiB.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from threading import Lock
from typing import BinaryIO

from cachetools import LRUCache

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.storage.base import FileInfo, SeekableReader, Store
from prefect_raybatch.storage.proof import CHUNK

CHECKED_BLOCK = 256 << 10  # bytes covered by one checksum
SUM_BYTES = 16
SHORT_HASH = 16  # hex digits of a SHA-256 in the name of a table


@dataclass(frozen=True)
class BlockSums:
    """Checksums of the blocks of a file whose SHA-256 was verified.

    The file has `size` bytes; `sums` holds SUM_BYTES bytes for each block of CHECKED_BLOCK bytes.
    """

    sha256: str
    size: int
    sums: bytes

    def of_block(self, number: int) -> bytes:
        return self.sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]


_Version = tuple[str, str, FileInfo, int | None, int | None]
_known: LRUCache[_Version, BlockSums] = LRUCache(1024)  # 64 KiB for each GiB of a file
_lock = Lock()


def block_sums(store: Store, path: str, sha256: str) -> BlockSums:
    """Return the checksums of a file's blocks.

    The first call for a version of the file reads all of it; later calls in this process return the
    same checksums. `sha256` is the recorded hash, or its first SHORT_HASH digits. Raises
    `CorruptRun` if the file is missing or has another hash.
    """
    try:
        info = store.stat(path)
        # ctime and inode differ if a file was replaced with the same size and modification time.
        version = (store.uri, sha256, info, info.ctime_ns, info.inode)
        with _lock:
            known = _known.get(version)
        if known is None:
            with store.open(path) as stream:
                known = _read(stream)
    except FileNotFoundError:
        raise CorruptRun(f"{store.uri}/{path} is missing") from None
    if len(sha256) < SHORT_HASH or not known.sha256.startswith(sha256):
        raise _other_contents(f"{store.uri}/{path}")
    with _lock:
        _known[version] = known
    return known


def _read(stream: BinaryIO) -> BlockSums:
    whole, sums, size = hashlib.sha256(), bytearray(), 0
    while chunk := stream.read(CHUNK):
        while len(chunk) % CHECKED_BLOCK and (
            more := stream.read(CHECKED_BLOCK - len(chunk) % CHECKED_BLOCK)
        ):
            chunk += more
        whole.update(chunk)
        size += len(chunk)
        for start in range(0, len(chunk), CHECKED_BLOCK):
            sums += _sum(chunk[start : start + CHECKED_BLOCK])
    return BlockSums(whole.hexdigest(), size, bytes(sums))


def _sum(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=SUM_BYTES).digest()


def _other_contents(uri: str) -> CorruptRun:
    return CorruptRun(f"{uri} was damaged or replaced: its checksum differs from the recorded one")


def open_checked(store: Store, path: str, sums: BlockSums) -> BinaryIO:
    """Open a file for random reads, each of which is compared with `sums`.

    Raises `CorruptRun` if the file is missing; a read raises it if a block that it touches has
    another checksum.
    """
    try:
        return io.BufferedReader(
            _Checked(store.open(path), f"{store.uri}/{path}", sums), CHECKED_BLOCK
        )
    except FileNotFoundError:
        raise CorruptRun(f"{store.uri}/{path} is missing") from None


class _Checked(SeekableReader):
    """Reads a stream in blocks of CHECKED_BLOCK bytes and compares each with its checksum.

    Keeps the block that it read last, so that the next read does not fetch and check it again.
    `read_at` raises `CorruptRun` if a block has another checksum.
    """

    def __init__(self, stream: BinaryIO, uri: str, sums: BlockSums) -> None:
        super().__init__()
        self._stream, self._uri, self._sums = stream, uri, sums
        self._last = (-1, b"")

    @property
    def size(self) -> int:
        return self._sums.size

    def read_at(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        if start >= stop:
            return b""
        first = start // CHECKED_BLOCK
        data = self._blocks(first, -(-stop // CHECKED_BLOCK))
        return data[start - first * CHECKED_BLOCK : stop - first * CHECKED_BLOCK]

    def _blocks(self, first: int, stop: int) -> bytes:
        """Return the bytes of blocks [first, stop)."""
        number, kept = self._last
        held = kept if number == first else b""
        begin = first + bool(held)
        data = self._load(begin, stop) if begin < stop else b""
        if data:
            self._last = (stop - 1, data[(stop - 1 - begin) * CHECKED_BLOCK :])
        return held + data

    def _load(self, first: int, stop: int) -> bytes:
        begin, end = first * CHECKED_BLOCK, min(self._sums.size, stop * CHECKED_BLOCK)
        self._stream.seek(begin)
        data = b""
        while len(data) < end - begin and (more := self._stream.read(end - begin - len(data))):
            data += more
        for number in range(first, stop):
            block = data[(number - first) * CHECKED_BLOCK : (number + 1 - first) * CHECKED_BLOCK]
            if _sum(block) != self._sums.of_block(number):
                raise _other_contents(self._uri)
        return data

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            super().close()
