"""Reads a Parquet footer as plain values that can be changed and written again.

pyarrow reads footers, and writes them for rows that it encodes, but cannot change one. To move a
row group to another file, its offsets must be changed. A footer is one struct in Thrift's compact
protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md); its
fields are defined in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"PAR1"
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_INTEGERS = (_I16, _I32, _I64)
_STATISTICS = {1: "old max", 2: "old min", 3: "nulls", 5: "max", 6: "min"}  # of Statistics

ThriftFields = dict[int, Any]
"""A struct: {field number: (kind, value)}; the value of a list is (kind of items, items)."""


class FileField:
    """Field numbers of FileMetaData in parquet.thrift."""

    VERSION, SCHEMA, ROWS, GROUPS = 1, 2, 3, 4


class GroupField:
    """Field numbers of RowGroup in parquet.thrift; `STORED` is its total compressed size."""

    COLUMNS, SIZE, ROWS, OFFSET, STORED = 1, 2, 3, 5, 6


class ChunkField:
    """Field numbers of ColumnChunk in parquet.thrift; PAGE_INDEX fields locate the page index."""

    OFFSET, META = 2, 3
    PAGE_INDEX = (4, 5, 6, 7)


class ColumnField:
    """Field numbers of ColumnMetaData in parquet.thrift; a ColumnChunk holds it in field `META`."""

    VALUES, SIZE, STORED, STATISTICS = 5, 6, 7, 12
    FIRST_PAGE, INDEX_PAGE, DICTIONARY_PAGE = 9, 10, 11
    BLOOM = (14, 15)


def footer_of(data: bytes | memoryview) -> ThriftFields:
    """Return the `FileMetaData` at the end of a Parquet file's bytes.

    Raises ValueError or IndexError if there is no readable footer.
    """
    size = int.from_bytes(data[-8:-4], "little")
    if bytes(data[-4:]) != MAGIC or size + 12 > len(data):
        raise ValueError("not a Parquet file with a readable footer")
    return _Reader(bytes(data[-8 - size : -8])).struct()


def footer_at_end(stream: BinaryIO) -> ThriftFields:
    """Return the `FileMetaData` of a seekable Parquet file.

    Raises ValueError, IndexError or OSError if there is no readable footer.
    """
    stream.seek(-8, os.SEEK_END)
    size = int.from_bytes(stream.read(4), "little")
    stream.seek(-12 - size, os.SEEK_END)
    return footer_of(stream.read(size + 12))


@dataclass(frozen=True)
class GroupFigures:
    """The figures of a row group in a footer: its number of rows, and statistics of each column.

    `columns` has a dict for each column. "values" is the number of its values. "nulls" (the number
    of nulls) and the bounds "min", "max", "old min" and "old max" (encoded, as bytes) are there
    only if the footer has them.
    """

    rows: int
    columns: tuple[dict[str, Any], ...]


def footer_figures(footer: ThriftFields) -> list[GroupFigures]:
    """Return the figures of each row group in a footer.

    Raises KeyError, TypeError or ValueError for a malformed footer.
    """
    groups = []
    for group in listed(footer, FileField.GROUPS):
        columns = []
        for chunk in listed(group, GroupField.COLUMNS):
            metadata = chunk[ChunkField.META][1]
            at = ColumnField.STATISTICS
            bounds = metadata[at][1] if at in metadata else {}
            named = {name: bounds[n][1] for n, name in _STATISTICS.items() if n in bounds}
            columns.append({"values": metadata[ColumnField.VALUES][1], **named})
        groups.append(GroupFigures(group[GroupField.ROWS][1], tuple(columns)))
    return groups


def encoded(footer: ThriftFields) -> bytes:
    """Return the bytes that end a Parquet file after its last row group: footer, length, magic."""
    out = bytearray()
    _put_struct(out, footer)
    return bytes(out) + len(out).to_bytes(4, "little") + MAGIC


def integer(value: int) -> tuple[int, int]:
    """Return an i64 field for `ThriftFields`: (kind, value)."""
    return _I64, value


def structs(values: list[ThriftFields]) -> tuple[int, tuple[int, list[ThriftFields]]]:
    """Return a list of structs as a field of `ThriftFields`: (kind, (kind of items, items))."""
    return _LIST, (_STRUCT, values)


def listed(fields: ThriftFields, number: int) -> list[ThriftFields]:
    """Return the structs in field `number`, which is a list of structs.

    Raises KeyError if the field is missing, TypeError if it is no list.
    """
    values: list[ThriftFields] = fields[number][1][1]
    return values


@dataclass
class _Reader:
    data: bytes
    at: int = 0

    def struct(self) -> ThriftFields:
        fields, number = ThriftFields(), 0
        while header := self._byte():
            step, kind = header >> 4, header & 15
            number = number + step if step else self._whole()
            if kind in (_TRUE, _FALSE):
                fields[number] = _TRUE, kind == _TRUE
            else:
                fields[number] = kind, self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in _INTEGERS:
            return self._whole()
        if kind == _BINARY:
            return self._take(self._count())
        if kind == _STRUCT:
            return self.struct()
        if kind in (_LIST, _SET):
            header = self._byte()
            size, each = header >> 4, header & 15
            size = self._count() if size == 15 else size
            return each, [self._value(each) for _ in range(size)]
        if kind == _DOUBLE:
            return self._take(8)
        if kind in (_TRUE, _FALSE, _BYTE):  # in a list a bool is a byte
            return self._byte()
        raise ValueError(f"unknown Thrift type {kind} in a Parquet footer")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("a Parquet footer is truncated")
        return self.data[self.at - size : self.at]

    def _count(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _whole(self) -> int:
        value = self._count()
        return value >> 1 ^ -(value & 1)


def _put_struct(out: bytearray, fields: ThriftFields) -> None:
    last = 0
    for number, (kind, value) in sorted(fields.items()):
        if kind == _TRUE and not value:
            kind = _FALSE
        if 0 < number - last < 16:
            out.append(number - last << 4 | kind)
        else:
            out.append(kind)
            _put_whole(out, number)
        if kind not in (_TRUE, _FALSE):
            _put(out, kind, value)
        last = number
    out.append(0)


def _put(out: bytearray, kind: int, value: Any) -> None:
    if kind in _INTEGERS:
        _put_whole(out, value)
    elif kind == _BINARY:
        _put_count(out, len(value))
        out += value
    elif kind == _STRUCT:
        _put_struct(out, value)
    elif kind in (_LIST, _SET):
        each, values = value
        out.append(min(len(values), 15) << 4 | each)
        if len(values) >= 15:
            _put_count(out, len(values))
        for item in values:
            _put(out, each, item)
    elif kind == _DOUBLE:
        out += value
    else:
        out.append(value)


def _put_count(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _put_whole(out: bytearray, value: int) -> None:
    _put_count(out, value << 1 if value >= 0 else ~value << 1 | 1)
