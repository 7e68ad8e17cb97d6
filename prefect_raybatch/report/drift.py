"""Tests whether a run differs from earlier runs more than they do from each other (drift). Pure.

A run is one observation, however many rows it has: the input of each run differs a little, so a
test that counts rows would report a difference for most runs of a large job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

from prefect_raybatch.report.answers import (
    KIND_NAMES,
    LEAST_ANSWERS,
    LEAST_MOVED,
    PROMPTS,
    Shift,
    largest_changes,
)

LEAST_RUNS = 14  # earlier runs, below which nothing is reported as drift
MOST_RUNS = 21  # newest earlier runs that a run is compared with
# A run may raise a false alarm with probability 1 %, divided among the tests: three distributions
# of answers, failed rows, the length of prompts, missing and new values of the input (`inputs.py`),
# and the number of rows (`few_rows`).
TESTS = 8
RUN_CHANCE = 0.01 / TESTS
# Rare names come in bursts, so their shares have longer tails than a t-test assumes: the distance
# of a run from the mean must also exceed this many times the largest of the runs before.
BEYOND = 2.5
LEAST_LONGER = 0.05  # smallest reported change, as a share of the usual mean prompt length
LEAST_SHARE = 0.005  # share of the answers in any of the runs; rarer names are not tested

Distribution = Mapping[str, float]


def chance_after(
    value: float, earlier: Sequence[float], noise: float = 0.0, beyond: float = BEYOND
) -> float:
    """Return the probability that a run is by chance as far from earlier runs as `value` is.

    The distance is that from the mean of `earlier`, the values of earlier runs. The test is a
    t-test of one new observation. Its variance is at least `noise`, the variance that comes from
    counting a limited number of rows. Returns 1 with fewer than two earlier runs. Returns 1 also if
    the distance of `value` is at most `beyond` times the largest distance of an earlier run.
    """
    number = len(earlier)
    if number < 2:
        return 1.0
    spread = max(variance(earlier), noise)
    mean = fmean(earlier)
    distance = abs(value - mean)
    if distance <= beyond * max(abs(other - mean) for other in earlier):
        return 1.0
    if not spread:
        return 0.0
    return t_tail(distance / math.sqrt(spread * (1 + 1 / number)), number - 1)


def t_tail(value: float, freedom: int) -> float:
    """Return P(|T| >= value) of Student's t with `freedom` degrees of freedom.

    Uses the finite sums of Abramowitz and Stegun, 26.7.
    """
    angle = math.atan(value / math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(freedom // 2):
        total += term
        term *= square * (2 * k + 2) / (2 * k + 3) if odd else square * (2 * k + 1) / (2 * k + 2)
    inside = math.sin(angle) * total
    return max(0.0, 1.0 - (2 / math.pi * (angle + inside) if odd else inside))


def drifts(
    now: Mapping[str, Distribution], earlier: Sequence[Mapping[str, Distribution]], before_key: str
) -> tuple[Shift, ...]:
    """Return the distributions of a run that differ from those of `earlier` runs beyond chance.

    `now` has the counts of the run, as {kind: {name: count}}. `earlier` has such counts for each
    earlier run, newest first. `before_key` is the run key of the newest earlier run.
    """
    each = (
        _drift(kind, now.get(kind, {}), [run.get(kind, {}) for run in earlier], before_key)
        for kind in KIND_NAMES
    )
    return tuple(shift for shift in each if shift is not None)


def enough(
    kind: str, now: Mapping[str, Distribution], earlier: Sequence[Mapping[str, Distribution]]
) -> bool:
    """Return whether answers of `kind` can be compared with those of `earlier` runs.

    True if the run (`now`) and at least LEAST_RUNS of the earlier runs each count at least
    LEAST_ANSWERS of them.
    """
    runs = [run for run in earlier if _total(run.get(kind, {})) >= LEAST_ANSWERS]
    return _total(now.get(kind, {})) >= LEAST_ANSWERS and len(runs) >= LEAST_RUNS


def prompt_drift(now: float | None, earlier: Sequence[float], before_key: str) -> Shift | None:
    """Return the change of the mean prompt length (tokens) if it is beyond chance, else None.

    `now` is the mean of the run, None if unknown. `earlier` has the means of earlier runs, newest
    first; `before_key` is the run key of the newest. Returns None with fewer than 14 earlier runs.
    """
    lengths = [tokens for tokens in earlier if tokens > 0][:MOST_RUNS]
    if not now or len(lengths) < LEAST_RUNS:
        return None
    logs = [math.log(tokens) for tokens in lengths]
    usual = math.exp(fmean(logs))
    chance = chance_after(math.log(now), logs)
    moved = abs(now / usual - 1)
    if chance >= RUN_CHANCE or moved < LEAST_LONGER:
        return None
    return Shift(PROMPTS, before_key, moved, chance, {"tokens": (usual, now)}, len(lengths))


def _drift(
    kind: str, now: Distribution, earlier: Sequence[Distribution], before_key: str
) -> Shift | None:
    runs = [run for run in earlier if _total(run) >= LEAST_ANSWERS][:MOST_RUNS]
    if _total(now) < LEAST_ANSWERS or len(runs) < LEAST_RUNS:
        return None
    names = list(dict.fromkeys(name for run in (now, *runs) for name in run))
    common = [n for n in names if max(share_of(run, n) for run in (now, *runs)) >= LEAST_SHARE]
    chances = [share_chance(now, runs, name) for name in common]
    shares = {n: (fmean(share_of(run, n) for run in runs), share_of(now, n)) for n in names}
    moved = sum(abs(b - a) for a, b in shares.values()) / 2
    chance = min(1.0, min(chances, default=1.0) * len(common))  # Bonferroni
    if moved < LEAST_MOVED or chance >= RUN_CHANCE:
        return None
    return Shift(kind, before_key, moved, chance, largest_changes(shares), len(runs))


def share_chance(
    now: Distribution, runs: Sequence[Distribution], name: str, beyond: float = BEYOND
) -> float:
    """Return `chance_after` for the share of `name` in the run (`now`) and in earlier `runs`.

    It is computed for arcsin(sqrt(share)) instead of the share: the variance that comes from
    counting is then 1 / (4 rows), whatever the share is.
    """
    noise = fmean(1 / (4 * _total(run)) for run in (now, *runs))
    angles = [math.asin(math.sqrt(share_of(run, name))) for run in (now, *runs)]
    return chance_after(angles[0], angles[1:], noise, beyond)


def share_of(counts: Distribution, name: str) -> float:
    """Return the share of `name` in all counts, from 0 to 1."""
    return min(1.0, max(0.0, counts.get(name, 0.0) / _total(counts)))


def _total(counts: Distribution) -> float:
    return sum(counts.values())
