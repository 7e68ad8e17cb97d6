"""What watching costs a run: microseconds a commit in the driver's thread, CPU of the threads
beside it, and events and calls of 100,000 shards by a clock that is turned by hand.

    python benchmarks/watching.py
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from typing import Any

from prefect_raybatch.compile.job import compile_job, public_job
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import Counts, Listener
from prefect_raybatch.driver.monitor import Monitor
from prefect_raybatch.flow import events, page
from prefect_raybatch.flow.page import Page
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.records import Commit, InputFile
from prefect_raybatch.plan.plan import make_plan
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import open_store

SHARDS, ROWS = 100_000, 100
HOURS = 8


def commit(shard: int) -> Commit:
    now = time.time()
    stats = {
        "rows": ROWS,
        "started": now - 1,
        "ended": now,
        "engine_s": 1.0,
        "output_tokens": 900.0,
    }
    return Commit(shard, "a", "t", "h", ((0, ROWS),), (), (), (), stats, {}, {}, now)


def microseconds(observe: Any) -> float:
    """A commit's share in `Progress.add` and `observe`, over 100,000 of them."""
    progress = Progress(SHARDS * ROWS, SHARDS)
    commits = [commit(shard) for shard in range(SHARDS)]
    began = time.perf_counter()
    for one in commits:
        progress.add(one, one.stats.started)
        observe(progress)
    return (time.perf_counter() - began) / SHARDS * 1e6


def plan_of(job: BatchJob) -> Any:
    import pyarrow as pa

    files = [InputFile("in.parquet", 1, None, 1, SHARDS * ROWS)]
    model = {"source": "demo", "revision": None, "identity": "0" * 64}
    resolved, schema = Resolved.of(job, model), pa.schema([("x", pa.string())])
    spec = compile_job(resolved.job, schema.names)
    kept = public_job(resolved.job, spec.finish)
    return make_plan(spec, resolved.identity, model, kept, "k", files, schema, 50.0, snapshot=False)


def counted(run: Run, job: BatchJob) -> Counter[str]:
    """Calls and events of a steady run of 8 hours."""
    calls: Counter[str] = Counter()
    now = [0.0]
    shown = Page(job, run, clock=lambda: now[0])
    shown.log = type("Log", (), {"info": lambda self, text: calls.update(["log lines"])})()  # type: ignore[assignment]
    page.Page._show = lambda self, artifact, kind, data: calls.update([kind])  # type: ignore[method-assign]
    events.emit_event = lambda **event: calls.update([event["event"]])  # type: ignore[assignment]
    progress = Progress(SHARDS * ROWS, SHARDS)
    for second in range(HOURS * 3600 + 1):
        now[0] = float(second)
        while progress.tally.shards < second / (HOURS * 3600) * SHARDS:
            progress.add(commit(progress.tally.shards), time.time() - 1)
        shown._counts, shown._progress = Counts.of(progress), progress
        shown._heard = now[0]
        shown.tick()
    return calls


def main() -> None:
    job = BatchJob.from_dict(
        {
            "name": "watching",
            "source": {"uri": "in.parquet"},
            "prompt": {"template": "{x}"},
            "output": {"uri": "out"},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, "k", "h", SHARDS * ROWS, SHARDS, False)
        plan, _ = plan_of(job)
        bare = microseconds(lambda progress: None)
        watched = microseconds(Monitor("a", plan, open_store(folder), Limits(), lambda p: None))
        shown = microseconds(Monitor("a", plan, open_store(folder), Limits(), Page(job, run)))
        quiet = Monitor("a", plan, open_store(folder), Limits(), Listener())
        quiet(Progress(10, 10))
        cpu = time.process_time()
        with quiet:
            time.sleep(20)
        cpu = (time.process_time() - cpu) / 20
        calls = counted(run, job)
    told = sum(n for name, n in calls.items() if name.startswith("raybatch."))
    figures = {
        "us_a_commit_bare": round(bare, 1),
        "us_a_commit_with_monitor": round(watched, 1),
        "us_a_commit_with_monitor_and_page": round(shown, 1),
        "cpu_share_of_the_threads": round(cpu, 5),
        "events": told,
        "calls_a_second": round((calls.total() - told) / (HOURS * 3600), 3),
        "calls": dict(calls),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
