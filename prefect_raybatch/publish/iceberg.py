"""An Iceberg table: one transaction with the rows and a property that names the run's plan.

The property is looked for first, and in the summaries of snapshots; it outlives their expiry. The
library's own retry is switched off on the handle: it would rebase the append on a table in which
another publisher has put the rows meanwhile, and double them. Any error, an unknown outcome
included, is answered by loading the table again and looking.

A merge deletes the rows of its keys and appends its own in that transaction. Snapshots of the steps
between are in the table's history; no reader of the table meets them.
"""

from __future__ import annotations

import warnings
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.publish.base import PROPERTY, PUBLISH_TRIES, AnsweredRows, Observe, Sink
from prefect_raybatch.publish.types import converted_schema
from prefect_raybatch.storage import iceberg_options, s3_settings

MOST_GROUPS = 1000  # of keys of several columns: the library looks at each for every row


class IcebergSink(Sink):
    """Append, or merge by key, into a table of a catalog; it is made, not partitioned, where there
    is none."""

    module, extra = "pyiceberg", "iceberg"

    def existing(self) -> pa.Schema | None:
        catalog = self._catalog()
        table = self._load(catalog)
        if table is None:
            self._need_namespace(catalog)
            return None
        self._need_mergeable(table)
        return table.schema().as_arrow()

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
        for snapshot in reversed(table.metadata.snapshots):  # of a merge the last one has them all
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
        self._need_mergeable(table)
        there = table.schema().as_arrow()
        wanted = converted_schema(rows.schema, self.target)
        self.fit(wanted, there)
        schema = pa.schema([f for f in there if f.name in wanted.names])
        data: Any = rows.as_schema(schema)
        if not table.spec().is_unpartitioned():
            data = data.read_all()  # the library streams into tables without partitions alone
        with table.transaction() as transaction:
            if self.target.key and table.current_snapshot() is not None:
                with warnings.catch_warnings():
                    # That none of the keys is there is no fault.
                    warnings.filterwarnings("ignore", message="Delete operation did not match")
                    transaction.delete(self._same_keys(rows, there), rows.marks)
            transaction.append(data, snapshot_properties=rows.marks)
            transaction.set_properties({_property(rows): rows.run_key})

    def _need_mergeable(self, table: Any) -> None:
        """`ConfigError` for a table that the library cannot merge into."""
        if not self.target.key:
            return
        snapshot = table.current_snapshot()
        told = snapshot.summary.additional_properties if snapshot and snapshot.summary else {}
        if int(told.get("total-equality-deletes", 0)):
            raise ConfigError(
                f"{self.what}: the table there has equality deletes, which pyiceberg cannot apply; "
                "append, or compact the table"
            )
        if not table.spec().is_unpartitioned():
            raise ConfigError(
                f"{self.what}: the table there is partitioned, where pyiceberg's merges are "
                "reported to leave rows twice (apache/iceberg-python#3758); append, or merge into "
                "a table without partitions"
            )

    def _same_keys(self, rows: AnsweredRows, there: pa.Schema) -> Any:
        """An expression that is true for the rows of the table that have one of the rows' keys."""
        from pyiceberg import expressions

        of: Any = expressions  # its types know of less than its classes take
        names = self.target.key
        schema = pa.schema([there.field(name) for name in names])
        keys = rows.as_schema(schema).read_all()
        # The column of most values goes into one set for each group of the others.
        *names, last = sorted(names, key=lambda name: pc.count_distinct(keys[name]).as_py())
        if not names:
            return of.In(last, keys[last].to_pylist())
        groups = keys.group_by(names, use_threads=False).aggregate([(last, "list")]).to_pylist()
        if len(groups) > MOST_GROUPS:
            raise ConfigError(
                f"{self.what}: the key {', '.join(self.target.key)} makes {len(groups):,} groups "
                f"by {', '.join(names)}, of which a merge takes {MOST_GROUPS:,}; merge by one "
                "column that is unique, or choose another format"
            )
        found = []
        for group in groups:
            terms = [of.EqualTo(name, group[name]) for name in names]
            found.append(of.And(*terms, of.In(last, group[f"{last}_list"])))
        return found[0] if len(found) == 1 else of.Or(*found)

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
