"""Sums the decompressed sizes that an Arrow IPC file declares, before it is decompressed.

Each compressed buffer begins with its decompressed size (Arrow's format, Message.fbs). Its offset
is in its batch's metadata, a flatbuffer that pyarrow does not expose, so the few necessary fields
are read here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.source.bounds import check_expansion_bound

ARROW_MAGIC = b"ARROW1"
DICTIONARY_BATCH, RECORD_BATCH = 2, 3
CONTINUATION = -1
PREFIX = 8  # bytes that hold the size before a compressed buffer
FOOTER_BLOCK_BYTES = 24  # {offset, metaDataLength, bodyLength} in a footer
BUFFER_STRUCT_BYTES = 16  # {offset, length} in a batch's metadata
SKIPPED_AT_ONCE = 1 << 20
LEGACY = b"ARROW:experimental_compression"  # metadata key, before the format had a field


@dataclass(frozen=True)
class _Table:
    """A flatbuffer table at byte `at` of `data`; an absent numeric field counts as 0."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> _Table:
        return cls(data, _number("<I", data, 0))

    def place(self, field: int) -> int | None:
        fields = self.at - _number("<i", self.data, self.at)
        entry = 4 + 2 * field
        if entry + 2 > _number("<H", self.data, fields):
            return None
        offset = _number("<H", self.data, fields + entry)
        return self.at + offset if offset else None

    def number(self, field: int, kind: str) -> int:
        place = self.place(field)
        return 0 if place is None else _number(kind, self.data, place)

    def table(self, field: int) -> _Table | None:
        place = self.place(field)
        return None if place is None else _Table(self.data, place + self.number(field, "<I"))

    def structs(self, field: int, size: int, kind: str) -> list[tuple[int, ...]]:
        """Return the structs of the vector in field number `field` as tuples; [] if it is absent.

        Each struct has `size` bytes; `kind` is its format for Python's `struct` module.
        """
        place = self.place(field)
        if place is None:
            return []
        start = place + self.number(field, "<I")
        count = _number("<I", self.data, start)
        if count * size > len(self.data):
            raise ValueError("the metadata counts more items than it holds")
        return [struct.unpack_from(kind, self.data, start + 4 + i * size) for i in range(count)]


def check_declared_sizes(stream: Any, size: int, is_file: bool, where: str) -> None:
    """Raise SourceError if compressed buffers declare more bytes than the expansion bound allows.

    `size` is the size of the file in bytes, `where` names it in the error. `is_file`: `stream` has
    Arrow's file format; otherwise the stream format. Raises ValueError or OSError for a damaged
    file.
    """
    total = 0
    try:
        blocks = _file_blocks(stream) if is_file else _stream_blocks(stream)
        for metadata, body in blocks:
            for offset, length in _compressed_buffers(metadata):
                _go_to(stream, body + offset)
                declared = _number("<q", stream.read(PREFIX), 0)
                # -1: this buffer is stored uncompressed, because compression saved nothing.
                total += declared if declared >= 0 else length - PREFIX
                check_expansion_bound(total, size, where)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the metadata cannot be read: {error}") from None


def _file_blocks(stream: Any) -> Iterator[tuple[bytes, int]]:
    """Yield (metadata, offset of the body in the file) of each batch in Arrow's file format."""
    stream.seek(-len(ARROW_MAGIC) - 4, os.SEEK_END)
    length = _number("<i", stream.read(4), 0)
    end = stream.tell() - 4
    if not 0 < length <= end:
        raise ValueError("the footer has no valid length")
    stream.seek(end - length)
    footer = _Table.root(stream.read(length))
    for field in (2, 3):  # dictionaries, record batches
        for offset, metadata_length, _ in footer.structs(field, FOOTER_BLOCK_BYTES, "<qi4xq"):
            if offset < 0 or metadata_length < PREFIX:
                raise ValueError("the footer names a batch at an invalid place")
            stream.seek(offset)
            metadata = stream.read(metadata_length)
            marked = _number("<i", metadata, 0) == CONTINUATION
            yield metadata[8 if marked else 4 :], offset + metadata_length


def _stream_blocks(stream: Any) -> Iterator[tuple[bytes, int]]:
    """Yield (metadata, offset of the body in the stream) of each message in the stream format."""
    while len(head := stream.read(4)) == 4:
        length = _number("<i", head, 0)
        if length == CONTINUATION:
            length = _number("<i", stream.read(4), 0)
        if length == 0:
            return
        if length < 0:
            raise ValueError("a message has no valid length")
        metadata = stream.read(length)
        body = stream.tell()
        body_bytes = _Table.root(metadata).number(3, "<q")
        if body_bytes < 0:
            raise ValueError("a message has no valid length")
        yield metadata, body
        _go_to(stream, body + body_bytes)


def _compressed_buffers(metadata: bytes) -> list[tuple[int, int]]:
    """Return (offset in the batch's body, length) of a batch's compressed buffers, sorted."""
    message = _Table.root(metadata)
    kind, batch = message.number(1, "<B"), message.table(2)
    if batch is not None and kind == DICTIONARY_BATCH:
        batch = batch.table(1)
    if batch is None or kind not in (DICTIONARY_BATCH, RECORD_BATCH):
        return []
    if batch.place(3) is None and LEGACY not in metadata:
        return []
    buffers = [(at, length) for at, length in batch.structs(2, BUFFER_STRUCT_BYTES, "<qq")]
    return sorted((at, length) for at, length in buffers if length >= PREFIX)


def _go_to(stream: Any, place: int) -> None:
    if stream.seekable():
        stream.seek(place)
        return
    left = place - stream.tell()
    if left < 0:
        raise ValueError("the buffers overlap")
    while left and (skipped := len(stream.read(min(left, SKIPPED_AT_ONCE)))):
        left -= skipped


def _number(kind: str, data: bytes, at: int) -> int:
    if at < 0:
        raise ValueError("the metadata points outside itself")
    return int(struct.unpack_from(kind, data, at)[0])
