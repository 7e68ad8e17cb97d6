"""Writes tables as the Parquet files of a snapshot, in row groups and parts of bounded size."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.ledger.part_files import PartFiles
from prefect_raybatch.ledger.records import InputFile
from prefect_raybatch.source.arrow_types import (
    cast_exactly,
    check_carried,
    holds_empty_struct,
    written,
)
from prefect_raybatch.source.find import input_file
from prefect_raybatch.source.streams import one_line
from prefect_raybatch.storage import Store

GROUP_ROWS = 16_384  # most rows in a row group
GROUP_BYTES = 64 << 20  # most bytes in a row group, which has fewer rows if they are large
PART_ROWS = 1 << 18
WEIGHED_ROWS = 1024  # rows in an item of `weights`
TABLE_CELLS = 20_000_000  # rows times columns that are held as one table
SNAPSHOT_PART_BYTES = 128 << 20


class SnapshotWriter:
    """Writer of the Parquet files of a snapshot, all with one schema.

    `row_bytes` is the highest mean of bytes per row in any table written so far. `weights` are
    (rows, bytes) of consecutive ranges of the rows written. Once a table needs a schema other than
    the one of the rows already written, the writer deletes its files and writes nothing more, and
    `close` returns None.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self.row_bytes = 0.0
        self.weights: list[tuple[int, int]] = []
        self._store = store
        self._parts = PartFiles(store, folder)
        self._files: list[InputFile] = []
        self._held: list[pa.Table] = []
        self._held_rows = self._held_bytes = self._part_bytes = 0
        self._schema: pa.Schema | None = None
        self._given_up = False

    def write(self, table: pa.Table, schema: pa.Schema) -> None:
        """Add rows; `schema` is the snapshot's schema as known so far.

        Raises SourceError for values that Parquet or the schema cannot hold, and the errors of
        `PartFiles`.
        """
        if self._given_up or not table.num_rows:
            return
        schema = written(schema)
        if self._schema is None:
            check_carried(schema, "the input")
        if self._schema is not None and schema != self._schema:
            self.abandon()
            return
        self._schema = schema
        if not len(schema):  # only JSON objects without keys so far
            return
        most = max(1, TABLE_CELLS // len(schema))
        for start in range(0, table.num_rows, most):
            self._write(conform(table.slice(start, most), schema))

    def _write(self, table: pa.Table) -> None:
        self.row_bytes = max(self.row_bytes, table.nbytes / table.num_rows)
        self._weigh(table)
        # Large rows make small groups, so that a reader needs little memory for one.
        step = max(1, min(GROUP_ROWS, int(GROUP_BYTES * table.num_rows / max(1, table.nbytes))))
        while table.num_rows:
            room = min(step, GROUP_ROWS - self._held_rows)
            self._hold(table.slice(0, room))
            table = table.slice(room)

    def close(self) -> tuple[InputFile, ...] | None:
        """Finish the last part; return the files written, or None if they were abandoned."""
        if self._given_up:
            return None
        self._flush()
        self._finish_part()
        return tuple(self._files)

    def abandon(self) -> None:
        """Delete the files written, which no plan lists yet, and write nothing more."""
        self._given_up = True
        self._held.clear()
        self._parts.discard()
        with suppress(RayBatchError):  # only tidiness
            self._store.delete([file.uri for file in self._files])
        self._files.clear()

    def _weigh(self, table: pa.Table) -> None:
        for start in range(0, table.num_rows, WEIGHED_ROWS):
            part = table.slice(start, WEIGHED_ROWS)
            rows, size = part.num_rows, part.nbytes
            if self.weights and self.weights[-1][0] < WEIGHED_ROWS // 2:  # of many small tables
                held, before = self.weights.pop()
                rows, size = rows + held, size + before
            self.weights.append((rows, size))

    def _hold(self, table: pa.Table) -> None:
        self._held.append(table)
        self._held_rows += table.num_rows
        self._held_bytes += table.nbytes
        if self._held_rows >= GROUP_ROWS or self._held_bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the pending rows as one row group."""
        if not self._held:
            return
        try:
            self._parts.write(pa.concat_tables(self._held))
        except pa.ArrowInvalid as error:
            raise SourceError(
                f"source.uri: Parquet cannot store a value of the input ({one_line(error)}). Write "
                "the column with another type, or leave it out with source.columns"
            ) from None
        self._part_bytes += self._held_bytes
        self._held.clear()
        self._held_rows = self._held_bytes = 0
        if self._parts.rows >= PART_ROWS or self._part_bytes >= SNAPSHOT_PART_BYTES:
            self._finish_part()

    def _finish_part(self) -> None:
        made = self._parts.finish()
        if made is not None:
            part, info = made
            self._files.append(input_file(part.path, info, part.rows))
        self._part_bytes = 0


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return `table` with exactly the columns and types of `schema`; absent columns are null.

    Raises SourceError for a value that the type in `schema` cannot hold unchanged.
    """
    columns = []
    for field in schema:
        if field.name in table.column_names:
            try:
                columns.append(_convert(table.column(field.name), field.type))
            except pa.ArrowInvalid as error:
                raise SourceError(
                    f"source.uri: column {field.name!r} is {field.type} over all rows, which "
                    f"cannot hold every value unchanged ({error}). Write the column with one type, "
                    "or leave it out with source.columns"
                ) from None
        else:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
    return pa.Table.from_arrays(columns, schema=schema)


def _convert(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    import pyarrow.compute as pc

    if pa.types.is_boolean(kind) and pa.types.is_string(column.type):
        return pc.equal(pc.utf8_lower(column), "true")
    if column.type != kind and holds_empty_struct(column.type):
        values = [_with_text(value, kind) for value in column.to_pylist()]
        return pa.chunked_array([pa.array(values, kind)])
    if column.type != kind and pa.types.is_null(column.type):
        return pa.chunked_array([pa.nulls(len(column), kind)])
    return column if column.type == kind else cast_exactly(column, kind)


def _with_text(value: Any, kind: pa.DataType) -> Any:
    """Return a JSON value with "{}" in place of each empty dict for which `kind` has text.

    `kind` is the type of the value. Empty dicts are replaced at any depth. `kind` has text where
    all values of a key are objects without keys, because Parquet cannot store such objects.
    """
    types = pa.types
    if value is None:
        return None
    if types.is_struct(kind):
        return {field.name: _with_text(value.get(field.name), field.type) for field in kind}
    if types.is_map(kind):
        return [(_with_text(k, kind.key_type), _with_text(v, kind.item_type)) for k, v in value]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_with_text(item, kind.value_type) for item in value]
    return "{}" if value == {} and types.is_string(kind) else value
