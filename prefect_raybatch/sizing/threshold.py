"""Finds the threshold of a cascade from the answers of both its models to sampled rows. No I/O.

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
    """A threshold of a cascade, and its effect on a sample of `rows` rows.

    `escalated` counts the rows with a sureness of the first model under `below`: they get the
    larger model's answer. `agreed` counts the rows that then have the larger model's answer.
    `bound` is the lower confidence limit of the share of such rows in the whole input.
    """

    below: float
    agreed: int
    escalated: int
    rows: int
    bound: float


def thresholds(measure: str) -> tuple[float, ...]:
    """Return the thresholds to test, highest first; `measure` is "probability" or "logprob"."""
    shares = [1 - step / STEPS_OF_PROBABILITY for step in range(STEPS_OF_PROBABILITY)]
    return tuple(round(p if measure == "probability" else math.log(p), 6) for p in shares)


def find_threshold(
    sureness: np.ndarray,
    agrees: np.ndarray,
    agreement: float,
    confidence: float,
    order: Sequence[float],
) -> TestedThreshold | None:
    """Test the thresholds in `order`; return the last one that passes before the first failure.

    Returns None if the first threshold fails. For each row, `sureness` is how sure the first model
    was (minus infinity: always escalated, infinity: never), and `agrees` says whether both models
    gave the same answer. Rows with a sureness below the threshold are escalated. They count as
    agreeing, because they get the larger model's answer. A threshold passes if, with probability
    `confidence`, at least the share `agreement` of all rows then agrees.
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
