"""Blocks of rows to a Parquet snapshot, under one schema that is known only at their end."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

import pyarrow as pa

from prefect_raybatch.errors import SourceError
from prefect_raybatch.ledger.layout import INPUT
from prefect_raybatch.source.arrow_types import written
from prefect_raybatch.source.columns import Shape
from prefect_raybatch.source.find import Inventory
from prefect_raybatch.source.snapshot_writer import SnapshotWriter
from prefect_raybatch.storage import Store

COPY_TRIES = 4  # a second pass knows all types; more are needed only when the input changes

Blocks = Iterable[tuple[str, pa.Table]]  # (which file, some of its rows)


def copy_tables(
    blocks: Callable[[], Blocks],
    shape: Shape,
    store: Store,
    attempt: str,
    limit: int | None,
    kind: str,
) -> Inventory:
    """Write all blocks under one schema.

    A pass that meets a value its schema cannot hold goes on without writing, so that the next
    one knows every type: two passes at most, unless the input changes meanwhile.
    """
    for _ in range(COPY_TRIES):
        parts = SnapshotWriter(store, f"{INPUT}/{attempt}-{uuid.uuid4()}")
        try:
            seen = 0
            for where, table in blocks():
                if limit is not None:
                    table = table.slice(0, limit - seen)
                seen += table.num_rows
                shape.see(where, table)
                parts.write(table, shape.schema)
                if seen == limit:
                    break
            if seen and not len(shape.schema):
                raise SourceError("source.uri: the rows have no columns; there is nothing to read")
            files = parts.close()
        except BaseException:
            parts.abandon()
            raise
        if files is not None:
            schema = written(shape.schema)
            return Inventory(files, schema, parts.row_bytes, kind)
    raise SourceError("source.uri: the input keeps changing while it is copied; try again later")
