"""Decides the arrangement of a run's engines from the job's earlier runs. No I/O.

1. Only earlier runs that did the same work count (`is_same_work`). If there are none, the cost
   model's choice is used.
2. The incumbent is the arrangement that the coming run uses (`incumbent_of`). It is the challenger
   that won its trial in the last run. Without a winner, it is the arrangement that the last run
   used, unless that has to be given up for the one that was used before. It is given up if its
   engines failed, or if the last run was over 10 % slower than runs with the one used before. If
   none of those was measured, the last run is compared with earlier runs with its own arrangement.
   The cost model's own choice is given up only if a run failed with it.
3. A challenger halves or doubles engines per GPU, `max_num_seqs` or both (`candidates`). It must
   fit, must not be barred (`barred`), and is expected to be at least 5 % faster than the incumbent
   (`challenger_of`).
4. A fifth of the shards tries the challenger, if the run lasts long enough for a second start.
5. The challenger is adopted if its gain is above 0 with 95 % confidence. Otherwise it is barred for
   seven runs.

Nothing here trusts a record: its arrangement counts only if it is one of those that fit now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from prefect_raybatch.learning.score import LEAST_SHARDS
from prefect_raybatch.ledger.arrangement import (
    Arrangement,
    ArrangementNote,
    ArrangementOutcome,
    TrialOutcome,
    WorkKey,
)
from prefect_raybatch.words import counted

TRIAL_EVERY, TRIAL_FIRST = 5, 2  # shards of a trial: a fifth, spread evenly over the input
LEAST_GAIN = 0.05  # least expected gain of a challenger
GIVEN_UP_AT = 0.1  # slowdown of a run at which an adopted arrangement is given up
MEDIAN_RUNS = 5
BARRED_RUNS = 7
STARTS_WORTH = 20  # a run with a trial must last this many times as long as a start
LEAST_SECONDS = 300.0  # shortest run from which others learn
SAME_LENGTH = 1.25  # factor within which lengths in tokens are the same
SAME_TOKENS = 16  # lengths up to this many tokens always count as the same


@dataclass(frozen=True)
class EarlierRun:
    """An earlier run of the job, as its records describe it.

    `key` is its run key. `decided` is the decision on its arrangement when it began. `outcome` is
    what it measured, None unless the run is complete. `has_failed`: its last attempt failed with an
    error of its engines, so it is not complete. `rows_per_gpu_s` is its rate over the working time.
    """

    key: str
    decided: ArrangementNote
    outcome: ArrangementOutcome | None = None
    has_failed: bool = False
    rows_per_gpu_s: float = 0.0

    @property
    def used(self) -> Arrangement:
        return self.decided.incumbent

    @property
    def score(self) -> float | None:
        """Return the GPU-seconds per 1,000 tokens; None if unknown or not to be learned from."""
        outcome = self.outcome
        if outcome is None or outcome.uncounted or outcome.score is None:
            return None
        return outcome.score if outcome.score > 0 else None

    @property
    def trial(self) -> TrialOutcome | None:
        """Return the outcome of the run's trial, or None if it had no trial.

        If the run's figures do not count (`ArrangementOutcome.uncounted`), returns the trial only
        if its engines did not work.
        """
        outcome = self.outcome
        if outcome is None or outcome.trial is None or self.decided.challenger is None:
            return None
        return outcome.trial if outcome.trial.error or not outcome.uncounted else None

    @property
    def winner(self) -> Arrangement | None:
        """Return the challenger if it won its trial, else None."""
        trial = self.trial
        has_won = trial is not None and not trial.error and (trial.bound or 0.0) > 0
        return self.decided.challenger if has_won else None

    @property
    def loser(self) -> Arrangement | None:
        """Return the challenger if it lost, its trial failed or the run failed; else None."""
        if self.outcome is None:
            return self.decided.challenger if self.has_failed else None
        trial = self.trial
        has_ended = trial is not None and (trial.error or trial.bound is not None)
        return self.decided.challenger if has_ended and self.winner is None else None

    @property
    def broke(self) -> bool:
        """Return whether the run failed without a trial, or an engine of its incumbent died."""
        return self.has_broken_off if self.outcome is None else self.outcome.has_deaths

    @property
    def has_broken_off(self) -> bool:
        """Return whether the run failed without a trial, and was never completed."""
        return self.outcome is None and self.has_failed and self.decided.challenger is None


@dataclass(frozen=True)
class ComingRun:
    """What is known of a run that is about to start.

    `model` is the arrangement that the cost model chooses. `fits(arrangement)` returns whether it
    fits the cluster and the job. `expect(measured, busy, other)` returns the expected rate of
    `other` divided by the rate of `measured`, whose GPUs were busy for the share `busy` of time.
    `in_flight(arrangement)` returns how many shards are in engines at once. `trial_shards` is the
    number of shards that a trial would infer.
    """

    work: WorkKey
    model: Arrangement
    fits: Callable[[Arrangement], bool]
    expect: Callable[[Arrangement, float, Arrangement], float]
    in_flight: Callable[[Arrangement], int]
    rows: int
    gpus: int
    trial_shards: int


@dataclass(frozen=True)
class Incumbent:
    """The arrangement that the coming run uses for all shards outside of a trial, and why.

    `given_up` is the arrangement that it replaces because that failed or was slower, else None.
    """

    arrangement: Arrangement
    why: str
    given_up: Arrangement | None = None


def in_trial(shard: int) -> bool:
    """Return whether the shard of this number is one of those that a trial infers."""
    return shard % TRIAL_EVERY == TRIAL_FIRST


def is_same_work(one: WorkKey, other: WorkKey) -> bool:
    """Return whether two runs do the same work, so that one can learn from the other.

    Lengths in tokens may differ by a quarter, and everything else must be equal.
    """
    fixed = [
        (w.model, w.vllm, w.card, w.gpus, w.cpus, w.grammar, w.settings, len(w.tokens))
        for w in (one, other)
    ]
    return fixed[0] == fixed[1] and all(map(_is_same_length, one.tokens, other.tokens))


def _is_same_length(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return high <= SAME_TOKENS or high <= low * SAME_LENGTH


def candidates(*centres: Arrangement) -> list[Arrangement]:
    """Return the `centres`, then arrangements with half or twice their engines, sequences or both.

    No arrangement is in the list twice.
    """
    near = [
        Arrangement(engines, sequences)
        for centre in centres
        for engines in _half_and_double(centre.engines_per_gpu)
        for sequences in _half_and_double(centre.max_num_seqs)
    ]
    return list(dict.fromkeys([*centres, *near]))


def _half_and_double(number: int) -> tuple[int, ...]:
    return (number, max(1, number // 2), 2 * number)


def decide(coming: ComingRun, earlier: Sequence[EarlierRun], by: str) -> ArrangementNote:
    """Decide in attempt `by` how a run's engines are arranged; `earlier` runs are newest first."""
    runs = [run for run in earlier if is_same_work(run.decided.work, coming.work)]
    incumbent = incumbent_of(coming, runs)
    challenger, ratio = challenger_of(coming, runs, incumbent)
    why = incumbent.why
    if challenger is not None:
        reason = _why_no_trial(coming, runs, incumbent.arrangement, challenger)
        faster = f"{challenger}, which should be {ratio - 1:.0%} faster"
        what = f"the run has {reason} to try" if reason else "a fifth of the shards tries"
        why = f"{why}; {what} {faster}"
        challenger = None if reason else challenger
    return ArrangementNote(
        work=coming.work,
        model=coming.model,
        incumbent=incumbent.arrangement,
        challenger=challenger,
        predicted=round(ratio, 4),
        why=why,
        read=tuple(run.key for run in runs),
        by=by,
    )


def incumbent_of(coming: ComingRun, runs: Sequence[EarlierRun]) -> Incumbent:
    """Choose the arrangement of the coming run outside of a trial.

    `runs` are earlier runs of the same work, newest first. The choice is the winner of the last
    run's trial, or else what the last run used. If that run failed or was slower than usual, an
    earlier arrangement takes its place. The cost model decides if there is no earlier run, or none
    whose arrangement fits.
    """
    if not runs:
        return Incumbent(coming.model, "by the cost model, as no earlier run did the same work")
    last, winner = runs[0], runs[0].winner
    if winner is not None and coming.fits(winner):
        return Incumbent(winner, f"it won its trial in run {last.key}")
    if not coming.fits(last.used):
        return Incumbent(coming.model, "by the cost model")
    if last.used == last.decided.model:
        return _instead_of_models_choice(coming, runs)
    before = next((run.used for run in runs if run.used != last.used), last.decided.model)
    before = before if coming.fits(before) else coming.model
    if last.broke:
        return Incumbent(before, f"run {last.key} failed with {last.used}", last.used)
    usual = usual_score(runs, before) or usual_score(runs[1:], last.used)
    if last.score is not None and usual is not None and last.score > (1 + GIVEN_UP_AT) * usual:
        slower = f"run {last.key} was {last.score / usual - 1:.0%} slower with {last.used}"
        return Incumbent(before, slower, last.used)
    same = sum(run.used == last.used for run in runs)
    return Incumbent(last.used, f"as in {counted(same, 'earlier run')}")


def _instead_of_models_choice(coming: ComingRun, runs: Sequence[EarlierRun]) -> Incumbent:
    """Return the cost model's choice, unless the last run failed with that choice.

    In that case, returns the arrangement of an earlier measured run, if one fits. A completed run
    does not count as failed, even if an engine died in it.
    """
    last = runs[0]
    has_failed = last.has_broken_off and last.used == coming.model
    others = (run.used for run in runs if run.used != last.used and run.score is not None)
    before = next(filter(coming.fits, others), None) if has_failed else None
    if before is None:
        return Incumbent(coming.model, "by the cost model")
    return Incumbent(before, f"run {last.key} failed with {last.used}", last.used)


def usual_score(runs: Sequence[EarlierRun], arrangement: Arrangement) -> float | None:
    """Return the median score of the newest five measured runs with this `arrangement`, or None.

    A score is in GPU-seconds per 1,000 tokens.
    """
    scores = [run.score for run in runs if run.used == arrangement and run.score is not None]
    return median(scores[:MEDIAN_RUNS]) if scores else None


def barred(runs: Sequence[EarlierRun]) -> set[Arrangement]:
    """Return the arrangements that lost a trial or were given up in the last seven runs."""
    lost = {run.loser for run in runs[:BARRED_RUNS]}
    given_up = {
        run.used
        for newer, run in pairwise(runs[: BARRED_RUNS + 1])
        if newer.used != run.used
        and run.winner is None
        and (run.used != run.decided.model or run.has_broken_off)
    }
    return {arrangement for arrangement in lost | given_up if arrangement is not None}


def challenger_of(
    coming: ComingRun, runs: Sequence[EarlierRun], incumbent: Incumbent
) -> tuple[Arrangement | None, float]:
    """Return (arrangement to try, its expected rate / the incumbent's rate).

    Returns (None, 1.0) if none is expected to be at least 5 % faster, or if no run measured the
    incumbent. If earlier runs measured an arrangement, the expected rate follows from their scores.
    Otherwise it is predicted.
    """
    own = incumbent.arrangement
    usual, busy = usual_score(runs, own), _busy(runs, own)
    if usual is None or busy is None:
        return None, 1.0
    closed = {own, incumbent.given_up, *barred(runs)}
    ratios: dict[Arrangement, float] = {}
    for other in candidates(own, coming.model):
        if other not in closed and coming.fits(other):
            score = usual_score(runs, other)
            ratios[other] = usual / score if score else coming.expect(own, busy, other)
    best = max(ratios, key=ratios.__getitem__, default=None)
    return (best, ratios[best]) if best and ratios[best] >= 1 + LEAST_GAIN else (None, 1.0)


def _busy(runs: Sequence[EarlierRun], arrangement: Arrangement) -> float | None:
    """Return the share of time with busy GPUs in the newest run with this `arrangement`, or None.

    Skips runs that did not measure it.
    """
    found = (run.outcome.busy for run in runs if run.used == arrangement and run.outcome)
    return next((busy for busy in found if busy is not None and 0 < busy <= 1), None)


def _why_no_trial(
    coming: ComingRun, runs: Sequence[EarlierRun], incumbent: Arrangement, challenger: Arrangement
) -> str:
    """Return "too little time" or "too few shards" if a trial would not be worth it, else ""."""
    last = next(run for run in runs if run.used == incumbent and run.score is not None)
    start = last.outcome.start if last.outcome else 0.0
    seconds = coming.rows / max(last.rows_per_gpu_s * coming.gpus, 1e-9)
    if seconds < max(STARTS_WORTH * start, LEAST_SECONDS):
        return "too little time"
    ends = 2 * coming.in_flight(challenger)
    return "too few shards" if coming.trial_shards < ends + LEAST_SHARDS else ""
