"""Seconds, CPU seconds and memory of finalize by where its files are written, for one or two
versions of the package.

A run of committed pieces is made once for each version with its own code (rows of words of about
1 KB), copied for each trial, and finalized: in the driver alone, then on Ray clusters of 1, 2, ...
nodes of one CPU each, all on this machine. Each trial is a process of its own, and its CPU seconds
are those of everything below it, Ray's own processes included, less what they had taken before.

    python benchmarks/finalize.py                                  this version, 0.5 GiB
    python benchmarks/finalize.py --old ../at-an-older-commit      side by side with a worktree
    python benchmarks/finalize.py --store s3 --nodes 1,2
    python benchmarks/finalize.py --races                          conditional PUTs on radosgw

Prints one row a trial: seconds, CPU seconds, both per GiB of Arrow, the driver's peak in MB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
BUCKET = "finalize-benchmark"
ROWS = 2_000  # a shard
WORDS = 200_000
MODEL = {"source": "demo", "revision": None, "identity": "0" * 64}


# --- one trial, in a process of its own -------------------------------------------------------


def make(args: argparse.Namespace) -> dict[str, Any]:
    """A run with a commit for every shard, its pieces written by the finish stage."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from helpers.engines import with_answers
    from helpers.small import make_job
    from helpers.specs import finish_stage, new_plan_of

    from prefect_raybatch.compile.resolved import Resolved
    from prefect_raybatch.ledger.layout import piece_path
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.ledger.records import InputFile, Receipt, Unit
    from prefect_raybatch.stages.block import tag
    from prefect_raybatch.stages.finish import RECEIPT
    from prefect_raybatch.storage import open_store

    rng = np.random.default_rng(7)
    letters = rng.integers(97, 123, (WORDS, 9), dtype=np.uint8)
    words = [bytes(row[: 3 + i % 7]).decode() for i, row in enumerate(letters)]
    # A few words are common and most are not, as in prose.
    prose = " ".join(words[i] for i in np.minimum(rng.zipf(1.3, 6_000_000) - 1, WORDS - 1))

    def text(length: int) -> str:
        start = int(rng.integers(0, len(prose) - length))
        return prose[start : start + length]

    def rows(start: int) -> Any:
        return pa.table(
            {
                "id": pa.array(range(start, start + ROWS), pa.int64()),
                "Company": [text(350) for _ in range(ROWS)],
            }
        )

    shards = max(1, args.mib * 2**20 // (ROWS * 1050))
    output = {"uri": "x", "file_mb": args.file_mb}
    source = {"uri": "in.parquet", "rows_per_shard": ROWS}
    job = make_job(source=source, output=output)
    files = [InputFile("in.parquet", 1000, None, 1, shards * ROWS)]
    schema = rows(0).schema
    plan, tables = new_plan_of(Resolved.of(job, MODEL), "key", files, schema, 50.0, snapshot=False)
    store = open_store(args.uri, options(args))
    ledger = Ledger(store)
    ledger.create_plan(plan, tables)
    finish = finish_stage(job.output, dict(MODEL), store, "attempt")
    arrow = 0
    for shard in range(shards):
        table = tag(rows(shard * ROWS), Unit(shard, 0, ROWS))
        block = with_answers(table, [None] * ROWS, [text(650) for _ in range(ROWS)])
        receipts = [Receipt.from_json(text) for text in finish(block)[RECEIPT].to_pylist()]
        assert ledger.commit(plan, ROWS, receipts)
        piece = store.read(piece_path(receipts[0].pieces[0].path))
        # In the calling thread: read_table would abort some processes that end right after it.
        arrow += pq.ParquetFile(pa.BufferReader(piece)).read(use_threads=False).nbytes
    return {"shards": shards, "arrow": arrow}


def finalize(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, CPU seconds and the peak of this process; on a cluster where one is named."""
    from prefect_raybatch.api import finalize_run
    from prefect_raybatch.job.batch_job import BatchJob
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.runs.run import Run
    from prefect_raybatch.storage import open_store

    store = open_store(args.uri, options(args))
    plan = Ledger(store).load_plan()
    assert plan is not None
    output = {**plan.job["output"], "uri": "x", "options": options(args)}
    job = BatchJob.from_dict({**plan.job, "output": output})
    run = Run(store.uri, "key", plan.hash, plan.rows, plan.shards, False)
    if args.nodes:  # whatever the size, and also with one worker
        from prefect_raybatch.cluster import side_by_side

        workers_for = side_by_side.workers_for

        @contextmanager
        def workers(cluster: Any, size: int) -> Iterator[int]:
            with workers_for(cluster, 1 << 40) as found:
                yield max(2, found)

        side_by_side.workers_for = workers
    with cluster(args.nodes) as seconds:
        before, began = seconds(), time.perf_counter()
        finalize_run(job, run)
        took, cpu = time.perf_counter() - began, seconds() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": round(took, 2), "cpu": round(cpu, 2), "peak_mb": round(peak)}


@contextmanager
def cluster(nodes: int) -> Iterator[Any]:
    """In a cluster of that many nodes of one CPU, of none at 0: a function that tells the CPU
    seconds spent so far by this process and all below it."""
    import psutil

    me = psutil.Process()

    def seconds() -> float:
        total = 0.0
        for process in (me, *me.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
                if process == me:
                    total += times.children_user + times.children_system
        return total

    if not nodes:
        yield seconds
        return
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 10**8}
    there = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(nodes - 1):
            there.add_node(**node)
        there.wait_for_nodes()
        ray.init(there.address, logging_level="error", log_to_driver=False)
        yield seconds
    finally:
        ray.shutdown()
        there.shutdown()


def options(args: argparse.Namespace) -> dict[str, Any]:
    return json.loads(args.options)


PHASES = {"make": make, "finalize": finalize}


# --- all of them ------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--old", help="a worktree of an older version, measured beside this one")
    parser.add_argument("--mib", type=int, default=512, help="of rows, about")
    parser.add_argument("--file-mb", type=int, default=32, help="output.file_mb")
    parser.add_argument("--nodes", default="0,1,2,4", help="clusters to try; 0 is the driver alone")
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--folder", help="where to work; by default a temporary folder")
    parser.add_argument("--races", action="store_true", help="only race conditional PUTs on S3")
    parser.add_argument("--uri", default="", help=argparse.SUPPRESS)
    parser.add_argument("--options", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        args.nodes = int(args.nodes)
        print(json.dumps(PHASES[args.phase](args)))
        return 0
    sys.path.insert(0, str(HERE / "tests"))
    with (
        tempfile.TemporaryDirectory(prefix="raybatch-finalize-", dir=args.folder) as folder,
        server(args, folder) as given,
    ):
        if args.races:
            return races(given, folder)
        measure(args, folder, given)
    return 0


@contextmanager
def server(args: argparse.Namespace, folder: str) -> Iterator[dict[str, str]]:
    """The options of an S3 server where one is wanted."""
    if args.store == "local" and not args.races:
        yield {}
        return
    from s3server import start_s3

    with start_s3(Path(folder) / "s3") as s3:
        s3.create_bucket(BUCKET)
        yield s3.options


def measure(args: argparse.Namespace, folder: str, given: dict[str, str]) -> None:
    trees = {"this": HERE, **({"old": Path(args.old).resolve()} if args.old else {})}
    print(f"{'version':9}{'nodes':>6}{'seconds':>9}{'CPU s':>8}{'s/GiB':>8}{'CPU/GiB':>9}{'MB':>7}")
    for name, tree in trees.items():
        whole = f"{folder}/{name}"
        made = trial(args, tree, "make", f"{whole}", {}, 0)
        gib = made["arrow"] / 2**30
        for nodes in map(int, args.nodes.split(",")):
            if nodes and name == "old":
                continue  # it has one way
            uri = f"{folder}/{name}-{nodes}"
            if args.store == "s3":
                uri = upload(whole, f"s3://{BUCKET}/{uuid.uuid4()}", given)
            else:
                shutil.copytree(whole, uri)
            found = trial(args, tree, "finalize", uri, given, nodes)
            shutil.rmtree(uri, ignore_errors=True)
            print(
                f"{name:9}{nodes or 'driver':>6}{found['seconds']:9.1f}{found['cpu']:8.1f}"
                f"{found['seconds'] / gib:8.1f}{found['cpu'] / gib:9.1f}{found['peak_mb']:7.0f}",
                flush=True,
            )


def trial(
    args: argparse.Namespace, tree: Path, phase: str, uri: str, given: dict[str, str], nodes: int
) -> dict[str, Any]:
    command = [sys.executable, __file__, f"--phase={phase}", f"--uri={uri}", f"--nodes={nodes}"]
    command += [f"--mib={args.mib}", f"--file-mb={args.file_mb}", f"--options={json.dumps(given)}"]
    path = f"{tree}{os.pathsep}{tree / 'tests'}"
    around = {**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=around, cwd=tree, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def upload(folder: str, uri: str, given: dict[str, str]) -> str:
    from prefect_raybatch.storage import open_store

    store = open_store(uri, given)
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: store.put(str(p.relative_to(folder)), p.read_bytes()), paths))
    return uri


# --- races ------------------------------------------------------------------------------------


def races(given: dict[str, str], folder: str, rounds: int = 4) -> int:
    """8 x 128 MiB: who makes a file, and who replaces it. 1 unless one writer wins each."""
    from prefect_raybatch.storage import open_store

    store, lost = open_store(f"s3://{BUCKET}/races", given), 0
    for number in range(8):
        Path(f"{folder}/{number}").write_bytes(bytes([number]) * (128 << 20))
    for turn in range(rounds):
        made = together(lambda n, t=turn: store.put_file_if_absent(f"{t}", f"{folder}/{n}"))
        first = store.read(f"{turn}") == bytes([made[0]]) * (128 << 20)
        seen = store.put(f"{turn}", b"of none of them")  # or its ETag would be one of theirs
        replaced = together(lambda n, s=seen: store.replace_file(s.path, f"{folder}/{n}", s))
        body = store.read(f"{turn}")
        whole = (
            first and len(made) == len(replaced) == 1 and body == bytes([replaced[0]]) * (128 << 20)
        )
        said = "whole" if whole else "NOT WHOLE"
        print(f"round {turn}: made by {made}, replaced by {replaced}, {said}", flush=True)
        lost += not whole
        store.delete([f"{turn}"])
    return 1 if lost else 0


def together(write: Any) -> list[int]:
    start = threading.Barrier(8)

    def one(number: int) -> bool:
        start.wait()
        return bool(write(number))

    with ThreadPoolExecutor(8) as pool:
        return [number for number, won in enumerate(pool.map(one, range(8))) if won]


if __name__ == "__main__":
    sys.exit(main())
