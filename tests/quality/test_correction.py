"""The judge's error: both corrections against simulated nights, scipy, and worked cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from prefect_raybatch.quality import correction
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.quality.correction import (
    LEAST_LABELLED,
    Confusion,
    Labelled,
    by_confusion,
    by_labels,
    corrected,
)

NIGHTS = 10_000
SHARES = (0.5, 0.7, 0.9, 0.97, 0.99)
SAMPLES = (50, 200, 1000)
JUDGES = ((0.95, 0.9), (0.9, 0.7), (0.99, 0.99), (0.8, 0.6))  # calls right right, wrong wrong
Found = tuple[np.ndarray, np.ndarray, np.ndarray]


def limits(hits: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return [estimate, low, high] of each share, by scipy."""
    low = np.where(hits > 0, stats.beta.ppf(0.025, hits, rows - hits + 1), 0.0)
    high = np.where(hits < rows, stats.beta.ppf(0.975, hits + 1, rows - hits), 1.0)
    return np.array([hits / rows, low, high])


@pytest.mark.parametrize(("hits", "rows"), [(0, 7), (3, 7), (7, 7), (188, 200), (990, 1000)])
def test_the_limits_of_one_share_are_those_of_scipy(hits: int, rows: int) -> None:
    found = stats.binomtest(hits, rows).proportion_ci(0.95, "exact")
    assert interval(hits, rows) == pytest.approx((found.low, found.high), abs=1e-9)


@pytest.mark.parametrize("freedom", [LEAST_LABELLED - 1, 100, 1000])
def test_the_quantile_of_student_is_that_of_scipy(freedom: int) -> None:
    found = correction.student_quantile(np.float64(freedom))
    assert found == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


def nights_by_confusion(
    night: np.random.Generator, share: float, rows: int, golden: int, judge: tuple[float, float]
) -> Found:
    """Return the corrected shares of nights with at least one golden row of each kind."""
    right = night.binomial(golden, share, NIGHTS)
    right = right[(right > 0) & (right < golden)]
    wrong = golden - right
    called = night.binomial(rows, share * judge[0] + (1 - share) * (1 - judge[1]), len(right))
    with np.errstate(invalid="ignore"):
        return corrected(
            limits(called, np.full(len(right), rows)),
            limits(night.binomial(right, judge[0]), right),
            limits(night.binomial(wrong, 1 - judge[1]), wrong),
        )


@pytest.mark.parametrize("rows", SAMPLES)
def test_the_confusion_covers_the_accuracy_of_ten_thousand_nights(rows: int) -> None:
    night = np.random.default_rng(47)
    for golden in (50, 200):
        for share in SHARES:
            for judge in JUDGES:
                _, low, high = nights_by_confusion(night, share, rows, golden, judge)
                covered = ((low <= share) & (share <= high)).mean()
                assert covered >= 0.94, (golden, share, judge, covered)


def test_the_confusion_removes_what_an_uncorrected_judge_gets_wrong() -> None:
    night = np.random.default_rng(1)
    found, low, high = nights_by_confusion(night, 0.9, 1000, 1000, (0.9, 0.7))
    naive = 0.9 * 0.9 + 0.1 * 0.3
    assert naive == pytest.approx(0.84) and np.nanmean(found) == pytest.approx(0.9, abs=0.01)
    assert ((low <= naive) & (naive <= high)).mean() < 0.9, "the interval knows the difference"


def test_a_worked_confusion() -> None:
    share, low, high = by_confusion(170, 200, Confusion(180, 171, 20, 4))
    assert share == pytest.approx((0.85 - 0.2) / (0.95 - 0.2))
    assert 0 <= low < share < high <= 1
    perfect = by_confusion(170, 200, Confusion(10**6, 10**6, 10**6, 0))
    assert perfect == pytest.approx((0.85, *interval(170, 200)), abs=1e-3)


@pytest.mark.parametrize(
    ("rows", "judge"),
    [
        (0, Confusion(10, 9, 10, 1)),
        (200, Confusion(0, 0, 10, 1)),
        (200, Confusion(10, 9, 0, 0)),
        (200, Confusion(10, 3, 10, 3)),  # by chance
    ],
)
def test_a_judge_of_which_nothing_is_known_shows_nothing(rows: int, judge: Confusion) -> None:
    share, low, high = by_confusion(rows // 2, rows, judge)
    assert math.isnan(share) and (low, high) == (0.0, 1.0)


def nights_by_labels(
    night: np.random.Generator, share: float, labelled: int, rows: int, judge: tuple[float, float]
) -> Found:
    cells = [share * judge[0], share * (1 - judge[0])]
    cells += [(1 - share) * (1 - judge[1]), (1 - share) * judge[1]]
    table = night.multinomial(labelled, cells, NIGHTS).T.astype(float)
    called = night.binomial(rows, cells[0] + cells[2], NIGHTS).astype(float)
    return by_labels(table, called, np.full(NIGHTS, float(rows)))


@pytest.mark.parametrize("rows", SAMPLES)
def test_labels_cover_the_accuracy_of_ten_thousand_nights(rows: int) -> None:
    night = np.random.default_rng(48)
    for part in (0.1, 0.3, 0.8):
        labelled = max(LEAST_LABELLED, int(part * rows))
        for share in SHARES:
            for judge in JUDGES:
                _, low, high = nights_by_labels(
                    night, share, labelled, max(0, rows - labelled), judge
                )
                covered = ((low <= share) & (share <= high)).mean()
                assert covered >= 0.94, (labelled, share, judge, covered)


def test_a_good_judge_narrows_the_interval_and_a_useless_one_does_not_widen_it() -> None:
    night = np.random.default_rng(3)
    widths = {}
    for name, judge in {"good": (0.98, 0.98), "useless": (0.5, 0.5)}.items():
        _, low, high = nights_by_labels(night, 0.8, 100, 900, judge)
        widths[name] = np.median(high - low)
    alone = np.diff(interval(80, 100))[0]
    assert widths["good"] < 0.6 * alone and widths["useless"] < 1.02 * alone


def test_labels_of_a_sample_alone_give_its_share() -> None:
    share, low, high = Labelled(45, 3, 1, 1).estimate(0, 0)
    assert share == 0.96 and low < 0.96 < high
    assert Labelled(50, 0, 0, 0).estimate(100, 100)[0] == 1.0
