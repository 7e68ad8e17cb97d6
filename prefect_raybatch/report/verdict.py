"""Describes a run's outcome in one line, for the run history and the states of flow runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from prefect_raybatch.report.advice import DEADLINE_MISSED
from prefect_raybatch.report.drift import LEAST_RUNS, MOST_RUNS, RUN_CHANCE, chance_after
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import duration
from prefect_raybatch.words import counted, money

FEW_ROWS = 0.5  # share of the usual rows below which a run has few
SLOW = 2.0  # times the usual seconds
SLOW_LEAST = 60.0  # seconds more than usual, below which short runs differ anyway
COMPARED_RUNS = 7  # completed runs that give the usual numbers of rows and seconds
NOTHING_TO_DO = "Nothing to do."
DRIFT_REMARK = "The run has drifted from those before it."
FALLEN_REMARK = "The accuracy fell below that of the first runs: see the report."
DISAGREEMENT_REMARK = "The models of the cascade agree on fewer rows than in the first runs."
LOST_ALARM_REMARK = "A new baseline began while an alarm rang: see the report."
LATE_REMARK = "The deadline was missed: see the advice in the report."


def outcome_text(
    rows: int,
    good: int,
    failed: int,
    seconds: float,
    cost: float | None,
    remarks: Sequence[str] = (),
    currency: str = "",
) -> str:
    """Describe the outcome of a completed run in one line, followed by `remarks`.

    `rows` are all rows, `good` the answered and `failed` the quarantined ones. `seconds` is the
    elapsed time. Without remarks it ends with "Nothing to do.".
    """
    parts = [f"{good:,} of {counted(rows, 'row')}"]
    if failed:
        share = 100 * failed / rows
        parts.append(f"{failed:,} in quarantine ({max(share, 0.1):.1f} %)")
    if left_out := rows - good - failed:
        parts.append(f"{left_out:,} left out")
    parts.append(duration(seconds))
    if cost is not None:
        parts.append(f"cost {money(cost, currency)}")
    return " ".join([f"{', '.join(parts)}.", *(remarks or [NOTHING_TO_DO])])


def verdict_of(report: RunReport, remarks: Sequence[str] = (), seconds: float = 0.0) -> str:
    """Describe the outcome of the completed run of a report; see `outcome_text`.

    `seconds` is the run's elapsed time, 0 if unknown. If the report has a longer time, that is
    shown.
    """
    seconds = max(report.elapsed, report.seconds, seconds)
    cost = report.cost.get("total")
    if missed_deadline(report):
        remarks = [*remarks, LATE_REMARK]
    counts = (report.rows, report.good, report.failed)
    return outcome_text(*counts, seconds, cost, remarks, report.currency)


def missed_deadline(report: RunReport) -> bool:
    """Return whether the run took longer than limits.deadline, by the report's advice."""
    return any(advice.about == DEADLINE_MISSED for advice in report.advice)


def few_rows(rows: int, earlier: Sequence[int]) -> str | None:
    """Return a remark if a run has less than half the usual number of rows, else None.

    `earlier` are the numbers of rows of earlier completed runs, newest first; the usual number is
    the median of the newest 7. If there are 14 or more, `rows` must also differ from their mean by
    more than chance explains (`chance_after`).
    """
    logs = [math.log(number) for number in earlier[:MOST_RUNS] if number > 0]
    if rows and len(logs) >= LEAST_RUNS and chance_after(math.log(rows), logs) >= RUN_CHANCE:
        return None
    compared = earlier[:COMPARED_RUNS]
    if not compared or rows >= FEW_ROWS * (usual := median(compared)):
        return None
    text = _usually(len(compared), f"{usual:,.0f}")
    return f"Far fewer rows than usual: {rows:,}; {text}. Check the input."


def _usually(runs: int, value: str) -> str:
    """Return the end of a sentence: that `value` is the median of the last `runs` runs."""
    if runs == 1:
        return f"the completed run before has {value}"
    return f"the median of the last {runs} completed runs is {value}"


def usual_seconds(earlier: Sequence[float]) -> float | None:
    """Return the usual time of a run in seconds: the median of the newest 7; None if there is none.

    `earlier` are the seconds of earlier completed runs, newest first.
    """
    return median(earlier[:COMPARED_RUNS]) if earlier else None


def is_slow(seconds: float, usual: float | None) -> bool:
    """Return whether a run takes at least twice the usual time and at least a minute longer.

    False if `usual` is None.
    """
    return usual is not None and seconds >= max(SLOW * usual, usual + SLOW_LEAST)


def slow(seconds: float, earlier: Sequence[float]) -> str | None:
    """Return a remark if a run took much longer than usual (`is_slow`), else None.

    `earlier` are the seconds of earlier completed runs, newest first.
    """
    usual = usual_seconds(earlier)
    if usual is None or not is_slow(seconds, usual):
        return None
    text = _usually(len(earlier[:COMPARED_RUNS]), duration(usual))
    return f"At least twice the usual time: {duration(seconds)}; {text}."
