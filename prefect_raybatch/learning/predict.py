"""Predicts how much faster another arrangement of engines is, from a measured one. No I/O.

The cost model has two unknowns for a row: the seconds in which an engine works without its GPU, and
the seconds on the GPU. Both follow from two measured values: the rate, and the share of time in
which the GPU did not wait for the host, `busy`. The seconds on the GPU are busy / rate. The seconds
without the GPU are those for which the queue of the cost model gives the same `busy`.

For another `max_num_seqs`, both change as the cost model says. If the GPU was busy all the time,
more engines gain nothing. If it waited for the host for the share h, they gain at most 1 / (1 - h).
"""

from __future__ import annotations

from prefect_raybatch.ledger.arrangement import Arrangement
from prefect_raybatch.model.memory import Model
from prefect_raybatch.sizing import cost
from prefect_raybatch.sizing.cards import Card
from prefect_raybatch.sizing.cost import Tokens

MOST_BUSY = 0.995  # the queue of the cost model never reaches 1
MOST_RATIO = 1e4  # upper bound for an engine's time without its GPU / time on it
BISECTIONS = 60


def expected_ratio(
    model: Model, card: Card, row: Tokens, measured: Arrangement, busy: float, other: Arrangement
) -> float:
    """Return the expected rate of arrangement `other` / the rate of the `measured` arrangement.

    `busy` is the measured share of time (above 0, at most 1) in which the GPU did not wait for the
    host.
    """
    busy = min(busy, MOST_BUSY)
    away, gpu = _seconds(model, card, row, measured)
    other_away, other_gpu = _seconds(model, card, row, other)
    # In units of the measured rate's inverse, a row takes `busy` seconds of the GPU.
    cycle = busy * (1 + _away(measured.engines_per_gpu, busy))
    on_gpu = busy * other_gpu / gpu
    alone = max(0.0, cycle * (other_away + other_gpu) / (away + gpu) - on_gpu)
    return cost.busy(other.engines_per_gpu, alone, on_gpu) / on_gpu


def _seconds(
    model: Model, card: Card, row: Tokens, arrangement: Arrangement
) -> tuple[float, float]:
    engines, seqs = arrangement.engines_per_gpu, arrangement.max_num_seqs
    return cost.engine_seconds(model, card, row, engines, seqs)


def _away(engines: int, busy: float) -> float:
    """Return the ratio of an engine's time without its GPU to its time on the GPU.

    It is the ratio with which `engines` engines keep one GPU busy for the share `busy` of the time.
    """
    low, high = 0.0, MOST_RATIO
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost.busy(engines, middle, 1.0) > busy else (low, middle)
    return low
