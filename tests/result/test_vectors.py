"""Vectors and labels through the end of a run: in input order, failed rows apart, and proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import MODEL, SmallRun, receipts, small_run, success_of
from helpers.specs import finish_stage

from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.verify import verify
from prefect_raybatch.stages.columns import VECTOR
from prefect_raybatch.stages.pooling import Pooling, RowAnswer, Texts, column, without_misfits
from prefect_raybatch.stages.vllm.stepper import Completion
from prefect_raybatch.storage import open_store

ROWS, SIZE, FAILS = 17, 3, 6


def commit(run: SmallRun, task: Pooling, shard: int) -> None:
    """One shard's vectors, by the stages' own functions: (row, row / 2, 1), NaN in one row."""
    unit = run.whole(shard)
    start = run.shards[shard].start
    answers: list[RowAnswer] = []
    for i in range(unit.rows):
        number = start + i
        vector = np.array([number, number / 2, np.nan if number == FAILS else 1], np.float32)
        answers.append((i, [i], Completion([], vector=vector)))
    found = without_misfits(answers)
    bad = [i for i, _, completion in found if completion.error]
    table = run.block(unit, failed=bad).append_column(VECTOR, column(unit.rows, found))
    (receipt,) = receipts(
        finish_stage(run.job.output, dict(MODEL), run.store, "a", task=task)(table)
    )
    assert receipt.lost is None, receipt.lost
    assert run.ledger.commit(run.plan, run.shards[shard].rows, [receipt])


@pytest.mark.parametrize(
    ("kind", "fields", "value"),
    [
        ("embed", {"vector_type": "float32"}, lambda i: [i, i / 2, 1]),
        ("embed", {"vector_type": "float16"}, lambda i: [i, i / 2, 1]),
        ("classify", {}, lambda i: "c" if i < 1 else "a"),
    ],
)
def test_the_result_is_in_order_and_proved(
    tmp_path: Path, kind: str, fields: dict[str, Any], value: Any
) -> None:
    output = {"uri": "out", "column": "answer", **fields}
    run = small_run(tmp_path, rows=ROWS, per_shard=5, engine={"task": kind}, output=output)
    task = Pooling(kind, Texts.ONE, {"task": kind}, labels=("a", "b", "c"))
    for shard in (3, 1, 0, 2):
        commit(run, task, shard)
    parts = finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20, True).parts
    run.ledger.succeed(success_of(run, parts))
    (path,) = (tmp_path / "data").iterdir()
    table = pq.read_table(path)
    left = [i for i in range(ROWS) if i != FAILS]
    assert table["_row"].to_pylist() == left
    if kind == "embed":
        assert table["answer"].type.list_size == SIZE
        assert str(table["answer"].type.value_type).replace("half", "float16").startswith("float")
    assert table["answer"].to_pylist() == [value(i) for i in left]
    assert verify(open_store(str(tmp_path))).ok
    swapped = table["answer"].take(pa.array([1, *range(1, len(left))]))
    changed = table.set_column(table.column_names.index("answer"), "answer", swapped)
    pq.write_table(changed, path)
    assert not verify(open_store(str(tmp_path))).ok
