"""Tests after every run whether a share fell below that of a job's first runs. No I/O.

The share is the accuracy: rows are right or wrong. Or it is the agreement of a small model with a
larger one: a row counts as right if their answers are equal.

The first `BASELINE_RUNS` measured runs are the baseline, with which later runs are compared. The
e-value of a later run says how strongly all runs so far speak against "the mean accuracy of each
run is at least that of the baseline". While that is true, the e-value reaches 100 in at most one of
a hundred series of runs, however many runs there are and however often somebody looks (Ville's
inequality).

The e-value is a product of two factors. It is computed for every accuracy p that the baseline may
have, and the smallest product counts:

- the evidence of the baseline against p. It is a likelihood ratio: the likelihood of the baseline's
  rows, averaged over all accuracies by Jeffreys' prior, divided by their likelihood at accuracy p
  (R. E. Krichevsky and V. K. Trofimov, IEEE Transactions on Information Theory 27, 1981);
- the evidence that the later runs have less than p. It is the wealth of a gambler who bets against
  each right answer (I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by
  betting", Journal of the Royal Statistical Society B 86, 2024). Half of the stake is never bet.
  The other half is spread over bets and over the run with which betting begins, so that a drop
  after many good runs is noticed.

Rows may differ in their chance of being right: the products then only become smaller (inequality of
the means).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefect_raybatch.ledger.strict import Count, Number, StrictRecord

BASELINE_RUNS = 14
ALARM = 100.0  # e-value at which the alarm is raised: at most one false alarm in 100 series
MOST_LATER = 400  # newest runs after the baseline with which betting may begin
BETS = np.geomspace(0.01, 1.0, 12)  # shares of the stake; at most 1, so that wealth stays positive
GRID = 600  # accuracies at which the product is computed
RULED_OUT = 30.0  # log of the baseline's evidence beyond which an accuracy is ruled out
LARGEST = 1e9  # largest e-value that is written
NEWEST_NAMED = 60  # newest runs that a series names
ACCURACY, AGREEMENT = "accuracy", "agreement"  # names of shares
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ShareSeries(StrictRecord):
    """The shares of right rows of a job's measured runs, up to and including one run.

    `key` is the series key. It identifies how the runs were measured, such as the golden file or
    the judge; another key begins a new series. `measure` names the share (ACCURACY or AGREEMENT).
    `runs` has the run keys of the newest measured runs, oldest first; a repaired run has the run
    key of the original.

    The baseline is the first `baseline` runs. In these together, `right` of `rows` rows were right.
    `later` runs followed; `after` has (right, rows) of the newest of these runs, oldest first.
    `e_value` says how strongly the runs show that the share fell.

    If a series with another series key came before, `replaces` is the run key of its last run. If
    that series had raised an alarm that was still on, `replaced_alarm` is the run key of the last
    run with the alarm. If the newest run was measured before under other series keys, `taken_from`
    has these keys; the run no longer counts in their series.
    """

    key: str
    baseline: Count
    right: Count
    rows: Count
    later: Count = 0
    after: tuple[tuple[Count, Count], ...] = ()
    e_value: Number = 1.0
    runs: tuple[str, ...] = ()
    measure: str = ACCURACY
    replaces: str = ""
    replaced_alarm: str = ""
    taken_from: tuple[str, ...] = ()

    @property
    def lost_alarm(self) -> bool:
        """Return whether a new series hides the alarm of the series that it replaced.

        True if the replaced series' alarm was on and this series has no run after its baseline yet.
        The share may have been low in the whole baseline. Then it cannot fall below it, and this
        series raises no alarm.
        """
        return bool(self.replaced_alarm) and not self.later

    @property
    def rings(self) -> bool:
        """Return whether to report that the share of right rows fell.

        It fell if the e-value (how strongly the runs speak against an unchanged share; 1 is no
        evidence) has reached ALARM.
        """
        return self.e_value >= ALARM

    def short(self) -> str:
        """Return the e-value as text, or e.g. `baseline 3 of 14` if no run follows it yet."""
        if not self.later:
            return f"baseline {self.baseline} of {BASELINE_RUNS}"
        return f"over {LARGEST:,.0f}" if self.e_value >= LARGEST else f"{self.e_value:,.3g}"

    def text(self) -> str:
        """Return in one line whether the share fell, with the e-value and the baseline's share.

        If it fell, the text names the run with which it probably did, and says what to do. While
        there is no run after the baseline, it says instead which run of the baseline this is.
        """
        if not self.later:
            begun = f"run {self.baseline} of the {BASELINE_RUNS} that later ones are compared with"
            if not self.replaces:
                return begun
            what = "models or threshold" if self.measure == AGREEMENT else "golden rows or judge"
            rang = f"; the alarm rang in run {self.replaced_alarm}" if self.replaced_alarm else ""
            return f"{begun}, because {what} changed after run {self.replaces}{rang}"
        base = f"{self.right / self.rows:.1%} in the first {BASELINE_RUNS} runs"
        about = f"(e-value {self.short()}, alarm at {ALARM:g}; {base})"
        if not self.rings:
            return f"no sign of a lower {self.measure} {about}"
        began = self.fell_with()
        since, then = (f", probably with run {began}", "with it") if began else ("", "before")
        return f"the {self.measure} fell{since} {about}. Look at what changed {then}: job or input"

    def fell_with(self) -> str:
        """Return the key of the run with which the share most probably fell; "" if not known.

        This is the run R for which the runs from R on speak most strongly for a lower share. It is
        not known if no run follows the baseline, if no row of the baseline is right, or if the run
        is too old to be in `runs`.
        """
        if not self.after or not self.right:
            return ""
        share = np.array([self.right / self.rows])
        logs = _log_wealth(share, self.later, self.after)[0]
        back = len(self.after) - int(logs.max(axis=0).argmax())
        return self.runs[-back] if back <= len(self.runs) else ""


def continued(
    before: ShareSeries | None,
    key: str,
    right: int,
    rows: int,
    *,
    run: str,
    measure: str = ACCURACY,
) -> ShareSeries:
    """Return the series `before` with one more run, in which `right` of `rows` rows were right.

    If `before` is None or has another `key`, the run begins a new series. `run` is the run's key;
    for a repaired run it is the key of the original run.
    """
    if before is None:
        before = ShareSeries(key, 0, 0, 0)
    elif before.key != key:
        before = new_series_after(before, key)
    named: dict[str, Any] = {
        "runs": (*before.runs, run)[-NEWEST_NAMED:],
        "measure": measure,
        "replaces": before.replaces,
        "replaced_alarm": before.replaced_alarm,
    }
    if before.baseline < BASELINE_RUNS:
        base = (before.baseline + 1, before.right + right, before.rows + rows)
        return ShareSeries(key, *base, **named)
    later, after = before.later + 1, (*before.after, (right, rows))[-MOST_LATER:]
    found = e_value(before.right, before.rows, later, after)
    return ShareSeries(
        *(key, before.baseline, before.right, before.rows, later, after),
        e_value=float(f"{found:.6g}"),
        **named,
    )


def new_series_after(before: ShareSeries, key: str) -> ShareSeries:
    """Return an empty series with the series key `key`, which replaces the series `before`."""
    last = before.runs[-1] if before.runs else ""
    alarm = last if before.rings else before.replaced_alarm if before.lost_alarm else ""
    return ShareSeries(key, 0, 0, 0, replaces=last, replaced_alarm=alarm)


def e_value(right: int, rows: int, later: int, after: tuple[tuple[int, int], ...]) -> float:
    """Return the e-value of `later` runs: how strongly they show a share below the baseline's.

    In the baseline, `right` of `rows` rows were right. `after` has (right, rows) of the newest
    later runs, oldest first. Returns 1 (no evidence) if `after` is empty or no row of the baseline
    is right.

    The minimum over the baseline's accuracy (see the module) is computed on a grid of accuracies.
    Between two points of the grid, each of the two factors gets the smaller of its values at these
    points. So the result is never too large.
    """
    if not right or not after:  # no share is below 0
        return 1.0
    share = right / rows
    low = _far_below(right, rows)
    grid = np.linspace(low, share, GRID)
    against = _log_against(grid, right, rows)
    for_less = _log_for_less(grid, later, after)
    found = np.append(against[1:] + for_less[:-1], against[0] + math.log(0.5))
    return float(min(LARGEST, math.exp(min(found.min(), 50.0))))


def _log_against(p: Floats, right: int, rows: int) -> Floats:
    """Return, for each accuracy in `p`, the log of the baseline's evidence against it.

    The evidence is a likelihood ratio. Its numerator is the likelihood of the baseline, averaged
    over all accuracies by Jeffreys' prior; its denominator is the likelihood at that accuracy. In
    the baseline, `right` of `rows` rows were right.
    """
    wrong = rows - right
    mixed = math.lgamma(right + 0.5) + math.lgamma(wrong + 0.5) - math.lgamma(rows + 1)
    mixed -= math.log(math.pi)
    of_p = right * np.log(p) + (wrong * np.log1p(-p) if wrong else 0.0)
    found: Floats = mixed - of_p
    return found


def _far_below(right: int, rows: int) -> float:
    """Return the highest accuracy that the baseline rules out as too low.

    An accuracy is ruled out if the log of the evidence against it (`_log_against`) exceeds
    RULED_OUT. In the baseline, `right` of `rows` rows were right.
    """
    low, high = 0.0, right / rows
    for _ in range(60):  # below the baseline's share, the evidence falls with the accuracy
        middle = (low + high) / 2
        if middle == 0.0 or _log_against(np.array(middle), right, rows) > RULED_OUT:
            low = middle
        else:
            high = middle
    return high


def _log_for_less(grid: Floats, later: int, after: tuple[tuple[int, int], ...]) -> Floats:
    """Return, for each accuracy in `grid`, the log of the evidence that later runs are below it.

    The evidence is the wealth of a gambler who bets half of the stake (see the module). `later` and
    `after` are as in `e_value`.
    """
    logs = _log_wealth(grid, later, after)
    most = np.maximum(logs.max(axis=(1, 2)), 0.0)
    wealth = np.exp(logs - most[:, None, None]).sum(axis=(1, 2))
    found: Floats = most + np.log(0.5 * np.exp(-most) + 0.5 * wealth)
    return found


def _log_wealth(grid: Floats, later: int, after: tuple[tuple[int, int], ...]) -> Floats:
    """Return the log of the wealth of many gamblers who bet against right answers, each weighted.

    A gambler assumes an accuracy, always bets the same share of the stake, and begins with one of
    the runs. The array has the dimensions (accuracies in `grid`, shares in BETS, first runs in
    `after`). `later` and `after` are as in `e_value`.
    """
    counts = np.array(after, np.float64)
    since = counts[::-1].cumsum(axis=0)[::-1]  # right and rows from each run on
    begins = np.arange(later - len(after) + 1, later + 1, dtype=np.float64)
    weights = -np.log(begins * (begins + 1.0)) - math.log(len(BETS))
    wins = np.log1p(np.outer(grid, BETS))  # log growth of the stake by each wrong answer
    losses = np.log1p(-np.outer(1.0 - grid, BETS))  # and by each right one
    wrong, hits = (since[:, 1] - since[:, 0]), since[:, 0]
    found: Floats = np.multiply.outer(wins, wrong) + np.multiply.outer(losses, hits) + weights
    return found
