"""How many rows to compare to show that two settings give the same answers. No I/O.

The bound is the exact one-sided lower limit for a binomial proportion (C. J. Clopper and E. S.
Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
Biometrika 26, 1934): the proportion at which the observed number of agreements, or more, has the
probability 1 - confidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.engine import TRY_FP8
from prefect_raybatch.words import counted

CONFIDENCE = 0.95  # of all comparisons together
LEAST_SAMPLE = 200  # rows
MOST_SAMPLE = 4000  # rows, unless even full agreement needs more


def comparable_rows(larger: Sequence[object]) -> np.ndarray:
    """Return bool[rows]: True for each row to which the larger model gave an answer.

    `larger` are its answers, None for each row that it failed. In such a row, a smaller model's
    answer counts neither as equal nor as different.
    """
    return np.array([answer is not None for answer in larger], bool)


def unanswered_text(rows: int, kind: str, model: str) -> str:
    """Return a text such as `3 checked rows got no answer of the larger model`; "" for 0 `rows`.

    In the example, `kind` is "checked row" and `model` is "the larger model".
    """
    return f"{counted(rows, kind)} got no answer of {model}" if rows else ""


def lower_bound(agreed: int, rows: int, confidence: float) -> float:
    """Return the lower confidence limit (0 to 1) of the share of all rows that agree.

    `agreed` rows agreed in a random sample of `rows` rows. `confidence` is between 0 and 1.
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


def bonferroni_confidence(tries: int) -> float:
    """Return the confidence that each of `tries` comparisons needs, by the Bonferroni correction.

    With it, all results hold together with the confidence `CONFIDENCE`.
    """
    return 1 - (1 - CONFIDENCE) / max(1, tries)


def least_sample(least: float, confidence: float) -> int:
    """Return the fewest rows that, if all agree, show an agreement of `least` (0 to 1)."""
    return math.ceil(math.log(1 - confidence) / math.log(least) - 1e-9)


def sample_size(least: float, confidence: float) -> int:
    """Return how many rows to compare to show that at least the share `least` of all rows agrees.

    The number suffices if the share of rows that differ is at most half of what `least` allows.
    It is at least `LEAST_SAMPLE`, and normally at most `MOST_SAMPLE`. It is higher if even a sample
    in which all rows agree shows less than `least` with only `MOST_SAMPLE` rows.
    """
    must = least_sample(least, confidence)
    for differ in range(1, 100):
        rows = math.ceil(2 * differ / (1 - least))
        if lower_bound(rows - differ, rows, confidence) >= least:
            break
    return max(min(rows, MOST_SAMPLE), must, LEAST_SAMPLE)


def trial_rows(tries: Sequence[Mapping[str, str]], least: float, rows: int) -> int:
    """Return how many of a run's `rows` rows to infer in each precision to decide on `try-fp8`.

    `tries` are the engine arguments of each lower precision; without any, returns 0. `least` is the
    share of answers that must agree (limits.min_agreement). Raises `ConfigError` if `rows` are too
    few to show that.
    """
    if not tries:
        return 0
    confidence = bonferroni_confidence(len(tries))
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
