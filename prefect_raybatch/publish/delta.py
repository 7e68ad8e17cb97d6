"""A Delta table: one commit that carries an application transaction of the run's plan.

One handle looks for the transaction and commits: whoever commits the same one meanwhile makes this
commit fail, and the next look finds it. A handle that is opened anew between look and commit would
not do: the log accepts the same (app_id, version) again (delta-rs#2580, #3821), and rows double.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from prefect_raybatch.publish.base import PROPERTY, PUBLISH_TRIES, AnsweredRows, Observe
from prefect_raybatch.publish.stores import FolderSink
from prefect_raybatch.publish.types import converted_schema

VERSION = 1  # of our application transaction: a run is published once


class DeltaSink(FolderSink):
    """Append, or merge by key, into a table that is made where there is none."""

    module, extra = "deltalake", "delta"

    def existing(self) -> pa.Schema | None:
        table = self._open()
        return None if table is None else pa.schema(table.schema().to_arrow())

    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        from deltalake.exceptions import CommitFailedError

        app_id = f"{PROPERTY.rstrip('.')}:{rows.plan}"
        for _ in range(PUBLISH_TRIES):
            with self.plainly(rows):
                handle = self._open() or self._create(rows)
                observe("opened")
                if handle is None or handle.transaction_version(app_id) is not None:
                    if handle is None:
                        continue
                    return str(handle.version())
                observe("looked")
                try:
                    self._commit(handle, rows, app_id)
                except CommitFailedError:
                    continue  # another writer was first: perhaps with these rows
                observe("committed")
                return str(handle.version())
        raise self.lost()

    def _commit(self, handle: Any, rows: AnsweredRows, app_id: str) -> None:
        from deltalake import CommitProperties, Transaction, write_deltalake

        # No retries by the library: what it tries again it does not look for first.
        properties = CommitProperties(
            custom_metadata=rows.marks,
            max_commit_retries=0 if self.target.mode == "merge" else None,
            app_transactions=[Transaction(app_id, VERSION)],
        )
        there = pa.schema(handle.schema().to_arrow())
        wanted = converted_schema(rows.schema, self.target)
        schema = self.fit(wanted, there)
        if self.target.mode == "append":
            write_deltalake(
                handle, rows.as_schema(schema), mode="append", commit_properties=properties
            )
            return
        keys = [name.replace("`", "``") for name in self.target.key]
        (
            handle.merge(
                rows.as_schema(pa.schema([schema.field(name) for name in wanted.names])),
                predicate=" AND ".join(f"t.`{name}` = s.`{name}`" for name in keys),
                source_alias="s",
                target_alias="t",
                commit_properties=properties,
            )
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute()
        )

    def _open(self) -> Any:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self.uri, storage_options=self.keys)
        except TableNotFoundError:
            return None

    def _create(self, rows: AnsweredRows) -> Any:
        """An empty table to commit to, or None where another writer made one meanwhile."""
        from deltalake import DeltaTable, Schema
        from deltalake.exceptions import DeltaError

        try:
            return DeltaTable.create(
                self.uri,
                schema=Schema.from_arrow(converted_schema(rows.schema, self.target)),
                mode="error",
                partition_by=self.target.partition_by or None,
                storage_options=self.keys,
            )
        except DeltaError:
            if self._open() is None:
                raise
            return None
