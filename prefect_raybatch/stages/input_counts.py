"""Counts a shard's missing values by column, and how many rows have each common value.

The counts are summed over a run, so that a run can be compared with earlier ones. A value is
counted by a digest, so that records and reports hold no text of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from prefect_raybatch.ledger.stats import (
    AND_VALUE,
    INPUT_FILLED,
    INPUT_NULLS,
    INPUT_VALUES,
    common_values,
)
from prefect_raybatch.stages.block import input_columns

_MOST_COLUMNS = 16  # further columns are not counted: a record stays small
_LONGEST_COLUMN, _LONGEST_VALUE = 80, 60  # characters, bytes
_DIGEST_BYTES = 6


def input_counts(table: pa.Table, columns: Sequence[str] | None) -> dict[str, float]:
    """Return {name of a count: number of rows}: nulls, other values and common values by column.

    The names are INPUT_NULLS + column, INPUT_FILLED + column (rows that are not null), and, for
    each common value, INPUT_VALUES + column + AND_VALUE + digest of the value. `columns` are the
    input columns to count, None: all. Columns after the first _MOST_COLUMNS, and columns with a
    name over _LONGEST_COLUMN characters, are left out. Values that are rare, long, or of a type
    such as a list get no count of their own.
    """
    present = input_columns(table)
    names = present if columns is None else [name for name in columns if name in present]
    figures: dict[str, float] = {}
    for name in names[:_MOST_COLUMNS]:
        if len(name) > _LONGEST_COLUMN or AND_VALUE in name:
            continue
        column = _with_nulls(_decoded(table[name]))
        figures[f"{INPUT_NULLS}{name}"] = float(column.null_count)
        figures[f"{INPUT_FILLED}{name}"] = filled = float(len(column) - column.null_count)
        for value, number in _few_values(column, filled).items():
            digest = hashlib.blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()
            figures[f"{INPUT_VALUES}{name}{AND_VALUE}{digest}"] = number
    return figures


def _few_values(column: pa.ChunkedArray, filled: float) -> dict[bytes, float]:
    """Return {value as UTF-8 text: number of rows} for the values that are common in a column.

    `filled` is the number of rows that are not null.
    """
    texts = _as_texts(column)
    if texts is None:
        return {}
    texts = texts.cast(pa.large_binary())  # a text that is not UTF-8 fails only its row
    short = texts.filter(pc.less_equal(pc.binary_length(texts), _LONGEST_VALUE))  # and not null
    counted = pc.value_counts(short)
    values, rows = counted.field("values").to_pylist(), counted.field("counts").to_pylist()
    counts = {value: float(number) for value, number in zip(values, rows, strict=True)}
    return common_values(counts, filled)


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column with a dictionary encoding undone, because a dictionary may hold nulls."""
    if not pa.types.is_dictionary(column.type):
        return column
    try:
        return column.cast(column.type.value_type)
    except pa.ArrowNotImplementedError:  # a dictionary of lists
        return column


def _with_nulls(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column with null for NaN, which pandas writes for a missing number."""
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)


def _as_texts(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return the values as texts; None for a type that is not counted.

    For floats, only whole numbers are returned: pandas turns a column of whole numbers into floats
    as soon as one is missing.
    """
    if pa.types.is_floating(column.type):
        numbers = column.cast(pa.float64())
        whole = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less(pc.abs(numbers), 2.0**53))
        column = numbers.filter(whole).cast(pa.int64())
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_date,
    )
    if not any(test(column.type) for test in tests):
        return None
    return column if pa.types.is_large_string(column.type) else column.cast(pa.string())
