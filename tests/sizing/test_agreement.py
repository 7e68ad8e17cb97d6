"""What a sample shows of all rows, against tables and against chance itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.sizing.agreement import (
    bonferroni_confidence,
    least_sample,
    lower_bound,
    sample_size,
    trial_rows,
)


@pytest.mark.parametrize(
    ("agreed", "rows", "confidence", "bound"),
    [  # quantile of the beta distribution (agreed, rows - agreed + 1) at 1 - confidence
        (10, 10, 0.95, 0.7411),
        (9, 10, 0.95, 0.6058),
        (5, 10, 0.95, 0.2224),
        (8, 10, 0.975, 0.4439),
        (1, 10, 0.95, 0.0051),
        (299, 299, 0.95, 0.9900),
    ],
)
def test_the_bound_is_that_of_the_tables(agreed, rows, confidence, bound):
    assert lower_bound(agreed, rows, confidence) == pytest.approx(bound, abs=6e-5)


@given(rows=st.integers(1, 400), data=st.data())
def test_the_bound_is_below_what_was_seen_and_grows_with_it(rows, data):
    agreed = data.draw(st.integers(0, rows))
    found = lower_bound(agreed, rows, 0.95)
    assert 0 <= found <= agreed / rows
    assert found <= lower_bound(min(rows, agreed + 1), rows, 0.95) + 1e-12
    assert lower_bound(agreed, rows, 0.99) <= found


def test_the_bound_is_passed_by_chance_no_oftener_than_it_says():
    # at a share of 0.98, how often 300 rows show 0.98 or more: the sum over all outcomes
    rows, share = 300, 0.98
    from math import comb

    wrong = sum(
        comb(rows, n) * share**n * (1 - share) ** (rows - n)
        for n in range(rows + 1)
        if lower_bound(n, rows, 0.95) > share
    )
    assert 0 < wrong <= 0.05


@pytest.mark.parametrize("least", [0.5, 0.9, 0.99, 0.995, 0.999])
def test_the_sample_can_show_what_is_asked_for(least):
    need = least_sample(least, 0.95)
    assert lower_bound(need, need, 0.95) >= least > lower_bound(need - 1, need - 1, 0.95)
    size = sample_size(least, 0.95)
    assert size >= need
    if least <= 0.99:  # with half of what may differ
        differ = int(size * (1 - least) / 2)
        assert lower_bound(size - differ, size, 0.95) >= least


def test_what_is_tried_more_often_must_show_more():
    assert bonferroni_confidence(1) == pytest.approx(0.95)
    assert bonferroni_confidence(3) == pytest.approx(1 - 0.05 / 3)


def test_too_few_rows_are_told_with_what_they_could_show():
    tries = [{"quantization": "fp8"}]
    assert trial_rows(tries, 0.99, 299) == 299
    assert trial_rows(tries, 0.99, 10**9) == sample_size(0.99, 0.95) == 1200
    with pytest.raises(ConfigError) as told:
        trial_rows(tries, 0.99, 100)
    text = str(told.value)
    assert "limits.min_agreement: 100 rows cannot show 0.99" in text
    assert "0.9705" in text and "299 rows" in text and "set engine.quantization to fp8" in text
    assert trial_rows((), 0.99, 100) == 0
