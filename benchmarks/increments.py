"""What planning a night that reuses answers takes: keys, buckets, join; memory and seconds.

    python benchmarks/increments.py --rows 10000000 --changed 0.05 --doubled 0.1

Keys are made of messages as a template makes them, without files: what is read besides is the
table itself. `--rows` rows are joined with as many earlier answers, of which `--changed` are gone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import time
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.plan.joining import Join
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.request_key import Keying, context_of

BLOCK = 8192


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=float, default=0.05)
    parser.add_argument("--doubled", type=float, default=0.1)
    parser.add_argument("--no-keys", action="store_true", help="leave out the making of keys")
    given = parser.parse_args()
    print(json.dumps(run(given.rows, given.changed, given.doubled, not given.no_keys)))


if __name__ == "__main__":
    main()
