"""Simulate nights of jobs that learn how to arrange their engines, with measured rates and noise.

    python benchmarks/learn_nights.py [--seeds N] [--nights N]

The rates of each kind of work are those of results/sweep-h100.jsonl. Each night and each shard has
lognormal noise of 3 %. "By the model" begins with the choice of the cost model among the measured
arrangements, "any" with each of them, as if the model had chosen it. For each, it prints the share
of series that are within 5 % of the best measured arrangement on the night after the fifth, the
mean rate there, and the most nights of a series that were over 10 % slower than the model's choice.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from gpu import DIMENSIONS

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers.learning import Series, Work, works

from prefect_raybatch.ledger.arrangement import Arrangement


def simulated(work: Work, model: Arrangement, seeds: int, nights: int) -> tuple[float, float, int]:
    """Return (share within 5 % of the best, mean rate / the best, most slow nights of a series)."""
    reached, rates, slow = 0, 0.0, 0
    for seed in range(seeds):
        series = Series(work, model, np.random.default_rng(seed))
        for _ in range(nights):
            series.night()
        after = work.rate(series.decide().incumbent)
        reached += after >= 0.95 * work.best()
        rates += after / work.best()
        slow = max(slow, sum(rate < 0.9 * work.rate(model) for rate in series.rates))
    return reached / seeds, rates / seeds, slow


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--nights", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[bool]] = {"by the model": [], "any": []}
    print("work, begins with: rate / best before and after; within 5 %; slow nights at most")
    for work in works(DIMENSIONS):
        chosen = work.chosen()
        for model in sorted(work.rates):
            share, mean, slow = simulated(work, model, args.seeds, args.nights)
            by = "by the model" if model == chosen else "any"
            found[by].append(share == 1.0 and slow <= 1)
            before = work.rate(model) / work.best()
            print(
                f"{work.name:12} {model!s:8} {by:12} {before:.2f} {mean:.2f}; {share:.0%}; {slow}"
            )
    for by, reached in found.items():
        print(f"{by}: {sum(reached)} of {len(reached)} reach both goals with every seed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
