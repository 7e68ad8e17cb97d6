"""Partition columns in the path: `year=2026/city=Bonn/part-0.parquet`, as Hive writes them.

Names and values are read as by pyarrow's hive partitioning, except that digits with a leading zero
(`zip=02139`) stay text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from urllib.parse import unquote_to_bytes

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.source.arrow_types import cast_exactly

_WHOLE = re.compile(r"(0|-?[1-9][0-9]*)\Z")
NULL = "__HIVE_DEFAULT_PARTITION__"

Values = tuple[tuple[str, str | None], ...]  # (column, value as text, None for null)


@lru_cache(1024)
def path_values(root: str, folder: str) -> Values:
    """Return (column, value) for each column that the path supplies to a file.

    A value is text, or None for null. The file is in `folder`, relative to `root`. Columns come
    from `name=value` folders below the root and at the end of the root itself. Raises SourceError
    if the path has a column twice, or a name or value that is not UTF-8.
    """
    above: list[str] = []
    for part in reversed(root.split("/")):
        if not _is_pair(part):
            break
        above.insert(0, part)
    where = f"{root}/{folder}"
    found: dict[str, str | None] = {}
    for part in [*above, *folder.split("/")]:
        if not _is_pair(part):
            continue
        written = part.split("=", 1)
        name, value = (_decode(text, where) for text in written)
        if name in found:
            raise SourceError(f"{where}: duplicate column {name!r} in the path. Rename a folder")
        found[name] = None if written[1] == NULL else value
    return tuple(found.items())


def _is_pair(part: str) -> bool:
    return "=" in part[1:]


def _decode(text: str, where: str) -> str:
    try:
        return unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise SourceError(
            f"{where}: {text!r} in the path is not UTF-8. Rename the folder"
        ) from None


def path_types(
    files: Iterator[Values], declared: Mapping[str, pa.DataType] | None = None
) -> dict[str, pa.DataType]:
    """Return {column: type} for the columns in paths; `files` has the path columns of each file.

    The type is the `declared` one. Without it, the type is int32 if all values are whole numbers
    in the range of int32 without leading zeros, else string. Raises ConfigError for a value that a
    declared type cannot hold.
    """
    seen: dict[str, set[str]] = {}
    for values in dict.fromkeys(files):
        for name, value in values:
            seen.setdefault(name, set()).update(() if value is None else (value,))
    found = {}
    for name, texts in seen.items():
        kind = (declared or {}).get(name)
        for text in sorted(texts) if kind is not None else ():
            if not _holds(kind, text):
                raise ConfigError(
                    f"source.types: {name!r} is {text!r} in a path, which is not a valid {kind}. "
                    "Choose another type such as string"
                )
        found[name] = kind or (pa.int32() if _whole(texts) else pa.string())
    return found


def _whole(texts: set[str]) -> bool:
    return bool(texts) and all(_WHOLE.match(text) and _holds(pa.int32(), text) for text in texts)


def _holds(kind: pa.DataType, text: str) -> bool:
    try:
        cast_exactly(pa.chunked_array([pa.array([text], pa.string())]), kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def agrees(column: pa.Array | pa.ChunkedArray, value: str | None) -> bool:
    """Return whether all values of a column equal `value`, the text in a path (None: null)."""
    import pyarrow.compute as pc

    if value is None or column.null_count:
        return value is None and column.null_count == len(column)
    try:
        return bool(pc.all(pc.equal(column, pa.scalar(value).cast(column.type))).as_py())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False


def differs(where: str, name: str, value: str | None) -> str:
    """Return the error message for a column that is both in file `where` and in its path.

    `name` is the column, and `value` its value in the path. The file may have other values.
    """
    return (
        f"{where}: column {name!r} is both in the file and in the path, but the values in the file "
        f"are not known to be {value!r}, as in the path. Remove it from one of them, or leave it "
        "out with source.columns"
    )


def add_columns(
    table: pa.Table,
    where: str,
    values: Values,
    types: Mapping[str, pa.DataType],
    columns: Sequence[str] | None,
) -> pa.Table:
    """Return `table` with the columns in the path of its file added.

    With `columns`, the result has only these columns, in this order; a name that is in neither
    the table nor the path is skipped. `where` is the URI of the file, `values` are the columns in
    its path, and `types` their types. Raises SourceError if the table itself has a column of the
    path, but with other values.
    """
    for name, value in values:
        if columns is not None and name not in columns:
            continue
        column = pa.repeat(pa.scalar(value, pa.string()).cast(types[name]), table.num_rows)
        if name not in table.column_names:
            table = table.append_column(name, column)
        elif agrees(table[name], value):
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            raise SourceError(differs(where, name, value))
    if columns is None:
        return table
    return table.select([name for name in columns if name in table.column_names])
