"""Memory and speed of planning, committing and resuming, at the sizes of real runs.

The package's own code on a local disk, without engines: an input of real Parquet files (hard
links of one file of a single tiny column, so that all footers are read and no space is needed),
the plan, a commit of every shard but a few by synthetic receipts, and what a driver does when it
resumes, up to the read tasks it would hand to Ray. Each phase is a process of its own.

    python benchmarks/ledger.py
    python benchmarks/ledger.py --rows 1_000_000_000 --shards 250_000 --files 1000 --writers 16

Prints one row a step: seconds, memory (RSS) before and after it, and the process's peak so far,
in MB; the step "import" is what loading the code costs. Exit status 1 when a driver process (the
phases plan, start, resume) peaks above --bar.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

# Nothing heavy at module level: a child's peak counts from the memory of the process it is
# started from, and "before" shall show what our own imports cost.

DRIVER = ("plan", "start", "resume")
RUN_KEY = "ledger-benchmark"


class Steps:
    """What the steps of this phase took."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Measures the block; counts set in the dict it gives are shown beside it."""
        row: dict[str, Any] = {"phase": self.phase, "step": name, "before_mb": _rss_mb()}
        counts: dict[str, Any] = {}
        began = time.perf_counter()
        yield counts
        row["seconds"] = round(time.perf_counter() - began, 3)
        row["after_mb"] = _rss_mb()
        row["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
        self.rows.append({**row, "counts": counts})


def _rss_mb() -> float:
    """Resident memory of this process now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


# --- the phases, each in its own process ------------------------------------------------------


def make_input(args: argparse.Namespace, steps: Steps) -> None:
    """`files` Parquet files of together `rows` rows: hard links of at most two files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(args.folder) / "in"
    folder.mkdir()
    with steps.step("write") as counts:
        made: dict[int, Path] = {}
        for number in range(args.files):
            rows = args.rows // args.files + (number < args.rows % args.files)
            path = folder / f"{number:06d}.parquet"
            if rows in made:
                os.link(made[rows], path)
            else:
                table = pa.table({"n": pa.array([7], pa.int32()).take([0] * min(rows, 1 << 20))})
                with pq.ParquetWriter(path, table.schema) as writer:
                    for start in range(0, rows, 1 << 20):
                        writer.write_table(table.slice(0, rows - start))
                made[rows] = path
        counts["files"] = args.files


def plan(args: argparse.Namespace, steps: Steps) -> None:
    with steps.step("import"):
        from prefect_raybatch import job, runs, source  # noqa: F401
    with steps.step("inventory, plan, write") as counts:
        made = runs.plan_run(_job(args), RUN_KEY)
        counts["rows"], counts["shards"] = made.rows, made.shards


def commit(args: argparse.Namespace, steps: Steps) -> None:
    with steps.step("import"):
        from prefect_raybatch.ledger import Ledger
        from prefect_raybatch.storage import open_store, read_ahead
    ledger = Ledger(open_store(_run_folder(args)))
    plan = ledger.load_plan()
    assert plan is not None
    shards = ledger.shards(plan)
    receipt = _receipts()

    def one(shard: int) -> None:
        rows = shards[shard].rows
        if ledger.commit(plan, rows, [receipt(shard, rows)]) is None:
            raise SystemExit(f"shard {shard} was committed already")

    with steps.step("commit") as counts:
        done = range(plan.shards - args.pending)
        for _ in read_ahead(one, done, args.writers, args.writers):
            pass
        counts["commits"], counts["writers"] = len(done), args.writers


def _receipts() -> Callable[[int, int], Any]:
    """A function (shard, rows) -> receipt of the size a real one has: one piece, one range."""
    import uuid

    from prefect_raybatch.records import Piece, Receipt

    attempt, began = uuid.uuid4().hex, time.time() - 3600
    names = ("prompt_tokens", "cached_tokens", "output_tokens", "cut_off")
    sums = dict.fromkeys(names, 412_345.0)
    times = dict.fromkeys(("read_s", "prepare_s", "engine_s", "finish_s"), 3.1415)

    def receipt(shard: int, rows: int) -> Receipt:
        held = ((0, rows),)
        name = f"{shard:08d}-{uuid.uuid4()}.parquet"
        return Receipt(
            shard=shard,
            attempt=attempt,
            good=held,
            pieces=(Piece(name, "data", rows, 123_456, "0" * 64, held),),
            stats={**sums, **times, "rows": rows, "started": began, "ended": began + shard / 100},
            where={"node": "10.0.0.17", "pid": "4711"},
        )

    return receipt


def drive(args: argparse.Namespace, steps: Steps) -> None:
    """What `runs.infer_run` does up to the cluster: the phases start and resume."""
    with steps.step("import"):
        import numpy as np

        from prefect_raybatch.driver import Driver
        from prefect_raybatch.ledger import Ledger
        from prefect_raybatch.storage import open_store
    job, store = _job(args), open_store(_run_folder(args))
    ledger = Ledger(store)
    with steps.step("load the plan"):
        plan = ledger.load_plan()
        assert plan is not None
        shards = ledger.shards(plan)

    def build(units: Any, isolated: bool) -> Iterator[Any]:
        with steps.step("import Ray"):
            from prefect_raybatch.pipeline import Pipeline
            from prefect_raybatch.stages.read import ShardDatasource
        with steps.step("read tasks") as counts:
            pipeline = Pipeline(job, plan, shards, store, "attempt", "cpu", {}, shuffle="attempt")
            datasource = ShardDatasource(pipeline.reader, pipeline._tasks(units))
            counts["units"], counts["tasks"] = len(units), len(datasource.get_read_tasks(1))
        raise _Enough

    driver = Driver(plan, shards, ledger, job.limits, build, _no_quarantine)
    with steps.step("fold the commits") as counts:
        progress = driver.resume()
        counts["committed"] = progress.resumed_shards
        if progress.resumed_shards != int(np.count_nonzero(driver.done)):
            raise SystemExit("the fold does not hold the commits that are there")
    try:
        driver.run()
    except _Enough:
        return
    raise SystemExit("nothing was pending")


class _Enough(Exception):
    """The read tasks are there; the rest is Ray's."""


def _no_quarantine(unit: Any, reason: str) -> Any:
    raise NotImplementedError


def status(args: argparse.Namespace, steps: Steps) -> None:
    with steps.step("import"):
        from prefect_raybatch import cli
    shown = StringIO()
    with steps.step("raybatch status --json") as counts:
        with redirect_stdout(shown):
            cli.app(["status", _run_folder(args), "--json"], standalone_mode=False)
        found = json.loads(shown.getvalue())
        counts["committed"], counts["pending"] = found["committed"], found["pending"]


PHASES: dict[str, Callable[[argparse.Namespace, Steps], None]] = {
    "input": make_input,
    "plan": plan,
    "start": drive,
    "commit": commit,
    "resume": drive,
    "status": status,
}


def _job(args: argparse.Namespace) -> Any:
    from prefect_raybatch.job import BatchJob

    return BatchJob.from_dict(
        {
            "name": "ledger-benchmark",
            "source": {
                "uri": f"{args.folder}/in",
                "rows_per_shard": -(-args.rows // args.shards),
            },
            "prompt": {"template": "Say {n}."},
            "output": {"uri": f"{args.folder}/out"},
        }
    )


def _run_folder(args: argparse.Namespace) -> str:
    return f"{args.folder}/out/{RUN_KEY}"


# --- all of them ------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the input")
    parser.add_argument("--shards", type=int, default=2_500, help="shards of the plan")
    parser.add_argument("--files", type=int, default=100, help="files of the input")
    parser.add_argument("--pending", type=int, default=10, help="shards left uncommitted")
    parser.add_argument("--writers", type=int, default=1, help="threads that commit; a run has 1")
    parser.add_argument("--bar", type=float, default=600.0, help="MB a driver process may take")
    parser.add_argument("--folder", help="where to work; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        steps = Steps(args.phase)
        PHASES[args.phase](args, steps)
        print(json.dumps(steps.rows))
        return 0
    if args.folder:
        Path(args.folder).mkdir(parents=True)
        return measure(args)
    with tempfile.TemporaryDirectory(prefix="raybatch-ledger-") as args.folder:
        return measure(args)


def measure(args: argparse.Namespace) -> int:
    """Runs all phases; 1 when a driver process went above the bar."""
    rows: list[dict[str, Any]] = []
    if not args.json:
        print(f"{args.rows:,} rows, {args.files:,} files, {args.shards:,} shards\n")
        titles = f"{'phase':8}{'step':26}{'seconds':>9}{'before':>9}{'after':>9}{'peak MB':>9}"
        print(titles, flush=True)
    for phase in PHASES:
        for row in _run(phase, args):
            rows.append(row)
            if not args.json:
                print(_line(row), flush=True)
    peak = max(row["peak_mb"] for row in rows if row["phase"] in DRIVER)
    within = peak <= args.bar
    if args.json:
        size = {name: getattr(args, name) for name in ("rows", "files", "shards", "pending")}
        print(json.dumps({**size, "driver_peak_mb": peak, "within_bar": within, "steps": rows}))
    else:
        print(f"\ndriver peak {peak:.0f} MB, {'within' if within else 'ABOVE'} {args.bar:.0f} MB")
    return 0 if within else 1


def _run(phase: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    given = [f"--{name}={getattr(args, name)}" for name in ("rows", "shards", "files", "pending")]
    given += [f"--writers={args.writers}", f"--folder={args.folder}", f"--phase={phase}"]
    done = subprocess.run(
        [sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _line(row: dict[str, Any]) -> str:
    memory = "".join(f"{row[name]:>9.0f}" for name in ("before_mb", "after_mb", "peak_mb"))
    counts = ", ".join(f"{value:,} {name}" for name, value in row["counts"].items())
    return f"{row['phase']:8}{row['step']:26}{row['seconds']:>9.2f}{memory}  {counts}"


if __name__ == "__main__":
    sys.exit(main())
