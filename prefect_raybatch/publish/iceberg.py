"""An Iceberg table: one transaction with the append and a property that names the run's plan.

The property is looked for first, and in the summaries of snapshots; it outlives their expiry. The
library's own retry is switched off on the handle: it would rebase the append on a table in which
another publisher has put the rows meanwhile, and double them. Any error, an unknown outcome
included, is answered by loading the table again and looking.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.publish.base import PROPERTY, PUBLISH_TRIES, AnsweredRows, Observe, Sink
from prefect_raybatch.publish.types import converted_schema
from prefect_raybatch.storage import iceberg_options, s3_settings


class IcebergSink(Sink):
    """Append into a table of a catalog; it is made, not partitioned, where there is none."""

    module, extra = "pyiceberg", "iceberg"

    def existing(self) -> pa.Schema | None:
        catalog = self._catalog()
        table = self._load(catalog)
        if table is None:
            self._need_namespace(catalog)
        return None if table is None else table.schema().as_arrow()

    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException

        for _ in range(PUBLISH_TRIES):
            with self.plainly(rows):
                catalog = self._catalog()
                table = self._load(catalog) or self._create(catalog, rows)
                if table is None:
                    continue
                observe("opened")
                if (version := self._found(table, rows)) is not None:
                    return version
                observe("looked")
                try:
                    self._commit(table, rows)
                except (CommitFailedException, CommitStateUnknownException):
                    continue
                observe("committed")
                return str(table.metadata.current_snapshot_id)
        raise self.lost()

    def _found(self, table: Any, rows: AnsweredRows) -> str | None:
        """The snapshot with the rows, where the table says that it has them."""
        for snapshot in table.metadata.snapshots:
            summary = snapshot.summary.additional_properties if snapshot.summary else {}
            if summary.get(f"{PROPERTY}plan") == rows.plan:
                return str(snapshot.snapshot_id)
        return table.properties.get(_property(rows)) and "an expired snapshot"

    def _commit(self, table: Any, rows: AnsweredRows) -> None:
        retries = {"commit.retry.num-retries": "0"}
        # On this handle alone: the table's own properties are not touched.
        table.metadata = table.metadata.model_copy(
            update={"properties": {**table.metadata.properties, **retries}}
        )
        there = table.schema().as_arrow()
        wanted = converted_schema(rows.schema, self.target)
        self.fit(wanted, there)
        schema = pa.schema([f for f in there if f.name in wanted.names])
        data: Any = rows.as_schema(schema)
        if not table.spec().is_unpartitioned():
            data = data.read_all()  # the library streams into tables without partitions alone
        with table.transaction() as transaction:
            transaction.append(data, snapshot_properties=rows.marks)
            transaction.set_properties({_property(rows): rows.run_key})

    def _catalog(self) -> Any:
        from pyiceberg.catalog import load_catalog

        # Files are written with the keys of the store, but for those that the catalog gives.
        keys = s3_settings(self.options) if self.options else None
        properties = {**iceberg_options(keys), **self.target.catalog}
        return load_catalog(properties.pop("name", None), **properties)

    def _load(self, catalog: Any) -> Any:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return catalog.load_table(self.target.table)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def _need_namespace(self, catalog: Any) -> None:
        """`ConfigError` where a table cannot be made; keys that may not look are no fault."""
        from pyiceberg.exceptions import ForbiddenError, NoSuchNamespaceError

        try:
            catalog.load_namespace_properties(str(self.target.table).rpartition(".")[0])
        except NoSuchNamespaceError:
            raise self._without_namespace() from None
        except ForbiddenError:
            pass

    def _without_namespace(self) -> ConfigError:
        return ConfigError(
            f"{self.what}: the catalog has no namespace for {self.target.table!r}; create it, or "
            "correct table (namespace.table)"
        )

    def _create(self, catalog: Any, rows: AnsweredRows) -> Any:
        from pyiceberg.exceptions import NoSuchNamespaceError, TableAlreadyExistsError

        try:
            return catalog.create_table(
                self.target.table, schema=converted_schema(rows.schema, self.target)
            )
        except TableAlreadyExistsError:
            return None
        except NoSuchNamespaceError:
            raise self._without_namespace() from None


def _property(rows: AnsweredRows) -> str:
    return f"{PROPERTY}published.{rows.plan}"
