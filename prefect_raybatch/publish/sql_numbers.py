"""Tells which numbers a database column would round, so that none is rounded silently."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import types as kinds

if TYPE_CHECKING:
    from sqlalchemy.types import TypeEngine

Holds = Callable[[Any], bool]  # whether a column holds a value
# Relative difference at which a float of this many bits still approximates a decimal number: a few
# units in the last place.
FLOAT_TOLERANCE = {16: 2.0**-10, 32: 2.0**-22, 64: 2.0**-50}
_EXACT = Context(prec=76)  # digits: more than an Arrow decimal has


def number_check(kind: pa.DataType, column: TypeEngine[Any], dialect: str) -> Holds | None:
    """Return a test of whether a column holds a value of Arrow type `kind` without rounding it.

    A float passes if it approximates a decimal number that the column holds, as 0.1 does. Returns
    None if the column holds all values of the type.
    """
    import sqlalchemy as sql

    if kinds.is_dictionary(kind):
        return number_check(kind.value_type, column, dialect)
    if isinstance(column, sql.ARRAY) and hasattr(kind, "value_type"):
        inner = kind.value_type
        item = column if kinds.is_nested(inner) else column.item_type
        holds = number_check(inner, item, dialect)
        if holds is None:
            return None
        return lambda values: all(value is None or holds(value) for value in values)
    if not isinstance(column, sql.Numeric):
        return None
    if isinstance(column, sql.Float) or dialect == "sqlite":  # SQLite keeps decimals as floats
        return _fits_double if kinds.is_integer(kind) or kinds.is_decimal(kind) else None
    scale = column.scale
    if scale is None or (kinds.is_integer(kind) and scale >= 0):
        return None
    if kinds.is_floating(kind):
        return _float_fits_scale(scale, FLOAT_TOLERANCE[kind.bit_width])
    return _decimal_fits_scale(scale)


def _fits_double(value: int | Decimal) -> bool:
    double = float(value)
    return Decimal(double) == value or Decimal(repr(double)) == value


def _decimal_fits_scale(scale: int) -> Holds:
    def holds(value: int | Decimal) -> bool:
        shifted = Decimal(value).scaleb(scale, _EXACT)
        return shifted == shifted.to_integral_value()

    return holds


def _float_fits_scale(scale: int, tolerance: float) -> Holds:
    def holds(value: float) -> bool:
        # The database decides about NaN and infinity.
        if not math.isfinite(value):
            return True
        return math.isclose(round(value, scale), value, rel_tol=tolerance)

    return holds
