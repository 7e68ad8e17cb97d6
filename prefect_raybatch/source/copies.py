"""Copies blocks of rows to a Parquet snapshot, with one schema that is known only at their end."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.ledger.layout import INPUT
from prefect_raybatch.source.arrow_types import written
from prefect_raybatch.source.columns import Shape
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.find import Inventory
from prefect_raybatch.source.snapshot_writer import SnapshotWriter, conform
from prefect_raybatch.storage import Store


@dataclass(frozen=True)
class Chosen:
    """The part of the rows that is written: rows that match `filter`, and `columns` (None: all)."""

    filter: Filter
    columns: Sequence[str] | None = None

    def rows(self, table: pa.Table, schema: pa.Schema) -> pa.Table:
        """Return the matching rows of a table read with `schema`.

        Raises ConfigError if the filter does not fit the schema.
        """
        return self.filter.keep(conform(table, schema))

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the part of `schema` that is written."""
        names = schema.names if self.columns is None else self.columns
        return pa.schema([field for field in schema if field.name in names])


COPY_TRIES = 4  # a second pass knows all types; more are needed only when the input changes

Blocks = Iterable[tuple[str, pa.Table]]  # (which file, some of its rows)


def copy_tables(
    blocks: Callable[[], Blocks],
    shape: Shape,
    store: Store,
    attempt: str,
    limit: int | None,
    kind: str,
    chosen: Chosen | None = None,
) -> Inventory:
    """Write all blocks, or what is `chosen` of them, with one schema.

    A pass that meets a value that its schema cannot hold continues without writing, so that the
    next pass knows every type: at most two passes, unless the input changes meanwhile.
    """
    for _ in range(COPY_TRIES):
        known = written(shape.schema)
        parts = SnapshotWriter(store, f"{INPUT}/{attempt}-{uuid.uuid4()}")
        try:
            fault = _pass(blocks, shape, parts, limit, chosen)
            files = parts.close()
        except BaseException:
            parts.abandon()
            raise
        schema = written(shape.schema)
        if fault is not None and schema == known:  # no type is left that could change
            raise fault
        if files is not None:
            schema = schema if chosen is None else chosen.schema(schema)
            weights = tuple(parts.weights)
            return Inventory(files, schema, parts.row_bytes, kind, weights=weights)
    raise SourceError(
        "source.uri: the input keeps changing while it is being copied. Start again when nothing "
        "writes to it"
    )


def _pass(
    blocks: Callable[[], Blocks],
    shape: Shape,
    parts: SnapshotWriter,
    limit: int | None,
    chosen: Chosen | None,
) -> ConfigError | None:
    """Read all blocks once.

    Return why the filter does not fit the types so far, which a later value may change.
    """
    seen, fault, first = 0, None, None
    for where, table in blocks():
        if limit is not None and chosen is None:
            table = table.slice(0, limit - seen)
        shape.see(where, table)
        schema = shape.schema
        if chosen is not None:
            first = first or written(schema)
            if written(schema) != first:  # what was kept before was kept by other types
                parts.abandon()
            try:
                table = chosen.rows(table, written(schema))
            except ConfigError as error:
                fault = error
                parts.abandon()
                continue
            schema = chosen.schema(schema)
            table = table if limit is None else table.slice(0, limit - seen)
        seen += table.num_rows
        parts.write(table, schema)
        if seen == limit:
            break
    if seen and not len(shape.schema):
        raise SourceError("source.uri: the rows have no columns. Check the files")
    return fault
