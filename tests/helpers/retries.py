"""Runs and the runs that retry their failed rows, worked through without Ray.

Rows are read from the child's own snapshot and go through the real finish stage, ledger and
finalize; only the engine's answers are made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from helpers.specs import finish_stage
from prefect_raybatch.api import finalize_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.layout import RESULT_FOLDERS
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.run import Run
from prefect_raybatch.stages.block import Failure, tag
from prefect_raybatch.storage import open_store

from .engines import with_answers
from .small import MODEL, SmallRun, receipts, small_run

FAILED = {4: "EngineDied", 7: "ValueError", 11: "ValueError", 18: "PromptTooLong"}


def first_run(
    root: Path | str,
    failed: Mapping[int, str] = FAILED,
    key: str = "key",
    finish: bool = True,
    text: str = "answer",
    same: bool = False,
    **groups: Any,
) -> SmallRun:
    """A finished run of 20 rows in 4 shards at ROOT/KEY, in which rows fail with these classes; the
    answers are `text` and a number. `same`: all rows have the same Company."""
    groups["output"] = {"uri": str(root), **groups.get("output", {})}
    run = small_run(Path(root, key), key=key, **groups)
    for shard in range(run.plan.shards):
        rows = run.block(run.whole(shard)).select(["id", "Company", "tags"])
        if same:
            rows = rows.set_column(1, "Company", pa.array(["the same"] * len(rows)))
        commit(run.ledger, run.job, shard, rows, failed, text)
    if finish:
        end(run.job, run.store.uri)
    return run


def end(job: BatchJob, uri: str) -> RunReport:
    store = open_store(uri, job.output.options)
    plan = Ledger(store).load_plan()
    assert plan is not None
    run = Run(uri, plan.run_key, plan.hash, plan.rows, plan.shards, False)
    return finalize_run(job, run)


def commit(
    ledger: Ledger,
    job: BatchJob,
    shard: int,
    rows: pa.Table,
    failed: Mapping[int, str],
    text: str = "answer",
) -> None:
    """Commits a shard holding `rows`; those whose id is in `failed` failed in the engine."""
    ids = rows["id"].to_pylist()
    errors = [
        Failure("engine", failed[i], "refused").to_dict() if i in failed else None for i in ids
    ]
    block = with_answers(tag(rows, Unit(shard, 0, len(ids))), errors, [f"{text} {i}" for i in ids])
    (receipt,) = receipts(finish_stage(job.output, dict(MODEL), ledger.store, "a")(block))
    plan = ledger.load_plan()
    assert plan is not None
    ledger.commit(plan, len(ids), [receipt])


def work(
    retry: Retry | Run, job: BatchJob, failed: Mapping[int, str] | None = None, most: int = 10_000
) -> None:
    """What infer does: commits up to `most` pending shards, from the rows of the snapshot."""
    run = retry.run if isinstance(retry, Retry) else retry
    ledger = Ledger(open_store(run.uri, job.output.options))
    plan = ledger.load_plan()
    assert plan is not None and plan.snapshot
    tables = []
    for file in ledger.files(plan):
        with ledger.store.open(file.uri) as stream:
            tables.append(pq.read_table(stream))
    whole, shards = pa.concat_tables(tables), ledger.shards(plan)
    done = ledger.committed(plan)
    for shard in [s for s in range(plan.shards) if not done[s]][:most]:
        at = shards[shard]
        commit(ledger, job, shard, whole.slice(at.start, at.rows), failed or {})


def retried(
    uri: str,
    errors: Iterable[str] | None = None,
    failed: Mapping[int, str] | None = None,
    **more: Any,
) -> str:
    """A retry from plan to _SUCCESS; returns its run directory."""
    made = plan_retry(uri, list(errors) if errors else None, **more)
    assert isinstance(made, Retry), made
    work(made, made.job, failed)
    finalize_run(made.job, made.run)
    return made.run.uri


def numbers(uri: str | Path, kind: str = "data") -> list[int]:
    """The row numbers in a run's result."""
    plan = Ledger(open_store(str(uri))).load_plan()
    assert plan is not None
    files = sorted(Path(uri, RESULT_FOLDERS[kind]).glob("*.parquet"))
    return [n for file in files for n in pq.read_table(file)["_row"].to_pylist()]
