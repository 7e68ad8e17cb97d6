"""Infers a column's type from its texts: int64, float64 or bool if every text survives, else text.

A text survives if the typed value, written again, is the same text: 007 and 1.50 stay text.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pyarrow as pa

# Texts that equal their typed value, written again: no leading zeros (postal codes), no plus sign,
# no -0, no more digits than the type holds (identifiers).
_INTEGER = "^(0|-?[1-9][0-9]{0,17})$"
_BOOL = "^(True|False)$"
# A few digits with a fraction that ends in no zero. Other numbers are checked one by one.
_FLOAT = r"^-?([1-9][0-9]{0,8}\.(0|[0-9]{0,5}[1-9])|0\.(0|0{0,3}[1-9]([0-9]{0,9}[1-9])?))$"
_NUMBER = r"^-?[0-9]+(\.[0-9]+)?(e[-+][0-9]+)?$"


def text_type(column: pa.ChunkedArray, before: pa.DataType | None) -> pa.DataType:
    """Return the type that reproduces the texts of `column` as written.

    It is int64, float64 or bool if that reproduces all texts, otherwise text. `before` is the type
    of the column's earlier values, None or null if there are none. If it is set, the result is
    `before` or text. If `column` has only nulls, the result is `before`, or the null type.
    """
    if before == pa.string():
        return before
    if column.null_count == len(column):
        return before or pa.null()
    kinds = [before] if before is not None and not pa.types.is_null(before) else [*_LOOKS]
    return next((kind for kind in kinds if _all(column, _LOOKS[kind])), pa.string())


def _all(column: pa.ChunkedArray, looks: Callable[[pa.ChunkedArray], bool]) -> bool:
    return looks(column[:64]) and looks(column)  # a few values settle most columns


def _match(column: pa.ChunkedArray, pattern: str) -> bool:
    import pyarrow.compute as pc

    return pc.all(pc.match_substring_regex(column, pattern)).as_py() is not False


def _floats(column: pa.ChunkedArray) -> bool:
    import pyarrow.compute as pc

    column = column.filter(pc.invert(pc.match_substring_regex(column, _FLOAT)))
    return _match(column, _NUMBER) and all(_is_float(text) for text in column.to_pylist())


def _is_float(text: str) -> bool:
    value = float(text)
    return repr(value) == text and math.isfinite(value)


_LOOKS: dict[pa.DataType, Callable[[pa.ChunkedArray], bool]] = {
    pa.int64(): lambda column: _match(column, _INTEGER),
    pa.float64(): _floats,
    pa.bool_(): lambda column: _match(column, _BOOL),
}


def common_text_type(one: pa.DataType | None, other: pa.DataType) -> pa.DataType:
    """Return the type of a CSV column by the types of two parts of it: text unless they agree.

    If a part has no values (null) or was not read yet (None), the type of the other part counts.
    """
    if one is None or pa.types.is_null(one) or one == other:
        return other
    return one if pa.types.is_null(other) else pa.string()
