"""Publishers killed with SIGKILL at random moments, two at once, until one is let alone.

    python -m chaos.publisher RUN_DIR FOLDER SEED ROUNDS

Each round has a target of its own, and what it holds then must be the answered rows, each once.
This process imports the libraries and forks: a publisher that is made to be killed costs no start.
It never uses them itself, since their threads would not be there in a child.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import deltalake
import lance
import pyiceberg.catalog.sql
import pyiceberg.io.pyarrow
import sqlalchemy.dialects.sqlite
from helpers.targets import TARGETS

from prefect_raybatch.api import publish_run
from prefect_raybatch.job.batch_job import BatchJob

LIBRARIES = (deltalake, lance, pyiceberg, sqlalchemy)  # what a publisher has imported
APPENDED = ("delta", "iceberg", "sql", "lance", "parquet")
MERGED = ("delta", "iceberg", "sql", "lance")
MODES = [(format, "append") for format in APPENDED] + [(format, "merge") for format in MERGED]


class Round:
    """One target, and those that publish to it."""

    def __init__(self, run: Path, folder: Path, format: str, mode: str, number: int) -> None:
        self.run, self.format = run, format
        self.root = folder / f"{format}-{mode}-{number}"
        self.root.mkdir(parents=True)
        more = {"mode": mode, "key": ["_row"]} if mode == "merge" else {}
        target = {**TARGETS[format][0](self.root, **more), "name": self.root.name}
        value = json.loads((run / "_raybatch/plan.json").read_text())["job"]
        value["output"] = {**value["output"], "publish": [target]}
        self.job = value

    def child(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            sys.stdout = sys.stderr = open(self.root / "log", "a")  # noqa: SIM115
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def publish(self) -> None:
        publish_run(BatchJob.from_dict(self.job), str(self.run))

    def read(self) -> None:
        """The row numbers in the target, as often as they are there."""
        rows = [row["_row"] for row in TARGETS[self.format][1](self.root)]
        (self.root / "found.json").write_text(json.dumps(rows))

    def killed(self, delays: list[float]) -> int:
        """Publishers at once, killed after these seconds; how many were still at work."""
        began, kills = time.monotonic(), 0
        pids = [self.child(self.publish) for _ in delays]
        for delay, pid in sorted(zip(delays, pids, strict=True)):
            time.sleep(max(0.0, began + delay - time.monotonic()))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            kills += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        return kills

    def alone(self, work: Callable[[], None]) -> float:
        """Seconds that it took; an error where it failed."""
        began = time.monotonic()
        _, status = os.waitpid(self.child(work), 0)
        if status:
            raise SystemExit(f"{self.root.name}: {(self.root / 'log').read_text()[-500:]}")
        return time.monotonic() - began


def answered(run: Path) -> int:
    return int(json.loads((run / "_SUCCESS").read_text())["data"])


def main(run: str, folder: str, seed: str, rounds: str) -> int:
    rng, found = random.Random(seed), {}
    expected, faults = answered(Path(run)), []
    for format, mode in MODES:
        seen: dict[str, Any] = {"rounds": 0, "kills": 0}
        first = Round(Path(run), Path(folder), format, mode, 0)
        took = first.alone(first.publish)
        for number in range(1, int(rounds) + 1):
            one = Round(Path(run), Path(folder), format, mode, number)
            for _ in range(rng.choice([1, 1, 2, 3])):
                delays = [rng.uniform(0, 1.3 * took) for _ in range(rng.choice([1, 2, 2]))]
                seen["kills"] += one.killed(delays)
            with_other = [one.child(one.publish) for _ in range(rng.choice([0, 1]))]
            one.alone(one.publish)
            for pid in with_other:
                os.waitpid(pid, 0)
            one.alone(one.read)
            rows = Counter(json.loads((one.root / "found.json").read_text()))
            if len(rows) != expected or set(rows.values()) != {1}:
                most = max(rows.values(), default=0)
                faults.append(
                    f"{one.root.name}: {len(rows)} of {expected} rows, up to {most} times"
                )
            seen["rounds"] += 1
        found[f"{format} {mode}"] = seen | {"seconds": round(took, 2)}
    print(json.dumps({"targets": found, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
