"""Publishes to a Delta table in one commit, with an application transaction named after the plan.

The same table handle looks for the transaction and commits. If another publisher commits the
transaction in between, this commit fails, and the next look finds the rows. A new handle for the
commit would not do: the log accepts the same (app_id, version) again (delta-rs#2580, #3821), and
rows would double.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, PublishFailed
from prefect_raybatch.ledger.records import JsonObject
from prefect_raybatch.publish.base import PROPERTY, PUBLISH_TRIES, AnsweredRows, Observe
from prefect_raybatch.publish.stores import FolderSink
from prefect_raybatch.publish.types import converted_schema
from prefect_raybatch.schemes import store_scheme
from prefect_raybatch.storage.delta_access import delta_access

if TYPE_CHECKING:
    from deltalake import DeltaTable

# Errors of delta-rs that a retry only repeats: it rejects the rows, the columns or the table.
_REFUSED = re.compile(
    r"schema error|duplicate field|invalid data|validation check|append-only|unsupported"
    r"|not supported|feature|not found in schema|error partitioning|protocol",
    re.IGNORECASE,
)


class DeltaSink(FolderSink):
    """A Delta table as a target: rows are appended or merged by key; a missing table is created."""

    module, extra = "deltalake", "delta"

    def existing(self) -> pa.Schema | None:
        table = self._open()
        if table is None:
            return None
        by = list(table.metadata().partition_columns)
        if self.target.partition_by and by != self.target.partition_by:
            raise ConfigError(
                f"{self.what}: partition_by is {', '.join(self.target.partition_by)}, but the "
                f"existing table is partitioned by {', '.join(by) or 'no column'}. Remove "
                "partition_by, which only applies to a new table"
            )
        append_only = table.metadata().configuration.get("delta.appendOnly", "")
        if self.target.key and append_only.lower() == "true":
            raise ConfigError(
                f"{self.what}: the existing table only allows appends (delta.appendOnly), but a "
                "merge replaces rows. Set mode to append, or unset the property"
            )
        return pa.schema(table.schema().to_arrow())

    def check_names(self, names: Sequence[str]) -> None:
        self.refuse_alike(names, str.lower)

    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        from deltalake.exceptions import CommitFailedError

        for _ in range(PUBLISH_TRIES):
            with self.with_plain_errors(rows):
                handle = self._open() or self._create(rows)
                observe("opened")
                if handle is None:
                    continue
                if (version := version_with(handle, rows.plan, rows.recorded)) is not None:
                    return version
                observe("looked")
                try:
                    self._commit(handle, rows)
                except CommitFailedError as error:
                    if self.hopeless(error) is not None:
                        raise
                    continue  # another writer was first: perhaps with these rows
                observe("committed")
                return str(handle.version())
        raise self.lost_rows_error()

    def refused(self, error: Exception) -> str | None:
        from deltalake.exceptions import DeltaProtocolError, SchemaMismatchError

        if store_scheme(self.uri) == "az" and "Invalid table version" in str(error):
            # The server returned the whole log. Nothing is committed, so no row is duplicated.
            return (
                "the server ignores startFrom in listings. Use Azure Blob Storage, or Azurite 3.37 "
                "or newer"
            )
        final = (SchemaMismatchError, DeltaProtocolError, ValueError, TypeError)
        refused = isinstance(error, final) or _REFUSED.search(str(error)) is not None
        return "the table rejects the rows" if refused else None

    def holds(self, plan: str, recorded: str) -> bool:
        with self.with_plain_errors():
            handle = self._open()
            return handle is not None and version_with(handle, plan, recorded) is not None

    def _commit(self, handle: DeltaTable, rows: AnsweredRows) -> None:
        from deltalake import CommitProperties, Transaction, write_deltalake

        # Count on from the table's last number: a restored table keeps the numbers of the
        # transactions that it no longer contains.
        app_id = _app_id(rows.plan)
        number = (handle.transaction_version(app_id) or 0) + 1
        # No retries by the library: it does not check whether the first try was committed.
        properties = CommitProperties(
            custom_metadata=rows.marks,
            max_commit_retries=0 if self.target.mode == "merge" else None,
            app_transactions=[Transaction(app_id, number)],
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

    def _open(self) -> DeltaTable | None:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            place, keys, _ = delta_access(self.uri, self.options)
            return DeltaTable(place, storage_options=keys)
        except TableNotFoundError:
            return None

    def _create(self, rows: AnsweredRows) -> DeltaTable | None:
        """Create an empty table and return it; None if another writer created one meanwhile."""
        from deltalake import CommitProperties, DeltaTable, Schema
        from deltalake.exceptions import DeltaError

        place, keys, _ = delta_access(self.uri, self.options)
        try:
            return DeltaTable.create(
                place,
                schema=Schema.from_arrow(converted_schema(rows.schema, self.target)),
                mode="error",
                partition_by=self.target.partition_by or None,
                storage_options=keys,
                # The library would create it once more, and replace the schema of the first.
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except DeltaError:
            if self._open() is None:
                raise
            return None


def _app_id(plan: str) -> str:
    return f"{PROPERTY.rstrip('.')}:{plan}"


def version_with(handle: DeltaTable, plan: str, recorded: str = "") -> str | None:
    """Return the table's version in which a commit wrote the rows of `plan`; None if it lacks them.

    The plan's application transaction alone is no proof: it survives a RESTORE to an earlier
    version. So the history is followed from the newest version down; at a RESTORE it continues with
    the restored version. Returns None if the history lacks the commit, for example because it was
    undone, or if a later commit emptied or overwrote the table.

    The search may end before it finds the commit, because the log is cut off or does not say which
    version was restored. Then there are two proofs that the table has the rows: the plan's
    application transaction, and `recorded`, the version in the run directory ("" if none). They do
    not count if a RESTORE went back to a version before `recorded`. Returns `recorded`; if it is
    "", returns the version at which the log is cut off, or the newest version if the restored one
    is unknown.
    """
    known = handle.transaction_version(_app_id(plan)) is not None
    if not known and not recorded:
        return None
    if not handle.file_uris():
        return None  # somebody emptied the table
    version, commits = commits_of_log(handle)
    while version in commits:
        commit = commits[version]
        if commit.get(f"{PROPERTY}plan") == plan:
            return str(version)
        if empties_table(handle, commit):
            return None
        if commit.get("operation") == "RESTORE":
            restored = restored_version(commit, commits)
            if restored is None:
                return recorded or str(handle.version())
            version = restored
        else:
            version -= 1
    if version < 0 or any(one.get(f"{PROPERTY}plan") == plan for one in commits.values()):
        return None  # the commit was undone, or there was none
    if recorded.isdigit() and int(recorded) > version:
        return None  # a RESTORE went back to a version before it
    return recorded or str(version)


def commits_of_log(handle: DeltaTable) -> tuple[int, dict[int, JsonObject]]:
    """Return (newest version, {version: commit in the table's log}); move `handle` to that version.

    The library lists the current log, but numbers its entries from the handle's version down. So
    each commit that another writer has added since shifts the numbers by one (delta-rs#4488).
    Therefore a list counts only if the handle has the newest version both before and after the list
    is read. Raises `PublishFailed` if that fails 20 times.
    """
    handle.update_incremental()
    for _ in range(PUBLISH_TRIES):
        version, commits = handle.version(), handle.history()
        handle.update_incremental()
        if handle.version() == version:
            return version, {int(one["version"]): one for one in commits}
    raise PublishFailed(
        f"{handle.table_uri}: {PUBLISH_TRIES} times others committed to the table while its log "
        "was read. When it is less busy, run raybatch publish RUN_DIR --job JOB"
    )


def empties_table(handle: DeltaTable, commit: JsonObject) -> bool:
    """Return whether a commit surely removed every earlier row from the table."""
    operation, given = str(commit.get("operation")), commit.get("operationParameters") or {}
    if operation.startswith(("TRUNCATE", "REPLACE TABLE", "CREATE OR REPLACE TABLE")):
        return True
    everything = given.get("predicate") in (None, "", "[]", "true", '["true"]')
    if operation == "WRITE" and str(given.get("mode")).lower() == "overwrite":
        # Of a table with partitions an overwrite may replace only those that it writes.
        return everything and not handle.metadata().partition_columns
    return operation == "DELETE" and everything


def restored_version(commit: JsonObject, commits: Mapping[int, Any]) -> int | None:
    """Return the version to which `commit`, a RESTORE, went back; None if unknown.

    The commit names that version by number or by time. `commits` are all commits in the log, by
    version. If a damaged log gives a number that is not below the commit's own, the version is
    unknown.
    """
    given = commit.get("operationParameters") or {}
    version, at = str(given.get("version")), given.get("datetime") or given.get("timestamp")
    if version.isdigit():
        return int(version) if int(version) < commit["version"] else None
    try:
        text = str(at)
        millis = int(text) if text.isdigit() else _millis(text)
    except ValueError:
        return None
    before = [
        number
        for number, one in commits.items()
        if number < commit["version"] and one.get("timestamp", millis + 1) <= millis
    ]
    return max(before, default=None)


def _millis(text: str) -> int:
    """Convert a time as Spark writes it ("2026-07-01 10:00:00.0") to milliseconds since 1970.

    A time without a zone is UTC.
    """
    when = datetime.fromisoformat(text)
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
