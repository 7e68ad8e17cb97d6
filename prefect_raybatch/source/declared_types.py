"""Types that source.types gives to columns of CSV and JSON files and of `key=value` folders."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.source import Source
from prefect_raybatch.job.sql_types import arrow_type
from prefect_raybatch.source.arrow_types import cast_exactly
from prefect_raybatch.source.hive import Values, path_types

TYPED = ("csv", "jsonl")  # formats without types of their own
_LONG_WHOLE = "^-?[0-9]{4,}$"  # float16 holds all whole numbers of fewer digits


def typed_columns(kind: str, source: Source, files: Iterable[Values]) -> dict[str, pa.DataType]:
    """Return the types of the columns in paths, and of those columns of files that source.types
    names.

    Raises ConfigError where source.types names a column of files that have types of their own.
    """
    declared = {name: arrow_type(text) for name, text in source.types.items()}
    paths = path_types(iter(files), declared)
    columns = {name: of for name, of in declared.items() if name not in paths}
    if columns and kind not in TYPED:
        name = next(iter(columns))
        raise ConfigError(
            f"source.types: {name!r} names no column of a key=value folder, and columns of {kind} "
            "files have their own types; remove it"
        )
    return paths | columns


def check_type_columns(columns: Collection[str], names: Collection[str]) -> None:
    """Raise ConfigError for a column of source.types that is not among `names`."""
    for name in columns:
        if name not in names:
            near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"source.types: the input has no column {name!r}{hint} "
                f"(columns: {', '.join(names)})"
            )


def digits_kept(types: Mapping[str, pa.DataType]) -> list[str]:
    """Return the columns whose type tells apart numbers that one float stands for."""
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_decimal)
    return [name for name, kind in types.items() if any(held(kind) for held in kinds)]


def with_types(table: pa.Table, types: Mapping[str, pa.DataType], where: str) -> pa.Table:
    """Return rows of the file `where` with the columns of `types` cast. Raises SourceError with
    the first value that a type does not hold."""
    for name, kind in types.items():
        if name in table.column_names:
            at = table.column_names.index(name)
            table = table.set_column(at, name, cast_column(table[name], name, kind, where))
    return table


def cast_column(
    column: pa.ChunkedArray, name: str, kind: pa.DataType, where: str
) -> pa.ChunkedArray:
    """Return a column cast to a declared type. Raises as `with_types`."""
    try:
        made = cast_exactly(column, kind)
        if pa.types.is_floating(kind):
            _check_whole_numbers(column, kind)
        return made
    except pa.ArrowNotImplementedError:
        raise ConfigError(
            f"source.types: {where}: column {name!r} holds {column.type}, which cannot be read as "
            f"{kind}; choose another type"
        ) from None
    except pa.ArrowInvalid:
        value = next(value for value in column.to_pylist() if not _fits(value, column.type, kind))
        raise SourceError(
            f"{where}: column {name!r} holds {value!r}, which is no {kind} (source.types); mend "
            "the value, or choose another type such as string"
        ) from None


def _check_whole_numbers(column: pa.ChunkedArray, kind: pa.DataType) -> None:
    """Raise ArrowInvalid for a text or a wider float of a whole number that floats of `kind` do not
    hold, as a cast of integers does."""
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        changed = pc.not_equal(column, column.cast(kind).cast(column.type))
        if pc.any(pc.and_(changed, pc.equal(column, pc.floor(column)))).as_py():
            raise pa.ArrowInvalid(f"a whole number is no {kind}")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return
    for text in column.filter(pc.match_substring_regex(column, _LONG_WHOLE)).to_pylist():
        if Decimal(pa.scalar(text).cast(kind).as_py()) != Decimal(text):
            raise pa.ArrowInvalid(f"{text} is no {kind}")


def _fits(value: object, held: pa.DataType, kind: pa.DataType) -> bool:
    try:
        column = pa.chunked_array([pa.array([value], held)])
        cast_exactly(column, kind)
        if pa.types.is_floating(kind):
            _check_whole_numbers(column, kind)
    except pa.ArrowInvalid:
        return False
    return True
