"""Whether the accuracy fell below that of a job's first runs, looked at after every run. Pure.

The first `BASELINE_RUNS` measured runs are the baseline, and stay it. The e-value of each later run
says how strongly all runs so far speak against "the mean accuracy of each run is at least that of
the baseline". While that is true, the e-value reaches 100 in at most one of a hundred series of
runs, however many runs there are and however often somebody looks (Ville's inequality).

It is the smallest, over all accuracies p that the baseline may have, of the product of
- the evidence of the baseline against p: a likelihood ratio, mixed by Jeffreys' prior (R. E.
  Krichevsky and V. K. Trofimov, IEEE Transactions on Information Theory 27, 1981), and
- the evidence of the later runs for less than p: the wealth of a gambler who bets against each
  right answer (I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by
  betting", Journal of the Royal Statistical Society B 86, 2024). Half of the stake is never bet.
  The other half is spread over bets and over the run with which betting begins, so that a drop
  after many good runs is noticed.

A row may have its own chance of being right: the products then only become smaller (inequality of
the means).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefect_raybatch.ledger.strict import Count, Number, StrictRecord

BASELINE_RUNS = 14
ALARM = 100.0  # the e-value that rings: at most one false alarm in so many series
MOST_LATER = 400  # newest runs after the baseline with which betting may begin
BETS = np.geomspace(0.01, 1.0, 12)  # shares of the stake; at most 1, so that wealth stays positive
GRID = 600  # accuracies at which the product is computed
RULED_OUT = 30.0  # log of the baseline's evidence, beyond which an accuracy need not be looked at
LARGEST = 1e9  # e-value that is written
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AccuracySeries(StrictRecord):
    """The measured runs of a job up to one of them.

    `key` identifies what they were measured by: another golden file or judge begins a new series.
    The first `baseline` runs had `right` of `rows` right; `after` are (right, rows) of the newest
    later ones, of which `later` there were in all.
    """

    key: str
    baseline: Count
    right: Count
    rows: Count
    later: Count = 0
    after: tuple[tuple[Count, Count], ...] = ()
    e_value: Number = 1.0

    @property
    def rings(self) -> bool:
        """Return whether the accuracy fell."""
        return self.e_value >= ALARM

    def short(self) -> str:
        """Return the e-value, or how far the baseline is."""
        if not self.later:
            return f"baseline {self.baseline} of {BASELINE_RUNS}"
        return f"{self.e_value:,.3g}"

    def text(self) -> str:
        """Return the finding in one line."""
        if not self.later:
            return f"run {self.baseline} of the {BASELINE_RUNS} that later ones are compared with"
        finding = "the accuracy fell" if self.rings else "no sign of a lower accuracy"
        base = f"{self.right / self.rows:.1%} in the first {BASELINE_RUNS} runs"
        return f"{finding} (e-value {self.e_value:,.3g}, alarm at {ALARM:g}; {base})"


def continued(before: AccuracySeries | None, key: str, right: int, rows: int) -> AccuracySeries:
    """Return the series with one more run, of which `right` of `rows` rows were right."""
    if before is None or before.key != key:
        before = AccuracySeries(key, 0, 0, 0)
    if before.baseline < BASELINE_RUNS:
        return AccuracySeries(key, before.baseline + 1, before.right + right, before.rows + rows)
    later, after = before.later + 1, (*before.after, (right, rows))[-MOST_LATER:]
    found = e_value(before.right, before.rows, later, after)
    return AccuracySeries(
        *(key, before.baseline, before.right, before.rows, later, after),
        e_value=float(f"{found:.6g}"),
    )


def e_value(right: int, rows: int, later: int, after: tuple[tuple[int, int], ...]) -> float:
    """Return the e-value of `later` runs, the newest of which are `after`, against a baseline.

    Between two grid points the smaller factor of each is taken, so the result is never too large.
    """
    if not right or not after:  # nothing is lower than no right answer
        return 1.0
    share = right / rows
    low = _far_below(right, rows)
    grid = np.linspace(low, share, GRID)
    against = _log_against(grid, right, rows)
    for_less = _log_for_less(grid, later, after)
    found = np.append(against[1:] + for_less[:-1], against[0] + math.log(0.5))
    return float(min(LARGEST, math.exp(min(found.min(), 50.0))))


def _log_against(p: Floats, right: int, rows: int) -> Floats:
    """Return the log of the baseline's evidence against each accuracy in `p`."""
    wrong = rows - right
    mixed = math.lgamma(right + 0.5) + math.lgamma(wrong + 0.5) - math.lgamma(rows + 1)
    mixed -= math.log(math.pi)
    of_p = right * np.log(p) + (wrong * np.log1p(-p) if wrong else 0.0)
    found: Floats = mixed - of_p
    return found


def _far_below(right: int, rows: int) -> float:
    """Return an accuracy below the baseline's that its evidence rules out."""
    low, high = 0.0, right / rows
    for _ in range(60):  # below the baseline's share, the evidence falls with the accuracy
        middle = (low + high) / 2
        if middle == 0.0 or _log_against(np.array(middle), right, rows) > RULED_OUT:
            low = middle
        else:
            high = middle
    return high


def _log_for_less(grid: Floats, later: int, after: tuple[tuple[int, int], ...]) -> Floats:
    """Return, for each accuracy, the log of the later runs' evidence that theirs is less."""
    counts = np.array(after, np.float64)
    since = counts[::-1].cumsum(axis=0)[::-1]  # right and rows from each run on
    begins = np.arange(later - len(after) + 1, later + 1, dtype=np.float64)
    weights = -np.log(begins * (begins + 1.0)) - math.log(len(BETS))
    wins = np.log1p(np.outer(grid, BETS))  # of each wrong answer
    losses = np.log1p(-np.outer(1.0 - grid, BETS))  # of each right one
    wrong, hits = (since[:, 1] - since[:, 0]), since[:, 0]
    logs = np.multiply.outer(wins, wrong) + np.multiply.outer(losses, hits) + weights
    most = np.maximum(logs.max(axis=(1, 2)), 0.0)
    wealth = np.exp(logs - most[:, None, None]).sum(axis=(1, 2))
    found: Floats = most + np.log(0.5 * np.exp(-most) + 0.5 * wealth)
    return found
