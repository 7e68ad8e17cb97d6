"""Where the time of short commands goes, from the start of their process to its end.

    python benchmarks/start.py [--rows 200] [--runs 3] [--kinds new waiting preview prefect]

Kinds: `new`, the demo without an engine from before; `waiting`, the demo with the engine that an
unmeasured demo left; `preview` of five rows of the demo's job; `prefect`, the demo as a flow with
Prefect's temporary server. Each kind runs in turn, `--runs` times, and the last column is the
median.

Prints Markdown: seconds of each phase, CPU-seconds by kind of process, and the load of the machine,
since on a busy one the seconds say little. The processes of an engine that waits are not below the
command, so their CPU-seconds do not count. The first run of a new environment also compiles what it
imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

KINDS_OF_RUN = ["new", "waiting", "preview", "prefect"]
Measured = tuple[dict[str, float], dict[str, float], float]  # phases, CPU-seconds, load before
KINDS = ("driver", "Prefect's server", "Ray", "Ray's workers", "other")


def measured() -> None:
    """The run, in a process of its own that notes when its phases begin and end."""
    file = Path("marks")
    began = psutil.Process().create_time()

    def mark(name: str) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps([name, time.time() - began]) + "\n")

    mark("python started")
    from prefect_raybatch.cli import commands, drive

    mark("CLI imported")
    flow = drive.run_flow

    @wraps(flow)
    def run_flow(*given: Any, **named: Any) -> Any:
        mark("job checked")
        from prefect_raybatch.flow import tasks

        mark("Prefect imported")
        for module, name, phase in ((tasks, "plan_run", "plan"), (tasks, "finalize", "finalize")):
            setattr(module, name, timed(getattr(module, name), phase))
        try:
            return flow(*given, **named)
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


def one(kind: str, rows: int, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds of each phase in order, CPU-seconds by kind) of a command in an empty folder."""
    if kind == "preview":
        command(["init", "--example"], folder)
        return watch_command(["preview", str(folder / "companies.yaml")], folder)
    words = ["demo", "--rows", str(rows), "--keep-engines"]
    if kind == "waiting":
        command([*words, "10m", "--folder", str(folder / "before")], folder)
        return watch_command([*words, "10m", "--folder", str(folder / "demo")], folder)
    command(["engines", "stop"], folder)
    words += ["0s", "--folder", str(folder / "demo")]
    return watch_command([*words, *(["--prefect"] if kind == "prefect" else [])], folder)


def command(words: list[str], folder: Path) -> None:
    """Run a command that is not measured."""
    run = [sys.executable, "-m", "prefect_raybatch.cli", *words]
    subprocess.run(run, check=True, cwd=folder, env=environment(), stdout=subprocess.DEVNULL)


def environment() -> dict[str, str]:
    env = {**os.environ, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def watch_command(words: list[str], folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Run a command, of a run with its phases; return as `one` does."""
    marks = folder / "marks"
    began = time.time()
    run = subprocess.Popen(
        [sys.executable, __file__, *words],
        # Without marks in the environment, which must be that of the command before it.
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )
    with watched(run.pid) as cpu:
        code = run.wait()
    whole = time.time() - began
    if code:
        raise SystemExit(f"{words} ended with {code}")
    at = dict(json.loads(line) for line in marks.read_text().splitlines())
    reports = list((folder / "demo").rglob("report.json"))
    if not reports:
        return {"imports of the CLI": at["CLI imported"], "in all": whole}, cpu.seconds()
    (start,) = json.loads(reports[0].read_text())["starts"]
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
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS_OF_RUN, default=KINDS_OF_RUN)
    asked = parser.parse_args()
    # All commands run in one folder, because an engine waits for commands of its folder only.
    runs: dict[str, list[Measured]] = {kind: [] for kind in asked.kinds}
    with TemporaryDirectory(prefix="rb", dir="/tmp") as folder:
        try:
            for number in range(asked.runs):
                for kind in asked.kinds:
                    empty(Path(folder))
                    load = os.getloadavg()[0]
                    runs[kind].append((*one(kind, asked.rows, Path(folder)), load))
                    print(number + 1, kind, "done", file=sys.stderr, flush=True)
        finally:
            command(["engines", "stop"], Path(folder))
    for kind, measured_runs in runs.items():
        show(kind, measured_runs)


def empty(folder: Path) -> None:
    """Remove everything in the folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def show(kind: str, runs: list[Measured]) -> None:
    """Print a table of the runs of a kind, with the medians."""
    rows = {name: [seconds.get(name, 0.0) for seconds, _, _ in runs] for name in runs[0][0]}
    rows |= {f"CPU: {name}": [cpu[name] for _, cpu, _ in runs] for name in KINDS}
    rows["CPU in all"] = [sum(cpu.values()) for _, cpu, _ in runs]
    rows["load before"] = [load for _, _, load in runs]
    heads = [*map(str, range(1, len(runs) + 1)), "median"]
    print(f"\n| {kind}: s | " + " | ".join(heads) + " |\n| --- |" + " --- |" * len(heads))
    for name, values in rows.items():
        cells = [f"{value:.1f}" for value in [*values, median(values)]]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    # Its options begin with a dash, a command does not.
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        measured()
    else:
        main()
