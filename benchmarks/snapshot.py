"""What a snapshot of text files costs: seconds, CPU seconds and the most memory of the driver.

    python benchmarks/snapshot.py --rows 2000000 --files 10000 --old ANOTHER_WORKTREE
    python benchmarks/snapshot.py --datasets 1000000 4000000

The guides' CSV of customers in one file, its rows as JSON Lines, and many small CSV files, each
copied in a process of its own, in turn with the package of another worktree where one is named.
CPU seconds and memory are of that process, less what its imports took. With `--datasets` a
`ray.data.Dataset` of so many rows, which its own tasks write: memory is the driver's, over what it
had after a copy of a thousand rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def cpu() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def copied(uri: str, folder: Path) -> dict[str, Any]:
    """One copy, in this process."""
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet  # noqa: F401

    from prefect_raybatch.compile.job import read_spec
    from prefect_raybatch.job.source import Source
    from prefect_raybatch.source import snapshot
    from prefect_raybatch.storage import open_store

    store = open_store(str(folder))
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before, began = cpu(), time.perf_counter()
    made = snapshot(read_spec(Source(uri=uri)), store, "bench")
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rows": made.rows,
        "seconds": seconds,
        "cpu_s": cpu() - before,
        "mb": (peak - imported) / 1024,
        "stored_mb": sum(file.size for file in made.files) / 1e6,
        "schema": [f"{field.name} {field.type}" for field in made.schema],
    }


def dataset_copied(rows: int, folder: Path) -> dict[str, Any]:
    """One copy of a data set of customers, by a Ray that is started for it."""
    import pyarrow as pa
    import ray

    from prefect_raybatch.source.dataset_copies import snapshot_dataset
    from prefect_raybatch.storage import open_store

    def customers(batch: pa.Table) -> pa.Table:
        numbers = batch["id"].to_pylist()
        told = [f"Customer {n} of {n % 97} has written about order {n * 7919}" for n in numbers]
        return batch.append_column("text", pa.array(told))

    def copy(rows: int) -> Any:
        made = ray.data.range(rows).map_batches(customers, batch_format="pyarrow")
        return snapshot_dataset(made, open_store(str(folder)), "bench")

    ray.init(logging_level="error", log_to_driver=False, include_dashboard=False)
    copy(1_000)
    imported, before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, cpu()
    began = time.perf_counter()
    found = copy(rows)
    seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rows": found.rows,
        "seconds": seconds,
        "cpu_s": cpu() - before,
        "mb": (peak - imported) / 1024,
        "whole_mb": peak / 1024,
        "stored_mb": sum(file.size for file in found.files) / 1e6,
    }


def datasets(sizes: list[int], data: Path) -> None:
    print("| rows | seconds | CPU seconds | MB over a small copy | MB in all | stored MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rows in sizes:
        folder = data / f"run-{os.getpid()}"
        command = [sys.executable, __file__, "--case", str(rows), str(folder)]
        env = {**os.environ, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True)
        shutil.rmtree(folder)
        one = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {one['rows']:,} | {one['seconds']:.1f} | {one['cpu_s']:.1f} | {one['mb']:.0f} "
            f"| {one['whole_mb']:.0f} | {one['stored_mb']:.0f} |",
            flush=True,
        )


def inputs(data: Path, rows: int, files: int) -> dict[str, Path]:
    """The inputs by name, made once and left in `data`."""
    from prefect_raybatch.demo.customers import write_customers

    data.mkdir(parents=True, exist_ok=True)
    one, lines = data / f"customers-{rows}.csv", data / f"customers-{rows}.jsonl"
    many = data / f"customers-{rows}-in-{files}"
    if not one.exists():
        write_customers(one, rows, 7)
    if not lines.exists():
        import pyarrow.csv as pc

        with open(lines, "w", encoding="utf-8") as out:
            for batch in pc.open_csv(one):
                out.writelines(json.dumps(row, default=str) + "\n" for row in batch.to_pylist())
    if files and not many.exists():
        many.mkdir()
        for number in range(files):
            write_customers(many / f"{number:05d}.csv", 20, number)
    return {"one CSV": one, "JSON Lines": lines} | ({f"{files:,} CSVs": many} if files else {})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--files", type=int, default=10_000, help="small ones; 0 for none")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("/tmp/raybatch-snapshot"))
    parser.add_argument("--old", type=Path, help="a worktree to compare with")
    parser.add_argument("--datasets", type=int, nargs="+", help="rows of data sets, in their place")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        what, folder = args.case[0], Path(args.case[1])
        one = dataset_copied(int(what), folder) if what.isdecimal() else copied(what, folder)
        print(json.dumps(one))
        return 0
    if args.datasets:
        datasets(args.datasets, args.data)
        return 0
    versions = {"this": Path(__file__).parents[1]} | ({"old": args.old} if args.old else {})
    print("| input | version | rows | seconds | CPU seconds | MB over imports | stored MB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, path in inputs(args.data, args.rows, args.files).items():
        found: dict[str, list[dict[str, Any]]] = {version: [] for version in versions}
        for _ in range(args.trials):
            for version, root in versions.items():
                folder = args.data / f"run-{os.getpid()}"
                command = [sys.executable, __file__, "--case", str(path), str(folder)]
                env = {**os.environ, "PYTHONPATH": str(root)}
                done = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True)
                shutil.rmtree(folder)
                found[version].append(json.loads(done.stdout))
        for version, all_ in found.items():
            least = {n: min(one[n] for one in all_) for n in ("seconds", "cpu_s", "stored_mb")}
            peak = statistics.median(one["mb"] for one in all_)
            print(
                f"| {name} | {version} | {all_[0]['rows']:,} | {least['seconds']:.1f} "
                f"| {least['cpu_s']:.1f} | {peak:.0f} | {least['stored_mb']:.0f} |",
                flush=True,
            )
        if len({json.dumps(one["schema"]) for all_ in found.values() for one in all_}) > 1:
            raise SystemExit(f"{name}: the versions differ in their types")
    return 0


if __name__ == "__main__":
    sys.exit(main())
