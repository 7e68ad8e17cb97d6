"""Checks that a column can hold each value completely.

Arrow changes some values without raising an error. For example, it drops the time of day of a
datetime in a date column, and turns 1e39 into infinity in a float32 column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

# Errors of Arrow and of `check_exact` for a value that does not fit a type.
NOT_CAST = (pa.ArrowException, TypeError, ValueError, OverflowError)
# Absolute values that the narrower float types round to infinity begin here.
_INFINITE_FROM = {pa.float16(): 65520.0, pa.float32(): 2.0**128 - 2.0**103}
_COARSE = {"s": 10**6, "ms": 10**3}  # microseconds in a unit of time


def type_of(values: Sequence[object]) -> pa.DataType | None:
    """Return the Arrow type of the values; None if they have no common one."""
    try:
        return pa.infer_type(values)
    except NOT_CAST:
        return None


def check_exact(values: Sequence[object], kind: pa.DataType) -> None:
    """Raise an error if a column of type `kind` cannot hold each of the values completely.

    The error is one of the classes in `NOT_CAST`.
    """
    pa.array(values, kind)
    # Saves the walk through the values. Arrow infers one type for times with and without a zone.
    if type_of(values) == kind and not _holds_times(kind):
        return
    for value in values:
        _check_kept(value, kind)


def _check_kept(value: Any, kind: pa.DataType) -> None:
    """Raise ValueError if Arrow would change the value without an error.

    Only call it for a value that Arrow accepts in a column of type `kind`. Rounding to a float type
    is allowed.
    """
    types = pa.types
    value = value.as_py() if isinstance(value, pa.Scalar) else value
    if value is None or _refuses_losses(kind):
        return
    if types.is_struct(kind):
        fields = {name: f.type for f in kind for name in (f.name, f.name.encode())}
        for name, inner in _items(value, [f.name for f in kind]):
            if name in fields:
                _check_kept(inner, fields[name])
            elif inner is not None:
                raise ValueError(f"{name!r} is no field of the type")
    elif types.is_map(kind):
        for entry in value.items() if isinstance(value, Mapping) else value:
            key, item = entry.values() if isinstance(entry, Mapping) else entry
            _check_kept(key, kind.key_type)
            _check_kept(item, kind.item_type)
    elif types.is_nested(kind) and kind.value_type not in _INFINITE_FROM:
        for inner in value:
            _check_kept(inner, kind.value_type)
    elif types.is_nested(kind):
        _check_floats(np.array(list(value), float), kind.value_type)
    elif kind in _INFINITE_FROM:
        _check_floats(np.array([value], float), kind)
    elif isinstance(value, (date, time, timedelta, np.datetime64, np.timedelta64)):
        _check_time(value, kind)
    elif value != int(value):
        raise ValueError(f"{value} is not a whole number")


def _items(value: Any, names: Sequence[str]) -> Iterable[tuple[Any, Any]]:
    """Return the (name, value) pairs of a struct.

    The struct is a mapping, a sequence of such pairs, or a tuple with a value for each of `names`.
    """
    if isinstance(value, Mapping):
        return value.items()
    return zip(names, value, strict=True) if isinstance(value, tuple) else value


def _check_floats(values: np.ndarray, kind: pa.DataType) -> None:
    large = values[(np.abs(values) >= _INFINITE_FROM[kind]) & ~np.isinf(values)]
    if large.size:
        raise ValueError(f"{large[0]} is too large")


def _holds_times(kind: pa.DataType) -> bool:
    """Return whether values of a type are times or contain some."""
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return bool(pa.types.is_temporal(kind)) or any(map(_holds_times, inner))


def _refuses_losses(kind: pa.DataType) -> bool:
    """Return whether Arrow raises an error for each value that `kind` cannot hold completely."""
    types = pa.types
    if types.is_nested(kind):
        return not (types.is_struct(kind) or types.is_map(kind)) and _refuses_losses(
            kind.value_type
        )
    return not (types.is_integer(kind) or types.is_temporal(kind) or kind in _INFINITE_FROM)


def _check_time(value: Any, kind: pa.DataType) -> None:
    """Raise ValueError if Arrow would change a date, time or duration without an error.

    For example, it would drop the time of day, the time zone or the microseconds.
    """
    unit = str(getattr(kind, "unit", "day"))
    if isinstance(value, (np.datetime64, np.timedelta64)):  # an item of an array, taken as it is
        if np.datetime_data(value.dtype)[0] != unit:
            raise ValueError(f"{value!r} has another unit than {unit}")
        return
    if getattr(value, "tzinfo", None) is not None and getattr(kind, "tz", None) is None:
        raise ValueError(f"the time zone of {value} would be lost")
    if pa.types.is_date(kind):
        if isinstance(value, datetime) and value.time() != time():
            raise ValueError(f"the time of day of {value} would be lost")
        return
    micro = getattr(value, "microsecond", 0) or getattr(value, "microseconds", 0)
    nano = getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0)  # of pandas
    if micro % _COARSE.get(unit, 1) or (nano and unit != "ns"):
        raise ValueError(f"{value} is finer than {unit}")
