"""The types that text values have, so that each value comes back as it stood."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

# What a value must look like so that the typed value is the same: no leading zeros (postal codes),
# no more digits than the type holds (identifiers), no words (nan).
_DIGITS = "-?(0|[1-9][0-9]{0,%d})"
_LOOKS = {
    pa.int64(): f"^{_DIGITS % 17}$",
    pa.float64(): f"^{_DIGITS % 14}(\\.[0-9]+)?([eE][-+]?[0-9]{{1,2}})?$",
    pa.bool_(): "^(true|false|True|False|TRUE|FALSE)$",
}
_WIDER = {
    None: (pa.int64(), pa.float64(), pa.bool_()),
    pa.null(): (pa.int64(), pa.float64(), pa.bool_()),
    pa.int64(): (pa.int64(), pa.float64()),
    pa.float64(): (pa.float64(),),
    pa.bool_(): (pa.bool_(),),
}


def text_type(column: pa.ChunkedArray, before: pa.DataType | None) -> pa.DataType:
    """The narrowest type, not narrower than `before`, that holds the values of a text column."""
    import pyarrow.compute as pc

    if before == pa.string():
        return before
    if column.null_count == len(column):
        return before or pa.null()
    for kind in _WIDER[before]:
        looks = partial(pc.match_substring_regex, pattern=_LOOKS[kind])
        # A few values settle most columns.
        if all(pc.all(looks(part)).as_py() is not False for part in (column[:64], column)):
            return kind
    return pa.string()


def common_text_type(one: pa.DataType | None, other: pa.DataType) -> pa.DataType:
    """A type for the values of two parts of a text column; the values may yet show that it takes a
    wider one: an int64 of 17 digits is no float64."""
    if one is None or pa.types.is_null(one) or one == other:
        return other
    if pa.types.is_null(other):
        return one
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()
