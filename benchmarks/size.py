"""A whole run over a large CSV, stage by stage: seconds and memory at several sizes.

    python benchmarks/size.py --rows 250000 1000000 2000000 --data /tmp/raybatch-size

The guides' CSV of customers with the bundled model's job: the real snapshot, plan, prompts in
tokens, pieces, commits, result and proof, on Ray on this machine. The engine alone is not real: it
answers one of the labels, in tokens, at once. So what is seen is all that the engine is not, and
whether it grows with the table. The CSV is made once and left in `--data`.

Each size has a process of its own. Memory is what a process has for itself, looked at twice a
second: of the driver in each stage, of the largest worker of each kind and of all of Ray's
processes over the run; `shm` is what Ray's object store had taken of /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
from images_memory import MIB, Watch

STAGES = ("snapshot", "plan", "start of Ray", "run", "finalize", "verify")


class Answers:
    """In the engine's place: one of the labels, which the prompt decides."""

    def __init__(self, spec: Any) -> None:
        from prefect_raybatch.model import pinned as models
        from prefect_raybatch.stages.block import load_tokenizer

        tokenizer = load_tokenizer(*models.tokenizer_place(spec.model))
        labels = spec.sampling["choice"]
        self.labels = [tokenizer.encode(label, add_special_tokens=False) for label in labels]

    def __call__(self, table: pa.Table) -> pa.Table:
        from prefect_raybatch.stages.block import is_passthrough, timed
        from prefect_raybatch.stages.columns import ERROR, TOKENS
        from prefect_raybatch.stages.engine import answered
        from prefect_raybatch.stages.vllm.stepper import Completion

        if is_passthrough(table):
            return table
        began, made = time.time(), []
        errors, tokens = table[ERROR].to_pylist(), table[TOKENS].combine_chunks()
        for i, error in enumerate(errors):
            if error is None:
                prompt = tokens[i].values.to_numpy()
                label = self.labels[zlib.crc32(prompt.tobytes()) % len(self.labels)]
                made.append((i, [i], Completion([label], None, "stop", len(prompt))))
        return timed(answered(table, made, began), "engine", began)


class Stages:
    """Seconds, CPU seconds and the most memory of this process, stage by stage."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is forgotten
        began, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            row = self.rows.setdefault(name, {"seconds": 0.0, "cpu_s": 0.0, "driver_mib": 0.0})
            row["seconds"] += time.perf_counter() - began
            row["cpu_s"] += time.process_time() - cpu
            row["driver_mib"] = max(row["driver_mib"], peak_mib())


def peak_mib() -> float:
    text = Path("/proc/self/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


class Shared(threading.Thread):
    """The most of /dev/shm that was taken since this began."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over, self._first, self.most = threading.Event(), taken(), 0.0

    def run(self) -> None:
        while not self._over.wait(0.5):
            self.most = max(self.most, (taken() - self._first) / MIB)

    def stop(self) -> None:
        self._over.set()
        self.join()


def taken() -> int:
    return shutil.disk_usage("/dev/shm").used


def job_over(data: Path, folder: Path) -> Any:
    from prefect_raybatch import BatchJob
    from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE

    return BatchJob.from_dict(
        {
            "name": "demo",
            "source": {"uri": str(data)},
            "prompt": {"system": SYSTEM, "template": TEMPLATE},
            "sampling": {"temperature": 0, "max_tokens": 16, "choice": list(LABELS)},
            "engine": {"model": "demo", "max_model_len": 256, "device": "cpu"},
            "output": {"uri": str(folder / "out"), "column": "industry"},
        }
    )


def measured(data: Path, folder: Path) -> dict[str, Any]:
    """One size, in this process."""
    import ray

    from prefect_raybatch import source
    from prefect_raybatch.api import finalize_run, infer_run, plan_run
    from prefect_raybatch.report.report import stage_table
    from prefect_raybatch.result.verify import verify
    from prefect_raybatch.storage import open_store

    stages, copy = Stages(), source.snapshot
    spent: dict[str, float] = {}

    def snapshot(*arguments: Any) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        try:
            return copy(*arguments)
        finally:
            spent["seconds"] = time.perf_counter() - began
            spent["cpu_s"] = time.process_time() - cpu

    source.snapshot = snapshot
    job = job_over(data, folder)
    with stages.stage("plan"):
        planned = plan_run(job, "bench")
    plan = stages.rows.pop("plan")
    stages.rows["snapshot"] = {**plan, **spent}
    stages.rows["plan"] = {n: plan[n] - spent.get(n, 0.0) for n in ("seconds", "cpu_s")}
    stages.rows["plan"]["driver_mib"] = plan["driver_mib"]  # of both
    watch, shared = Watch(), Shared()
    with stages.stage("start of Ray"):
        ray.init("local", include_dashboard=False, logging_level="error", log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
    watch.start()
    shared.start()
    with stages.stage("run"):
        progress = infer_run(job, planned, engine=Answers)
    watch.stop()
    shared.stop()
    with stages.stage("finalize"):
        report = finalize_run(job, planned, progress)
    with stages.stage("verify"):
        found = verify(open_store(planned.uri))
    if not found.ok or report.good != planned.rows:
        raise SystemExit(f"{report.good} of {planned.rows} rows: {report.failures}, {found}")
    return {
        "rows": planned.rows,
        "shards": planned.shards,
        "csv_mib": round(data.stat().st_size / MIB),
        "stages": {n: {k: round(v, 1) for k, v in r.items()} for n, r in stages.rows.items()},
        "workers_mib": {**watch.taken(), "shm": round(shared.most, 1)},
        "cpu_s": round(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 1),
        "stage_table": stage_table(report),
    }


def one(rows: int, data: Path, seed: int) -> dict[str, Any]:
    from prefect_raybatch.demo.customers import write_customers

    data.mkdir(parents=True, exist_ok=True)
    path = data / f"customers-{rows}-{seed}.csv"
    if not path.exists():
        print(f"writing {path}", file=sys.stderr, flush=True)
        write_customers(path, rows, seed)
    folder = data / f"run-{os.getpid()}-{rows}"
    command = [sys.executable, __file__, "--case", str(path), str(folder)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(found: list[dict[str, Any]]) -> None:
    print("| rows | " + " | ".join(STAGES) + " | all | rows/s |")
    print("| --- |" + " --- |" * (len(STAGES) + 2))
    for one in found:
        seconds = [one["stages"][name]["seconds"] for name in STAGES]
        cells = [f"{s:.1f} s" for s in seconds]
        rate = one["rows"] / sum(seconds)
        print(f"| {one['rows']:,} | {' | '.join(cells)} | {sum(seconds):.0f} s | {rate:,.0f} |")
    kinds = sorted({kind for one in found for kind in one["workers_mib"]})
    print("\n| rows | " + " | ".join(f"driver, {n}" for n in STAGES) + " | " + " | ".join(kinds))
    for one in found:
        cells = [f"{one['stages'][n]['driver_mib']:.0f}" for n in STAGES]
        cells += [f"{one['workers_mib'].get(kind, 0):.0f}" for kind in kinds]
        print(f"| {one['rows']:,} | {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[250_000, 1_000_000, 2_000_000])
    parser.add_argument("--data", type=Path, default=Path("/tmp/raybatch-size"))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", help="a line of JSON a size is appended there")
    parser.add_argument("--case", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(*args.case)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the process of the size
    found = []
    for rows in args.rows:
        found.append(one(rows, args.data, args.seed))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        if args.out:
            about = {"date": f"{date.today()}", "cpus": os.cpu_count(), "seed": args.seed}
            with open(args.out, "a") as out:
                out.write(json.dumps({**about, **found[-1]}) + "\n")
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
