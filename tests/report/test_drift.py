"""The drift of a run from the runs before it: false alarms, real shifts, and the tail of t."""

from __future__ import annotations

import numpy as np
import pytest

from prefect_raybatch.report.drift import (
    LEAST_RUNS,
    MOST_RUNS,
    chance_after,
    drifts,
    prompt_drift,
    t_tail,
)
from prefect_raybatch.report.inputs import Inputs, input_drifts
from prefect_raybatch.report.verdict import few_rows

LABELS = ("Retail", "Finance", "Law", "Health", "Other")
SHARES = np.array([0.5, 0.25, 0.15, 0.08, 0.02])


# By the tables of Student's t.
@pytest.mark.parametrize(
    ("value", "freedom", "chance"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (3.182, 3, 0.05), (2.160, 13, 0.05), (3.012, 13, 0.01),
     (2.845, 20, 0.01), (3.850, 20, 0.001), (0.0, 7, 1.0)],
)  # fmt: skip
def test_the_tail_of_t(value, freedom, chance):
    assert t_tail(value, freedom) == pytest.approx(chance, rel=5e-3)


def runs_of_a_job(rng, number, rows, spread, shares=SHARES):
    """Return runs whose shares differ from run to run, as those of real inputs do."""
    each = rng.dirichlet(shares * spread, number)
    return [
        {
            "labels": dict(zip(LABELS, map(float, rng.multinomial(rows, p)), strict=True)),
            "ends": dict(
                zip(("stop", "length"), map(float, rng.multinomial(rows, q)), strict=True)
            ),
            "failures": dict(
                zip(("answered", "failed"), map(float, rng.multinomial(rows, f)), strict=True)
            ),
        }
        for p, q, f in zip(
            each,
            rng.dirichlet(np.array([0.97, 0.03]) * spread, number),
            rng.dirichlet(np.array([0.99, 0.01]) * spread, number),
            strict=True,
        )
    ]


COUNTRIES = 0.5 ** np.arange(1, 21)  # from half of the rows to one in a million


def inputs_of_a_job(rng, number, rows, spread, nulls=(0.3, 0.05, 0.01)):
    """Return inputs with three columns of rare and common values, and with nulls."""
    made = []
    for _ in range(number):
        missing = {
            f"c{at}": rng.binomial(rows, rng.beta(share * spread, (1 - share) * spread))
            for at, share in enumerate(nulls)
        }
        values = {}
        for column, null in missing.items():
            counts = rng.multinomial(rows - null, rng.dirichlet(COUNTRIES * spread))
            values[column] = {f"v{at}": float(n) for at, n in enumerate(counts) if n}
        both = {c: {"null": float(n), "filled": float(rows - n)} for c, n in missing.items()}
        made.append(Inputs(both, values))
    return made


@pytest.mark.parametrize("spread", [30, 300, 10_000])  # from runs that differ a lot to few
@pytest.mark.parametrize("rows", [300, 100_000])
def test_at_most_one_false_alarm_in_a_hundred_runs(spread, rows):
    rng = np.random.default_rng(47)
    alarms = nights = 0
    for _ in range(150):
        runs = runs_of_a_job(rng, LEAST_RUNS + 10, rows, spread)
        sizes = np.exp(rng.normal(13, 5 / np.sqrt(spread), len(runs)))
        lengths = np.exp(rng.normal(6, 3 / np.sqrt(spread), len(runs)))
        inputs = inputs_of_a_job(rng, len(runs), rows, spread)
        for at in range(LEAST_RUNS, len(runs)):
            earlier = runs[at - min(at, MOST_RUNS) : at][::-1]
            prompts = list(map(float, lengths[at - min(at, MOST_RUNS) : at]))
            found = drifts(runs[at], earlier, "before")
            longer = prompt_drift(float(lengths[at]), prompts, "before")
            few = few_rows(int(sizes[at]), list(map(int, sizes[:at][::-1])))
            other = input_drifts(inputs[at], inputs[at - min(at, MOST_RUNS) : at][::-1], "before")
            alarms += bool(found or longer or few or other)
            nights += 1
    assert alarms <= nights / 100


def test_a_real_shift_is_found_and_named():
    rng = np.random.default_rng(4)
    runs = runs_of_a_job(rng, LEAST_RUNS, 5_000, 2_000)
    moved = np.array([0.3, 0.45, 0.15, 0.08, 0.02])
    (now,) = runs_of_a_job(rng, 1, 5_000, 2_000, moved)
    (shift,) = drifts(now, runs, "monday")
    assert shift.kind == "labels" and shift.is_drift and shift.runs == LEAST_RUNS
    assert list(shift.changes)[:2] in (["Retail", "Finance"], ["Finance", "Retail"])
    assert f"the {LEAST_RUNS} runs before" in shift.line()
    assert drifts(now, runs[1:], "monday") == ()  # too few runs to say


def test_a_label_never_seen_before_is_drift():
    rng = np.random.default_rng(4)
    runs = runs_of_a_job(rng, LEAST_RUNS, 5_000, 2_000)
    now = {"labels": {**runs[0]["labels"], "none of the labels": 400.0}}
    (shift,) = drifts(now, runs, "monday")
    assert shift.changes["none of the labels"][0] == 0.0


def test_longer_prompts_are_drift():
    usual = [500.0 + 5 * (k % 5) for k in range(LEAST_RUNS)]
    shift = prompt_drift(700.0, usual, "monday")
    assert shift is not None and "509 -> 700 tokens" in shift.line()
    assert prompt_drift(515.0, usual, "monday") is None
    assert prompt_drift(700.0, usual[1:], "monday") is None
    assert prompt_drift(None, usual, "monday") is None


def test_runs_that_never_differ_leave_no_room_for_chance():
    assert chance_after(1.0, [1.0] * 20) == 1.0 and chance_after(2.0, [1.0] * 20) == 0.0
    assert chance_after(2.0, [1.0]) == 1.0


def test_more_failed_rows_than_runs_of_this_job_have_are_drift():
    rng = np.random.default_rng(4)
    runs = runs_of_a_job(rng, LEAST_RUNS + 1, 5_000, 2_000)
    now = {**runs.pop(), "failures": {"answered": 4_200.0, "failed": 800.0}}
    (shift,) = drifts(now, runs, "monday")
    assert shift.kind == "failures" and "of rows: " in shift.line()


def test_a_job_whose_rows_always_vary_has_no_few_rows():
    volatile = [10_000, 900, 4_000, 15_000, 700, 12_000, 9_000] * 2
    assert few_rows(800, volatile) is None
    assert few_rows(800, volatile[:7]) is not None  # too few runs to know it
    assert few_rows(0, volatile) is not None
    assert few_rows(800, [10_000 + k for k in range(LEAST_RUNS)]) is not None


def inputs_of(null=0, **values):
    counts = {value: float(rows) for value, rows in values.items()}
    nulls = {"Country": {"null": float(null), "filled": sum(counts.values())}}
    return Inputs(nulls, {"Country": counts})


def usual_inputs(number=LEAST_RUNS):
    return [inputs_of(null=20 + k % 5, DE=600 + k, FR=380 - k) for k in range(number)]


def test_more_missing_values_than_runs_of_this_job_have_are_drift():
    (shift,) = input_drifts(inputs_of(null=200, DE=500, FR=300), usual_inputs(), "monday")
    assert shift.kind == "nulls" and shift.is_drift and list(shift.changes) == ["Country"]
    assert shift.line().endswith("missing values than the 14 runs before: Country 2.2% -> 20.0%")
    assert input_drifts(inputs_of(null=200, DE=800), usual_inputs()[1:], "monday") == ()
    assert input_drifts(inputs_of(null=25, DE=600, FR=375), usual_inputs(), "monday") == ()
    assert input_drifts(inputs_of(null=0, DE=100), usual_inputs(), "monday") == ()  # too few rows


def test_values_never_seen_before_are_drift():
    now = inputs_of(null=20, DE=600, FR=280, Atlantis=90, Mu=10)
    (shift,) = input_drifts(now, usual_inputs(), "monday")
    assert shift.kind == "values" and shift.is_drift
    assert shift.line() == (
        "columns have other shares of values never seen before than the 14 runs before: "
        "Country 0.0% -> 10.2%"
    )
    # Fewer than three rows in forty, or a value of the runs that are compared, is none.
    rare = inputs_of(null=20, DE=600, FR=320, Atlantis=60)
    assert input_drifts(rare, usual_inputs(), "monday") == ()
    assert input_drifts(now, [now, *usual_inputs()], "monday") == ()


def test_a_column_that_has_other_values_in_each_run_is_not_drift():
    dates = [inputs_of(**{f"2026-11-{k + 1:02d}": 1_000}) for k in range(LEAST_RUNS + 1)]
    assert input_drifts(dates[-1], dates[:-1], "monday") == ()


def test_a_column_of_many_values_is_compared_only_if_it_had_few():
    garbage = Inputs({"Country": {"null": 20.0, "filled": 980.0}}, {"Country": {"DE": 100.0}})
    (shift,) = input_drifts(garbage, usual_inputs(), "monday")
    assert shift.changes == {"Country": (0.0, 880 / 980)}
    assert input_drifts(garbage, [garbage] * LEAST_RUNS, "monday") == ()
    many = [inputs_of(**{f"v{k}": 20 for k in range(40)})] * LEAST_RUNS
    assert input_drifts(inputs_of(DE=1_000), many, "monday") == ()


def test_a_job_that_counts_no_inputs_has_no_drift_of_inputs():
    assert input_drifts(Inputs(), usual_inputs(), "monday") == ()
    assert input_drifts(usual_inputs(1)[0], [Inputs()] * LEAST_RUNS, "monday") == ()
