"""Applies source.filter to rows, with one meaning for all formats, and converts it to SQL.

As in SQL, a row is kept if the whole condition is true; a comparison with null is neither true nor
false.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import cached_property, reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.filter_text import (
    AllOf,
    AnyOf,
    Compare,
    Condition,
    IsNull,
    Like,
    Literal,
    OneOf,
    columns_in,
    parse_filter,
)
from prefect_raybatch.words import did_you_mean

if TYPE_CHECKING:
    import pyarrow.compute as pc

_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
_WORDS = {bool: "TRUE or FALSE", str: "a text", int: "a number", Decimal: "a number"}


@dataclass(frozen=True)
class Filter:
    """A condition on rows: `text` is source.filter, `condition` the result of parsing it."""

    text: str

    @cached_property
    def condition(self) -> Condition:
        try:
            return parse_filter(self.text)
        except ValueError as error:
            raise ConfigError(f"source.filter: {error}") from None

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_in(self.condition)

    def expression(self, schema: pa.Schema) -> pc.Expression:
        """Return the filter as a pyarrow expression for rows of `schema`.

        Raises ConfigError for a missing column, or a value that cannot be compared with its
        column.
        """
        return _expression(self.condition, schema)

    def skips(self, schema: pa.Schema) -> bool:
        """Return whether files and row groups may be skipped if their statistics rule out a match.

        Returns False if the filter has `!=` or `NOT IN` on a column of floats. Such a filter keeps
        NaN, but statistics do not show whether there is any.
        """
        return not _unequal_floats(self.condition, schema)

    def keep(self, table: pa.Table) -> pa.Table:
        """Return the rows of `table` that match; raises ConfigError as `expression` does."""
        return table.filter(self.expression(table.schema))

    def sql(self, schema: pa.Schema, quote: str = '"') -> str | None:
        """Return an SQL condition that is true for all matching rows, and possibly for others.

        So `keep` must still be applied to the rows read. Returns None if there is no such
        condition; then all rows must be read. `quote` surrounds column names. Values are written as
        literals of their columns' types.
        """
        return _sql(self.condition, schema, quote)


def _unequal_floats(condition: Condition, schema: pa.Schema) -> bool:
    if isinstance(condition, AllOf | AnyOf):
        return any(_unequal_floats(part, schema) for part in condition.parts)
    unequal = isinstance(condition, Compare) and condition.op == "!="
    unequal = unequal or (isinstance(condition, OneOf) and condition.negated)
    named = condition.column in schema.names
    return unequal and named and pa.types.is_floating(schema.field(condition.column).type)


def _field(name: str, schema: pa.Schema) -> pa.Field:
    if name in schema.names:
        return schema.field(name)
    raise ConfigError(
        f"source.filter: the input has no column {name!r}{did_you_mean(name, schema.names)} "
        f"(columns: {', '.join(schema.names)})"
    )


def typed(value: Literal, field: pa.Field) -> pa.Scalar:
    """Convert a literal of the filter to a scalar that can be compared with the column `field`.

    Raises ConfigError if the types do not match, or the literal is not valid for the column's
    type.
    """
    types, kind = pa.types, _value_type(field)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    try:
        if isinstance(value, bool):
            if types.is_boolean(kind):
                return pa.scalar(value)
        elif isinstance(value, str):
            if text:
                return pa.scalar(value, pa.string() if types.is_string_view(kind) else kind)
            if types.is_temporal(kind) and not types.is_duration(kind):
                return _moment(value, kind)
        elif types.is_decimal(kind):
            return pa.scalar(float(value))  # `_compare_exactly` compares them
        elif types.is_integer(kind):
            low, high = _bounds(kind)
            held = low <= value <= high and value == int(value)
            return pa.scalar(int(value), kind) if held else pa.scalar(float(value))
        elif types.is_floating(kind):
            # Rounded like the column's values, so that 19.99 equals a float32 of 19.99.
            return pa.scalar(float(value)).cast(kind, safe=False)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise ConfigError(
            f"source.filter: {value!r} is not a valid {kind}, the type of column {field.name!r} "
            f"({error}). Correct the value"
        ) from None
    number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    remedy = f"Compare it with a value of type {kind}"
    if text and number:
        remedy = f"Set its type with source.types: {{{field.name}: double}}"
    raise ConfigError(
        f"source.filter: column {field.name!r} is {kind}, which cannot be compared with "
        f"{_WORDS[type(value)]} ({str(value)!r}). {remedy}"
    )


def _value_type(field: pa.Field) -> pa.DataType:
    return field.type.value_type if pa.types.is_dictionary(field.type) else field.type


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    """Return the lowest and the highest value of an integer or decimal type.

    The values of a decimal type are in units of its last digit.
    """
    if pa.types.is_decimal(kind):
        return 1 - 10**kind.precision, 10**kind.precision - 1
    bits = kind.bit_width
    if pa.types.is_signed_integer(kind):
        return -(1 << bits - 1), (1 << bits - 1) - 1
    return 0, (1 << bits) - 1


def _moment(value: str, kind: pa.DataType) -> pa.Scalar:
    """Convert a text to a date, time or timestamp of type `kind`.

    If the type has a time zone, a timestamp without one is taken as UTC. Raises ArrowInvalid or
    ValueError for an invalid text, and for a timestamp with a UTC offset if the type has no time
    zone.
    """
    if pa.types.is_timestamp(kind):
        zoned = re.search(r"(Z|[+-]\d\d:?\d\d)$", value[10:]) is not None
        if kind.tz is not None and not zoned:
            value = (value if len(value) > 10 else f"{value} 00:00:00") + "Z"
    if pa.types.is_time(kind):
        return pa.scalar(time.fromisoformat(value), kind)
    return pa.scalar(value, pa.string()).cast(kind)


def _expression(condition: Condition, schema: pa.Schema) -> pc.Expression:
    import pyarrow.compute as pc

    if isinstance(condition, AllOf | AnyOf):
        join = and_ if isinstance(condition, AllOf) else or_
        return reduce(join, (_expression(part, schema) for part in condition.parts))
    field = _field(condition.column, schema)
    column = pc.field(condition.column)
    if isinstance(condition, IsNull):
        return column.is_valid() if condition.negated else column.is_null()
    if isinstance(condition, Like):
        typed("", field)
        found = pc.match_like(column, condition.pattern)
        return ~found if condition.negated else found
    if isinstance(condition, OneOf):
        found = reduce(or_, (_compare(field, "=", value) for value in condition.values))
        return ~found if condition.negated else found
    return _compare(field, condition.op, condition.value)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _compare(field: pa.Field, op: str, value: Literal) -> pc.Expression:
    """Return the expression `column op value`; its result is null where the column is null."""
    import pyarrow.compute as pc

    column, kind, scalar = pc.field(field.name), _value_type(field), typed(value, field)
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        # Arrow would cast the column to a float, or to another width, and fail for large values.
        return _compare_exactly(column, op, Decimal(value), kind)
    if pa.types.is_float16(kind):  # which Arrow does not compare
        column, scalar = column.cast(pa.float32()), scalar.cast(pa.float32())
    return _OPERATORS[op](column, scalar)


def _compare_exactly(
    column: pc.Expression, op: str, value: Decimal, kind: pa.DataType
) -> pc.Expression:
    """Return `column op value` for an integer or decimal column, without a cast of the column."""

    def literal(units: int) -> pa.Scalar:
        return pa.scalar(
            _EXACT.scaleb(Decimal(units), -scale) if scale is not None else units, kind
        )

    scale = kind.scale if pa.types.is_decimal(kind) else None
    low, high = _bounds(kind)
    units = _EXACT.scaleb(value, scale or 0)
    if low <= units <= high:
        floor = math.floor(units)
        if floor == units:
            return _OPERATORS[op](column, literal(floor))
        if op not in ("=", "!="):
            # The column holds no value between a fraction and its floor.
            return _OPERATORS[{"<": "<=", ">=": ">"}.get(op, op)](column, literal(floor))
        always = op == "!="
    else:
        always = op == "!=" or op in (("<", "<=") if units > high else (">", ">="))
    return column >= literal(low) if always else column < literal(low)


def _sql(condition: Condition, schema: pa.Schema, quote: str) -> str | None:
    if isinstance(condition, AllOf | AnyOf):
        parts = [_sql(part, schema, quote) for part in condition.parts]
        known = [part for part in parts if part is not None]
        if isinstance(condition, AllOf):  # without a part, only more rows match
            return f"({' AND '.join(known)})" if known else None
        return f"({' OR '.join(known)})" if len(known) == len(parts) else None
    if _unequal_floats(condition, schema):
        return None
    field = _field(condition.column, schema)
    if quote in field.name and quote != '"':  # only standard SQL says how to write that
        return None
    name = quote + field.name.replace('"', '""' if quote == '"' else '"') + quote
    if isinstance(condition, IsNull):
        return f"{name} IS {'NOT ' if condition.negated else ''}NULL"
    if isinstance(condition, Like):
        if "\\" in condition.pattern:  # escapes differ
            return None
        return f"{name} {'NOT ' if condition.negated else ''}LIKE {_quoted(condition.pattern)}"
    if isinstance(condition, OneOf):
        values = [_sql_value(value, field) for value in condition.values]
        if None in values:
            return None
        return f"{name} {'NOT ' if condition.negated else ''}IN ({', '.join(map(str, values))})"
    value = _sql_value(condition.value, field)
    return None if value is None else f"{name} {condition.op} {value}"


def _sql_value(value: Literal, field: pa.Field) -> str | None:
    """Return a value as an SQL literal; None for types that databases write in different ways."""
    found = typed(value, field)
    if pa.types.is_timestamp(found.type):
        return _sql_timestamp(found)
    scalar: Any = found.as_py()
    if isinstance(scalar, bool):
        return "TRUE" if scalar else "FALSE"
    if isinstance(scalar, str):
        return _quoted(scalar)
    if isinstance(scalar, date):
        return f"DATE '{scalar.isoformat()}'"
    if isinstance(scalar, int):
        return str(scalar)
    return None  # engines round floats and decimals differently, and write times of day differently


def _sql_timestamp(scalar: pa.Scalar) -> str | None:
    """Return a timestamp as an SQL literal; None if engines would change it, or fail.

    Returns None in three cases:

    - nanoseconds, because literals have only microseconds;
    - years outside 1678 to 2261, because engines hold 64-bit nanoseconds since 1970;
    - time zones other than UTC, because Lance compares literals with the zone's local time.
    """
    kind = scalar.type
    if kind.unit == "ns" or kind.tz not in (None, "UTC"):
        return None
    moment = scalar.cast(pa.timestamp(kind.unit)).as_py()
    if not 1678 <= moment.year <= 2261:
        return None
    return f"TIMESTAMP '{moment:%Y-%m-%dT%H:%M:%S.%f}{'Z' if kind.tz else ''}'"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
