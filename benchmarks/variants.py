"""Runs of the package that its users never make: without commits, and one stopped and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

from prefect_raybatch import BatchJob
from prefect_raybatch.api import infer_run, plan_run
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.compile.job import compile_planned
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.runs.run import load_run
from prefect_raybatch.stages.engine import EngineStage
from prefect_raybatch.storage import FileInfo, open_store
from prefect_raybatch.storage.local import LocalStore


class Nowhere(LocalStore):
    """Forgets what is put: the pieces of a run without commits.

    It remembers what `put_proved` asks about a file: its size and its MD5, like S3.
    """

    def put(self, path: str, data: bytes) -> FileInfo:
        self.last = FileInfo(path, len(data), hashlib.md5(data).hexdigest(), None)
        return self.last

    def stat(self, path: str) -> FileInfo:
        return self.last if self.last.path == path else super().stat(path)


def without_commits(job: BatchJob) -> list[Receipt]:
    """Receipts of all shards through our stages: no pieces, no commit records, no Prefect."""
    run = plan_run(job, "bench")
    ledger = Ledger(open_store(run.uri))
    plan, shards = load_run(ledger, run)
    units = [Unit(i, 0, shards[i].rows) for i in range(plan.shards)]
    spec = compile_planned(job, plan)
    with cluster.connected(spec.cluster) as have:
        size = sized.for_attempt(spec.sizes, plan, have)
        cluster.check_fit(spec.sizes, have, size.pool)
        pipeline = Pipeline(spec, plan, shards, ledger.store, "bench", size)
        pipeline.finish = type(pipeline.finish)(
            **{**pipeline.finish.__dict__, "store": Nowhere(run.uri)}
        )
        done = list(pipeline(units, False))
    lost = [receipt.lost for receipt in done if receipt.lost]
    if lost:
        raise SystemExit(f"{len(lost)} shards were lost: {lost[0]}")
    return done


def resumed(job: BatchJob) -> dict[str, float]:
    """A run stopped after 90 % of its rows, then resumed. Seconds from the moment that all engines
    are ready to the first new shard's entry into one, and to its commit."""

    class Enough(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.done >= 0.9 * progress.rows:
            raise Enough

    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"

        class Timed(EngineStage):
            """Says when its engine is ready."""

            def __init__(self, spec: Any) -> None:
                super().__init__(spec)
                ready.write_text(repr(time.time()))

        run = plan_run(job, "bench")
        with contextlib.suppress(Enough):
            infer_run(job, run, stop)
        ready.unlink(missing_ok=True)
        began = time.time()
        infer_run(job, run, engine=Timed)
        at = float(ready.read_text())
    ledger = Ledger(open_store(run.uri))
    plan, _ = load_run(ledger, run)
    new = [c.stats for c in ledger.commits(plan, ledger.listing(plan)) if c.stats.started > began]
    return {
        "new_shards": len(new),
        "engine_ready_s": at - began,
        "first_row_s": max(0.0, min(stats.started for stats in new) - at),
        "first_commit_s": max(0.0, min(stats.ended for stats in new) - at),
    }
