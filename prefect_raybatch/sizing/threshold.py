"""Finds the threshold of a cascade from rows that both its models answered. Pure.

Learn then test (A. N. Angelopoulos and others, "Learn then test: calibrating predictive algorithms
to achieve risk control", 2021) with fixed sequence testing: thresholds are tested from the one that
sends most rows to the larger model to the one that sends fewest, each at the full error rate, until
the first that cannot be shown to keep the agreement. Each test is an exact binomial one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefect_raybatch.sizing.agreement import lower_bound

STEPS_OF_PROBABILITY = 200  # thresholds from 1 down; fixed, because the data must not choose them


@dataclass(frozen=True)
class TestedThreshold:
    """A threshold of a cascade, and how it did on a sample of `rows` rows.

    Rows of which the first model is less sure than `below` are escalated: the larger model answers
    them. `agreed` rows then have the larger model's answer. `bound` is the lower confidence limit
    of the share of all rows for which that holds.
    """

    below: float
    agreed: int
    escalated: int
    rows: int
    bound: float


def thresholds(measure: str) -> tuple[float, ...]:
    """Return the thresholds to test, highest first, for a measure (probability or logprob)."""
    shares = [1 - step / STEPS_OF_PROBABILITY for step in range(STEPS_OF_PROBABILITY)]
    return tuple(round(p if measure == "probability" else math.log(p), 6) for p in shares)


def find_threshold(
    sureness: np.ndarray,
    agrees: np.ndarray,
    agreement: float,
    confidence: float,
    order: Sequence[float],
) -> TestedThreshold | None:
    """Return the last threshold in `order` before the first that fails its test, or None.

    Of each row, `sureness` is how sure the first model was (minus infinity: always escalated,
    infinity: never), and `agrees` whether both models answered the same. An escalated row agrees,
    because its answer is the larger model's. With probability `confidence`, at least `agreement` of
    all rows agree with the threshold returned.
    """
    best, rows = None, len(sureness)
    for below in order:
        kept = sureness >= below
        agreed = rows - int(np.count_nonzero(kept & ~agrees))
        bound = lower_bound(agreed, rows, confidence)
        if bound < agreement:
            break
        best = TestedThreshold(below, agreed, rows - int(kept.sum()), rows, bound)
    return best
