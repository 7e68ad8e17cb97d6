"""Arrow types of input columns: which of them a run can store, and the common type of two."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial

import pyarrow as pa

from prefect_raybatch.errors import SourceError
from prefect_raybatch.job.checks import RESERVED

# The type of JSON numbers that are kept as text, because neither int64 nor float64 can represent
# them. No other JSON value is read as large_string.
NUMBER_TEXT = pa.large_string()
# The column of nulls that counts the rows of a block of JSON objects without keys. pyarrow cannot
# slice, join or convert a table without columns.
ROWS_WITHOUT_KEYS = f"{RESERVED}rows"
_LONG_WHOLE = "^-?[0-9]{4,}$"  # float16 holds all whole numbers of fewer digits


def map_type(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return `kind` with `change` applied to its nested types, innermost first, then to itself.

    A dictionary type is first replaced by its value type. Extension types are returned unchanged,
    and `change` is not called for them.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    inner = partial(map_type, change=change)
    if types.is_struct(kind):
        kind = pa.struct([pa.field(f.name, inner(f.type)) for f in kind])
    elif types.is_map(kind):
        kind = pa.map_(inner(kind.key_type), inner(kind.item_type))
    elif types.is_fixed_size_list(kind):
        kind = pa.list_(inner(kind.value_type), kind.list_size)
    elif types.is_large_list(kind):
        kind = pa.large_list(inner(kind.value_type))
    elif types.is_list(kind):
        kind = pa.list_(inner(kind.value_type))
    elif types.is_dictionary(kind):
        kind = inner(kind.value_type)
    return change(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return `kind` without dictionary and view types, at any depth: string for string_view."""

    def change(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_string_view(kind):
            return pa.string()
        return pa.binary() if pa.types.is_binary_view(kind) else kind

    return map_type(kind, change)


def check_carried(schema: pa.Schema, where: str) -> None:
    """Raise SourceError for a column with a type that Parquet cannot store.

    Also raised for a struct with duplicate field names, at any depth. `where` names the input.
    """
    for field in schema:
        if (name := _field_twice(field.type)) is not None:
            raise SourceError(
                f"{where}: column {field.name!r} has two fields named {name!r}. Rename one of "
                "them, or leave the column out with source.columns"
            )
        kind = _not_carried(field.type)
        if kind is not None:
            raise SourceError(
                f"{where}: column {field.name!r} has type {kind}, which Parquet cannot store. "
                "Write the column with another type, or leave it out with source.columns"
            )


def _field_twice(kind: pa.DataType) -> str | None:
    """Return the first duplicate field name of a struct within `kind`; None if there is none.

    Rows become Python dictionaries, which would lose all but one value of that name.
    """
    twice: list[str] = []

    def look(inner: pa.DataType) -> pa.DataType:
        if pa.types.is_struct(inner):
            names = [field.name for field in inner]
            twice.extend(name for name in names if names.count(name) > 1)
        return inner

    map_type(kind, look)
    return twice[0] if twice else None


def _not_carried(kind: pa.DataType) -> pa.DataType | None:
    """Return the first type in `kind` that a snapshot cannot store; None if it can store all.

    `kind` itself is looked at before its nested types. A type cannot be stored if Parquet does not
    support it, or if Arrow cannot read it back. Run-end-encoded types count as well, because
    `decoded` replaces only run-end-encoded columns, not nested types.
    """
    types = pa.types
    if types.is_union(kind) or types.is_interval(kind) or types.is_run_end_encoded(kind):
        return kind
    if types.is_decimal(kind) and kind.scale < 0:
        return kind
    if types.is_fixed_size_binary(kind) and not kind.byte_width:
        return kind
    if types.is_fixed_size_list(kind) and not kind.list_size:
        return kind
    if types.is_dictionary(kind) and (
        types.is_nested(kind.value_type)
        or types.is_string_view(kind.value_type)
        or types.is_binary_view(kind.value_type)
    ):
        return kind
    if isinstance(kind, pa.BaseExtensionType):
        return _not_carried(kind.storage_type)
    inner = [kind.value_type] if types.is_dictionary(kind) else []
    inner += [kind.field(i).type for i in range(kind.num_fields)]
    return next((found for one in inner if (found := _not_carried(one)) is not None), None)


def decoded(table: pa.Table) -> pa.Table:
    """Return the table with each run-end-encoded column replaced by its values."""
    import pyarrow.compute as pc

    for number, field in enumerate(table.schema):
        if pa.types.is_run_end_encoded(field.type):
            column = table.column(number)
            values = [pc.run_end_decode(chunk) for chunk in column.chunks]
            made = pa.chunked_array(values, field.type.value_type)
            table = table.set_column(number, field.name, made)
    return table


def decoded_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema that `decoded` gives a table with `schema`."""
    return pa.schema(
        [
            (f.name, f.type.value_type if pa.types.is_run_end_encoded(f.type) else f.type)
            for f in schema
        ]
    )


def written(schema: pa.Schema) -> pa.Schema:
    """Return the schema with which a snapshot writes columns of this `schema`.

    The null type and structs without fields become text, at any depth: Parquet does not support
    them. The result lacks the column ROWS_WITHOUT_KEYS, which only stands for JSON rows without
    keys.
    """

    def change(kind: pa.DataType) -> pa.DataType:
        return pa.string() if pa.types.is_null(kind) or is_empty_struct(kind) else kind

    columns = [field for field in schema if field.name != ROWS_WITHOUT_KEYS]
    return pa.schema([(field.name, map_type(field.type, change)) for field in columns])


def is_empty_struct(kind: pa.DataType) -> bool:
    """Return whether `kind` is a struct without fields, the type of empty JSON objects."""
    return bool(pa.types.is_struct(kind)) and kind.num_fields == 0


def holds_empty_struct(kind: pa.DataType) -> bool:
    """Return whether `kind` contains a struct without fields, at any depth."""
    found = []

    def look(inner: pa.DataType) -> pa.DataType:
        found.append(is_empty_struct(inner))
        return inner

    map_type(kind, look)
    return any(found)


def common_type(a: pa.DataType, b: pa.DataType, union: bool = False) -> pa.DataType | None:
    """Return the type that holds all values of both types; None if there is none.

    Null and another type give the other type; two signed or two unsigned integers, or two floats,
    give the wider one; text, binary and lists give the large variant if either is large. With
    `union` (text formats) int and float give float64, a number and NUMBER_TEXT (numbers kept as
    text) give NUMBER_TEXT, and structs may differ in fields.

    `pyarrow.unify_schemas` with permissive promotion is not used. It also merges types in ways that
    change values or cannot be cast: uint64 and int64 to int64, int64 and float64 to float64, text
    and binary to binary.
    """
    types = pa.types
    if a == b:
        return a
    if types.is_null(a) or types.is_null(b):
        return b if types.is_null(a) else a
    for same in (types.is_signed_integer, types.is_unsigned_integer, types.is_floating):
        if same(a) and same(b):
            return a if a.bit_width >= b.bit_width else b
    if union and {_is_number(a), _is_number(b)} == {True}:
        return pa.float64()
    if union and NUMBER_TEXT in (a, b):
        return NUMBER_TEXT if _is_number(a) or _is_number(b) else None
    for small, large in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())):
        if {a, b} == {small, large}:
            return large
    if types.is_struct(a) and types.is_struct(b):
        return _common_struct(a, b, union)
    if types.is_map(a) and types.is_map(b):
        key = common_type(a.key_type, b.key_type, union)
        item = common_type(a.item_type, b.item_type, union)
        return pa.map_(key, item) if key is not None and item is not None else None
    return _common_list(a, b, union)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _common_struct(a: pa.StructType, b: pa.StructType, union: bool) -> pa.DataType | None:
    left, right = ({f.name: f.type for f in kind} for kind in (a, b))
    if len(left) < a.num_fields or len(right) < b.num_fields:
        return None
    if not union and left.keys() != right.keys():
        return None
    both = {
        name: common_type(left.get(name, pa.null()), right.get(name, pa.null()), union)
        for name in left | right
    }
    return None if None in both.values() else pa.struct(list(both.items()))


def _common_list(a: pa.DataType, b: pa.DataType, union: bool) -> pa.DataType | None:
    types = pa.types
    if not all(types.is_list(kind) or types.is_large_list(kind) for kind in (a, b)):
        return None
    value = common_type(a.value_type, b.value_type, union)
    if value is None:
        return None
    large = types.is_large_list(a) or types.is_large_list(b)
    return pa.large_list(value) if large else pa.list_(value)


def cast_exactly(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Cast a column as Arrow does, but without rounding a whole number.

    Raises ArrowInvalid if a float type cannot represent a whole number exactly. A float cast to
    text is written as Python writes it (1.0, where Arrow writes 1).
    """
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if text and pa.types.is_floating(column.type):
        texts = [None if value is None else repr(value) for value in column.to_pylist()]
        return pa.chunked_array([pa.array(texts, kind)])
    if pa.types.is_decimal(kind) and pa.types.is_integer(column.type):
        # Arrow would require room for the largest number of the integer type.
        column = column.cast(pa.string())
    made = column.cast(kind)
    if pa.types.is_floating(kind):
        _check_whole_numbers(column, made)
    return made


def _check_whole_numbers(column: pa.ChunkedArray, made: pa.ChunkedArray) -> None:
    """Raise ArrowInvalid if a whole number in `column` is rounded in `made`, its cast to floats.

    Arrow checks this for columns of integers; this checks columns of text and of wider floats.
    """
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        changed = pc.not_equal(column, made.cast(column.type))
        if pc.any(pc.and_(changed, pc.equal(column, pc.floor(column)))).as_py():
            raise pa.ArrowInvalid(f"a whole number does not fit {made.type} exactly")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return
    for text in column.filter(pc.match_substring_regex(column, _LONG_WHOLE)).to_pylist():
        if Decimal(pa.scalar(text).cast(made.type).as_py()) != Decimal(text):
            raise pa.ArrowInvalid(f"{text} does not fit {made.type} exactly")
