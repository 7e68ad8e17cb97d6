"""Measures GPU-seconds per 1,000 tokens of a run's shards, and the gain of a trial. No I/O.

At each moment, the time of the GPUs is divided equally among the shards that are in engines then,
so that the shares of all shards add up to the GPUs' time. A run with a trial has two parts, each
with its own engines: the shards of the trial, and all other shards. Only a part's steady time
counts: after its first shard has ended and before its last one starts. The times in which engines
fill up or run empty do not count. A shard that is only partly in steady time counts with that share
of its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LEAST_SHARDS = 6  # fewest shards of a part in steady time, and fewest pairs of a trial
MOST_BATCHES = 10
MOST_EDGE = 0.5  # share of a shard's duration that may lie in head or tail
COMPARED_SHARDS = 2  # shards on each side that a shard of the trial is compared with
# One-sided 95 % quantiles of Student's t by degrees of freedom, from LEAST_SHARDS - 1 on.
T95 = {5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


@dataclass(frozen=True)
class PartShards:
    """The shards of a part of a run, all by the same engines, as arrays of equal length.

    `numbers` are the shards' numbers, `started` and `ended` the seconds since 1970 between which
    each was in engines, `tokens` the tokens of its prompts and answers.
    """

    numbers: np.ndarray
    started: np.ndarray
    ended: np.ndarray
    tokens: np.ndarray

    def where(self, mask: np.ndarray) -> PartShards:
        """Return the shards for which `mask` (bool) is true."""
        return PartShards(*(a[mask] for a in (self.numbers, self.started, self.ended, self.tokens)))


@dataclass(frozen=True)
class SteadyShards:
    """Shards that ran mostly in steady time: after the first shard ended, before the last started.

    `seconds` is the wall-clock time charged to each shard: each moment of the steady time is
    divided equally among the shards then in engines. Multiply it by the number of GPUs to get
    GPU-seconds. `tokens` are the shard's tokens in steady time, `ended` is when it ended, in
    seconds since 1970.
    """

    numbers: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray
    ended: np.ndarray

    def score(self, gpus: int) -> float | None:
        """Return the GPU-seconds per 1,000 tokens; None for fewer than LEAST_SHARDS shards."""
        if len(self.numbers) < LEAST_SHARDS or not self.tokens.sum():
            return None
        return float(1000 * gpus * self.seconds.sum() / self.tokens.sum())


def steady_shards(part: PartShards) -> SteadyShards:
    """Return the shards that were in engines in steady time, with their shares of it.

    Leaves out shards without tokens or times, and shards that were mostly outside steady time. If
    fewer than LEAST_SHARDS remain, returns no shards.
    """
    known = (part.ended > part.started) & (part.started > 0) & (part.tokens > 0)
    part = part.where(known)
    if len(part.numbers) < LEAST_SHARDS:
        return _none()
    begin, end = float(part.ended.min()), float(part.started.max())
    low, high = np.clip(part.started, begin, end), np.clip(part.ended, begin, end)
    inside = high - low
    mostly = inside > (1 - MOST_EDGE) * (part.ended - part.started)
    if end <= begin or mostly.sum() < LEAST_SHARDS:
        return _none()
    # Seconds up to each event, each divided by the number of shards in flight.
    events = np.unique(np.concatenate([low, high]))
    ends_before = np.searchsorted(np.sort(high), events[:-1], side="right")
    flight = np.searchsorted(np.sort(low), events[:-1], side="right") - ends_before
    steps = np.diff(events) / np.maximum(flight, 1)
    sums = np.concatenate([[0.0], np.cumsum(steps)])
    seconds = sums[np.searchsorted(events, high)] - sums[np.searchsorted(events, low)]
    tokens = part.tokens * inside / (part.ended - part.started)
    return SteadyShards(part.numbers[mostly], seconds[mostly], tokens[mostly], part.ended[mostly])


def _none() -> SteadyShards:
    empty = np.zeros(0)
    return SteadyShards(empty, empty, empty, empty)


@dataclass(frozen=True)
class Gain:
    """How much faster a trial's engines were than the run's other engines.

    A `gain` of 0.1 is 10 %; `bound` is its lower limit with 95 % confidence. `pairs` is the number
    of compared shards. `gain` and `bound` are None if that is below LEAST_SHARDS.
    """

    pairs: int
    gain: float | None = None
    bound: float | None = None


def paired_gain(trial: SteadyShards, others: SteadyShards) -> Gain:
    """Return how much faster a trial's shards were than neighbouring shards of the other engines.

    A shard's neighbours are the others' shards at most COMPARED_SHARDS before or after it in the
    input. Let d be the logarithm of (neighbours' seconds per token / the shard's). Successive
    shards of an engine are not independent, so their d are averaged in batches of shards that ended
    one after the other. n compared shards make n // 2 batches of nearly equal size, but at least 6
    and at most 10. There is no gain below LEAST_SHARDS shards.

    Let m be the mean of the batch means, s their standard deviation and b their number. `gain` is
    exp(m) - 1. `bound`, its lower 95 % confidence limit, is
    exp(m - t(0.95, b - 1) * s / sqrt(b)) - 1 (Schmeiser, Batch Size Effects in the Analysis of
    Simulation Output, Operations Research 30, 1982).
    """
    if min(len(trial.numbers), len(others.numbers)) < LEAST_SHARDS:
        return Gain(0)
    parts = zip(others.numbers.tolist(), others.seconds, others.tokens, strict=True)
    costs = {number: (seconds, tokens) for number, seconds, tokens in parts}
    found = []
    for at in np.argsort(trial.ended, kind="stable").tolist():
        number = int(trial.numbers[at])
        near = [
            costs[n]
            for n in range(number - COMPARED_SHARDS, number + COMPARED_SHARDS + 1)
            if n in costs
        ]
        seconds, tokens = (sum(values) for values in zip(*near, strict=True)) if near else (0, 0)
        if seconds > 0 and tokens > 0 and trial.seconds[at] > 0:
            found.append(math.log(seconds / tokens * trial.tokens[at] / trial.seconds[at]))
    if len(found) < LEAST_SHARDS:
        return Gain(len(found))
    number = min(MOST_BATCHES, max(LEAST_SHARDS, len(found) // 2))
    means = np.array([batch.mean() for batch in np.array_split(np.array(found), number)])
    error = T95[number - 1] * float(means.std(ddof=1)) / math.sqrt(number)
    mean = float(means.mean())
    return Gain(len(found), math.exp(mean) - 1, math.exp(mean - error) - 1)
