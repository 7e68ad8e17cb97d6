"""Selects the rows to judge: a random sample of the answered rows, and golden rows."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prefect_raybatch.source.row_sample import RowSample, SampledNumbers
from prefect_raybatch.storage.parquet import parquet_table

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset

# Columns that `judged_rows` adds: is the row in the sample; is its answer right (null: unknown).
IN_SAMPLE, KNOWN_RIGHT = "_judge_in_sample", "_judge_known_right"
JUDGE_COLUMNS = (IN_SAMPLE, KNOWN_RIGHT)


def judged_rows(
    result: pyarrow.dataset.Dataset,
    row_number: str,
    columns: Sequence[str],
    sample: int,
    run_key: str,
    known: Mapping[int, bool],
) -> pa.Table:
    """Return the rows of a result to judge, in input order: `sample` random rows, and golden rows.

    `known` has the golden rows: {row number: whether the answer is right}. `row_number` is the
    column with the row numbers. A hash of run key and row number chooses the sample. So it is the
    same in each call for a run, and differs between runs.

    The table has these `columns` and JUDGE_COLUMNS. The latter say whether a row is in the sample,
    and whether its answer is right (null if the row is not golden).
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not result.count_rows():  # it has no columns either
        return pa.table({name: pa.array([], pa.bool_()) for name in JUDGE_COLUMNS})
    seed = int(hashlib.sha256(f"judge {run_key}".encode()).hexdigest()[:15], 16)
    chosen = RowSample(sample, seed).among(_numbers(result, row_number))
    wanted = np.union1d(chosen, np.fromiter(known, np.int64, len(known)))
    table = result.to_table(
        columns=list(dict.fromkeys([*columns, row_number])),
        filter=pc.field(row_number).isin(pa.array(wanted)),
    ).sort_by(row_number)
    numbers = table[row_number].to_pylist()
    table = table.select(list(dict.fromkeys(columns)))
    in_sample = pa.array(np.isin(np.array(numbers, np.int64), chosen))
    right = pa.array([known.get(number) for number in numbers], pa.bool_())
    return table.append_column(IN_SAMPLE, in_sample).append_column(KNOWN_RIGHT, right)


def judged_to_parquet(table: pa.Table) -> bytes:
    """Encode the rows to judge as a Parquet file."""
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def judged_from_parquet(data: bytes) -> pa.Table:
    """Decode a Parquet file that `judged_to_parquet` returned."""
    return parquet_table(data)


def _numbers(result: pyarrow.dataset.Dataset, row_number: str) -> Iterator[SampledNumbers]:
    for batch in result.to_batches(columns=[row_number]):
        yield batch.column(0).to_numpy()
