"""Applies source.types to columns of CSV and JSON files and of `key=value` folders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.table_formats import arrow_type
from prefect_raybatch.source.arrow_types import cast_exactly
from prefect_raybatch.source.hive import Values, path_types
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.words import did_you_mean

TYPED = ("csv", "jsonl")  # formats without types of their own


def typed_columns(kind: str, source: ReadSpec, files: Iterable[Values]) -> dict[str, pa.DataType]:
    """Return {column: type} of the columns in paths (`key=value` folders) and in source.types.

    `kind` is the files' format; `files` has the path columns of each file. Raises ConfigError if
    source.types names a column of files whose format has types of its own.
    """
    declared = {name: arrow_type(text) for name, text in source.types.items()}
    paths = path_types(iter(files), declared)
    columns = {name: of for name, of in declared.items() if name not in paths}
    if columns and kind not in TYPED:
        name = next(iter(columns))
        raise ConfigError(
            f"source.types: {name!r} is not the column of a key=value folder, and {kind} files "
            "have types of their own. Remove it"
        )
    return paths | columns


def check_type_columns(columns: Collection[str], names: Collection[str]) -> None:
    """Raise ConfigError if one of `columns` (source.types) is not in the input (`names`)."""
    for name in columns:
        if name not in names:
            raise ConfigError(
                f"source.types: the input has no column {name!r}{did_you_mean(name, names)} "
                f"(columns: {', '.join(names)})"
            )


def digits_kept(types: Mapping[str, pa.DataType]) -> list[str]:
    """Return the columns whose declared type is text or decimal.

    A JSON reader must keep their numbers as written: converted to float64, they would lose digits.
    """
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_decimal)
    return [name for name, kind in types.items() if any(held(kind) for held in kinds)]


def with_types(table: pa.Table, types: Mapping[str, pa.DataType], where: str) -> pa.Table:
    """Return a table of the file `where` with the columns of `types` cast to these types.

    Columns that the table lacks are skipped. Raises SourceError with the first value that a type
    cannot hold, ConfigError if a column cannot be cast to its type at all.
    """
    for name, kind in types.items():
        if name in table.column_names:
            at = table.column_names.index(name)
            table = table.set_column(at, name, cast_column(table[name], name, kind, where))
    return table


def cast_column(
    column: pa.ChunkedArray, name: str, kind: pa.DataType, where: str
) -> pa.ChunkedArray:
    """Return a column cast to a declared type; raise the errors of `with_types`.

    `name` is the column's name, `where` the file's.
    """
    try:
        return cast_exactly(column, kind)
    except pa.ArrowNotImplementedError:
        raise ConfigError(
            f"source.types: {where}: column {name!r} is {column.type} and cannot be read as "
            f"{kind}. Choose another type"
        ) from None
    except pa.ArrowInvalid:
        value = next(value for value in column.to_pylist() if not _fits(value, column.type, kind))
        raise SourceError(
            f"{where}: column {name!r} has the value {value!r}, which is not a valid {kind} "
            "(source.types). Fix the value, or choose another type such as string"
        ) from None


def _fits(value: object, held: pa.DataType, kind: pa.DataType) -> bool:
    try:
        cast_exactly(pa.chunked_array([pa.array([value], held)]), kind)
    except pa.ArrowInvalid:
        return False
    return True
