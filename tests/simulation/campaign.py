"""Many schedules, and the planted bugs that they are to find."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from .mutants import MUTANTS, Mutant, planted
from .schedule import Outcome, run_schedule

ABREAST = 25  # schedules that a process is given at a time


@dataclass(frozen=True)
class Hunt:
    """Whether a planted bug was found: in how many schedules, and by which fault."""

    mutant: str
    schedules: int
    fault: str | None
    seed: str = ""

    def __str__(self) -> str:
        if self.fault is None:
            return f"NOT FOUND {self.mutant}: {self.schedules} schedules saw nothing wrong"
        return f"found {self.mutant} in schedule {self.schedules} ({self.seed}): {self.fault[:150]}"


def seeds(base: str, number: int) -> list[str]:
    return [f"{base}-{at}" for at in range(number)]


def hunt(mutant: Mutant, seed: str) -> Hunt:
    """Schedules with the bug planted, until one of them shows it."""
    with planted(mutant):
        for at, one in enumerate(seeds(seed, mutant.within)):
            if faults := run_schedule(one).faults:
                return Hunt(mutant.name, at + 1, faults[0], one)
    return Hunt(mutant.name, mutant.within, None)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.one:
        outcome = run_schedule(args.one)
        print(outcome.text(whole=True))
        return 1 if outcome.faults else 0
    if args.digests:
        for seed in args.digests.split(","):
            print(f"digest {seed} {run_schedule(seed).digest}")
    chosen = _mutants(args.mutants)
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        lay = map if args.processes == 1 else pool.map
        wrong = _schedules(args.seed, lay(run_schedule, seeds(args.seed, args.schedules)))
        missed = 0
        for found in lay(partial(hunt, seed=args.seed), chosen):
            print(found, flush=True)
            missed += found.fault is None
    return 1 if wrong or missed else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seed", default=str(int.from_bytes(os.urandom(3), "big")))
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--mutants", default="", help="all, quick, or names by comma")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--one", metavar="SEED", help="one schedule, with its whole trace")
    parser.add_argument("--digests", metavar="SEEDS", help="of these schedules, by comma")
    return parser.parse_args(argv)


def _mutants(text: str) -> list[Mutant]:
    if text in ("all", "quick"):
        return [mutant for mutant in MUTANTS if text == "all" or mutant.quick]
    known = {mutant.name: mutant for mutant in MUTANTS}
    return [known[name] for name in text.split(",") if name]


def _schedules(seed: str, outcomes: Iterable[Outcome]) -> int:
    """Prints what is wrong, and a line over all; the number of schedules that did not hold."""
    began = time.monotonic()
    befell, most, number, lines, wrong = Counter[str](), 0.0, 0, 0, 0
    for outcome in outcomes:
        befell.update(outcome.befell)
        number, lines = number + 1, lines + len(outcome.trace)
        most = max(most, outcome.seconds)
        if outcome.faults:
            wrong += 1
            print(outcome.text(), flush=True)
    happened = ", ".join(f"{times:,} times {what}" for what, times in sorted(befell.items()))
    seconds = time.monotonic() - began
    print(
        f"seed {seed}: {number:,} schedules, {lines:,} requests ({happened or 'no fault'}); "
        f"{wrong} not ok; {seconds:.0f} s, at most {most:.2f} s for one",
        flush=True,
    )
    return wrong
