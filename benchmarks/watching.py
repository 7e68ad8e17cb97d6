"""What watching costs a run: microseconds a commit in the driver's thread, CPU of the threads
beside it, and events and calls of so many shards by a clock that is turned by hand.

    python benchmarks/watching.py [--shards 100000] [--seconds 20]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from typing import Any

from prefect_raybatch.compile.job import cluster_spec, compile_job, public_job, size_spec
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import INFERRING, Counts, Heartbeat, Listener
from prefect_raybatch.driver.monitor import Monitor
from prefect_raybatch.flow import events, page
from prefect_raybatch.flow.page import Page
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import Commit, InputFile
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.plan.plan import make_plan
from prefect_raybatch.runs.run import Run
from prefect_raybatch.storage import open_store

ROWS = 100  # a shard
HOURS = 8


def commit(shard: int) -> Commit:
    now = time.time()
    stats = ShardStats(rows=ROWS, started=now - 1, ended=now, engine_s=1.0, output_tokens=900.0)
    good, none = Positions.spans((0, ROWS)), Positions()
    return Commit(shard, "a", "t", "h", good, none, none, (), stats, {}, {}, now)


def microseconds(shards: int, observe: Any) -> float:
    """Return a commit's share in `Progress.add` and `observe`, over so many of them."""
    progress = Progress(shards * ROWS, shards)
    commits = [commit(shard) for shard in range(shards)]
    began = time.perf_counter()
    for one in commits:
        progress.add(one, one.stats.started)
        observe(progress)
    return (time.perf_counter() - began) / shards * 1e6


def plan_of(job: BatchJob, rows: int) -> Any:
    import pyarrow as pa

    files = [InputFile("in.parquet", 1, None, 1, rows)]
    model = {"source": "demo", "revision": None, "identity": "0" * 64}
    resolved, schema = Resolved.of(job, model), pa.schema([("x", pa.string())])
    spec = compile_job(resolved.job, schema.names)
    kept = public_job(resolved.job, spec.finish)
    return make_plan(spec, resolved.identity, model, kept, "k", files, schema, 50.0, snapshot=False)


def counted(run: Run, job: BatchJob, shards: int) -> Counter[str]:
    """Calls and events of a steady run of 8 hours."""
    calls: Counter[str] = Counter()
    now = [0.0]
    parts = (job.output, job.limits, cluster_spec(job), size_spec(job))
    shown = Page(run, *parts, clock=lambda: now[0])
    shown.log = type("Log", (), {"info": lambda self, text: calls.update(["log lines"])})()  # type: ignore[assignment]
    page.Page.show = lambda self, artifact, kind: calls.update([kind])  # type: ignore[method-assign]
    page.Page.image = lambda self, beat: "drawn"  # type: ignore[method-assign]
    events.emit_event = lambda **event: calls.update([event["event"]])  # type: ignore[assignment]
    progress = Progress(shards * ROWS, shards)
    for second in range(HOURS * 3600 + 1):
        now[0] = float(second)
        while progress.tally.shards < second / (HOURS * 3600) * shards:
            progress.add(commit(progress.tally.shards), time.time() - 1)
        shown(progress)
        shown.on_heartbeat(Heartbeat.of(Counts.of(progress), now[0], phase=INFERRING))
        shown.tick()
    if not calls:
        raise SystemExit("the page made no call, so nothing is measured")
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=20, help="of the threads beside it")
    args = parser.parse_args()
    job = BatchJob.from_dict(
        {
            "name": "watching",
            "source": {"uri": "in.parquet"},
            "prompt": {"template": "{x}"},
            "output": {"uri": "out"},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, "k", "h", args.shards * ROWS, args.shards, False)
        plan, _ = plan_of(job, args.shards * ROWS)

        def monitor(observe: Any) -> Monitor:
            return Monitor("a", plan, open_store(folder), Limits(), observe)

        bare = microseconds(args.shards, lambda progress: None)
        watched = microseconds(args.shards, monitor(lambda p: None))
        parts = (job.output, job.limits, cluster_spec(job), size_spec(job))
        shown = microseconds(args.shards, monitor(Page(run, *parts)))
        quiet = monitor(Listener())
        quiet(Progress(10, 10))
        cpu = time.process_time()
        with quiet:
            time.sleep(args.seconds)
        cpu = (time.process_time() - cpu) / args.seconds
        calls = counted(run, job, args.shards)
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
