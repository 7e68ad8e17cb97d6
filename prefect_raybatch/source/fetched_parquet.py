"""Parquet that is not read in place, since the place may change or go: its rows, to be copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.job.trust import check_types
from prefect_raybatch.source.columns import check_columns
from prefect_raybatch.source.find import File
from prefect_raybatch.source.streams import one_line

FETCHED_ROWS = 16_384  # decoded at a time


def parquet_tables(
    file: File, columns: Sequence[str] | None, known: dict[str, None]
) -> Iterator[pa.Table]:
    """The rows of a Parquet file, with `columns` where given; notes all names."""
    with _opened(file) as parquet:
        schema = parquet.schema_arrow
        chosen = check_columns(columns, schema.names, file.uri)
        check_types(pa.schema([schema.field(name) for name in chosen]), file.uri, SourceError)
        known.update(dict.fromkeys(schema.names))
        batches = parquet.iter_batches(batch_size=FETCHED_ROWS, columns=chosen, use_threads=False)
        for batch in batches:
            yield pa.Table.from_batches([batch]).select(chosen)


def parquet_rows(file: File) -> int:
    with _opened(file) as parquet:
        return int(parquet.metadata.num_rows)


@contextmanager
def _opened(file: File) -> Iterator[Any]:
    import pyarrow.parquet as pq

    try:
        with (
            file.store.open(file.info.path) as handle,
            pq.ParquetFile(handle, pre_buffer=False) as parquet,
        ):
            yield parquet
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{file.uri}: is not a readable Parquet file ({one_line(error)}); set source.format "
            "if it is of another kind"
        ) from None
