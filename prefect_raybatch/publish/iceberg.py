"""Publishes to an Iceberg table in one transaction, which adds the rows and marks them by plan.

The table has the rows if a snapshot marked with the plan is an ancestor of the current one; after a
rollback it is none. Once that snapshot has expired, a table property with the plan is the proof.

The library's retries are switched off. They would rebase the append on a table to which another
publisher has just added the same rows, so the table would have them twice. After any error,
including an unknown outcome, the table is loaded again and checked.

A merge deletes the table's rows that have the same keys and appends the new rows, in the same
transaction. Both steps are in the table's history, but no reader sees the table between them.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.trusted_places import check_written
from prefect_raybatch.publish.base import PROPERTY, PUBLISH_TRIES, AnsweredRows, Observe, Sink
from prefect_raybatch.publish.types import converted_schema
from prefect_raybatch.schemes import options_for
from prefect_raybatch.source.tables.iceberg import file_properties, open_catalog
from prefect_raybatch.storage import s3_settings

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

MOST_GROUPS = 1000  # groups of a key of several columns; the library tests each for every row
LOCATION_CODE = "write.py-location-provider.impl"  # a table's property: a Python class to import
PLACE_PROPERTIES = ("write.data.path", "write.metadata.path")  # where a table's files lie


class IcebergSink(Sink):
    """An Iceberg table of a catalog as a target: rows are appended, or merged by key.

    A missing table is created without partitions.
    """

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
            with self.with_plain_errors(rows):
                catalog = self._catalog()
                table = self._load(catalog) or self._create(catalog, rows)
                if table is None:
                    continue
                observe("opened")
                if (version := _snapshot_with(table, rows.plan)) is not None:
                    return version
                observe("looked")
                try:
                    self._commit(table, rows)
                except (CommitFailedException, CommitStateUnknownException):
                    continue
                observe("committed")
                return str(table.metadata.current_snapshot_id)
        raise self.lost_rows_error()

    def check_names(self, names: Sequence[str]) -> None:
        super().check_names(names)
        if "" in names:
            raise ConfigError(f"{self.what}: Iceberg needs a name for each column. Name it")

    def rehearse(self, schema: pa.Schema, existing: pa.Schema | None) -> None:
        """If there is no table, create one in an in-memory catalog and a temporary folder.

        This raises for names and types that the library rejects. Does nothing if the table exists.
        """
        from pyiceberg.catalog.memory import InMemoryCatalog

        if existing is not None:
            return
        if any(_has_unnamed_field(field.type) for field in schema):
            raise ConfigError(f"{self.what}: Iceberg needs a name for each field. Name it")
        with tempfile.TemporaryDirectory(prefix="raybatch-") as folder:
            catalog = InMemoryCatalog("rehearsal", warehouse=f"file://{folder}")
            try:
                catalog.create_namespace("rehearsal")
                table = catalog.create_table("rehearsal.answers", schema=schema)
                table.append(schema.empty_table())
            finally:
                catalog.close()

    def refused(self, error: Exception) -> str | None:
        from pyiceberg import exceptions

        final = (exceptions.ValidationError, exceptions.BadRequestError, ValueError, TypeError)
        return "the table rejects the rows" if isinstance(error, final) else None

    def place(self) -> tuple[str, ...]:
        return ("iceberg", json.dumps(self.target.catalog, sort_keys=True), str(self.target.table))

    def holds(self, plan: str, recorded: str) -> bool:
        with self.with_plain_errors():
            table = self._load(self._catalog())
            return table is not None and _snapshot_with(table, plan, recorded) is not None

    def _commit(self, table: Table, rows: AnsweredRows) -> None:
        retries = {"commit.retry.num-retries": "0"}
        # Only on this handle: the properties of the stored table stay as they are.
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
                    # A table without any of the keys is no error.
                    warnings.filterwarnings("ignore", message="Delete operation did not match")
                    transaction.delete(self._same_keys(rows, there), rows.marks)
            transaction.append(data, snapshot_properties=rows.marks)
            appended = cast("Snapshot", transaction.table_metadata.current_snapshot())
            transaction.set_properties(
                {_property(rows.plan): f"{appended.snapshot_id}:{_age(appended)}"}
            )

    def _need_mergeable(self, table: Table) -> None:
        """Raise `ConfigError` for a merge into a table with equality deletes or partitions.

        pyiceberg cannot merge into such tables correctly.
        """
        if not self.target.key:
            return
        snapshot = table.current_snapshot()
        properties = snapshot.summary.additional_properties if snapshot and snapshot.summary else {}
        if int(properties.get("total-equality-deletes", 0)):
            raise ConfigError(
                f"{self.what}: the existing table has equality deletes, which pyiceberg cannot "
                "apply. Set mode to append, or compact the table"
            )
        if not table.spec().is_unpartitioned():
            raise ConfigError(
                f"{self.what}: the existing table is partitioned, and pyiceberg's merges may "
                "duplicate rows there (apache/iceberg-python#3758). Set mode to append, or merge "
                "into a table without partitions"
            )

    def _same_keys(self, rows: AnsweredRows, existing: pa.Schema) -> BooleanExpression:
        """Return an expression that is true for rows of the table whose key is also in `rows`.

        `existing` is the table's schema. Raises `ConfigError` if the expression would be too large.
        """
        from pyiceberg import expressions

        of: Any = expressions  # its annotations allow fewer types than its classes
        names = self.target.key
        schema = pa.schema([existing.field(name) for name in names])
        keys = rows.as_schema(schema).read_all()
        # The column with most distinct values becomes one IN list for each group of the others.
        *names, last = sorted(names, key=lambda name: pc.count_distinct(keys[name]).as_py())
        if not names:
            among: BooleanExpression = of.In(last, keys[last].to_pylist())
            return among
        groups = keys.group_by(names, use_threads=False).aggregate([(last, "list")]).to_pylist()
        if len(groups) > MOST_GROUPS:
            raise ConfigError(
                f"{self.what}: the key {', '.join(self.target.key)} makes {len(groups):,} groups "
                f"by {', '.join(names)}, but a merge allows {MOST_GROUPS:,}. Merge by one unique "
                "column, or choose another format"
            )
        alternatives: list[BooleanExpression] = []
        for group in groups:
            terms = [of.EqualTo(name, group[name]) for name in names]
            alternatives.append(of.And(*terms, of.In(last, group[f"{last}_list"])))
        any_of: BooleanExpression = (
            of.Or(*alternatives) if len(alternatives) > 1 else alternatives[0]
        )
        return any_of

    def _catalog(self) -> Catalog:
        # Files are written with the store's credentials unless the catalog provides others.
        given = options_for("s3://", self.options)
        files = file_properties(self.options, s3_settings(given) if given else None)
        return open_catalog({**files, **self.target.catalog})

    def _load(self, catalog: Catalog) -> Table | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            table = catalog.load_table(str(self.target.table))
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        self._check_places(table)
        return table

    def _check_places(self, table: Table) -> None:
        """Raise `ConfigError` if a table names Python code to load, or lies in a wrong place.

        A wrong place is one to which the policy in force does not allow writing.
        """
        properties = table.metadata.properties
        if LOCATION_CODE in properties:
            raise ConfigError(
                f"{self.what}: the existing table names Python code to load ({LOCATION_CODE}), "
                "which is not done. Remove that property of the table"
            )
        for place in (table.location(), *map(properties.get, PLACE_PROPERTIES)):
            if place:
                check_written(f"{self.what}: the table's files", place)

    def _check_namespace_place(self, catalog: Catalog) -> None:
        """Raise `ConfigError` if the policy does not allow writing where new tables would lie.

        Credentials without permission to read the namespace's location are no error.
        """
        from pyiceberg.exceptions import ForbiddenError

        namespace = str(self.target.table).rpartition(".")[0]
        with suppress(ForbiddenError):
            if place := catalog.load_namespace_properties(namespace).get("location"):
                check_written(f"{self.what}: the tables of {namespace}", place)

    def _need_namespace(self, catalog: Catalog) -> None:
        """Raise `ConfigError` if the namespace of a new table is missing.

        Credentials without permission to check are no error.
        """
        from pyiceberg.exceptions import ForbiddenError, NoSuchNamespaceError

        try:
            catalog.load_namespace_properties(str(self.target.table).rpartition(".")[0])
        except NoSuchNamespaceError:
            raise self._without_namespace() from None
        except ForbiddenError:
            pass

    def _without_namespace(self) -> ConfigError:
        return ConfigError(
            f"{self.what}: the catalog has no namespace for {self.target.table!r}. Create it, or "
            "correct table (namespace.table)"
        )

    def _create(self, catalog: Catalog, rows: AnsweredRows) -> Table | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, TableAlreadyExistsError

        try:
            self._check_namespace_place(catalog)
            table = catalog.create_table(
                str(self.target.table), schema=converted_schema(rows.schema, self.target)
            )
            self._check_places(table)  # a REST catalog chooses the place
            return table
        except TableAlreadyExistsError:
            return None
        except NoSuchNamespaceError:
            raise self._without_namespace() from None


def _has_unnamed_field(kind: pa.DataType) -> bool:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    return any(not field.name or _has_unnamed_field(field.type) for field in fields)


def _property(plan: str) -> str:
    return f"{PROPERTY}published.{plan}"


def _age(snapshot: Snapshot) -> int:
    """Return a snapshot's sequence number, or its time in ms in tables of format 1."""
    return int(snapshot.sequence_number or snapshot.timestamp_ms)


def _snapshot_with(table: Table, plan: str, recorded: str = "") -> str | None:
    """Return the id of the snapshot in the table's present history that added the rows of `plan`.

    Returns None if the complete history lacks that snapshot, or if the table was emptied later.

    The history may be cut off, because old snapshots expired. Then the snapshot's id is taken from
    the table's property for the plan or, if there is none, from `recorded` (the run directory's
    record). Returns "an expired snapshot" if that snapshot has expired. Returns None if neither
    names a snapshot, or if a rollback removed it from the history. That is so if it still exists,
    or if it is younger than the oldest snapshot of the history.
    """
    from pyiceberg.table.snapshots import Operation, ancestors_of

    oldest = None
    for oldest in ancestors_of(table.current_snapshot(), table.metadata):
        summary = oldest.summary
        if summary is None:
            continue
        marked = f"{PROPERTY}plan" in summary.additional_properties
        if summary.additional_properties.get("total-records") == "0" and not marked:
            return None  # somebody emptied the table
        # A merge deletes first, under the same mark: only the append has the rows.
        if summary.operation != Operation.APPEND:
            continue
        if summary.additional_properties.get(f"{PROPERTY}plan") == plan:
            return str(oldest.snapshot_id)
    # A snapshot without a parent is no proof: pyiceberg also shows none if the parent has expired.
    if oldest is None or oldest.sequence_number == 1:
        return None  # the whole history, and the rows are not in it
    named = table.properties.get(_property(plan)) or recorded
    snapshot, _, age = named.partition(":")
    if any(str(one.snapshot_id) == snapshot for one in table.metadata.snapshots):
        return None
    if age.isdigit() and int(age) > _age(oldest):
        return None
    return "an expired snapshot" if named else None
