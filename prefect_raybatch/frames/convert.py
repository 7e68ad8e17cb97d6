"""Turns a caller's data into an Arrow table, and adds answers to data of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_COLUMN = "text"  # the column of a list of texts

# Returns a copy of the caller's data with the columns of a table of equal length added.
AddColumns = Callable[["pa.Table"], Any]


def read_data(data: object, fields: Sequence[str]) -> tuple[pa.Table, AddColumns, list[str]]:
    """Return the columns `fields` as a table, a function that adds columns, and all column names.

    The function takes a table with as many rows as the data, and returns a copy of the data with
    the table's columns added. Columns not in `fields` are not read, so they may hold any Python
    object.
    Raises `ConfigError` for data of another kind, a missing or duplicate column, and values that no
    Arrow type holds.
    """
    import pyarrow as pa

    kind = f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}"
    if kind == "pandas.Series":
        series: Any = data
        table, add, names = _of_pandas(series.to_frame(series.name or TEXT_COLUMN), fields)
    elif kind == "pandas.DataFrame":
        table, add, names = _of_pandas(data, fields)
    elif kind == "polars.DataFrame":
        table, add, names = _of_polars(data, fields)
    elif isinstance(data, pa.Table):
        _check_columns(fields, data.column_names)
        table, add, names = data.select(fields), partial(_joined, data), data.column_names
    elif isinstance(data, list):
        table, add, names = _of_list(data, fields)
    else:
        raise ConfigError(
            f"the data is a {kind}. Give a pandas or Polars DataFrame, a pandas Series, a pyarrow "
            "Table, or a list of dicts or of texts"
        )
    return _normal(table), add, names


def _normal(table: pa.Table) -> pa.Table:
    """Return the table with all texts as Arrow's `string` and without metadata.

    pandas, Polars and Arrow use different types for texts. Without this, the same data would have
    different hashes, and a second `ask` would not find the run of the first.
    """
    import pyarrow as pa

    arrays = []
    for column in table.columns:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            kind = pa.string()
        arrays.append(column if kind == column.type else column.cast(kind))
    return pa.table(arrays, names=table.column_names)


def _of_pandas(data: Any, fields: Sequence[str]) -> tuple[pa.Table, AddColumns, list[str]]:
    import pyarrow as pa

    names = [str(name) for name in data.columns]
    _check_columns(fields, names)
    columns = [data.iloc[:, names.index(name)] for name in fields]
    arrays = [
        _array(name, column, pa.Array.from_pandas)
        for name, column in zip(fields, columns, strict=True)
    ]

    def add(more: pa.Table) -> Any:
        # Numbers with nulls stay numbers in pandas' own nullable types.
        added = {name: _pandas_values(more[name]) for name in more.column_names}
        return data.assign(**{name: _indexed(data, values) for name, values in added.items()})

    return pa.table(arrays, names=list(fields)), add, names


def _pandas_values(column: pa.ChunkedArray) -> Any:
    import pandas
    import pyarrow as pa

    nullable = {
        pa.int64(): pandas.Int64Dtype(),
        pa.bool_(): pandas.BooleanDtype(),
    }
    return column.to_pandas(types_mapper=nullable.get)


def _indexed(data: Any, values: Any) -> Any:
    values.index = data.index
    return values


def _of_polars(data: Any, fields: Sequence[str]) -> tuple[pa.Table, AddColumns, list[str]]:
    import polars
    import pyarrow as pa

    _check_columns(fields, data.columns)
    arrays = [_array(name, data[name], _of_polars_series) for name in fields]

    def add(more: pa.Table) -> Any:
        columns = [polars.Series(name, polars.from_arrow(more[name])) for name in more.column_names]
        return data.with_columns(columns)

    return pa.table(arrays, names=list(fields)), add, list(data.columns)


def _of_polars_series(column: Any) -> pa.Array:
    import polars
    import pyarrow as pa

    if column.dtype == polars.Object:  # polars would write the addresses of the objects
        raise pa.ArrowTypeError("Python objects")
    return column.to_arrow()


def _of_list(data: list[Any], fields: Sequence[str]) -> tuple[pa.Table, AddColumns, list[str]]:
    import pyarrow as pa

    rows: list[Mapping[str, Any]]
    if all(isinstance(row, str | None) for row in data):
        rows, names = [{TEXT_COLUMN: row} for row in data], [TEXT_COLUMN]
    elif all(isinstance(row, Mapping) for row in data):
        rows, names = data, list(dict.fromkeys(name for row in data for name in row))
    else:
        kind = Mapping if isinstance(data[0], Mapping) else str | None
        at = next(i for i, row in enumerate(data) if not isinstance(row, kind))
        other = f", row 0 {type(data[0]).__name__}" if at else ""
        raise ConfigError(
            f"row {at} has the type {type(data[at]).__name__}{other}. "
            "Give a list of dicts or a list of texts"
        )
    if data:
        _check_columns(fields, names)
    arrays = [_array(name, [row.get(name) for row in rows], pa.array) for name in fields]

    def add(more: pa.Table) -> list[dict[str, Any]]:
        return [{**row, **new} for row, new in zip(rows, more.to_pylist(), strict=True)]

    return pa.table(arrays, names=list(fields)), add, names


def _array(name: str, values: Any, make: Callable[[Any], pa.Array]) -> pa.Array:
    import pyarrow as pa

    try:
        return make(values)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"column {name!r} mixes types or holds values that cannot be stored: {error}. Convert "
            "its values to one type, such as text"
        ) from None


def _check_columns(fields: Sequence[str], names: Sequence[str]) -> None:
    for name in fields:
        if name not in names:
            there = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise ConfigError(f"the data has no column {name!r}. Its columns: {there or 'none'}")
        if list(names).count(name) > 1:
            raise ConfigError(f"the data has several columns {name!r}. Rename all but one")


def _joined(data: pa.Table, more: pa.Table) -> pa.Table:
    for name in more.column_names:
        data = data.append_column(name, more[name])
    return data
