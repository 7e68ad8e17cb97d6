"""Rows of Hugging Face datasets as plain Arrow, for both the Hub and folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError

ROWS_AT_ONCE = 1000
MEDIA = {"bytes", "path"}  # fields of an image, as the library stores it


def choose_split(asked: str | None, names: Sequence[str], field: str) -> str:
    """Return the split to read: `asked`, or the dataset's only split if `asked` is None.

    `asked` may name several splits as a+b; `names` are all splits of the dataset. Raises
    ConfigError if a split is not in `names`, or if `asked` is None and there are several. `field`
    is the name of the job field, for the message.
    """
    if asked is None and len(names) == 1:
        return names[0]
    wrong = [part for part in (asked or "").split("+") if part not in names]
    if wrong:
        said = f"has no split {wrong[0]!r}" if asked else "has several splits"
        raise ConfigError(
            f"{field}: the dataset {said} (splits: {', '.join(names)}). Choose one, or several as "
            "a+b"
        )
    return str(asked)


def stored_type(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with extension types of the `datasets` library replaced by their storage types.

    Arrays of several dimensions become lists of lists, JSON becomes text.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return stored_type(kind.storage_type)
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, stored_type(f.type)) for f in kind])
    if types.is_fixed_size_list(kind):
        return pa.list_(stored_type(kind.value_type), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(stored_type(kind.value_type))
    return pa.list_(stored_type(kind.value_type)) if types.is_list(kind) else kind


def as_typed(what: str, table: pa.Table, fields: Sequence[pa.Field], before: int) -> pa.Table:
    """Return a table with the columns `fields` in their types; absent ones are null.

    Raises SourceError for a value that does not fit its column's type. In text files, the type was
    inferred from the first rows, so later values may not fit. For the error, `what` names the
    dataset, and `before` is the number of rows read earlier.
    """
    made = []
    for field in fields:
        if field.name not in table.column_names:
            made.append(pa.nulls(table.num_rows, field.type))
            continue
        column = table.column(field.name)
        if isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array([c.storage for c in column.chunks], column.type.storage_type)
        if pa.types.is_null(field.type) and not pa.types.is_null(column.type):
            raise _changed(what, field, column.type, before)
        try:
            made.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowException:
            raise _changed(what, field, column.type, before) from None
    return pa.Table.from_arrays(made, schema=pa.schema(fields))


def _changed(what: str, field: pa.Field, kind: pa.DataType, before: int) -> SourceError:
    return SourceError(
        f"{what}: column {field.name!r} is {field.type} in its first rows, but {kind} in the rows "
        f"from {before:,} (counted from 0). Declare its type in the card of the dataset "
        "(dataset_info), leave it out with source.columns, or download the files and set "
        "source.uri to them"
    )


def _is_media(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) and {field.name for field in kind} == MEDIA


def has_media(kind: pa.DataType) -> bool:
    """Return whether a type contains a struct {bytes, path}, an image or other media."""
    if _is_media(kind):
        return True
    return any(has_media(kind.field(i).type) for i in range(kind.num_fields))


def media_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries {bytes, path}, images or other media, in a value, at any depth."""
    if isinstance(value, dict):
        if value.keys() == MEDIA:
            yield value
        else:
            for inner in value.values():
                yield from media_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from media_in(inner)
