"""Where the time of a short run goes: the demo's phases from the start of its process to its end.

    python benchmarks/start.py [--rows 200] [--runs 2] [--no-prefect]

Prints Markdown: seconds of each phase, CPU-seconds of the driver, of Prefect's server and of Ray's
processes, and the load of the machine, since on a busy one the seconds say little. The environment
is that of `make demo`; the first run of a new environment also compiles what it imports, so the
second is the one to read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

MARKS = "RAYBATCH_BENCH_MARKS"  # environment: the file that the measured process writes
KINDS = ("driver", "Prefect's server", "Ray", "Ray's workers", "other")


def measured() -> None:
    """The run, in a process of its own that notes when its phases begin and end."""
    file = Path(os.environ[MARKS])
    began = psutil.Process().create_time()

    def mark(name: str) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps([name, time.time() - began]) + "\n")

    mark("python started")
    from prefect_raybatch.cli import commands, drive

    mark("CLI imported")
    flow = drive.run_flow

    @wraps(flow)
    def run_flow(*given: Any) -> Any:
        mark("job checked")
        from prefect_raybatch.flow import tasks

        mark("Prefect imported")
        for module, name, phase in ((tasks, "plan_run", "plan"), (tasks, "finalize", "finalize")):
            setattr(module, name, timed(getattr(module, name), phase))
        try:
            return flow(*given)
        finally:
            mark("flow ended")

    def timed(call: Any, phase: str) -> Any:
        @wraps(call)
        def inner(*given: Any, **named: Any) -> Any:
            mark(f"{phase} began")
            try:
                return call(*given, **named)
            finally:
                mark(f"{phase} ended")

        return inner

    drive.run_flow = run_flow
    for name, phase in (("plan_run", "plan"), ("finalize_run", "finalize")):
        setattr(drive, name, timed(getattr(drive, name), phase))
    try:
        commands.main(sys.argv[1:])
    finally:
        mark("report shown")


class Cpu:
    """CPU-seconds of a process and all below it, by kind; of what has ended, as last seen."""

    def __init__(self, root: int):
        self.root, self.seen = root, dict[tuple[int, float], tuple[str, float]]()

    def look(self) -> None:
        try:
            below = psutil.Process(self.root).children(recursive=True)
            everybody = [psutil.Process(self.root), *below]
        except psutil.Error:
            return
        for process in everybody:
            try:
                times, words = process.cpu_times(), " ".join(process.cmdline())
                key = (process.pid, process.create_time())
                self.seen[key] = (self.kind(process.pid, words), times.user + times.system)
            except psutil.Error:
                continue

    def kind(self, pid: int, words: str) -> str:
        if pid == self.root:
            return "driver"
        if "prefect" in words and ("uvicorn" in words or "server" in words):
            return "Prefect's server"
        if "ray::" in words or "default_worker" in words or "VLLM" in words:
            return "Ray's workers"
        return "Ray" if "ray" in words else "other"

    def seconds(self) -> dict[str, float]:
        found = dict.fromkeys(KINDS, 0.0)
        for kind, seconds in self.seen.values():
            found[kind] += seconds
        return found


@contextmanager
def watched(root: int) -> Iterator[Cpu]:
    cpu, over = Cpu(root), threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            cpu.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield cpu
    finally:
        over.set()
        thread.join()


def one(rows: int, more: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds of each phase in order, CPU-seconds by kind) of a run."""
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks"
        command = [sys.executable, __file__, "demo", "--rows", str(rows), *more]
        env = {**os.environ, MARKS: str(marks), "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        began = time.time()
        run = subprocess.Popen(
            [*command, "--folder", f"{folder}/demo"],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with watched(run.pid) as cpu:
            code = run.wait()
        whole = time.time() - began
        if code:
            raise SystemExit(f"the run ended with {code}")
        (report,) = Path(folder).rglob("report.json")
        (start,) = json.loads(report.read_text())["starts"]
        at = dict(json.loads(line) for line in marks.read_text().splitlines())
    return phases(at, start["seconds"], whole), cpu.seconds()


def phases(at: dict[str, float], start: dict[str, float], whole: float) -> dict[str, float]:
    from prefect_raybatch.stages.vllm.phases import START_PHASES

    flow = at.get("Prefect imported")
    checked = at.get("job checked", at["plan began"])
    found = {
        "process start": at["python started"],
        "imports of the CLI": at["CLI imported"] - at["python started"],
        "job checked, model resolved": checked - at["CLI imported"],
    }
    if flow is not None:
        found["Prefect: imports"] = flow - checked
        found["Prefect: server, flow run"] = at["plan began"] - flow
    found["plan"] = at["plan ended"] - at["plan began"]
    inner = {f"start: {name}": start[name] for name in START_PHASES if name in start}
    between = at["finalize began"] - at["plan ended"]
    found["Prefect's tasks, end of Ray"] = between - sum(inner.values())
    found |= inner
    found["finalize, report"] = at["finalize ended"] - at["finalize began"]
    found["end of the process"] = whole - at["finalize ended"]
    found["in all"] = whole
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--no-prefect", action="store_true")
    asked = parser.parse_args()
    more = ["--no-prefect"] if asked.no_prefect else []
    runs = []
    for number in range(asked.runs):
        load = os.getloadavg()[0]
        runs.append((*one(asked.rows, more), load))
        print(f"run {number + 1} done", file=sys.stderr, flush=True)
    heads = [f"run {number + 1}" for number in range(len(runs))]
    print("| s | " + " | ".join(heads) + " |\n| --- |" + " --- |" * len(runs))
    for name in runs[0][0]:
        print(f"| {name} | " + " | ".join(f"{run[0].get(name, 0):.1f}" for run in runs) + " |")
    for kind in KINDS:
        print(f"| CPU: {kind} | " + " | ".join(f"{run[1][kind]:.1f}" for run in runs) + " |")
    print("| CPU in all | " + " | ".join(f"{sum(run[1].values()):.1f}" for run in runs) + " |")
    print("| load before | " + " | ".join(f"{run[2]:.1f}" for run in runs) + " |")


if __name__ == "__main__":
    if MARKS in os.environ:
        measured()
    else:
        main()
