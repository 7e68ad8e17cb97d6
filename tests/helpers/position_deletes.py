"""Deletes by position and by equality for Iceberg tables: pyiceberg writes neither."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, AssertTableUUID, SetSnapshotRefUpdate


class _DeletesWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def delete_positions(table: Any, folder: Path, rows: Sequence[int]) -> None:
    """A snapshot in which rows of the table's first data file are deleted, by their place in it."""
    file = next(iter(table.scan().plan_files())).file.file_path
    ids = {b"PARQUET:field_id": b"2147483546"}, {b"PARQUET:field_id": b"2147483545"}
    schema = pa.schema(
        [
            pa.field("file_path", pa.string(), nullable=False, metadata=ids[0]),
            pa.field("pos", pa.int64(), nullable=False, metadata=ids[1]),
        ]
    )
    data = pa.table({"file_path": [file] * len(rows), "pos": list(rows)}, schema)
    _commit(table, folder, data, DataFileContent.POSITION_DELETES)


def delete_equal(table: Any, folder: Path, column: str, values: Sequence[int]) -> None:
    """A snapshot in which all rows with one of these values are deleted."""
    field = table.schema().find_field(column)
    ids = {b"PARQUET:field_id": str(field.field_id).encode()}
    schema = pa.schema([pa.field(column, pa.int64(), metadata=ids)])
    data = pa.table({column: list(values)}, schema)
    _commit(table, folder, data, DataFileContent.EQUALITY_DELETES, [field.field_id])


def _commit(
    table: Any,
    folder: Path,
    data: pa.Table,
    content: DataFileContent,
    equality: list[int] | None = None,
) -> None:
    parent = table.current_snapshot()
    number, sequence = parent.snapshot_id + 1, table.metadata.last_sequence_number + 1
    path = folder / f"{number}-deletes.parquet"
    pq.write_table(data, path)
    deletes = DataFile.from_args(
        content=content,
        file_path=f"file://{path}",
        file_format=FileFormat.PARQUET,
        partition={},
        record_count=data.num_rows,
        file_size_in_bytes=path.stat().st_size,
        equality_ids=equality,
        spec_id=0,
    )
    manifest = table.io.new_output(f"file://{folder}/{number}-m0.avro")
    with _DeletesWriter(table.spec(), table.schema(), manifest, number, "null") as writer:
        writer.add_entry(
            ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED,
                snapshot_id=number,
                sequence_number=None,
                file_sequence_number=None,
                data_file=deletes,
            )
        )
    listing = f"file://{folder}/snap-{number}.avro"
    with write_manifest_list(
        2, table.io.new_output(listing), number, parent.snapshot_id, sequence, "null"
    ) as out:
        out.add_manifests([writer.to_manifest_file(), *parent.manifests(table.io)])
    kind = "position" if equality is None else "equality"
    totals = {k: v for k, v in parent.summary.additional_properties.items() if "total" in k}
    totals[f"total-{kind}-deletes"] = str(data.num_rows)
    snapshot = Snapshot(
        snapshot_id=number,
        parent_snapshot_id=parent.snapshot_id,
        sequence_number=sequence,
        timestamp_ms=parent.timestamp_ms + 1000,
        manifest_list=listing,
        summary=Summary(Operation.DELETE, **totals),
        schema_id=table.schema().schema_id,
    )
    table.catalog.commit_table(
        table,
        (AssertTableUUID(uuid=table.metadata.table_uuid),),
        (
            AddSnapshotUpdate(snapshot=snapshot),
            SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=number),
        ),
    )
    table.refresh()
