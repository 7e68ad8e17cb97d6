"""Simulated nights with measured rates and noise: what is reached, and what bad nights cost."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.learning import WORK, Series, Work, arranged, works

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gpu import DIMENSIONS

from prefect_raybatch.learning.rules import EarlierRun
from prefect_raybatch.ledger.arrangement import Arrangement

WORKS = works(DIMENSIONS)
SEEDS, NIGHTS = range(4), 5
# (work, arrangement): a wrong choice of the cost model from which halves and doubles lead on.
WRONG = [
    *(("05b record", "1x256"), ("05b free", "1x1024"), ("05b schema", "2x512")),
    *(("05b choice", "1x256"), ("15b record", "1x1024"), ("moe record", "1x256")),
    ("moe free", "1x256"),
]


def work_named(name: str) -> Work:
    return next(work for work in WORKS if work.name == name)


def series_of(work: Work, model: Arrangement, seed: int, nights: int = NIGHTS) -> Series:
    series = Series(work, model, np.random.default_rng(seed))
    for _ in range(nights):
        series.night()
    return series


def check(series: Series) -> None:
    """Both goals: within 5 % of the best, and at most one night 10 % slower than the model."""
    after = series.work.rate(series.decide().incumbent)
    assert after >= 0.95 * series.work.best()
    usual = series.work.rate(series.model)
    assert sum(rate < 0.9 * usual for rate in series.rates) <= 1


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_from_the_cost_models_choice(work):
    for seed in SEEDS:
        check(series_of(work, work.chosen(), seed))


@pytest.mark.parametrize("name, wrong", WRONG)
def test_from_a_wrong_choice(name, wrong):
    for seed in SEEDS:
        check(series_of(work_named(name), arranged(wrong), seed))


def test_a_neighbour_on_the_gpu_costs_what_was_learned_at_most():
    """It halves the rates of single nights; a learned arrangement is given up for seven runs."""
    work = work_named("15b record")
    slowed = work.slowed(2.0)
    for seed in SEEDS:
        for bad in range(1, 8):
            series = Series(work, arranged("1x256"), np.random.default_rng(seed))
            for night in range(16):
                series.night(slowed if night == bad else work)
            usual = work.rate(series.model)
            others = [rate for night, rate in enumerate(series.rates) if night != bad]
            assert sum(rate < 0.9 * usual for rate in others) <= 1
            assert work.rate(series.decide().incumbent) >= 0.7 * work.best()


def test_another_card_begins_anew_and_the_first_one_goes_on():
    work = work_named("05b schema")
    series = series_of(work, arranged("1x256"), 0)
    assert series.decide().incumbent == arranged("4x256")
    other = replace(WORK, card="H200, 131.4 GiB")
    assert series.decide(key=other).incumbent == arranged("1x256")
    series.night(key=other)
    assert series.decide().incumbent == arranged("4x256")


def test_a_job_that_changes_begins_anew():
    series = series_of(work_named("05b schema"), arranged("1x256"), 0)
    longer = replace(WORK, tokens=(64.0, 48.0))
    assert series.decide(key=longer).incumbent == arranged("1x256")


def test_nights_without_figures_leave_all_as_it_is():
    def without(run: EarlierRun) -> EarlierRun:
        return replace(run, outcome=None)

    work = work_named("05b schema")
    series = Series(work, arranged("1x256"), np.random.default_rng(0))
    for _ in range(NIGHTS):
        series.night(change=without)
    assert {run.used for run in series.runs} == {arranged("1x256")}


def test_a_report_that_lies_about_a_trial_costs_one_night():
    """It says that a slower arrangement won: the next run uses it, and the one after does not."""
    work = work_named("05b schema")
    series = series_of(work, arranged("4x256"), 0, nights=3)
    last = series.runs[0]
    assert last.outcome is not None
    from prefect_raybatch.ledger.arrangement import TrialOutcome

    note = replace(last.decided, challenger=arranged("2x512"))
    lie = replace(last.outcome, decided=note, trial=TrialOutcome(40, 1.0, 0.9))
    series.runs[0] = replace(last, decided=note, outcome=lie)
    series.night()
    assert series.runs[0].used == arranged("2x512")
    assert series.decide().incumbent == arranged("4x256")
