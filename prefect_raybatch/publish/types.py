"""Converts the types of a result's columns to types that a target can store.

The types are checked when a run is planned, not when its rows are ready. A conversion loses no
values; only the name of a time zone, the encoding or the width may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyarrow import types as kinds

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.publish import PublishTarget

SIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()}
WIDTHS = {**{pa.int8(): 1, pa.int16(): 2, pa.int32(): 4, pa.int64(): 8}}


class Unfit(ValueError):
    """Raised for a type that a target cannot hold; the message says what to do."""


def converted_schema(schema: pa.Schema, target: PublishTarget, whole: bool = True) -> pa.Schema:
    """Return the columns with the types in which `target` stores them.

    Raises `ConfigError`, which names the column, for a type that the target cannot store. `whole`:
    `schema` has all columns of the result. Then `ConfigError` is also raised if the target's key or
    partition columns are not among them.
    """
    for name in (*target.key, *target.partition_by):
        if whole and name not in schema.names:
            raise ConfigError(
                f"output.publish: {target.label}: the result has no column {name!r} (columns: "
                f"{', '.join(schema.names)})"
            )
    fields = []
    for field in schema:
        try:
            fields.append(pa.field(field.name, converted(field.type, target), field.nullable))
        except Unfit as error:
            raise ConfigError(
                f"output.publish: {target.label}: column {field.name!r} is of type {field.type}, "
                f"which {target.format} cannot store. {error}, or leave it out of the result"
            ) from None
    return pa.schema(fields)


def converted(kind: pa.DataType, target: PublishTarget) -> pa.DataType:
    """Return the type in which a target stores values of `kind`; raise `Unfit` if it cannot."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if target.format in ("parquet", "lance"):
        return kind
    if kinds.is_dictionary(kind):
        return converted(kind.value_type, target)
    if kinds.is_nested(kind):
        inner = _nested(kind, target)
        flat = target.format == "sql"
        return pa.string() if flat else inner
    if target.format == "jsonl":
        if kinds.is_duration(kind) or kinds.is_interval(kind):
            raise Unfit("Cast it to seconds in output.postprocess")
        return kind
    return _plain(kind, target)


def _nested(kind: pa.DataType, target: PublishTarget) -> pa.DataType:
    if kinds.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([pa.field(f.name, converted(f.type, target), f.nullable) for f in fields])
    if kinds.is_map(kind):
        return pa.map_(converted(kind.key_type, target), converted(kind.item_type, target))
    if kinds.is_union(kind) or not hasattr(kind, "value_type"):
        raise Unfit("Write it as JSON text in output.postprocess")
    return pa.list_(converted(kind.value_type, target))


def _plain(kind: pa.DataType, target: PublishTarget) -> pa.DataType:
    where = target.format
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind):
        return pa.string()
    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_binary_view(kind):
        return pa.binary()
    if kinds.is_fixed_size_binary(kind):
        return kind if where == "iceberg" else pa.binary()
    if kinds.is_unsigned_integer(kind):
        return SIGNED.get(kind, pa.decimal128(20, 0))
    if kinds.is_integer(kind):
        return pa.int32() if where == "iceberg" and kind.bit_width < 32 else kind
    if kinds.is_float16(kind):
        if where == "delta":
            raise Unfit("Set output.vector_type to float32, cast it in output.postprocess")
        return pa.float32()
    if kinds.is_timestamp(kind):
        return _timestamp(kind, where)
    if kinds.is_date(kind):
        return pa.date32()
    if kinds.is_time(kind):
        if where == "delta" or kind == pa.time64("ns"):
            raise Unfit("Write it as text or a number in output.postprocess")
        return pa.time64("us")
    if kinds.is_decimal(kind):
        if kind.precision > 38:
            raise Unfit("Cast it to at most 38 digits")
        return pa.decimal128(kind.precision, kind.scale)
    if kinds.is_boolean(kind) or kinds.is_floating(kind):
        return kind
    raise Unfit("Cast it in output.postprocess (output.schema declares the types)")


def _timestamp(kind: pa.DataType, where: str) -> pa.DataType:
    if kind.unit == "ns":
        raise Unfit("Cast it to timestamp[us] in the input or in output.postprocess")
    if where == "iceberg" and kind.tz not in (None, "UTC", "Etc/UTC", "Z", "+00:00"):
        raise Unfit(f"Cast it from {kind.tz} to UTC")
    return pa.timestamp("us", kind.tz and "UTC")


def fitted(schema: pa.Schema, existing: pa.Schema, what: str, whole: bool = True) -> pa.Schema:
    """Check that rows with columns `schema` fit a table; return `existing`, the table's schema.

    Raises `ConfigError` if the table lacks a column, or if its column cannot hold the type without
    loss. `whole`: `schema` has all columns of the result. Then it is also raised if the result
    lacks a column in which the table accepts no null. `what` begins the message.
    """
    for field in schema:
        if field.name not in existing.names:
            raise ConfigError(
                f"{what}: the existing table has no column {field.name!r} (columns: "
                f"{', '.join(existing.names)}). Add it as {field.type}, or leave it out of the "
                "result"
            )
        kept = existing.field(field.name)
        if not _takes(kept.type, field.type):
            raise ConfigError(
                f"{what}: column {field.name!r} is {kept.type} in the existing table, but "
                f"{field.type} in the result. Cast one of them, or publish to another table"
            )
    for field in existing:
        if whole and field.name not in schema.names and not field.nullable:
            raise ConfigError(
                f"{what}: the existing table does not allow null in column {field.name!r}, which "
                "the result lacks. Allow null, or add the column to the result"
            )
    return existing


def _takes(there: pa.DataType, given: pa.DataType) -> bool:
    """Return whether a table's column of type `there` holds values of type `given` without loss."""
    if there == given or (there in WIDTHS and given in WIDTHS and WIDTHS[there] >= WIDTHS[given]):
        return True
    if kinds.is_floating(there) and kinds.is_floating(given):
        return bool(there.bit_width >= given.bit_width)
    for tests in (
        (kinds.is_string, kinds.is_large_string, kinds.is_string_view),
        (kinds.is_binary, kinds.is_large_binary, kinds.is_binary_view),
    ):
        if any(t(there) for t in tests) and any(t(given) for t in tests):
            return True
    if kinds.is_struct(there) and kinds.is_struct(given):
        names = {there.field(i).name: there.field(i).type for i in range(there.num_fields)}
        fields = [given.field(i) for i in range(given.num_fields)]
        return len(names) == len(fields) and all(
            f.name in names and _takes(names[f.name], f.type) for f in fields
        )
    if kinds.is_map(there) and kinds.is_map(given):
        return _takes(there.key_type, given.key_type) and _takes(there.item_type, given.item_type)
    if _listed(there) and _listed(given):
        return _takes(there.value_type, given.value_type)
    return bool(there.equals(given))


def _listed(kind: pa.DataType) -> bool:
    tests = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
    return any(test(kind) for test in tests)


def to_schema(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows cast to `schema`; columns that the rows lack are null.

    Raises `ConfigError` for a null or a value that a column of `schema` does not accept.
    """
    for batch in batches:
        table = pa.Table.from_batches([batch])
        columns = []
        for field in schema:
            if field.name not in table.column_names:
                columns.append(pa.nulls(len(batch), field.type))
                continue
            columns.append(_cast(table[field.name], field))
        yield from pa.Table.from_arrays(columns, schema=schema).combine_chunks().to_batches()


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if not field.nullable and column.null_count:
        raise ConfigError(
            f"the target does not allow null in column {field.name!r}, which is null in "
            f"{column.null_count:,} rows of the result. Allow null, or fill it in "
            "output.postprocess"
        )
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks])
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            f"column {field.name!r} cannot be written as {field.type}: {error}"
        ) from None
