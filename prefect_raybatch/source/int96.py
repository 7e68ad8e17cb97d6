"""INT96 timestamps in Parquet files, as Spark and Impala write them.

By default pyarrow reads them as nanoseconds, which wrap outside the years 1677 to 2262. Here they
are read as microseconds, the precision that Spark writes; more precise times are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

UNIT = "us"


def open_parquet(handle: BinaryIO, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file with INT96 timestamps as microseconds."""
    return pq.ParquetFile(handle, pre_buffer=False, coerce_int96_timestamp_unit=UNIT, **options)


def int96_columns(metadata: pq.FileMetaData, names: Sequence[str]) -> list[str]:
    """Return which of the top-level columns `names` contain INT96, at any depth."""
    columns = (metadata.schema.column(i) for i in range(metadata.num_columns))
    found = {c.path.split(".")[0] for c in columns if c.physical_type == "INT96"}
    return [name for name in names if name in found]


def int96_batches(
    parquet: pq.ParquetFile, handle: BinaryIO, columns: Sequence[str], **options: Any
) -> Iterator[pa.RecordBatch]:
    """Yield batches as `parquet.iter_batches` does; `handle` is the file that `parquet` reads.

    Raise ArrowInvalid for an INT96 time finer than a microsecond.
    """
    batches: Iterator[pa.RecordBatch] = parquet.iter_batches(
        columns=list(columns), use_threads=False, **options
    )
    times = int96_columns(parquet.metadata, columns)
    if not times:
        return batches
    fine = pq.ParquetFile(handle, metadata=parquet.metadata, pre_buffer=False)
    return map(_checked, batches, fine.iter_batches(columns=times, use_threads=False, **options))


def _checked(batch: pa.RecordBatch, fine: pa.RecordBatch) -> pa.RecordBatch:
    for field in fine.schema:
        # Both wrap in the same way, so that only lost digits make them differ.
        if not batch.column(field.name).cast(field.type, safe=False).equals(fine[field.name]):
            raise pa.ArrowInvalid(
                f"column {field.name!r} has INT96 times finer than a microsecond; write it as "
                "timestamp[ns] instead of INT96"
            )
    return batch
