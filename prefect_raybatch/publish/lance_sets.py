"""A Lance dataset: a new one per run, or a merge by key.

An append cannot be fenced there: of two with the same rows, both are accepted.
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

PRIMARY_KEY = b"lance-schema:unenforced-primary-key"  # by it merges of the same keys conflict

# What Lance says of columns and rows that it will not take at another time either.
_REFUSED = re.compile(r"LanceError\(Schema\)|schema error|invalid user input|not supported", re.I)


class LanceSink(FolderSink):
    module, extra = "lance", "lance"

    def existing(self) -> pa.Schema | None:
        found = self._open()
        if found is None or self.target.mode == "append":  # its data set is one of the run's own
            return None
        return found.schema

    def fit(self, wanted: pa.Schema, there: pa.Schema, whole: bool = True) -> pa.Schema:
        for name in self.target.key:
            if name in there.names and PRIMARY_KEY not in (there.field(name).metadata or {}):
                raise ConfigError(
                    f"{self.what}: column {name!r} of the dataset is not a primary key, so two "
                    f"concurrent merges may both add a row. Set {PRIMARY_KEY.decode()} on the "
                    "field, or name a new dataset, which is created with it"
                )
        return super().fit(wanted, there, whole)

    def refused(self, error: Exception) -> str | None:
        refused = isinstance(error, (ValueError, TypeError)) or _REFUSED.search(str(error))
        return "the dataset rejects the rows" if refused else None

    def holds(self, plan: str, recorded: str) -> bool:
        with self.plainly():
            found = self._open()
            if found is None or _is_empty(found):
                return False
            if self.target.mode == "append" or _plan(found) == plan:
                return _plan(found) == plan
            return _has_version(found, recorded)

    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        for _ in range(PUBLISH_TRIES):
            with self.plainly(rows):
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
        raise self.lost()

    def _create(
        self, rows: AnsweredRows, observe: Observe, mode: Literal["create", "overwrite"] = "create"
    ) -> str | None:
        """Return the version of the dataset created; None if another writer created one meanwhile.

        Several that overwrite an emptied one write the same rows.
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

    def _own(self, found: LanceDataset, rows: AnsweredRows) -> str:
        """Return the version of a dataset that must be this run's."""
        if _plan(found) != rows.plan:
            raise ConfigError(
                f"{self.what}: {self.uri} exists, but holds another run. Use a uri with "
                "{run_key} in it"
            )
        return str(found.version)

    def _open(self) -> LanceDataset | None:
        import lance

        try:
            return lance.dataset(self.uri, storage_options=self.keys)
        except ValueError as error:
            if "not found" not in str(error):
                raise
            return None


def _is_empty(found: LanceDataset) -> bool:
    """Return whether a dataset was emptied: only runs with rows create one."""
    return bool(found.count_rows() == 0)


def _plan(found: LanceDataset) -> str | None:
    mark = (found.schema.metadata or {}).get(f"{PROPERTY}plan".encode())
    return mark.decode() if mark else None


def _has_version(found: LanceDataset, recorded: str) -> bool:
    """Return whether a dataset's present history has version `recorded`.

    A restore leaves later versions out. True if its transactions were cleaned up.
    """
    if not recorded.isdigit():
        return True
    version, wanted = int(found.version), int(recorded)
    while version > wanted:
        try:
            transaction = found.read_transaction(version)
        except (OSError, ValueError):
            return True
        if transaction is None:
            return True
        operation: Any = transaction.operation
        version = operation.version if type(operation).__name__ == "Restore" else version - 1
    return version == wanted
