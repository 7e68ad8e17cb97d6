"""The rules that arrange engines by earlier runs: what is used, what is tried, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.learning import WORK, arranged
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.learning.rules import (
    BARRED_RUNS,
    ComingRun,
    EarlierRun,
    barred,
    candidates,
    decide,
    in_trial,
    incumbent_of,
    is_same_work,
    usual_score,
)
from prefect_raybatch.ledger.arrangement import (
    Arrangement,
    ArrangementNote,
    ArrangementOutcome,
    TrialOutcome,
    WorkKey,
)

MODEL, WINNER, OTHER = arranged("1x512"), arranged("2x512"), arranged("2x256")
FITTING = {MODEL, WINNER, OTHER, arranged("4x512"), arranged("1x256")}
LOST, WON = TrialOutcome(20, 0.01, -0.02), TrialOutcome(20, 0.2, 0.15)
FAILED, UNSURE = TrialOutcome(0, error="it died"), TrialOutcome(3)


def run(
    used: Arrangement = MODEL,
    score: float | None = 10.0,
    challenger: Arrangement | None = None,
    trial: TrialOutcome | None = None,
    *,
    uncounted: str = "",
    has_deaths: bool = False,
    has_failed: bool = False,
    busy: float | None = 0.5,
    start: float = 60.0,
    work: WorkKey = WORK,
) -> EarlierRun:
    note = ArrangementNote(work, MODEL, used, challenger, 1.2, "why", (), "attempt")
    outcome = ArrangementOutcome(note, 1, score, busy, start, uncounted, has_deaths, trial)
    return EarlierRun("run", note, None if has_failed else outcome, has_failed, 100.0)


def coming(
    expect: Callable[[Arrangement, float, Arrangement], float] = lambda own, busy, other: 1.0,
    rows: int = 1_000_000,
    trial_shards: int = 50,
    model: Arrangement = MODEL,
) -> ComingRun:
    fits = FITTING.__contains__
    return ComingRun(WORK, model, fits, expect, lambda one: 4, rows, 1, trial_shards)


def faster(arrangement: Arrangement, ratio: float = 1.2) -> ComingRun:
    """A run in which one arrangement is expected to be faster than any other."""
    return coming(lambda own, busy, other: ratio if other == arrangement else 1.0)


# --- what is used -------------------------------------------------------------------------------

SLOW = [run(WINNER, 11.2), run(MODEL, 10.0, WINNER, WON)]


@pytest.mark.parametrize(
    "runs, used, why",
    [
        ([], MODEL, "no earlier run did the same work"),
        ([run()], MODEL, "by the cost model"),
        ([run(challenger=WINNER, trial=WON)], WINNER, "it won its trial"),
        ([run(challenger=WINNER, trial=LOST)], MODEL, "by the cost model"),
        ([run(challenger=WINNER, trial=UNSURE)], MODEL, "by the cost model"),
        ([run(challenger=WINNER, trial=FAILED)], MODEL, "by the cost model"),
        ([run(challenger=WINNER, trial=WON, uncounted="two attempts")], MODEL, "by the cost model"),
        ([run(challenger=arranged("16x512"), trial=WON)], MODEL, "by the cost model"),  # no room
        ([run(WINNER), run(WINNER)], WINNER, "as in 2 earlier runs"),
        ([run(arranged("16x512"))], MODEL, "by the cost model"),
        ([run(WINNER, None)], WINNER, "as in 1 earlier run"),
        (
            [run(WINNER, None, has_failed=True), run()],
            MODEL,
            "failed with 2 engines of 512 sequences",
        ),
        (
            [run(WINNER, 9.0, has_deaths=True), run()],
            MODEL,
            "failed with 2 engines of 512 sequences",
        ),
        (
            [run(WINNER, None, has_failed=True), run(OTHER)],
            OTHER,
            "failed with 2 engines of 512 sequences",
        ),
        ([run(MODEL, None, has_failed=True)], MODEL, "by the cost model"),
        (
            [run(MODEL, None, has_failed=True), run(WINNER)],
            WINNER,
            "failed with 1 engine of 512 sequences",
        ),
        ([run(MODEL, 9.0, has_deaths=True), run(WINNER)], MODEL, "by the cost model"),
        ([run(MODEL, None, has_failed=True), run(WINNER, None)], MODEL, "by the cost model"),
        (SLOW, MODEL, "was 12% slower with 2 engines of 512 sequences"),
        ([run(WINNER, 10.9), *SLOW[1:]], WINNER, "as in 1 earlier run"),
        (
            [run(WINNER, 11.2)] + [run(WINNER, 10.0)] * 5,
            MODEL,
            "was 12% slower with 2 engines of 512 sequences",
        ),
        ([run(WINNER, 30.0, uncounted="too short"), *SLOW[1:]], WINNER, "as in 1 earlier run"),
    ],
)
def test_the_incumbent(runs, used, why):
    found = incumbent_of(coming(), runs)
    assert found.arrangement == used and why in found.why


def test_a_choice_of_the_model_that_does_not_start_is_left_for_seven_runs() -> None:
    """A new version may choose engines that do not start where others ran well."""
    runs = [run(MODEL, None, has_failed=True), run(WINNER)]
    for _ in range(BARRED_RUNS):
        decided = decide(faster(MODEL), runs, "attempt")
        assert (decided.incumbent, decided.challenger) == (WINNER, None)
        runs.insert(0, run(WINNER))
    assert decide(faster(MODEL), [run(WINNER), *runs], "attempt").challenger == MODEL


def test_a_failure_in_a_run_with_a_trial_bars_the_challenger_and_keeps_the_incumbent():
    runs = [run(WINNER, challenger=OTHER, has_failed=True), run(WINNER), run()]
    assert incumbent_of(coming(), runs).arrangement == WINNER
    assert runs[0].loser == OTHER
    assert decide(faster(OTHER), runs, "attempt").challenger is None


def test_the_choice_of_the_cost_model_may_change():
    assert incumbent_of(coming(model=OTHER), [run()]).arrangement == OTHER
    assert incumbent_of(coming(model=OTHER), [run(WINNER)]).arrangement == WINNER


def test_the_usual_score_is_the_median_of_the_last_five_runs_that_count():
    scores = [50.0, 10.0, 11.0, 12.0, 90.0, 1.0, 1.0]
    runs = [run(score=score) for score in scores]
    assert usual_score(runs, MODEL) == 12.0
    assert usual_score([run(score=1.0, uncounted="short"), *runs], MODEL) == 12.0
    assert usual_score([run(WINNER, 1.0), *runs], MODEL) == 12.0
    assert usual_score(runs, WINNER) is None


# --- what is tried ------------------------------------------------------------------------------


def test_candidates_are_halves_and_doubles_of_the_incumbent_and_the_models_choice():
    assert candidates(arranged("2x512")) == [
        *(arranged("2x512"), arranged("2x256"), arranged("2x1024")),
        *(arranged("1x512"), arranged("1x256"), arranged("1x1024")),
        *(arranged("4x512"), arranged("4x256"), arranged("4x1024")),
    ]
    assert arranged("8x256") in candidates(arranged("1x256"), arranged("4x256"))
    assert candidates(arranged("1x1"))[0] == arranged("1x1")


def test_a_challenger_must_be_expected_to_be_five_percent_faster():
    note = decide(faster(WINNER), [run()], "attempt")
    assert (note.incumbent, note.challenger, note.predicted) == (MODEL, WINNER, 1.2)
    assert note.why == (
        "by the cost model; a fifth of the shards tries 2 engines of 512 sequences, which should "
        "be 20% faster"
    )
    assert note.read == ("run",)
    assert decide(faster(WINNER, 1.049), [run()], "attempt").challenger is None
    assert decide(faster(arranged("16x512")), [run()], "attempt").challenger is None


@pytest.mark.parametrize(
    "runs, night",
    [
        ([], faster(WINNER)),
        ([run(busy=None)], faster(WINNER)),  # how busy the GPU was is unknown
        ([run(score=None)], faster(WINNER)),
        ([run(uncounted="two attempts")], faster(WINNER)),
        ([run(start=10_000.0)], faster(WINNER)),  # a start takes as long as the run
        ([run()], replace(faster(WINNER), rows=20_000)),  # under five minutes
        ([run()], replace(faster(WINNER), trial_shards=13)),
        ([run(challenger=WINNER, trial=LOST)], faster(WINNER)),
        ([run(challenger=WINNER, trial=FAILED, uncounted="it died"), run()], faster(WINNER)),
        ([*SLOW], faster(WINNER)),
        ([run(), *SLOW], faster(WINNER)),
        ([run(challenger=WINNER, trial=WON)], faster(OTHER)),  # the new one is not measured yet
    ],
)
def test_nothing_is_tried(runs, night):
    assert decide(night, runs, "attempt").challenger is None


def test_a_trial_that_showed_nothing_is_repeated():
    runs = [run(challenger=WINNER, trial=UNSURE)]
    assert decide(faster(WINNER), runs, "attempt").challenger == WINNER


def test_a_measured_score_counts_more_than_what_is_expected():
    slower = [run(score=10.0), run(WINNER, 10.0), run(WINNER, 10.0)]
    assert decide(faster(WINNER), slower, "attempt").challenger is None
    quicker = [run(score=10.0), run(WINNER, 8.0)]
    found = decide(coming(), [run()] * BARRED_RUNS + quicker, "attempt")
    assert (found.challenger, found.predicted) == (WINNER, 1.25)


def test_what_lost_is_barred_for_seven_runs():
    lost = run(challenger=WINNER, trial=LOST)
    for runs in range(BARRED_RUNS):
        assert barred([run()] * runs + [lost]) == {WINNER}
    assert barred([run()] * BARRED_RUNS + [lost]) == set()


def test_what_was_given_up_is_barred_for_seven_runs():
    for runs in range(1, BARRED_RUNS):
        assert barred([run()] * runs + SLOW) == {WINNER}
    assert barred([run()] * BARRED_RUNS + SLOW) == {WINNER}
    assert barred([run()] * (BARRED_RUNS + 1) + SLOW) == set()


def test_a_trial_has_a_fifth_of_the_shards_spread_evenly():
    assert [shard for shard in range(20) if in_trial(shard)] == [2, 7, 12, 17]


# --- the same work ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, same",
    [
        ({}, True),
        ({"model": "another"}, False),
        ({"vllm": "0.33.0"}, False),
        ({"card": "H200, 131.4 GiB"}, False),
        ({"gpus": 2}, False),
        ({"cpus": 8.0}, False),
        ({"grammar": "xgrammar"}, False),
        ({"settings": "others"}, False),
        ({"tokens": (64.0, 24.0, 1.0)}, False),
        ({"tokens": (79.0, 29.0)}, True),
        ({"tokens": (81.0, 24.0)}, False),
        ({"tokens": (64.0, 8.0)}, False),
    ],
)
def test_work_is_the_same_if_all_but_lengths_are_equal(changes, same):
    other = replace(WORK, **changes)
    assert is_same_work(WORK, other) is same and is_same_work(other, WORK) is same
    runs = [run(challenger=WINNER, trial=WON, work=other)]
    assert decide(coming(), runs, "attempt").incumbent == (WINNER if same else MODEL)


def test_short_lengths_that_differ_by_some_tokens_are_the_same():
    assert is_same_work(replace(WORK, tokens=(1.0, 3.0)), replace(WORK, tokens=(12.0, 1.0)))


# --- whatever the records say -------------------------------------------------------------------

counts = st.integers(0, 1 << 20)
arrangements = st.builds(Arrangement, counts, counts) | st.sampled_from(sorted(FITTING))
figures = st.floats(-1e9, 1e9, allow_nan=False)
trials = st.builds(TrialOutcome, counts, figures | st.none(), figures | st.none(), st.text())
notes = st.builds(
    ArrangementNote,
    work=st.just(WORK),
    model=arrangements,
    incumbent=arrangements,
    challenger=arrangements | st.none(),
    predicted=figures,
    why=st.text(),
    read=st.just(()),
    by=st.text(),
)
outcomes = st.builds(
    ArrangementOutcome,
    decided=notes,
    gpus=counts,
    score=figures | st.none(),
    busy=figures | st.none(),
    start=figures,
    uncounted=st.sampled_from(["", "why"]),
    has_deaths=st.booleans(),
    trial=trials | st.none(),
)
runs = st.builds(
    lambda outcome, **more: EarlierRun("run", outcome.decided, outcome, **more),
    outcomes,
    has_failed=st.booleans(),
    rows_per_gpu_s=figures,
)


@given(st.lists(runs, max_size=20))
def test_records_choose_only_among_arrangements_that_fit(earlier):
    found = decide(faster(WINNER), earlier, "attempt")
    assert found.incumbent in FITTING
    assert found.challenger is None or found.challenger in FITTING - {found.incumbent}
    near = candidates(found.incumbent, MODEL)
    assert found.challenger is None or found.challenger in near
