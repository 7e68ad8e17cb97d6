"""Reads the current state of a run directory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefect_raybatch.compile.job import planned_job, prices_of
from prefect_raybatch.driver.cost import HOUR, spent_on
from prefect_raybatch.driver.stops import Stop
from prefect_raybatch.errors import ConfigError, CorruptRun, NoSuchRun
from prefect_raybatch.ledger.accepted import all_accepted
from prefect_raybatch.ledger.checkpoints import Listing
from prefect_raybatch.ledger.drains import Drain, read_drain
from prefect_raybatch.ledger.failures import FailureKey, alike, failure_texts
from prefect_raybatch.ledger.family import load_family, locate_run
from prefect_raybatch.ledger.forks import follow_forks
from prefect_raybatch.ledger.increments import (
    FIRST_KEY,
    has_begun,
    increment_of,
    is_first_phase,
    requests_ledger,
)
from prefect_raybatch.ledger.last_attempt import (
    ATTEMPT_FAILED,
    last_attempt_of,
)
from prefect_raybatch.ledger.layout import partial_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.partials import (
    PARTIAL_REPORT,
    PartialResult,
    all_partials,
    read_partial,
    split_partial,
)
from prefect_raybatch.ledger.precision import read_precision
from prefect_raybatch.ledger.record_files import read_record
from prefect_raybatch.ledger.records import JsonObject, Plan
from prefect_raybatch.ledger.stats import LARGER_ANSWERED, LARGER_FAILED
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.runs.attempts import open_step_of
from prefect_raybatch.runs.cascade import passed_on
from prefect_raybatch.runs.classifier_note import classifier_note
from prefect_raybatch.runs.costs import plain_price, with_cost
from prefect_raybatch.runs.drivers import driver_state, read_attempts, unended_beats
from prefect_raybatch.runs.finalize_run import last_dashboard, load_report, retry_notes
from prefect_raybatch.runs.run import PARTIAL_STATE, state_name
from prefect_raybatch.runs.starts import attempts_seconds, engine_deaths, starts_of
from prefect_raybatch.spec.cluster import Prices
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, open_store

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """The current state of a run directory.

    `state` is "planned", "unfinished", "completed" or, if the latest attempt failed, "failed".
    `failure` says why it failed. `command` continues the run, once `first_step` is done ("":
    nothing to do). Of `rows`, `done` are committed: `good` with an answer, `quarantined`, or
    `skipped` because output.postprocess left them out. `rate` is rows per second over the latest
    commits, or over all commits if the run is complete or has no recent commit. `seconds_left` is
    None unless a driver is at work. `failures` maps kinds of failure to the number of rows.

    `attempts` are the records of attempts, oldest first. `beats` are the heartbeats of attempts
    without a recorded end, newest first. `strays` are unexpected files among the commits. `stopped`
    says how the latest attempt crossed its error budget, None if it did not. `drained` is the drain
    request that stopped the latest attempt, None if none did. `partials` are the partial results,
    newest first. `cost` is the cost of all attempts, `cost_end` the expected total; None if
    unknown.

    `superseded_by` is the URI of the repaired run that replaces this one. A complete run may still
    be measured, judged or published: `undone` says which of these steps was not done, and why;
    `under_way` says which of them is in progress, and where. `retried_by` are the keys of the
    retries, if they took all failed rows. `failed_again` is the number of rows that failed there
    too, None until all these retries are complete. `retry_options` are the options that `raybatch
    retry-failed` needs.

    `first_phase` is the state of the first phase of a run with two. In a cascade, `asked_larger`
    counts the `done` rows that the larger model answered or failed. In the `first_phase` of a
    cascade, `to_larger` counts failed rows that go on to the larger model. They are not in its
    `quarantined` and `failures`.
    """

    run: str
    run_key: str
    job: str
    state: str
    rows: int
    done: int
    good: int
    quarantined: int
    skipped: int
    shards: int
    committed: int
    pending: int
    rate: float
    seconds_left: float | None
    failures: dict[str, int]
    attempts: tuple[JsonObject, ...]
    beats: tuple[JsonObject, ...]
    strays: tuple[str, ...] = ()
    stopped: Stop | None = None
    first_phase: Status | None = None
    partials: tuple[PartialResult, ...] = ()
    gpu_hours: float = 0.0
    cost: float | None = None
    cost_end: float | None = None
    currency: str = ""
    superseded_by: str | None = None
    drained: Drain | None = None
    failure: str = ""
    command: str = ""
    first_step: str = ""
    retried_by: tuple[str, ...] = ()
    failed_again: int | None = None
    retry_options: tuple[str, ...] = ()
    to_larger: int = 0
    asked_larger: int = 0
    undone: str = ""
    under_way: str = ""

    @property
    def first_model(self) -> Status | None:
        """Return the state of a cascade's first model; None before it began, or for other runs."""
        first = self.first_phase
        return first if first is not None and first.run_key == FIRST_KEY else None


def status(uri: str, options: StoreOptions | None = None) -> Status:
    """Return the state of the run in the directory `uri`; it may be running on other machines."""
    store = open_store(uri, options)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    listing, attempts = ledger.listing(plan), read_attempts(ledger)
    tally = _tally(ledger, plan, listing)
    finished = ledger.finished(plan) is not None
    rate = 0.0 if finished else tally.recent_rate()
    beats = () if finished else tuple(unended_beats(store, attempts))
    at_work = any(driver_state(beat) == "at work" for beat in beats)
    spent = spent_on(ledger, plan)
    prices = _prices(plan)
    cost = spent.cost_at(plain_price(prices))
    state = Status(
        run=store.uri,
        run_key=plan.run_key,
        job=plan.job_name,
        state=_state(ledger, plan, finished, tally),
        rows=plan.rows,
        done=tally.rows,
        good=tally.good,
        quarantined=tally.failed,
        skipped=tally.skipped,
        shards=plan.shards,
        committed=tally.shards,
        pending=plan.shards - tally.shards,
        rate=round(rate or tally.steady_rate, 1),
        seconds_left=round((plan.rows - tally.rows) / rate, 1) if rate and at_work else None,
        failures=failure_texts(alike(tally.failures)),
        attempts=tuple(attempts),
        beats=beats,
        strays=tuple(listing.strays),
        stopped=_stop_of(attempts, listing.done),
        first_phase=_first_phase(store, plan, options),
        superseded_by=_superseded_by(ledger, plan),
        partials=tuple(all_partials(store, plan)),
        drained=None if finished else _drained(store, attempts),
        gpu_hours=round(spent.gpu_seconds / HOUR, 6),
        cost=None if cost is None else round(cost, 6),
        currency=prices.currency,
        cost_end=beats[0]["cost_end"] if beats else None,
        asked_larger=_asked_larger(tally),
    )
    state = _with_last_attempt(state, store, finished)
    return _with_retries(state, plan, options) if finished and tally.failed else state


def _with_last_attempt(state: Status, store: Store, finished: bool) -> Status:
    """Return the state with the latest attempt's failure and the command that continues the run.

    For a `finished` run, it says instead which step is left or under way: measuring, judging or
    publishing.
    """
    attempt = open_step_of(store) if finished else last_attempt_of(store)
    if attempt is None:
        return state
    state = replace(state, command=attempt.command, first_step=attempt.first_step)
    if finished:
        return replace(state, undone=attempt.undone, under_way=attempt.under_way)
    name = ATTEMPT_FAILED if attempt.failure else state.state
    return replace(state, state=name, failure=attempt.failure)


def live_beats(state: Status) -> list[JsonObject]:
    """Return the heartbeats of drivers at work on a run or its first phase, newest first."""
    states = (state, state.first_phase) if state.first_phase is not None else (state,)
    live = [beat for one in states for beat in one.beats if driver_state(beat) == "at work"]
    return sorted(live, key=lambda beat: float(beat["age"]))


def _state(ledger: Ledger, plan: Plan, finished: bool, tally: Tally) -> str:
    return state_name(finished, finished or has_begun(ledger, plan, bool(tally.shards)))


def _asked_larger(tally: Tally) -> int:
    """Return how many committed rows a cascade's larger model answered or failed."""
    figures = tally.stats.others
    return sum(int(figures.get(name, 0)) for name in (LARGER_ANSWERED, LARGER_FAILED))


def _superseded_by(ledger: Ledger, plan: Plan) -> str | None:
    """Return the URI of the repaired run that replaces this one; None if there is none."""
    later, _ = follow_forks(ledger, plan)
    return None if later is ledger else later.store.uri


def _with_retries(state: Status, plan: Plan, options: StoreOptions | None) -> Status:
    """Add to the state of a finished run how its failed rows were retried; return it."""
    from prefect_raybatch.runs.retry import options_of_retry, takers_of_all

    if is_first_phase(plan):
        return state  # its rows are retried in the run itself
    state = replace(state, retry_options=tuple(options_of_retry(plan)))
    try:
        family = load_family(*locate_run(state.run, options))
        family.read_former()
        member = family.members.get(plan.run_key)
        takers = [] if member is None else takers_of_all(family, member)
    except (ConfigError, CorruptRun, NoSuchRun) as error:
        log.warning("retries of the failed rows are unknown: %s", error)
        return state
    state = replace(state, retried_by=tuple(taker.key for taker, _ in takers))
    if not takers or any(taker.summary is None for taker, _ in takers):
        return state
    return replace(state, failed_again=sum(failed for _, failed in takers))


def _first_phase(store: Store, plan: Plan, options: StoreOptions | None) -> Status | None:
    """Return the state of a run's requests phase or of a cascade's first model.

    None for a run of one phase, and before the first phase has begun.
    """
    increment = increment_of(plan)
    if increment is None or increment.asks is None:
        return None
    ledger = requests_ledger(store)
    if ledger.load_plan() is None:
        return None
    state, kinds = status(ledger.store.uri, options), passed_on(plan)
    return _without_passed_on(state, kinds) if kinds else state


def _without_passed_on(state: Status, kinds: frozenset[str]) -> Status:
    """Return the state of a cascade's first model, with failed rows moved to `to_larger`.

    These are the rows that failed with one of the error classes `kinds`; `quarantined` and
    `failures` no longer count them.
    """
    kept = {t: n for t, n in state.failures.items() if FailureKey.parse(t).error not in kinds}
    rows = sum(state.failures.values()) - sum(kept.values())
    left = state.quarantined - rows
    return replace(state, to_larger=rows, quarantined=left, failures=kept)


def state_of(uri: str, options: StoreOptions | None = None) -> str:
    """Return a run's state: "planned", "unfinished" or "completed"; reads no commit.

    Returns "partial" for the folder of a partial result. Raises `NoSuchRun` if there is no run.
    """
    uri, name = split_partial(uri)
    ledger = Ledger(open_store(uri, options))
    plan = need_plan(ledger)
    if name is not None:
        read_partial(ledger.store, plan, name)
        return PARTIAL_STATE
    finished = ledger.finished(plan) is not None
    begun = finished or has_begun(ledger, plan, bool(ledger.committed(plan).any()))
    return state_name(finished, begun)


def report_of(uri: str, options: StoreOptions | None = None) -> RunReport:
    """Return the report of the run directory `uri`.

    For a complete run, it is the one written at its end; else it is made from the commits so far.
    For the folder of a partial result, it is the one written there.
    """
    uri, name = split_partial(uri)
    store = open_store(uri, options)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    if name is not None:
        read_partial(store, plan, name)
        return RunReport.from_bytes(read_record(store, partial_path(name, PARTIAL_REPORT)))
    if ledger.finished(plan) is not None:
        found, last = load_report(store), open_step_of(store)
        if last is None:
            return found
        return replace(found, notes=(*found.notes, last.under_way or last.undone_advice))
    listing = ledger.listing(plan)
    tally = _tally(ledger, plan, listing)
    state, notes = _state(ledger, plan, False, tally), retry_notes(plan)
    attempt = last_attempt_of(store)
    if attempt is not None and attempt.failure:
        state = ATTEMPT_FAILED
        notes.append(f"failed during {attempt.failure}")
    attempts = read_attempts(ledger)
    stop = _stop_of(attempts, listing.done)
    notes += map(str, all_accepted(ledger))
    notes += [f"stopped: {stop.line()}", *stop.lines()] if stop else []
    made = reports.build(
        *(store.uri, plan, tally, state),
        notes=notes,
        dashboard=last_dashboard(store),
        engine_deaths=engine_deaths(ledger),
    )
    made = replace(made, starts=starts_of(attempts), precision=read_precision(store))
    made = replace(made, elapsed=round(attempts_seconds(ledger, plan), 1))
    made = replace(made, classifier=classifier_note(ledger, plan))
    return with_cost(made, ledger, plan, _prices(plan))


def _tally(ledger: Ledger, plan: Plan, listing: Listing) -> Tally:
    """Return the totals over all committed shards."""
    tally = Tally()
    for commit in ledger.commits(plan, listing):
        tally.add(commit)
    return tally


def _prices(plan: Plan) -> Prices:
    """Return the GPU prices in the job of a run."""
    return prices_of(planned_job(plan).cluster)


def _stop_of(attempts: Sequence[JsonObject], done: np.ndarray) -> Stop | None:
    """Return how the latest attempt crossed its error budget.

    Returns None if it did not, or if the shard at which it stopped is committed by now.
    """
    stop = Stop.from_note(attempts[-1]) if attempts else None
    if stop is None or type(stop.shard) is not int or not 0 <= stop.shard < len(done):
        return None
    return None if done[stop.shard] else stop


def _drained(store: Store, attempts: Sequence[JsonObject]) -> Drain | None:
    """Return the drain request that stopped the latest attempt; None if none did."""
    found = read_drain(store)
    latest = attempts[-1]["attempt"] if attempts else None
    return found if found is not None and latest in found.attempts else None
