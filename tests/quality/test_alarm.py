"""The alarm on a lower accuracy: never too many false ones, and a real drop is noticed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from prefect_raybatch.quality.alarm import (
    AGREEMENT,
    ALARM,
    BASELINE_RUNS,
    BETS,
    MOST_LATER,
    ShareSeries,
    continued,
    e_value,
)

Counts = list[tuple[int, int]]


def series_of(counts: Counts, key: str = "k") -> list[ShareSeries]:
    made: list[ShareSeries] = []
    for right, rows in counts:
        made.append(continued(made[-1] if made else None, key, right, rows, run=f"n{len(made)}"))
    return made


def nights(rng: np.random.Generator, share: float, rows: int, number: int) -> Counts:
    return [(int(right), rows) for right in rng.binomial(rows, share, number)]


def by_definition(p: float, right: int, rows: int, after: Counts) -> float:
    """The product for one accuracy of the baseline, term by term."""
    mixed = math.exp(
        math.lgamma(right + 0.5) + math.lgamma(rows - right + 0.5) - math.lgamma(rows + 1)
    )
    against = mixed / math.pi / (p**right * (1 - p) ** (rows - right))
    bets = 0.0
    for first in range(len(after)):
        for bet in BETS:
            wealth = 1.0
            for hits, total in after[first:]:
                wealth *= (1 + bet * p) ** (total - hits) * (1 - bet * (1 - p)) ** hits
            bets += wealth / len(BETS) / ((first + 1) * (first + 2))
    return against * (0.5 + 0.5 * bets)


@pytest.mark.parametrize("after", [[(40, 50)], [(45, 50), (30, 50), (20, 50)], [(50, 50)] * 5])
def test_it_is_the_smallest_product_over_all_accuracies(after: Counts) -> None:
    grid = np.linspace(0.3, 0.999, 700)
    smallest = min(by_definition(float(p), 180, 200, after) for p in grid)
    found = e_value(180, 200, len(after), tuple(after))
    assert 0.8 * smallest <= found <= smallest * 1.0001


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_mean_over_all_outcomes_is_at_most_one(share: float) -> None:
    base, later = 14, 6
    of_base = stats.binom.pmf(range(base + 1), base, share)
    of_later = stats.binom.pmf(range(later + 1), later, share)
    mean = sum(
        of_base[right] * of_later[hits] * e_value(right, base, 1, ((hits, later),))
        for right in range(base + 1)
        for hits in range(later + 1)
    )
    assert 0 < mean <= 1


@pytest.mark.whole
@pytest.mark.parametrize(("share", "rows"), [(0.5, 50), (0.9, 200), (0.99, 50)])
def test_at_most_one_false_alarm_in_a_hundred_series(share: float, rows: int) -> None:
    rng, alarms, many = np.random.default_rng(47), 0, 200
    for _ in range(many):
        counts = nights(rng, share, rows, BASELINE_RUNS + 60)
        right, total = (sum(one[at] for one in counts[:BASELINE_RUNS]) for at in (0, 1))
        after = tuple(counts[BASELINE_RUNS:])
        looks = (1, 2, 4, 8, 15, 30, 60)
        alarms += any(e_value(right, total, n, after[:n]) >= ALARM for n in looks)
    assert alarms <= many / 100


@pytest.mark.whole
def test_nightly_agreements_raise_few_false_alarms_and_a_fall_is_found() -> None:
    """Of 200 checked rows a night, the larger model fails some. The night before may be any."""
    rng, many, false, found = np.random.default_rng(11), 150, 0, 0
    for _ in range(many):
        rows = rng.integers(120, 201, BASELINE_RUNS + 40)
        agreed = [(int(right), int(n)) for n in rows for right in [rng.binomial(n, 0.97)]]
        base = tuple(sum(night[at] for night in agreed[:BASELINE_RUNS]) for at in (0, 1))
        after = tuple(agreed[BASELINE_RUNS:])
        false += any(e_value(*base, n, after[:n]) >= ALARM for n in (1, 3, 10, 40))
        fallen = (*after, *nights(rng, 0.9, 200, 6))
        found += e_value(*base, len(fallen), fallen) >= ALARM
    assert false <= many / 100 and found >= 0.95 * many


def test_the_series_of_an_agreement_says_so() -> None:
    made: ShareSeries | None = None
    for night, agreed in enumerate([97] * BASELINE_RUNS + [60] * 2):
        made = continued(made, "models", agreed, 100, run=f"n{night}", measure=AGREEMENT)
    assert made is not None and made.rings
    assert made.text().startswith(f"the agreement fell, probably with run n{BASELINE_RUNS} (e-")
    assert "Look at what changed with it" in made.text()


def test_the_run_with_which_it_fell_is_named_and_a_capped_value_says_so() -> None:
    made: ShareSeries | None = None
    for night, agreed in enumerate([94] * (BASELINE_RUNS + 20) + [50] * 5):
        made = continued(made, "golden", agreed, 100, run=f"n{night}")
    assert made is not None and made.fell_with() == f"n{BASELINE_RUNS + 20}"
    assert made.short() == "over 1,000,000,000"


def test_a_lower_accuracy_rings_even_after_many_good_runs() -> None:
    rng = np.random.default_rng(1)
    for good in (1, 60):
        before = nights(rng, 0.93, 200, BASELINE_RUNS + good)
        made = series_of(before + nights(rng, 0.8, 200, 5))
        assert not any(one.rings for one in made[: len(before)]) and made[-1].rings
        assert "the accuracy fell" in made[-1].text() and "no sign" in made[len(before) - 1].text()


def test_a_higher_accuracy_never_rings() -> None:
    rng = np.random.default_rng(2)
    assert not any(
        one.rings for one in series_of(nights(rng, 0.8, 200, 14) + nights(rng, 0.95, 200, 30))
    )


def test_the_baseline_is_frozen_and_another_measure_begins_anew() -> None:
    made = series_of([(9, 10)] * BASELINE_RUNS + [(5, 10)] * 3)
    assert [one.later for one in made[-4:]] == [0, 1, 2, 3]
    assert {(one.right, one.rows) for one in made[-4:]} == {(126, 140)}
    assert all(one.e_value == 1.0 for one in made[:BASELINE_RUNS])
    anew = continued(made[-1], "another", 5, 10, run="last")
    assert (anew.baseline, anew.right, anew.later) == (1, 5, 0)


@pytest.mark.parametrize("right", [0, 140])
def test_a_baseline_without_a_right_or_a_wrong_row(right: int) -> None:
    assert 0 < e_value(right, 140, 1, ((10, 10),)) <= 1.0
    fallen = e_value(right, 140, 1, ((0, 100),))
    assert fallen >= ALARM if right else fallen <= 1.0


def test_a_record_stays_small() -> None:
    long = ShareSeries("k", BASELINE_RUNS, 126, 140, MOST_LATER, ((9, 10),) * MOST_LATER)
    made = continued(long, "k", 9, 10, run="last")
    assert made.later == MOST_LATER + 1 and len(made.after) == MOST_LATER
