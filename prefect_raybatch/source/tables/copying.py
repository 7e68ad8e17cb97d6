"""Opens a source that is a table, such as Delta or SQL, and copies its rows to Parquet files.

It can also estimate what the copy will hold, or read the first rows, without writing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.job.table_formats import TABLE_FORMATS
from prefect_raybatch.ledger.plan_tables import encode_schema
from prefect_raybatch.ledger.records import InputFile
from prefect_raybatch.source.arrow_types import plain_type, written
from prefect_raybatch.source.columns import Shape, check_columns
from prefect_raybatch.source.copies import Blocks, copy_tables
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.find import Inventory
from prefect_raybatch.source.row_sample import sample_of
from prefect_raybatch.source.snapshot_writer import conform
from prefect_raybatch.source.tables.base import TableSource
from prefect_raybatch.source.tables.delta import open_delta
from prefect_raybatch.source.tables.huggingface import open_huggingface
from prefect_raybatch.source.tables.iceberg import open_iceberg
from prefect_raybatch.source.tables.lance_sets import open_lance
from prefect_raybatch.source.tables.sql import open_sql
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import Store

GUESS_ROWS = 10_000  # read to estimate how many rows match a filter
OPENERS: dict[str, Callable[[ReadSpec], TableSource]] = {
    "delta": open_delta,
    "iceberg": open_iceberg,
    "lance": open_lance,
    "sql": open_sql,
    "huggingface": open_huggingface,
}


def snapshot_of(format: str, source: ReadSpec, run_store: Store, attempt: str) -> Inventory:
    """Copy the table that `source` names to Parquet under `_raybatch/input/ATTEMPT-UUID/`.

    Raises the errors of `snapshots.snapshot`.
    """
    with open_table(format, source) as table:
        chosen = _Chosen(table, source)

        def blocks() -> Blocks:
            for rows in chosen.tables(pushed=True):
                yield table.pin.uri, rows

        made = copy_tables(
            *(blocks, Shape(), run_store, attempt, source.limit, format),
            sample=sample_of(source),
        )
        if not made.rows:
            which = (
                "no row matches source.filter. Change the filter"
                if source.filter
                else "the table has no rows. Check source.uri and source.version"
            )
            raise SourceError(f"{chosen.name}: {which}")
        record = table.pin.record() | {"schema": encode_schema(plain(table.schema))}
        if source.filter:
            record["filter"] = source.filter
        return replace(made, format=format, table=record)


def estimate_inventory(format: str, source: ReadSpec) -> Inventory:
    """Estimate what `snapshot_of` would give, from metadata and the first rows; write nothing."""
    with open_table(format, source) as table:
        chosen = _Chosen(table, source)
        looked, sample, whole = chosen.sample()
        rows = looked if whole or table.rows is None else table.rows
        counted = table.rows is not None and table.counted and not source.filter
        guessed = not whole and not counted
        if source.filter and looked:
            rows = max(1, round(rows * sample.num_rows / looked))
        if source.most_rows is not None and rows >= source.most_rows:
            rows, guessed = source.most_rows, False
        if not looked:
            raise SourceError(
                f"{chosen.name}: the table has no rows. Check source.uri and source.version"
            )
        file = InputFile(uri=table.pin.uri, size=0, etag=None, mtime_ns=None, rows=rows)
        row_bytes = sample.nbytes / max(1, sample.num_rows)
        pin = table.pin.record()
        return Inventory((file,), chosen.schema, row_bytes, format, pin, guessed=guessed)


def head_of(format: str, source: ReadSpec) -> Iterator[tuple[str, pa.Table]]:
    """Yield (URI of the table, its first block of matching rows) once, or nothing if none match.

    Writes nothing.
    """
    with open_table(format, source) as table:
        first = next(_Chosen(table, source).tables(pushed=True), None)
        if first is not None:
            yield table.pin.uri, first


def plain(schema: pa.Schema) -> pa.Schema:
    """Return `schema` as the snapshot has it: without dictionary types, view types, metadata."""
    return pa.schema([(field.name, plain_type(field.type)) for field in schema])


class _Chosen:
    """Reader of the rows and columns of a table that a job needs, as the snapshot stores them."""

    def __init__(self, table: TableSource, source: ReadSpec) -> None:
        self._table = table
        self.name = f"source.uri: {table.pin.uri} at version {table.pin.version}"
        self._names = check_columns(source.columns, table.schema.names, table.pin.uri)
        self._all = written(plain(table.schema))
        self.schema = pa.schema([self._all.field(name) for name in self._names])
        _check_storable(self.name, pa.schema([table.schema.field(name) for name in self._names]))
        self._filter = Filter(source.filter) if source.filter else None
        if self._filter is not None:
            self._filter.expression(self._all)  # raises its errors before anything is read

    def tables(self, pushed: bool) -> Iterator[pa.Table]:
        """Yield the matching rows; with `pushed`, the table's reader also applies the filter."""
        for table in self._read(self._filter if pushed else None):
            kept = table if self._filter is None else self._filter.keep(table)
            if kept.num_rows:
                yield kept.select(self._names)

    def sample(self) -> tuple[int, pa.Table, bool]:
        """Read about GUESS_ROWS rows from the start of the table.

        Returns (number of rows read, table of those that match the filter, whether the table was
        read to its end).
        """
        looked, found = 0, [self.schema.empty_table()]
        for table in self._read(None):
            looked += table.num_rows
            kept = table if self._filter is None else self._filter.keep(table)
            found.append(kept.select(self._names))
            if looked >= GUESS_ROWS:
                return looked, pa.concat_tables(found), False
        return looked, pa.concat_tables(found), True

    def _read(self, pushed: Filter | None) -> Iterator[pa.Table]:
        needed = self._filter.columns if self._filter else ()
        names = list(dict.fromkeys([*self._names, *needed]))
        schema = pa.schema([self._all.field(name) for name in names])
        batches = self._table.batches(names, pushed)
        try:
            for batch in batches:
                if batch.num_rows:
                    yield conform(pa.Table.from_batches([batch]), schema)
        finally:
            getattr(batches, "close", list)()


def _check_storable(name: str, schema: pa.Schema) -> None:
    """Raise SourceError for a column whose type a snapshot cannot hold."""
    import pyarrow.parquet as pq

    check_types(schema, name, SourceError)
    for field in written(plain(schema)):
        try:
            pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except (pa.ArrowException, NotImplementedError) as error:
            raise SourceError(
                f"{name}: column {field.name!r} has type {field.type}, which Parquet cannot store "
                f"({error}). Convert it in the table, or leave it out with source.columns"
            ) from None


def open_table(format: str, source: ReadSpec) -> TableSource:
    """Return the table that `source` names, at source.version or as it is now.

    Raises ConfigError for a missing extra or a malformed source.version, SourceError for a table or
    version that does not exist or may not be read, `StoreUnavailable` if the location does not
    answer.
    """
    need_extra(format)
    return OPENERS[format](source)


def need_extra(format: str) -> None:
    """Raise ConfigError unless the library of a table format is installed."""
    known = TABLE_FORMATS[format]
    if find_spec(known.module) is None:
        raise ConfigError(
            f"source.format: {known.title} needs {known.module}, which is not installed. Run pip "
            f'install "prefect-raybatch[{known.extra}]"'
        )
