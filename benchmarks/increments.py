"""What planning a night that reuses answers takes: keys, buckets, join; memory and seconds.

    python benchmarks/increments.py --rows 10000000 --changed 0.05 --doubled 0.1
    python benchmarks/increments.py --rows 10000000 --table --cpus 2 --reckon 100000000

Keys are made of messages as a template makes them, without files: what is read besides is the
table itself. `--rows` rows are joined with as many earlier answers, of which `--changed` are gone.

With `--table` the rows are a Parquet file, and their keys are made as a night makes them: by Ray's
workers on so many `--cpus`, in this process for 0. Told are CPU seconds of this process and of
Ray's, and the most memory that each of them held; `--reckon` says what so many rows would take
on 2 and on 64 CPUs by these figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from images_memory import Watch

from prefect_raybatch.compile.job import compile_job, model_request
from prefect_raybatch.plan.joining import Join
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.request_key import Keying, context_of

BLOCK = 8192
GROUP = 1 << 18  # rows of a table's row group


def peak() -> float:
    """GiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def request(number: int) -> ChatRequest:
    system = {"role": "system", "content": "Answer with one industry of the list, no more."}
    text = f"Which industry is company {number} of Springfield in? It says: we build things."
    return ChatRequest([system, {"role": "user", "content": text}])


def keys_of(numbers: np.ndarray, full: bool, keying: Keying, table: pa.Table) -> list[bytes]:
    """The keys of rows by the number of their request; not `full`, a plain hash in their place."""
    if full:
        made = keying.keys([request(n) for n in numbers.tolist()], table)
        return [key for key in made if key]
    return [hashlib.blake2b(b"%d" % n, digest_size=16).digest() for n in numbers.tolist()]


def run(rows: int, changed: float, doubled: float, full: bool) -> dict[str, Any]:
    keying, rng = Keying(context_of({})), np.random.default_rng(1)
    table = pa.table({"n": pa.nulls(BLOCK)})
    spent = {"keys_s": 0.0, "buckets_s": 0.0}
    with Join(rows, rows) as join:
        for start in range(0, rows, BLOCK):
            numbers = np.arange(start, min(rows, start + BLOCK))
            theirs = keys_of(numbers, False, keying, table)
            moved = (numbers * 7919) % rows  # rows of tonight stand elsewhere
            new = rng.random(len(numbers)) < changed
            twice = rng.random(len(numbers)) < doubled
            moved = np.where(twice, moved // 2, moved) + np.where(new, rows, 0)
            began = time.perf_counter()
            if full:
                keys_of(moved, True, keying, table.slice(0, len(numbers)))
            spent["keys_s"] += time.perf_counter() - began
            ours = keys_of(moved, False, keying, table)
            began = time.perf_counter()
            join.theirs.add(theirs, numbers, np.zeros(len(numbers), bool))
            join.ours.add(ours, numbers, np.ones(len(numbers), bool))
            spent["buckets_s"] += time.perf_counter() - began
        began = time.perf_counter()
        join.run()
        spent["join_s"] = time.perf_counter() - began
        began = time.perf_counter()
        for _ in join.places():
            pass
        join.weights()
        spent["places_s"] = time.perf_counter() - began
        counts = join.counts
    told = {name: round(value, 2) for name, value in spent.items()}
    told["keys_us_a_row"] = round(spent["keys_s"] / rows * 1e6, 2)
    found = {"reused": counts.reused, "merged": counts.merged, "asked": counts.asked}
    return {"rows": rows, **found, **told, "peak_gib": round(peak(), 2)}


def write_table(path: Path, rows: int) -> None:
    texts = (f"company {n} of Springfield. It says: we build things." for n in range(rows))
    schema = pa.schema([("company", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, rows, GROUP):
            held = list(islice(texts, min(GROUP, rows - start)))
            writer.write_table(pa.table({"company": held}, schema))


def workers_cpu_s() -> float:
    """CPU seconds of the processes that this one started, and of theirs."""
    import psutil

    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return float(sum(one.user + one.system for one in times))


def tabled(rows: int, cpus: int) -> dict[str, Any]:
    """Keys of a table's rows, written to buckets and joined with as many earlier ones of theirs."""
    from prefect_raybatch import BatchJob, source
    from prefect_raybatch.model import pinned
    from prefect_raybatch.plan.row_keys import RowKeys, keying_of

    with tempfile.TemporaryDirectory(prefix="raybatch-bench-") as folder:
        write_table(Path(folder, "in.parquet"), rows)
        job = BatchJob.from_dict(
            {
                "name": "keys",
                "source": {"uri": f"{folder}/in.parquet"},
                "prompt": {
                    "system": "Answer with one industry of the list, no more.",
                    "template": "Which industry is {company} in?",
                },
                "sampling": {"temperature": 0},
                "engine": {"model": "demo", "max_model_len": 256},
                "output": {"uri": f"{folder}/out"},
                "reuse": "latest",
            }
        )
        model = pinned.pin(model_request(job.engine))
        spec = compile_job(job)
        keying, _ = keying_of(spec, model)
        made = RowKeys.of(spec, model, source.inventory(spec.read), None, keying)
        watch = Watch()
        if cpus:
            import ray

            ray.init("local", num_cpus=cpus, include_dashboard=False, logging_level="error")
        watch.start()
        idle = workers_cpu_s()
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        with Join(rows, rows) as join:
            made.add_to(join, spec.cluster)
            keys_s, busy = time.perf_counter() - began, workers_cpu_s() - idle
            after = resource.getrusage(resource.RUSAGE_SELF)
            for start in range(0, rows, GROUP):
                keys = join.keys[start : start + GROUP]
                numbers = np.arange(start, start + len(keys))
                join.theirs.add(keys.tobytes(), numbers, np.zeros(len(keys), bool))
            join_began = time.process_time()
            join.run()
            for _ in join.places():
                pass
            join_s = time.process_time() - join_began
            if join.counts.reused != rows:
                raise SystemExit(f"{join.counts} of {rows} rows")
        watch.stop()
        driver = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "rows": rows,
        "cpus": cpus,
        "keys_s": round(keys_s, 1),
        "keys_driver_cpu_s": round(driver, 1),
        "keys_workers_cpu_s": round(busy, 1),
        "join_cpu_s": round(join_s, 1),
        "driver_peak_gib": round(peak(), 2),
        "workers_peak_mib": watch.taken(),
    }


def reckoned(found: dict[str, Any], rows: int) -> list[str]:
    """Of so many rows, by what `found` took a row. The driver's part does not grow with CPUs."""
    each = 1 / found["rows"]
    driver, workers = found["keys_driver_cpu_s"] * each, found["keys_workers_cpu_s"] * each
    told = []
    for cpus in (2, 64):
        alone = max(driver, (driver + workers) / cpus) * rows
        join = found["join_cpu_s"] * each * rows
        disk = rows * (2 * 25 + 42) / 1e9
        told.append(
            f"{rows:,} rows on {cpus} CPUs: keys {alone / 60:.1f} min, join {join / 60:.1f} min, "
            f"{disk:.1f} GB of local disk"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=float, default=0.05)
    parser.add_argument("--doubled", type=float, default=0.1)
    parser.add_argument("--no-keys", action="store_true", help="leave out the making of keys")
    parser.add_argument("--table", action="store_true", help="make the keys of a real table")
    parser.add_argument("--cpus", type=int, default=2, help="of Ray, for --table; 0 without it")
    parser.add_argument("--reckon", type=int, default=100_000_000, help="rows to reckon for")
    given = parser.parse_args()
    if given.table:
        found = tabled(given.rows, given.cpus)
        print(json.dumps(found))
        print("\n".join(reckoned(found, given.reckon)))
        return
    print(json.dumps(run(given.rows, given.changed, given.doubled, not given.no_keys)))


if __name__ == "__main__":
    main()
