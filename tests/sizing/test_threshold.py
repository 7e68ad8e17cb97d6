"""The threshold of a cascade: exact tests, in an order that the data do not choose."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats

from prefect_raybatch.sizing import threshold
from prefect_raybatch.sizing.agreement import lower_bound
from prefect_raybatch.sizing.threshold import find_threshold, thresholds

ORDER = thresholds("probability")


@given(some.lists(some.tuples(some.floats(0, 1), some.booleans()), min_size=1, max_size=300))
def test_each_threshold_up_to_the_one_found_passes_the_exact_test_and_the_next_fails(rows):
    sureness, agrees = np.array([s for s, _ in rows]), np.array([a for _, a in rows])
    found = find_threshold(sureness, agrees, 0.9, 0.95, ORDER)
    passed = []
    for below in ORDER:
        wrong = int(((sureness >= below) & ~agrees).sum())
        passed.append(stats.binomtest(len(rows) - wrong, len(rows), 0.9, "greater").pvalue <= 0.05)
    last = next((i for i, one in enumerate(passed) if not one), len(passed)) - 1
    assert (None if found is None else found.below) == (ORDER[last] if last >= 0 else None)
    if found is not None:
        assert found.escalated == int((sureness < found.below).sum())
        exact = stats.beta.ppf(0.05, found.agreed, found.rows - found.agreed + 1)
        assert found.bound == pytest.approx(exact, abs=1e-9)


def test_in_simulated_samples_the_guarantee_is_broken_at_most_as_often_as_stated(monkeypatch):
    """The share of all rows that agree is known here, as a function of the threshold."""
    monkeypatch.setattr(threshold, "lower_bound", cache(lower_bound))
    chance = np.random.default_rng(7)
    broken = found_any = 0
    for _ in range(1000):
        sureness = chance.random(400)
        agrees = chance.random(400) < 0.75 + 0.25 * sureness
        found = find_threshold(sureness, agrees, 0.95, 0.95, ORDER)
        below = 1.0 if found is None else found.below
        found_any += found is not None
        # Rows kept have a sureness from `below` to 1, and differ with the chance (1 - s) / 4.
        broken += 1 - (1 - below) ** 2 / 8 < 0.95
    assert found_any == 1000
    assert broken <= stats.binom.ppf(0.999, 1000, 0.05)


def test_thresholds_fall_and_are_the_same_shares_for_both_measures():
    logs = thresholds("logprob")
    assert ORDER[0] == 1 and logs[0] == 0 and len(ORDER) == len(logs)
    assert all(np.diff(ORDER) < 0) and all(np.diff(logs) < 0)


def test_rows_that_are_always_escalated_agree_and_those_never_escalated_do_not():
    sureness = np.array([-np.inf] * 100 + [np.inf] * 2)
    agrees = np.array([False] * 102)
    found = find_threshold(sureness, agrees, 0.9, 0.95, ORDER)
    assert found is not None and (found.agreed, found.escalated) == (100, 100)
    assert find_threshold(sureness, agrees, 0.99, 0.95, ORDER) is None
