"""Checks a job's targets before anything is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.publish.publish import check_publish, check_unique
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages.result_columns import result_types
from prefect_raybatch.storage import Store

if TYPE_CHECKING:
    from prefect_raybatch.source import Inventory

READ_ROWS = 100_000  # of the input, held at a time


def check_targets_of(
    spec: RunSpec,
    given: pa.Schema,
    run_key: str = "RUN_KEY",
    found: Inventory | None = None,
    store: Store | None = None,
    later: bool = False,
) -> tuple[str, ...]:
    """Return a line for each target of the run, whose input has the columns `given`.

    `found` is the whole input; columns are read in which a target accepts no null, or by which it
    merges. `store` is the run's if they are its snapshot. `later`: the input is not available yet,
    and this is called again with it. Raises `ConfigError` for anything that would make publishing
    fail, as far as it can be known: a missing library or variable, a column that a target cannot
    hold or that does not fit the existing table, a place that is not writable, a key that is not
    unique; `PublishFailed` for a target that does not answer.
    """
    targets, keys = spec.output.targets, dict(spec.output.options)
    if not targets:
        return ()
    known, whole = result_types(spec.finish, spec.sampling, spec.engine.model.task, given)
    columns = _InputColumns(spec.finish, spec.read, given, found, store, later)
    return tuple(check_publish(targets, run_key, keys, known, whole, columns.check))


class _InputColumns:
    """Columns that go from the input to the result, and their values."""

    def __init__(
        self,
        finish: FinishSpec,
        read: ReadSpec,
        given: pa.Schema,
        found: Inventory | None,
        store: Store | None,
        later: bool,
    ) -> None:
        self._finish, self._options = finish, dict(read.options)
        self._given, self._found, self._store, self._later = given, found, store, later
        self._kept = {name for name in finish.kept(given.names) if name in given.names}

    def check(self, target: PublishTarget, never_null: Sequence[str]) -> None:
        """Raise `ConfigError` for nulls that the table rejects, and for a key that is not unique.

        Postprocess may leave out the rows concerned, so with it this is only checked at the end.
        """
        if self._finish.postprocess is not None:
            return
        self._check_answers(target, never_null)
        strict = [n for n in never_null if n in self._kept and n not in target.key]
        key = target.key if self._kept.issuperset(target.key) else []
        if self._found is None:
            if not self._later and target.format in ("delta", "iceberg"):
                for name in strict:
                    if self._given.field(name).nullable:
                        raise _may_be_null(target, name, "the input column is nullable")
            return
        strict = [name for name in strict if self._given.field(name).nullable]
        if not strict and not key:
            return
        tables = list(self._read(self._found, [*strict, *key]))
        if not tables:
            return
        values = pa.concat_tables(tables)
        for name in strict:
            if nulls := values[name].null_count:
                raise _may_be_null(target, name, f"it is null in {nulls:,} rows of the input")
        if key:
            check_unique(target, values.select(key), "the input")

    def _check_answers(self, target: PublishTarget, never_null: Sequence[str]) -> None:
        form = self._finish.schema
        for name, shape in (columns_of(form) if form is not None else {}).items():
            if name in never_null and shape.nullable:
                raise _may_be_null(target, name, "output.schema allows null")

    def _read(self, found: Inventory, names: Sequence[str]) -> Iterator[pa.Table]:
        from prefect_raybatch.stages.block import is_lost, losses
        from prefect_raybatch.stages.read import ShardReader

        schema = pa.schema([self._given.field(name) for name in dict.fromkeys(names)])
        reader = ShardReader(found.files, schema, self._store, self._options)
        starts = range(0, reader.rows, READ_ROWS)
        units = [(Unit(i, 0, min(READ_ROWS, reader.rows - at)), at) for i, at in enumerate(starts)]
        for task in reader.tasks(units, 1):
            for table in reader.read(task):
                if is_lost(table):
                    raise SourceError(losses(table)[0].message)
                yield table.select(schema.names)


def _may_be_null(target: PublishTarget, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"output.publish: {target.label}: the existing table does not allow null in column "
        f"{name!r}, but {why}. Allow null in the table, or fill or leave out those rows"
    )
