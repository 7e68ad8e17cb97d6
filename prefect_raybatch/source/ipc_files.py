"""Reads Arrow IPC files and streams, including Feather, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import RayBatchError, SourceError
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.source.arrow_types import check_carried, decoded, decoded_schema
from prefect_raybatch.source.bounds import check_columns_bound, check_rows_bound
from prefect_raybatch.source.columns import check_columns
from prefect_raybatch.source.find import File
from prefect_raybatch.source.ipc_sizes import check_declared_sizes
from prefect_raybatch.source.streams import one_line, open_bytes

_FILE, _FEATHER_1 = b"ARROW1", b"FEA1"


def arrow_tables(
    file: File, columns: Sequence[str] | None, known: dict[str, None]
) -> Iterator[pa.Table]:
    """Yield the non-empty batches of an Arrow file or stream with the chosen `columns` (None: all).

    Columns that only the path supplies are left out. Adds the names of all columns in the file to
    `known`. Raises SourceError if the file cannot be used, ConfigError for an unknown column.
    """
    rows = 0
    with _readable(file), _opened(file, columns, known) as (reader, chosen):
        for number, batch in enumerate(_batches(reader), 1):
            try:
                batch.validate(full=True)  # the data may not fit what the file declares
            except pa.ArrowInvalid as error:
                raise SourceError(
                    f"{file.uri}, batch {number} is damaged ({one_line(error)}). Write the file "
                    "again"
                ) from None
            rows += batch.num_rows
            check_rows_bound(rows, file.info.size, file.uri)
            if batch.num_rows:
                yield decoded(pa.Table.from_batches([batch]).select(chosen))


@contextmanager
def _readable(file: File) -> Iterator[None]:
    """Within the block, convert errors of pyarrow to SourceError that names the file."""
    try:
        yield
    except RayBatchError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{file.uri} is not a readable Arrow file or stream ({one_line(error)}). Write it "
            "again, remove it, or set source.format if it has another format"
        ) from None


def arrow_rows(file: File) -> int:
    """Return the approximate number of rows of an Arrow file or stream.

    Estimated from the first and last batch of a file, and from the first batch of a stream and the
    size of the file that holds it.
    """
    with _readable(file), _opened(file, None, {}) as (reader, _):
        if hasattr(reader, "num_record_batches"):
            count = int(reader.num_record_batches)
            if not count:
                return 0
            first, last = (reader.get_batch(i).num_rows for i in (0, count - 1))
            return int(first) * (count - 1) + int(last)
        batch = next(_batches(reader), None)
        if batch is None or not batch.num_rows:
            return 0
        return max(1, file.info.size * int(batch.num_rows) // max(1, int(batch.nbytes)))


@contextmanager
def _opened(
    file: File, columns: Sequence[str] | None, known: dict[str, None]
) -> Iterator[tuple[Any, list[str]]]:
    """Yield (pyarrow's reader of the chosen columns, their names).

    Adds the names of all columns in the file to `known`. Raises SourceError for Feather version 1,
    types that cannot be used, and files that exceed a bound.
    """
    with open_bytes(file) as stream:
        head = stream.read(len(_FILE))
    if head.startswith(_FEATHER_1):
        raise SourceError(
            f"{file.uri} is a Feather file of version 1. Read it with pyarrow.feather.read_table "
            "and write it again"
        )
    with open_bytes(file) as stream:
        opened = pa.ipc.open_file if head == _FILE else pa.ipc.open_stream
        schema = opened(stream).schema
    told = {name for name, _ in file.values} - {*schema.names}
    wanted = None if columns is None else [name for name in columns if name not in told]
    chosen = check_columns(wanted, schema.names, file.uri) if wanted != [] else []
    own = pa.schema([schema.field(name) for name in chosen])
    check_types(own, file.uri, SourceError)
    check_columns_bound(own, file.uri)
    check_carried(decoded_schema(own), file.uri)
    known.update(dict.fromkeys(schema.names))
    fields = sorted(schema.get_field_index(name) for name in chosen)
    with open_bytes(file) as stream:
        check_declared_sizes(stream, file.info.size, head == _FILE, file.uri)
    # pyarrow's own threads would need Python to release the handle: see Store.open.
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields or None)
    with open_bytes(file) as stream:
        yield opened(stream, options=options), chosen


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if hasattr(reader, "num_record_batches"):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader
