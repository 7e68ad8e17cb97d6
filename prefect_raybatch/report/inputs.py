"""Tests a run's input for more missing values, or more new values, than in earlier runs. Pure.

As in `drift.py`, a run is one observation, however many rows it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import fmean

from prefect_raybatch.ledger.stats import INPUT_FILLED, INPUT_NULLS, MOST_COUNTED
from prefect_raybatch.report.answers import (
    LEAST_ANSWERS,
    NEW_VALUES,
    NULLS,
    Shift,
    largest_changes,
)
from prefect_raybatch.report.drift import (
    LEAST_RUNS,
    MOST_RUNS,
    RUN_CHANCE,
    Distribution,
    share_chance,
    share_of,
)

# Half of the values that are counted, so that a column of many values does not pass as one of few.
FEW_VALUES = MOST_COUNTED // 2
# Rare nulls and values come in bursts, so their thresholds are higher than those of answers.
LEAST_NULLS, LEAST_NEW = 0.05, 0.075  # smallest reported changes of a share of the rows
BEYOND_NULLS = 4.0  # for nulls, in place of `drift.BEYOND`
_NULL, _FILLED, _NEW = "null", "filled", "new"


@dataclass(frozen=True)
class Inputs:
    """Counts of the values in the columns of a run's input.

    `nulls` is {column: {"null": rows, "filled": rows}}: the rows without and with a value. `values`
    is {column: {digest of a value: rows}}. It lacks columns whose type cannot be counted. For a
    column with many different values it has only the common values.
    """

    nulls: Mapping[str, Distribution] = field(default_factory=dict)
    values: Mapping[str, Distribution] = field(default_factory=dict)

    def filled(self, column: str) -> float:
        """Return the number of rows that have a value in the column."""
        return self.nulls.get(column, {}).get(_FILLED, 0.0)

    def rows(self, column: str) -> float:
        """Return the number of rows that were counted for the column."""
        return sum(self.nulls.get(column, {}).values())

    def has_few_values(self, column: str) -> bool:
        """Return whether the column has so few different values that all are counted."""
        values = self.values.get(column, {})
        return len(values) <= FEW_VALUES and sum(values.values()) == self.filled(column)

    def unseen(self, column: str, seen: Set[str]) -> Distribution:
        """Return {"new": rows, "seen": rows}: numbers of rows whose value is not, or is, in `seen`.

        `seen` has digests of values of the column. Nulls are not counted.
        """
        values = self.values.get(column, {})
        known = sum(rows for value, rows in values.items() if value in seen)
        return {_NEW: max(0.0, self.filled(column) - known), "seen": known}


def null_counts(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return {column: {"null": rows, "filled": rows}} from the summed figures of a run's shards."""
    counts: dict[str, dict[str, float]] = {}
    for prefix, name in ((INPUT_NULLS, _NULL), (INPUT_FILLED, _FILLED)):
        for figure, rows in figures.items():
            if figure.startswith(prefix):
                counts.setdefault(figure.removeprefix(prefix), {})[name] = rows
    return counts


def input_drifts(now: Inputs, earlier: Sequence[Inputs], before_key: str) -> tuple[Shift, ...]:
    """Return the shifts of missing and of new values from `earlier` runs that are beyond chance.

    There is at most one shift of each kind (NULLS, NEW_VALUES), over all columns. `earlier` is
    newest first, and `before_key` the run key of the newest. Columns that the run does not count
    are not compared.
    """
    each = (_null_drift(now, earlier, before_key), _value_drift(now, earlier, before_key))
    return tuple(shift for shift in each if shift is not None)


def _null_drift(now: Inputs, earlier: Sequence[Inputs], before_key: str) -> Shift | None:
    shares: dict[str, tuple[float, float]] = {}
    chances: list[float] = []
    number = 0
    for column, counts in now.nulls.items():
        runs = [run.nulls[column] for run in earlier if run.rows(column) >= LEAST_ANSWERS]
        runs = runs[:MOST_RUNS]
        if now.rows(column) < LEAST_ANSWERS or len(runs) < LEAST_RUNS:
            continue
        shares[column] = _usual_and_now(_NULL, counts, runs)
        chances.append(share_chance(counts, runs, _NULL, BEYOND_NULLS))
        number = max(number, len(runs))
    return _shift(NULLS, before_key, shares, chances, number, LEAST_NULLS)


def _value_drift(now: Inputs, earlier: Sequence[Inputs], before_key: str) -> Shift | None:
    """Return how the share of new values differs from that in earlier runs, by column.

    Returns None if the change is small or may be chance. A value of the run is new if no earlier
    run has it; a value of an earlier run is new if no other earlier run has it. Only columns with
    few different values in all earlier runs are compared. `earlier` are newest first; `before_key`
    is the run key of the newest.
    """
    shares: dict[str, tuple[float, float]] = {}
    chances: list[float] = []
    number = 0
    for column in now.nulls:
        runs = [run for run in earlier if run.filled(column) >= LEAST_ANSWERS][:MOST_RUNS]
        if now.filled(column) < LEAST_ANSWERS or len(runs) < LEAST_RUNS:
            continue
        if not all(run.has_few_values(column) for run in runs):
            continue
        found = Counter(value for run in runs for value in run.values.get(column, ()))
        twice = {value for value, number_of_runs in found.items() if number_of_runs > 1}
        unseen, usual = (
            now.unseen(column, found.keys()),
            [run.unseen(column, twice) for run in runs],
        )
        shares[column] = _usual_and_now(_NEW, unseen, usual)
        chances.append(share_chance(unseen, usual, _NEW))
        number = max(number, len(runs))
    return _shift(NEW_VALUES, before_key, shares, chances, number, LEAST_NEW)


def _usual_and_now(
    name: str, now: Distribution, runs: Sequence[Distribution]
) -> tuple[float, float]:
    return fmean(share_of(run, name) for run in runs), share_of(now, name)


def _shift(
    kind: str,
    before_key: str,
    shares: Mapping[str, tuple[float, float]],
    chances: Sequence[float],
    runs: int,
    least: float,
) -> Shift | None:
    """Return how columns changed, as a `Shift`; None if the change is small or may be chance.

    `kind`, `before_key` and `runs` (the number of earlier runs) are fields of the shift. `shares`
    is {column: (usual share, share now)}. `chances` has, for each column, the probability of its
    change by chance. Changes of a share below `least` are small.
    """
    chance = min(1.0, min(chances, default=1.0) * len(chances))  # Bonferroni
    moved = max((abs(now - usual) for usual, now in shares.values()), default=0.0)
    if moved < least or chance >= RUN_CHANCE:
        return None
    return Shift(kind, before_key, moved, chance, largest_changes(shares), runs)
