"""Checks a job's publish targets before the first request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.publish.files import check_partitions
from prefect_raybatch.publish.publish import check_publish, check_unique
from prefect_raybatch.publish.types import converted_schema, to_schema
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages.result_columns import result_types
from prefect_raybatch.storage import Store

if TYPE_CHECKING:
    from prefect_raybatch.source import Inventory

READ_ROWS = 100_000  # input rows of one read


def check_targets_of(
    spec: RunSpec,
    input_schema: pa.Schema,
    run_key: str = "RUN_KEY",
    inventory: Inventory | None = None,
    store: Store | None = None,
    later: bool = False,
) -> tuple[str, ...]:
    """Check the run's publish targets; return a line about each.

    `input_schema` has the input's columns. `inventory` has the files of the whole input. If it is
    given, the values of columns are read and checked: of merge keys, and of columns that must not
    be null in a target. `store` is the run's store if `inventory` is its snapshot. `later`: the
    input is not available yet, and the check is repeated once it is.

    Raises `ConfigError` for anything known to make publishing fail: a missing library or
    environment variable, a column that a target cannot hold or that does not fit the existing
    table, a place that is not writable, a key that is not unique. Raises `PublishFailed` for a
    target that does not answer, `SourceError` for unreadable rows.
    """
    targets, keys = spec.output.targets, dict(spec.output.options)
    if not targets:
        return ()
    known, whole = result_types(spec.finish, spec.sampling, spec.engine.model.task, input_schema)
    columns = _InputColumns(spec, input_schema, inventory, store, later)
    return tuple(check_publish(targets, run_key, keys, known, whole, columns.check))


class _InputColumns:
    """Input columns that the result keeps, with a check of their values."""

    def __init__(
        self,
        spec: RunSpec,
        input_schema: pa.Schema,
        inventory: Inventory | None,
        store: Store | None,
        later: bool,
    ) -> None:
        self._finish, self._options = spec.finish, dict(spec.read.options)
        self._several = spec.sampling.several
        self._input_schema, self._inventory, self._store, self._later = (
            input_schema,
            inventory,
            store,
            later,
        )
        self._kept = {
            name for name in spec.finish.kept(input_schema.names) if name in input_schema.names
        }

    def check(self, target: PublishTarget, never_null: Sequence[str]) -> None:
        """Raise `ConfigError` for nulls that the table rejects, repeated keys, and bad partitions.

        `never_null` are the columns in which the table accepts no null. Checks nothing if the job
        has `output.postprocess`, which may leave out such rows: then only the result is checked.
        """
        if self._finish.postprocess is not None:
            return
        self._check_answers(target, never_null)
        strict = [n for n in never_null if n in self._kept and n not in target.key]
        key = target.key if self._kept.issuperset(target.key) else []
        if self._inventory is None:
            if not self._later and target.format in ("delta", "iceberg"):
                for name in strict:
                    if self._input_schema.field(name).nullable:
                        raise _may_be_null(target, name, "the input column is nullable")
            return
        if target.format in ("parquet", "jsonl"):
            self._check_partitions(target, self._inventory)
        strict = [name for name in strict if self._input_schema.field(name).nullable]
        if not strict and not key:
            return
        keys = []  # the other columns may be long texts: they are not kept
        nulls = Counter[str]()
        for table in self._read(self._inventory, [*strict, *key]):
            nulls.update({name: table[name].null_count for name in strict})
            keys.append(table.select(key))
        for name, count in nulls.items():
            if count:
                raise _may_be_null(target, name, f"it is null in {count:,} rows of the input")
        if key and keys:
            check_unique(target, pa.concat_tables(keys), "the input")

    def _check_partitions(self, target: PublishTarget, inventory: Inventory) -> None:
        by = [name for name in target.partition_by if name in self._kept]
        if by:
            fields = pa.schema([self._input_schema.field(name) for name in by])
            schema = converted_schema(fields, target, whole=False)
            batches = (one for table in self._read(inventory, by) for one in table.to_batches())
            converted = to_schema(batches, schema)
            check_partitions((pa.Table.from_batches([one]) for one in converted), by, target)

    def _check_answers(self, target: PublishTarget, never_null: Sequence[str]) -> None:
        form = None if self._several else self._finish.schema  # else one list column
        for name, shape in (columns_of(form) if form is not None else {}).items():
            if name in never_null and shape.nullable:
                raise _may_be_null(target, name, "output.schema allows null")

    def _read(self, inventory: Inventory, names: Sequence[str]) -> Iterator[pa.Table]:
        from prefect_raybatch.stages.block import is_lost, losses
        from prefect_raybatch.stages.read import ShardReader

        schema = pa.schema([self._input_schema.field(name) for name in dict.fromkeys(names)])
        reader = ShardReader(inventory.files, schema, self._store, self._options)
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
