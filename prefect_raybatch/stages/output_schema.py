"""The types of the output columns: declared by the job, or inferred from a run's first shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.ledger.layout import OUTPUT_SCHEMA
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.source.arrow_types import written
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.exact_values import NOT_CAST, check_exact, type_of
from prefect_raybatch.stages.parsing import parsed_types
from prefect_raybatch.stages.result_columns import declared_schema
from prefect_raybatch.stages.row_outcomes import ColumnValues
from prefect_raybatch.stages.typed_answers import reader_of
from prefect_raybatch.storage import Store

ResultColumn = tuple[pa.Field, pa.Array]


def output_schema(
    spec: FinishSpec, several: bool, store: Store, rows: Sequence[ColumnValues]
) -> pa.Schema:
    """Return the types of the output columns, which are the same for all shards of a run.

    If neither the job nor an earlier shard determines them, infer them from `rows`, the values of
    this shard, and store them in the run directory `store` by put-if-absent. `several`: each row
    has several answers.
    """
    if spec.postprocess is None:
        form = spec.schema
        record = pa.struct(list(reader_of(form).schema)) if form is not None else pa.string()
        columns = [(spec.column, record)] if several or form is None else []
        columns += parsed_types(spec.parsing) if spec.parsing is not None else []
        beside = [pa.field(n, pa.list_(k) if several else k) for n, k in columns]
        alone = reader_of(form).schema if form is not None and not several else ()
        return pa.schema([*alone, *beside])
    if spec.types is not None:
        return declared_schema(spec.types)
    try:
        return _read_schema(store)
    except FileNotFoundError:
        # If two shards are first at the same time, one stores its schema, and both read that one.
        schema = _infer(rows).serialize().to_pybytes()
        put_record_if_absent(store, OUTPUT_SCHEMA, schema)
        return _read_schema(store)


def fitting_columns(
    schema: pa.Schema, rows: Mapping[int, ColumnValues]
) -> tuple[list[ResultColumn], dict[int, Failure]]:
    """Return the columns of the rows that fit the schema, and a failure for each other row.

    `rows` and the failures are by row index. A column has an entry for each fitting row, in the
    order of `rows`.
    """
    misfits: dict[int, Failure] = {}
    for i, row in rows.items():
        if row.keys() != set(schema.names):
            odd = sorted(set(row) ^ set(schema.names))
            misfits[i] = Failure(
                "postprocess",
                "SchemaError",
                f"columns {', '.join(odd)} are missing or unexpected. Return exactly the run's "
                f"output columns: {', '.join(schema.names)}",
            )
    for column in schema:
        fitting = [i for i in rows if i not in misfits]
        try:
            check_exact([rows[i][column.name] for i in fitting], column.type)
        except NOT_CAST:
            misfits |= {
                i: failure
                for i in fitting
                if (failure := _cast_failure(rows[i][column.name], column))
            }
    fitting = [i for i in rows if i not in misfits]
    return [(c, pa.array([rows[i][c.name] for i in fitting], c.type)) for c in schema], misfits


def _read_schema(store: Store) -> pa.Schema:
    data = read_record(store, OUTPUT_SCHEMA)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise CorruptRun(f"{OUTPUT_SCHEMA} is not a readable Arrow schema: {error}") from None
    check_types(schema, OUTPUT_SCHEMA)
    return schema


def _infer(rows: Sequence[ColumnValues]) -> pa.Schema:
    """Infer the columns' types from the first shard's rows.

    A column, field or list item becomes a string if its type is unknown because it has only nulls,
    no items or no fields.
    """
    # Use the column names that most rows have: the other rows fail later.
    names = Counter(frozenset(row) for row in rows).most_common(1)[0][0]
    rows = [row for row in rows if row.keys() == names]
    return written(
        pa.schema([(name, _infer_type([row[name] for row in rows])) for name in rows[0]])
    )


def _infer_type(values: Sequence[object]) -> pa.DataType:
    """Return the Arrow type of the values; if they have no common type, the most frequent one.

    If all values are None, it is Arrow's null type.
    """
    try:
        return pa.infer_type(values)
    except NOT_CAST:
        there = [value for value in values if value is not None]
        kinds = Counter(kind for value in there if (kind := type_of([value])) is not None)
        return kinds.most_common(1)[0][0] if kinds else pa.string()


def _cast_failure(value: object, column: pa.Field) -> Failure | None:
    try:
        check_exact([value], column.type)
    except NOT_CAST as error:
        return Failure(
            "postprocess",
            "SchemaError",
            f"column {column.name} has type {column.type}, but the value is "
            f"{type(value).__name__}: {str(error)[:300]}. Return that type, or declare another in "
            "output.schema"[:500],
        )
    return None
