"""Tells which numbers a database column would change, so that none is changed silently."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import types as kinds

if TYPE_CHECKING:
    from sqlalchemy.types import TypeEngine

Holds = Callable[[Any], bool]  # whether a column holds a value
# Differences at which a float of this many bits still approximates a decimal number: a relative
# one, of a few units in the last place; and one for noise of arithmetic, as in 100.1 - 100, in
# units of the column's last decimal.
FLOAT_TOLERANCE = {16: (2.0**-10, 2.0**-5), 32: (2.0**-22, 2.0**-11), 64: (2.0**-50, 2.0**-30)}
_EXACT = Context(prec=76)  # digits: more than an Arrow decimal has


def number_check(kind: pa.DataType, column: TypeEngine[Any], dialect: str) -> Holds | None:
    """Return a test of whether a column holds a value of Arrow type `kind` without changing it.

    A float passes if it approximates a decimal number that the column holds, as 0.1 does. An
    integer passes in a column of booleans if it is 0 or 1. Returns None if the column holds all
    values of the type.
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
    if isinstance(column, sql.Boolean) and kinds.is_integer(kind):
        return lambda value: value in (0, 1)
    if not isinstance(column, sql.Numeric):
        return None
    is_sqlite = dialect == "sqlite"  # it keeps decimals as floats, whatever their scale
    tests: list[Holds | None] = []
    if isinstance(column, sql.Float) or is_sqlite:
        tests.append(_float_check(kind, column, dialect))
    if column.scale is not None and not is_sqlite:  # MySQL's DOUBLE(10, 2) is a float with a scale
        tests.append(_scale_check(kind, column.scale))
    needed = [test for test in tests if test is not None]
    return (lambda value: all(test(value) for test in needed)) if needed else None


def _float_check(kind: pa.DataType, column: TypeEngine[Any], dialect: str) -> Holds | None:
    """Return a test of whether a column of floats holds an integer or decimal number.

    Returns None for floats, and for Oracle's FLOAT, REAL and DOUBLE PRECISION, which are decimal
    numbers.
    """
    import sqlalchemy as sql
    from sqlalchemy.dialects import mysql, oracle

    if not (kinds.is_integer(kind) or kinds.is_decimal(kind)):
        return None
    if dialect == "oracle" and not isinstance(column, (oracle.BINARY_FLOAT, oracle.BINARY_DOUBLE)):
        return None
    shorts = sql.REAL, mysql.FLOAT, oracle.BINARY_FLOAT
    is_double = dialect == "sqlite" or isinstance(column, sql.Double)
    is_short = isinstance(column, shorts) or (getattr(column, "precision", None) or 53) <= 24
    rounded = np.float32 if is_short and not is_double else np.float64

    def holds(value: int | Decimal) -> bool:
        with np.errstate(over="ignore"):
            number = rounded(float(value))
        return Decimal(float(number)) == value or Decimal(str(number)) == value

    return holds


def _scale_check(kind: pa.DataType, scale: int) -> Holds | None:
    """Return a test of whether a number has at most `scale` decimals, but for a float's noise."""
    if (kinds.is_integer(kind) and scale >= 0) or (kinds.is_decimal(kind) and scale >= kind.scale):
        return None
    if kinds.is_floating(kind):
        return _float_fits_scale(scale, *FLOAT_TOLERANCE[kind.bit_width])
    return _decimal_fits_scale(scale)


def _decimal_fits_scale(scale: int) -> Holds:
    def holds(value: int | Decimal) -> bool:
        shifted = Decimal(value).scaleb(scale, _EXACT)
        return shifted == shifted.to_integral_value()

    return holds


def _float_fits_scale(scale: int, tolerance: float, noise: float) -> Holds:
    def holds(value: float) -> bool:
        # The database decides about NaN and infinity.
        if not math.isfinite(value):
            return True
        rounded = round(value, scale)
        return math.isclose(rounded, value, rel_tol=tolerance, abs_tol=noise * 10.0**-scale)

    return holds
