"""Seconds of the first calls of `ask` on this machine, with the bundled model.

    python benchmarks/frames.py [--rows 3] [--runs 3]

Each run is a process of its own with an empty cache of answers, and prints the medians at the end:

  first    from the start of the process to the first answers: imports, Ray and engine included
  new      a second call, with other rows
  again    the second call once more, whose answers are stored
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

START = time.time()
LABELS = ["Law Firm", "Healthcare", "Technology", "Other"]


def call(first_row: int, rows: int, cache: str) -> float:
    """Ask about some companies; return the seconds it took."""
    import pandas

    from prefect_raybatch import ask

    names = [f"Acme Health {number}" for number in range(first_row, first_row + rows)]
    began = time.time()
    answered = ask(
        pandas.DataFrame({"Company": names}),
        "What industry is this company in: {Company}",
        model="demo",
        labels=LABELS,
        cache=cache,
    )
    if len(answered) != rows or answered.iloc[:, -1].isna().any():
        raise SystemExit(f"not all rows were answered:\n{answered}")
    return time.time() - began


def measure(rows: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        call(0, rows, cache)
        first = time.time() - START
        return {"first": first, "new": call(rows, rows, cache), "again": call(rows, rows, cache)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT", json.dumps(measure(args.rows)), flush=True)
        return 0
    results = []
    for _ in range(args.runs):
        command = [sys.executable, __file__, "--one", "--rows", str(args.rows)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        (line,) = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
        results.append(json.loads(line.removeprefix("RESULT ")))
        print(results[-1], flush=True)
    for name in results[0]:
        print(f"{name}: {statistics.median(each[name] for each in results):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
