"""How many rows show that two ways of asking agree, and what they show. Pure.

The bound is the exact one-sided lower limit for a binomial proportion (C. J. Clopper and E. S.
Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
Biometrika 26, 1934): the proportion at which that many agreements, or more, have the probability 1
- confidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.engine import TRY_FP8
from prefect_raybatch.words import counted

CONFIDENCE = 0.95  # over all that is tried together: what is tried more often must show more
LEAST_SAMPLE = 200  # rows
MOST_SAMPLE = 4000  # unless fewer cannot show it


def lower_bound(agreed: int, rows: int, confidence: float) -> float:
    """Return the lower confidence limit (0 to 1) for the share of rows that agree.

    `agreed` of `rows` rows drawn at random did.
    """
    if not 0 < agreed <= rows:
        return 0.0
    differ = np.arange(rows - agreed + 1)
    ways = np.array(
        [math.lgamma(rows + 1) - math.lgamma(j + 1) - math.lgamma(rows - j + 1) for j in differ]
    )
    low, high = 0.0, 1.0
    for _ in range(50):  # the chance of so few disagreements grows with the share
        share = (low + high) / 2
        logs = ways + differ * math.log1p(-share) + (rows - differ) * math.log(share)
        if np.exp(logs).sum() < 1 - confidence:
            low = share
        else:
            high = share
    return low


def confidence_of_each(tries: int) -> float:
    """Return the confidence that each of `tries` comparisons needs (Bonferroni correction)."""
    return 1 - (1 - CONFIDENCE) / max(1, tries)


def least_sample(least: float, confidence: float) -> int:
    """Return how many rows show the share `least` if the answers to all of them agree."""
    return math.ceil(math.log(1 - confidence) / math.log(least) - 1e-9)


def sample_size(least: float, confidence: float) -> int:
    """Return how many rows to compare, so that at least `least` of all answers are shown to agree.

    Enough if half as many rows differ as `least` allows: at least `LEAST_SAMPLE`, and at most
    `MOST_SAMPLE` unless even a sample without differences needs more.
    """
    must = least_sample(least, confidence)
    for differ in range(1, 100):
        rows = math.ceil(2 * differ / (1 - least))
        if lower_bound(rows - differ, rows, confidence) >= least:
            break
    return max(min(rows, MOST_SAMPLE), must, LEAST_SAMPLE)


def trial_rows(tries: Sequence[Mapping[str, str]], least: float, rows: int) -> int:
    """Return how many of the `rows` of a run are asked in both precisions; 0 without `tries`.

    `least` is the share of the answers that must agree (limits.min_agreement). Raises `ConfigError`
    if even all rows could not show that.
    """
    if not tries:
        return 0
    confidence = confidence_of_each(len(tries))
    need = least_sample(least, confidence)
    if rows < need:
        shown = lower_bound(rows, rows, confidence)
        field = next(iter(tries[0]))
        raise ConfigError(
            f"limits.min_agreement: {counted(rows, 'row')} cannot show {least}: if all answers "
            f"agreed, they would show {shown:.4f}, and {least} needs {need:,} rows. Lower "
            f"limits.min_agreement, set engine.{field} to fp8 instead of {TRY_FP8}, or remove it"
        )
    return min(rows, sample_size(least, confidence))
