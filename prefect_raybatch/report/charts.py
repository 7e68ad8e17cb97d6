"""Computes the data of a run's plots from the totals and per-shard figures of its commits. Pure.

The data has a bounded size, however many shards the run has.
"""

from __future__ import annotations

import numpy as np

from prefect_raybatch.report.records import Charts
from prefect_raybatch.report.tally import Tally

POINTS = 120  # maximum points of the throughput plot
CELLS = 2000  # maximum cells of the shard map
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def charts(tally: Tally, shards: int) -> Charts:
    """Return the data of the plots of a run with `shards` shards.

    The run may be active: commits that another thread adds to `tally` during the call are left out.
    """
    series = tally.series
    started, ended, _ = series.times()
    number = len(ended)
    # Copies: an array that numpy views cannot grow.
    rows, prompt, output, shard, failed = (
        np.array(values[:number], np.float64)
        for values in (series.rows, series.prompt, series.output, series.shard, series.failed)
    )
    return Charts(
        throughput=throughput_points(started, ended, np.stack([rows, prompt, output])),
        durations=duration_quantiles({k: np.array(v[:number]) for k, v in series.seconds.items()}),
        cells=cells(shards, shard.astype(int), failed.astype(int), rows.astype(int)),
    )


def throughput_points(
    started: np.ndarray, ended: np.ndarray, amounts: np.ndarray
) -> tuple[tuple[float, ...], ...]:
    """Divide the working time into equal spans; return (end of span, rate of each kind) for each.

    Times are in seconds, rates in amounts per second. `started` and `ended` have the times of each
    shard. `amounts` (float[kinds, shards]) has what each shard processed; it is spread evenly over
    the shard's time. Times in which no shard was at work, such as those between attempts, are cut
    out.
    """
    known = (ended > started) & (started > 0)
    started, ended, amounts = started[known], ended[known], amounts[:, known]
    if not started.size:
        return ()
    started, ended = _worked(started, ended)
    span = float(ended.max())
    edges = np.linspace(0.0, span, min(POINTS, max(10, started.size)) + 1)
    rates = np.diff(_done(started, ended, amounts, edges), axis=0) / np.diff(edges)[:, None]
    return tuple(
        (float(f"{at:.9g}"), *(float(f"{rate:.6g}") for rate in rates_then))
        for at, rates_then in zip(edges[1:], rates, strict=True)
    )


def _done(
    started: np.ndarray, ended: np.ndarray, amounts: np.ndarray, edges: np.ndarray
) -> np.ndarray:
    """Return float[edges, kinds]: how much of each kind was processed up to each time in `edges`.

    An amount is spread evenly over the time of its shard; see `throughput_points`.
    """
    times = np.concatenate([started, ended])
    order = np.argsort(times)
    times = times[order]
    done = []
    for amount in amounts:
        rate = amount / (ended - started)
        running = np.cumsum(np.concatenate([rate, -rate])[order])
        total = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
        done.append(np.interp(edges, times, total))
    # Rounding may make a sum of floats fall.
    return np.maximum.accumulate(np.stack(done, axis=1), axis=0)


def _worked(started: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shift start and end times to seconds since the first start, with idle gaps removed."""
    order = np.argsort(started)
    reached = np.maximum.accumulate(ended[order])
    gaps = np.maximum(started[order][1:] - reached[:-1], 0.0)
    idle = np.empty_like(started)
    idle[order] = np.concatenate([[0.0], np.cumsum(gaps)])
    origin = started.min()
    return started - origin - idle, ended - origin - idle


def duration_quantiles(seconds: dict[str, np.ndarray]) -> dict[str, tuple[float, ...]]:
    """Return {stage: (p5, p25, median, p75, p95, longest)} of task times in seconds.

    NaN is an unknown time. Stages without a known time are left out.
    """
    quantiles = {}
    for stage, values in seconds.items():
        values = values[~np.isnan(values)]
        if values.size:
            quantiles[stage] = tuple(round(float(q), 4) for q in np.quantile(values, QUANTILES))
    return quantiles


def cells(
    shards: int, shard: np.ndarray, failed: np.ndarray, rows: np.ndarray
) -> tuple[tuple[int, ...], ...]:
    """Group shards, in order, into at most CELLS groups of equal size, the last perhaps smaller.

    Return (shards, committed shards, failed rows, committed rows) of each group. The arrays have an
    entry per commit: shard number, failed rows, all rows.
    """
    if shards <= 0:
        return ()
    size = -(-shards // CELLS)
    number = -(-shards // size)
    fits = (shard >= 0) & (shard < shards)
    at = shard[fits] // size
    counts = [
        np.bincount(at, weights=weights, minlength=number).astype(int).tolist()
        for weights in (np.ones(at.size), failed[fits], rows[fits])
    ]
    sizes = [size] * (number - 1) + [shards - size * (number - 1)]
    return tuple(zip(sizes, *counts, strict=True))
