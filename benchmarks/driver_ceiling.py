"""How many commits a second one driver makes: where it holds engines back, and what would lift it.

    python benchmarks/driver_ceiling.py
    python benchmarks/driver_ceiling.py --engines 512 --stores s3 --rows-per-shard 4000

The package's own driver, monitor and ledger, with simulated engines at the seam between Ray and
them: each of `--engines` answers `--rate` rows a second and hands in a receipt when a shard is
done, at its due time and whether the driver is ready or not. A receipt comes as the JSON text that
Ray would bring. What Ray itself costs the driver is not in it. The S3 server is Ceph radosgw on
this machine, where it is installed, and takes its part of the CPUs.

Prints a table: commits and rows a second, the share of the engines that this keeps busy, driver CPU
(of one core), the time of a commit (middle and 99th percentile), and memory. `8 writers` is the
rate at which eight threads commit the same receipts: what is gained by waiting for several answers
of the store at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ledger as bench

WRITERS = 8
ENOUGH = 2_000  # commits by several writers


class Enough(Exception):
    """The time of a measurement is over."""


class Fleet:
    """Simulated engines as a pass of the driver."""

    def __init__(self, engines: int, rate: float, seconds: float):
        self.engines, self.rate, self.seconds = engines, rate, seconds
        self.began = 0.0
        self.taken: list[float] = []  # seconds from handing a receipt in until the next is wanted

    def __call__(self, units: Sequence[Any], isolated: bool) -> Iterator[Any]:
        from prefect_raybatch.ledger.records import Receipt

        made = bench.receipts()
        texts = [made(unit.shard, unit.rows).to_json() for unit in units]
        every = units[0].rows / (self.rate * self.engines)  # evenly, as engines that run for long
        self.began = time.perf_counter()
        self.cpu = time.process_time()
        for number, text in enumerate(texts):
            now = time.perf_counter()
            due = self.began + (number + 1) * every
            if now > self.began + self.seconds:
                raise Enough
            if due > now:
                time.sleep(due - now)
            handed = time.perf_counter()
            yield Receipt.from_json(text)
            self.taken.append(time.perf_counter() - handed)


def one(case: dict[str, Any]) -> dict[str, Any]:
    """A case, in a process of its own."""
    from prefect_raybatch.api import plan_run
    from prefect_raybatch.driver.driver import Driver
    from prefect_raybatch.driver.monitor import Monitor
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.storage import open_store

    args = Namespace(**case)
    bench.make_input(args, bench.Steps("input"))
    job = bench.job_of(args)
    run = plan_run(job, bench.RUN_KEY)
    book = Ledger(open_store(run.uri))
    plan = book.load_plan()
    assert plan is not None
    shards = book.shards(plan)
    monitor = Monitor("attempt", plan, book.store, job.limits, lambda progress: None)
    driver = Driver(plan, shards, book, job.limits, monitor)
    driver.resume()
    fleet = Fleet(case["engines"], case["rate"], case["seconds"])
    with monitor, contextlib.suppress(Enough):
        driver.run(fleet, no_quarantine)
    wall = time.perf_counter() - fleet.began
    cpu = time.process_time() - fleet.cpu
    done = len(fleet.taken)
    taken = sorted(fleet.taken)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "commits": done,
        "commits_s": done / wall,
        "rows_s": done * case["rows_per_shard"] / wall,
        "busy": done * case["rows_per_shard"] / wall / (case["rate"] * case["engines"]),
        "driver_cpu": cpu / wall,
        "cpu_ms_a_commit": 1000 * cpu / done,
        "middle_ms": 1000 * taken[done // 2],
        "p99_ms": 1000 * taken[done * 99 // 100],
        "peak_mb": peak,
        "writers_s": by_writers(book, plan, shards, driver.done),
    }


def by_writers(book: Any, plan: Any, shards: Any, done: Any) -> float | None:
    """Commits a second of several threads, of the shards that are left."""
    import numpy as np

    from prefect_raybatch.storage import read_ahead

    todo = np.flatnonzero(~done).tolist()[:ENOUGH]
    if len(todo) < 10 * WRITERS:
        return None
    made = bench.receipts()

    def commit(shard: int) -> Any:
        rows = shards[shard].rows
        return book.commit(plan, rows, [made(shard, rows)])

    began = time.perf_counter()
    for _ in read_ahead(commit, todo, WRITERS, WRITERS):
        pass
    return len(todo) / (time.perf_counter() - began)


def no_quarantine(unit: Any, why: Any) -> Any:
    raise NotImplementedError


def measured(case: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--case", json.dumps(case)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    return {**case, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", default="64,512")
    parser.add_argument("--rows-per-shard", default="1000,4000")
    parser.add_argument("--stores", default="local,s3")
    parser.add_argument("--rate", type=float, default=1000, help="rows a second of an engine")
    parser.add_argument("--seconds", type=float, default=15, help="that a case takes at most")
    parser.add_argument("--folder", help="where to work; by default a temporary folder")
    parser.add_argument("--out", type=Path, help="one JSON object a line")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(one(json.loads(args.case))))
        return 0
    print(
        f"{os.cpu_count()} CPUs, {args.rate:,.0f} rows/s an engine\n\n"
        "| store | engines | rows a shard | wanted commits/s | commits/s | rows/s | engines busy "
        "| driver CPU | ms of CPU a commit | a commit takes, p50 / p99 | memory | 8 writers |\n"
        "|" + " --- |" * 12,
        flush=True,
    )
    for store in args.stores.split(","):
        with tempfile.TemporaryDirectory(prefix="raybatch-driver-", dir=args.folder) as folder:
            plain = Namespace(store=store)
            with bench.server(plain, folder) as environment:
                for number, (engines, rows) in enumerate(
                    (int(engines), int(rows))
                    for engines in args.engines.split(",")
                    for rows in args.rows_per_shard.split(",")
                ):
                    case = case_of(args, store, engines, rows, f"{folder}/{number}")
                    found = measured(case, environment)
                    print(line(found), flush=True)
                    if args.out:
                        with args.out.open("a") as out:
                            out.write(json.dumps(found) + "\n")
    return 0


def case_of(args: Namespace, store: str, engines: int, rows: int, folder: str) -> dict[str, Any]:
    """As many shards as the engines would answer in that time, and some for the writers."""
    Path(folder).mkdir()
    shards = int(engines * args.rate / rows * args.seconds) + ENOUGH
    return {
        "store": store,
        "engines": engines,
        "rate": args.rate,
        "rows_per_shard": rows,
        "seconds": args.seconds,
        "shards": shards,
        "rows": shards * rows,
        "files": 50,
        "folder": folder,
    }


def line(found: dict[str, Any]) -> str:
    wanted = found["engines"] * found["rate"] / found["rows_per_shard"]
    writers = found["writers_s"]
    cells = [
        {"s3": "radosgw"}.get(found["store"], found["store"]),
        f"{found['engines']}",
        f"{found['rows_per_shard']:,}",
        f"{wanted:,.0f}",
        f"{found['commits_s']:,.0f}",
        f"{found['rows_s']:,.0f}",
        f"{found['busy']:.0%}",
        f"{found['driver_cpu']:.0%}",
        f"{found['cpu_ms_a_commit']:.1f}",
        f"{found['middle_ms']:.1f} / {found['p99_ms']:.0f} ms",
        f"{found['peak_mb']:.0f} MB",
        f"{writers:,.0f}/s" if writers else "",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
