"""Publishes to a Lance dataset: a new one per run, or a merge by key into an existing one.

Rows are not appended to an existing dataset: of two concurrent appends of the same rows, Lance
accepts both.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.publish.base import PROPERTY, PUBLISH_TRIES, AnsweredRows, Observe
from prefect_raybatch.publish.stores import FolderSink
from prefect_raybatch.publish.types import converted_schema

if TYPE_CHECKING:
    from lance import LanceDataset

PRIMARY_KEY = b"lance-schema:unenforced-primary-key"  # with it, merges of the same keys conflict

# Errors of Lance that a retry only repeats: it rejects the columns or the rows.
_REFUSED = re.compile(r"LanceError\(Schema\)|schema error|invalid user input|not supported", re.I)


class LanceSink(FolderSink):
    """A Lance dataset as a target: each run creates one, or merges its rows by key into one."""

    module, extra = "lance", "lance"

    def existing(self) -> pa.Schema | None:
        found = self._open()
        if found is None or self.target.mode == "append":  # then each run creates its own dataset
            return None
        return found.schema

    def fit(self, schema: pa.Schema, existing: pa.Schema, whole: bool = True) -> pa.Schema:
        for name in self.target.key:
            if name in existing.names and PRIMARY_KEY not in (existing.field(name).metadata or {}):
                raise ConfigError(
                    f"{self.what}: column {name!r} of the dataset is not a primary key, so two "
                    f"concurrent merges may both add a row. Set {PRIMARY_KEY.decode()} on the "
                    "field, or name a new dataset, which is created with it"
                )
        return super().fit(schema, existing, whole)

    def refused(self, error: Exception) -> str | None:
        refused = isinstance(error, (ValueError, TypeError)) or _REFUSED.search(str(error))
        return "the dataset rejects the rows" if refused else None

    def holds(self, plan: str, recorded: str) -> bool:
        with self.with_plain_errors():
            found = self._open()
            if found is None or _is_empty(found):
                return False
            if self.target.mode == "append" or _plan(found) == plan:
                return _plan(found) == plan
            return _has_version(found, recorded)

    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        for _ in range(PUBLISH_TRIES):
            with self.with_plain_errors(rows):
                found = self._open()
                observe("opened")
                if found is None:
                    if (version := self._create(rows, observe)) is not None:
                        return version
                    continue
                emptied = _is_empty(found)
                if self.target.mode == "append" and emptied and _plan(found) == rows.plan:
                    return self._create(rows, observe, "overwrite") or ""
                if self.target.mode == "append" or (_plan(found) == rows.plan and not emptied):
                    return self._own(found, rows)
                observe("looked")
                try:
                    merged = found.merge_insert(self.target.key)
                    schema = self.fit(converted_schema(rows.schema, self.target), found.schema)
                    merged = merged.when_matched_update_all().when_not_matched_insert_all()
                    merged.execute(rows.as_schema(schema))
                except OSError as error:
                    if "conflict" not in str(error).lower():
                        raise
                    continue
                observe("committed")
                return str((self._open() or found).version)
        raise self.lost_rows_error()

    def _create(
        self, rows: AnsweredRows, observe: Observe, mode: Literal["create", "overwrite"] = "create"
    ) -> str | None:
        """Create the dataset; return its version, None if another writer created one meanwhile.

        Mode "overwrite" is for an emptied dataset: if two publishers overwrite it, both write the
        same rows.
        """
        import lance

        fields = [
            field.with_nullable(False).with_metadata({PRIMARY_KEY: b"true"})
            if field.name in self.target.key
            else field
            for field in converted_schema(rows.schema, self.target)
        ]
        marks = {name.encode(): value.encode() for name, value in rows.marks.items()}
        observe("looked")
        try:
            dataset = lance.write_dataset(
                rows.as_schema(pa.schema(fields, marks)),
                self.uri,
                mode=mode,
                storage_options=self.keys,
            )
        except OSError:
            if self._open() is None:
                raise
            return None
        observe("committed")
        return str(dataset.version)

    def _own(self, dataset: LanceDataset, rows: AnsweredRows) -> str:
        """Return the version of a dataset that this run wrote.

        Raises `ConfigError` if another run wrote it.
        """
        if _plan(dataset) != rows.plan:
            raise ConfigError(
                f"{self.what}: {self.uri} exists, but holds another run. Use a uri with "
                "{run_key} in it"
            )
        return str(dataset.version)

    def _open(self) -> LanceDataset | None:
        import lance

        try:
            return lance.dataset(self.uri, storage_options=self.keys)
        except ValueError as error:
            if "not found" not in str(error):
                raise
            return None


def _is_empty(dataset: LanceDataset) -> bool:
    """Return whether somebody deleted all rows of a dataset.

    True if it has no rows: a run without rows creates no dataset.
    """
    return bool(dataset.count_rows() == 0)


def _plan(dataset: LanceDataset) -> str | None:
    mark = (dataset.schema.metadata or {}).get(f"{PROPERTY}plan".encode())
    return mark.decode() if mark else None


def _has_version(dataset: LanceDataset, recorded: str) -> bool:
    """Return whether a dataset's present history includes version `recorded` (a number as text).

    A restore removes the versions after the restored one. Returns True also if this cannot be
    determined: `recorded` is no number, the dataset's transactions were cleaned up, or one of them
    claims to restore a version that is not before it.
    """
    if not recorded.isdigit():
        return True
    version, wanted = int(dataset.version), int(recorded)
    while version > wanted:
        try:
            transaction = dataset.read_transaction(version)
        except (OSError, ValueError):
            return True
        if transaction is None:
            return True
        operation: Any = transaction.operation
        before = operation.version if type(operation).__name__ == "Restore" else version - 1
        if before >= version:
            return True
        version = before
    return version == wanted
