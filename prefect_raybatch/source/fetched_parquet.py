"""Reads Parquet files that are copied to a snapshot: over http(s), or to filter or sample rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.source.arrow_types import check_carried
from prefect_raybatch.source.bounds import check_columns_bound
from prefect_raybatch.source.columns import check_columns
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.find import File
from prefect_raybatch.source.int96 import int96_batches, open_parquet
from prefect_raybatch.source.parquet import batch_rows, check_footer
from prefect_raybatch.source.streams import one_line


def parquet_tables(
    file: File,
    columns: Sequence[str] | None,
    known: dict[str, None],
    filter: Filter | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a Parquet file with the chosen `columns` (None: all), batch by batch.

    Leaves out columns that only the file's path supplies. If all `columns` come from the path,
    yields the file's first column instead, so that rows can be counted. Adds the names of all
    columns in the file to `known`.

    Skips row groups whose statistics show that no row matches `filter`. Yields all rows of the
    other row groups. Raises SourceError if the file cannot be used, ConfigError for an unknown
    column.
    """
    with _opened(file) as (parquet, handle):
        schema = parquet.schema_arrow
        told = {name for name, _ in file.values} - {*schema.names}
        wanted = None if columns is None else [name for name in columns if name not in told]
        chosen = check_columns(wanted, schema.names, file.uri) if wanted != [] else schema.names[:1]
        own = pa.schema([schema.field(name) for name in chosen])
        check_types(own, file.uri, SourceError)
        check_columns_bound(own, file.uri)
        check_carried(own, file.uri)
        check_footer(parquet.metadata, file)
        known.update(dict.fromkeys(schema.names))
        for batch in int96_batches(
            parquet,
            handle,
            chosen,
            batch_size=_at_once(parquet.metadata),
            row_groups=_groups(parquet, filter),
        ):
            yield pa.Table.from_batches([batch]).select(chosen)


def _at_once(metadata: pq.FileMetaData) -> int:
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return batch_rows(sum(group.total_byte_size for group in groups) / max(1, metadata.num_rows))


def _groups(parquet: pq.ParquetFile, filter: Filter | None) -> list[int]:
    """Return the indexes of the row groups that may hold rows that match `filter`.

    Returns all row groups if there is no filter, or if it cannot be applied, e.g. because it uses a
    column of the path. pyarrow's dataset reader evaluates the statistics. It gets only a copy of
    the footer: with the file itself, it would read ahead in threads of its own (see `Store.open`).
    """
    import pyarrow.dataset as ds

    every = list(range(parquet.num_row_groups))
    if filter is None or not filter.skips(parquet.schema_arrow):
        return every
    footer = pa.BufferOutputStream()
    parquet.metadata.write_metadata_file(footer)
    fragment = ds.ParquetFileFormat().make_fragment(pa.BufferReader(footer.getvalue()))
    try:
        found = fragment.subset(filter=filter.expression(parquet.schema_arrow)).row_groups
    except (ConfigError, pa.ArrowException):  # e.g. the filter uses a column of the path
        return every
    return [group.id for group in found]


def parquet_rows(file: File) -> int:
    """Return the number of rows in a Parquet file, from its footer."""
    with _opened(file) as (parquet, _):
        return int(parquet.metadata.num_rows)


@contextmanager
def _opened(file: File) -> Iterator[tuple[pq.ParquetFile, BinaryIO]]:
    try:
        with (
            file.store.open(file.info.path) as handle,
            open_parquet(handle) as parquet,
        ):
            yield parquet, handle
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{file.uri} is not a readable Parquet file ({one_line(error)}). Write it again, "
            "remove it, or set source.format if it has another format"
        ) from None
