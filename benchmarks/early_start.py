"""What it brings that engines start while the input is copied: seconds to the first commit.

    python benchmarks/early_start.py --rows 300000 2000000 --trials 3

The guides' CSV of customers with the bundled model's job, from the job to the first shard that is
committed, then the run is left; in turn with the start behind the copy and beside it, each in a
process of its own. `--wait` makes the copy wait so many seconds, as one does that asks a database
or a far store: that takes no CPU, of which a start takes most on a small machine. The CPU-seconds
are of the process and all that it started.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from start import watched


class Committed(Exception):
    """The first shard is."""


def measured(table: str, folder: str, early: bool, wait: float) -> None:
    """The run, in this process; prints the seconds at which it was planned and had a commit."""
    from prefect_raybatch import source
    from prefect_raybatch.api import infer_run, plan_run
    from prefect_raybatch.cluster.prewarm import prewarm_allowed
    from prefect_raybatch.demo import SYSTEM, TEMPLATE
    from prefect_raybatch.driver.driver import Progress
    from prefect_raybatch.job.batch_job import BatchJob

    def observe(progress: Progress) -> None:
        if progress.recent:
            raise Committed

    copy = source.snapshot

    def slow(*given: Any) -> Any:
        time.sleep(wait)
        return copy(*given)

    vars(source)["snapshot"] = slow
    job = BatchJob.from_dict(
        {
            "name": "early-start",
            "source": {"uri": table},
            "prompt": {"system": SYSTEM, "template": TEMPLATE},
            "sampling": {"max_tokens": 8},
            "engine": {"model": "demo", "max_model_len": 512, "device": "cpu"},
            "output": {"uri": folder},
        }
    )
    began, found = time.perf_counter(), {}
    with prewarm_allowed() if early else nullcontext():
        run = plan_run(job, "key")
        found["planned"] = time.perf_counter() - began
        try:
            infer_run(job, run, observe)
        except Committed:
            found["committed"] = time.perf_counter() - began
    found["left"] = time.perf_counter() - began
    print(json.dumps(found))


def one(table: Path, early: bool, wait: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measured", str(table), folder]
        command += ["--early"] if early else []
        env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
        run = subprocess.Popen(
            [*command, "--wait", str(wait)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with watched(run.pid) as cpu:
            out, err = run.communicate()
        if run.returncode:
            raise SystemExit(err[-3000:])
        return {**json.loads(out.splitlines()[-1]), "cpu": sum(cpu.seconds().values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[300_000])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "early-start")
    parser.add_argument("--measured", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--early", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measured:
        table, folder = asked.measured
        measured(table, folder, asked.early, asked.wait)
        return
    from prefect_raybatch.demo.customers import write_customers

    asked.data.mkdir(parents=True, exist_ok=True)
    names = ("planned", "committed", "left", "cpu")
    print("| rows | engines | planned, s | first commit, s | left, s | CPU-seconds | load |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rows in asked.rows:
        table = asked.data / f"customers-{rows}.csv"
        if not table.exists():
            write_customers(table, rows)
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        loads: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(asked.trials):
            for early in (False, True):
                loads[early].append(os.getloadavg()[0])
                found[early].append(one(table, early, asked.wait))
        for early, runs in found.items():
            cells = [f"{statistics.median(run[name] for run in runs):.1f}" for name in names]
            load = f"{min(loads[early]):.0f} to {max(loads[early]):.0f}"
            how = "beside the copy" if early else "behind it"
            print(f"| {rows:,} | {how} | {' | '.join(cells)} | {load} |", flush=True)


if __name__ == "__main__":
    main()
