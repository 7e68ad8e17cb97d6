"""Bounds on the contents of an input, so that a small file cannot exhaust a machine's memory.

The operator can raise them with environment variables. A job file cannot, because its author may
have written the input file as well.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError


@dataclass(frozen=True)
class Bound:
    """An upper limit: `default`, unless the environment variable `variable` sets another.

    `what` is the counted noun in errors, e.g. "columns" for "the limit is 10,000 columns".
    """

    variable: str
    default: int
    what: str

    def value(self) -> int:
        """Return the limit in force; raise ConfigError if the variable is no positive integer."""
        text = os.environ.get(self.variable, "")
        if not text:
            return self.default
        try:
            number = int(text)
        except ValueError:
            number = 0
        if number < 1:
            raise ConfigError(f"{self.variable}={text}: must be a whole number above 0")
        return number

    def exceeded_error(self, where: str, holds: str) -> SourceError:
        """Return the error for an input that exceeds the limit.

        `where` names the input; `holds` says what it contains, such as "has 20,000 columns".
        """
        return SourceError(
            f"{where}: {holds}; the limit is {self.value():,} {self.what}. Rewrite the file, or "
            f"raise the limit with {self.variable} in the environment of the flow"
        )


COLUMN_BOUND = Bound("RAYBATCH_MAX_COLUMNS", 10_000, "columns, nested fields included")
EXPANSION_BOUND = Bound(
    "RAYBATCH_MAX_EXPANSION", 200, "times the file's size, above 1 GiB of decompressed data"
)
ROWS_BOUND = Bound("RAYBATCH_MAX_ROWS_PER_BYTE", 1_000, "rows per byte, above 1,000,000 rows")
FREE_BYTES = 1 << 30  # decompressed bytes that any file may have
FREE_ROWS = 1_000_000  # rows that any file may have


def fields_in(kind: pa.DataType) -> int:
    """Return how many fields a type has, counting itself and nested ones."""
    return 1 + sum(fields_in(kind.field(i).type) for i in range(kind.num_fields))


def check_columns_bound(schema: pa.Schema, where: str) -> None:
    """Raise SourceError if a file has more columns, nested fields included, than the limit.

    `where` names the file.
    """
    total = sum(fields_in(field.type) for field in schema)
    if total > COLUMN_BOUND.value():
        raise COLUMN_BOUND.exceeded_error(where, f"has {total:,} columns and nested fields")


def footer_fault(metadata: Any, size: int) -> str | None:
    """Return a description of the first impossible count in a Parquet footer, or None.

    The row counts of the file, its row groups and their column chunks must agree. `size` is the
    size of the file in bytes; no chunk may be larger.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows = [group.num_rows for group in groups]
    if min([metadata.num_rows, *rows]) < 0:
        return f"negative row count ({min([metadata.num_rows, *rows])})"
    if sum(rows) != metadata.num_rows:
        return f"the footer counts {metadata.num_rows:,} rows, its row groups {sum(rows):,}"
    for number, group in enumerate(groups):
        for index in range(group.num_columns):
            chunk, column = group.column(index), metadata.schema.column(index)
            values, repeated = chunk.num_values, column.max_repetition_level > 0
            if values < group.num_rows or (not repeated and values != group.num_rows):
                return (
                    f"row group {number} has {group.num_rows:,} rows, but {values:,} values of "
                    f"column {chunk.path_in_schema!r}"
                )
            stored = chunk.total_compressed_size
            if not 0 <= stored <= size or chunk.total_uncompressed_size < 0:
                return (
                    f"in row group {number}, column {chunk.path_in_schema!r} claims {stored:,} "
                    f"bytes, but the file has {size:,}"
                )
    return None


def check_expansion_bound(declared: int, size: int, where: str) -> None:
    """Raise SourceError if a file of `size` bytes claims to decompress to too many bytes.

    `declared` is the number of bytes that it claims. It is too high if it exceeds both FREE_BYTES
    (1 GiB) and EXPANSION_BOUND times `size`. `where` names the file.
    """
    if declared > max(FREE_BYTES, size * EXPANSION_BOUND.value()):
        raise EXPANSION_BOUND.exceeded_error(
            where, f"claims to decompress from {size:,} to at least {declared:,} bytes"
        )


def declared_bytes(metadata: Any) -> int:
    """Return how many bytes a Parquet file's columns decompress to, according to its footer."""
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return sum(
        group.column(index).total_uncompressed_size
        for group in groups
        for index in range(group.num_columns)
    )


def check_rows_bound(rows: int, size: int, where: str) -> None:
    """Raise SourceError if a file of `size` bytes claims too many `rows`.

    `rows` is too high if it exceeds both FREE_ROWS (a million) and ROWS_BOUND times `size`. `where`
    names the file.
    """
    if rows > max(FREE_ROWS, size * ROWS_BOUND.value()):
        raise ROWS_BOUND.exceeded_error(where, f"claims {rows:,} rows in {size:,} bytes")
