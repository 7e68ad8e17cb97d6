"""The current state of a run directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from prefect_raybatch.compile.job import planned_job, prices_of
from prefect_raybatch.driver.cost import HOUR, spent_on
from prefect_raybatch.driver.stops import Stop
from prefect_raybatch.errors import ConfigError, CorruptRun, NoSuchRun
from prefect_raybatch.ledger.accepted import all_accepted
from prefect_raybatch.ledger.checkpoints import Listing
from prefect_raybatch.ledger.drains import Drain, read_drain
from prefect_raybatch.ledger.failures import alike, failure_texts
from prefect_raybatch.ledger.family import load_family, place
from prefect_raybatch.ledger.forks import follow_forks
from prefect_raybatch.ledger.increments import asks_ledger, increment_of, is_first_phase
from prefect_raybatch.ledger.last_attempt import ATTEMPT_FAILED, last_attempt_of
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
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.runs.costs import plain_price, with_cost
from prefect_raybatch.runs.finalize_run import last_dashboard, load_report, of_whom
from prefect_raybatch.runs.run import PARTIAL_STATE, state_name
from prefect_raybatch.runs.starts import attempts_seconds, engine_deaths, starts_of
from prefect_raybatch.spec.cluster import Prices
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, open_store

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)
ATTEMPTS_SHOWN = 20  # attempts whose heartbeats a status looks at, the latest


@dataclass(frozen=True)
class Status:
    """The current state of a run directory.

    `rate` is rows per second over the latest commits; `beats` are the heartbeats of attempts that
    have not reported their end, newest first; `strays` are unexpected files among the commits;
    `stopped` says why the latest attempt stopped, if it was the error budget; `asks` is the state
    of the requests phase of a run that reuses answers; `partials` are its partial results, newest
    first, which do not change its state. `cost` is that of all attempts so far, `cost_end` the
    expected total; None if unknown. `superseded_by` is the run that replaces this one, which was
    repaired. `drained` is the drain request that stopped the latest attempt. `failure` says why the
    latest attempt at an incomplete run failed, `command` continues the run. `retried_by` are the
    runs that retry its failed rows, if they took all of them; `retry_options` are the options that
    another retry needs.
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
    asks: Status | None = None
    partials: tuple[PartialResult, ...] = ()
    gpu_hours: float = 0.0
    cost: float | None = None
    cost_end: float | None = None
    currency: str = ""
    superseded_by: str | None = None
    drained: Drain | None = None
    failure: str = ""
    command: str = ""
    retried_by: tuple[str, ...] = ()
    retry_options: tuple[str, ...] = ()


def status(uri: str, options: StoreOptions | None = None) -> Status:
    """Read a run directory, even while it runs, from any machine."""
    store = open_store(uri, options)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    listing = ledger.listing(plan)
    tally = _tally(ledger, plan, listing)
    finished = ledger.finished(plan) is not None
    rate = 0.0 if finished else tally.recent_rate()
    attempts = _attempts(ledger)
    attempt = None if finished else last_attempt_of(store)
    failure = attempt.failure if attempt is not None else ""
    state = ATTEMPT_FAILED if failure else state_name(finished, bool(tally.shards))
    later = follow_forks(ledger, plan)[0]
    beats = () if finished else tuple(_beats(store, attempts))
    spent = spent_on(ledger, plan)
    prices = _prices(plan)
    cost = spent.at(plain_price(prices))
    retries = _retries(store.uri, plan, options) if finished and tally.failed else ((), ())
    return Status(
        run=store.uri,
        run_key=plan.run_key,
        job=plan.job_name,
        state=state,
        rows=plan.rows,
        done=tally.rows,
        good=tally.good,
        quarantined=tally.failed,
        skipped=tally.skipped,
        shards=plan.shards,
        committed=tally.shards,
        pending=plan.shards - tally.shards,
        rate=round(rate or tally.steady_rate, 1),
        seconds_left=round((plan.rows - tally.rows) / rate, 1) if rate else None,
        failures=failure_texts(alike(tally.failures)),
        attempts=tuple(attempts),
        beats=beats,
        strays=tuple(listing.strays),
        stopped=_stop_of(attempts, listing.done),
        asks=_asks(store, plan, options),
        superseded_by=None if later.store is store else later.store.uri,
        partials=tuple(all_partials(store, plan)),
        drained=None if finished else _drained(store, attempts),
        gpu_hours=round(spent.gpu_seconds / HOUR, 6),
        cost=None if cost is None else round(cost, 6),
        currency=prices.currency,
        cost_end=beats[0]["cost_end"] if beats else None,
        failure=failure,
        command=attempt.command if attempt is not None and failure else "",
        retried_by=retries[0],
        retry_options=retries[1],
    )


def _retries(uri: str, plan: Plan, options: StoreOptions | None) -> tuple[tuple[str, ...], ...]:
    """Return `retried_by` and `retry_options` of a finished run with failed rows."""
    from prefect_raybatch.runs.retry import options_of_retry

    if is_first_phase(plan):
        return (), ()  # its rows are retried in the run itself
    needed = tuple(options_of_retry(plan))
    try:
        family = load_family(*place(uri, options))
        member = family.members.get(plan.run_key)
    except (ConfigError, CorruptRun, NoSuchRun) as error:
        log.warning("retries of the failed rows are unknown: %s", error)
        return (), needed
    if member is None or not family.is_taken(member):
        return (), needed
    return tuple(child.key for child in family.children(member.key)), needed


def _asks(store: Store, plan: Plan, options: StoreOptions | None) -> Status | None:
    """Return the state of the requests phase of a run that reuses answers.

    None for any other run, and before that phase has begun.
    """
    increment = increment_of(plan)
    if increment is None or increment.asks is None:
        return None
    ledger = asks_ledger(store)
    return None if ledger.load_plan() is None else status(ledger.store.uri, options)


def state_of(uri: str, options: StoreOptions | None = None) -> str:
    """Return planned, unfinished or completed, from a listing alone.

    Returns partial for the folder of a partial result. Raises `NoSuchRun`.
    """
    uri, name = split_partial(uri)
    ledger = Ledger(open_store(uri, options))
    plan = need_plan(ledger)
    if name is not None:
        read_partial(ledger.store, plan, name)
        return PARTIAL_STATE
    finished = ledger.finished(plan) is not None
    return state_name(finished, finished or bool(ledger.committed(plan).any()))


def report_of(uri: str, options: StoreOptions | None = None) -> RunReport:
    """Return the report of a run directory.

    It is the one written at its end or, before that, one from the commits so far. For a partial
    result's folder, it is the one written with it.
    """
    uri, name = split_partial(uri)
    store = open_store(uri, options)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    if name is not None:
        read_partial(store, plan, name)
        return RunReport.from_bytes(read_record(store, partial_path(name, PARTIAL_REPORT)))
    if ledger.finished(plan) is not None:
        return load_report(store)
    listing = ledger.listing(plan)
    tally = _tally(ledger, plan, listing)
    state, notes = state_name(False, bool(tally.shards)), of_whom(plan)
    attempt = last_attempt_of(store)
    if attempt is not None and attempt.failure:
        state = ATTEMPT_FAILED
        notes.append(f"failed during {attempt.failure}")
    attempts = _attempts(ledger)
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
    return with_cost(made, ledger, plan, _prices(plan))


def _tally(ledger: Ledger, plan: Plan, listing: Listing) -> Tally:
    """Return the figures of all committed shards."""
    tally = Tally()
    for commit in ledger.commits(plan, listing):
        tally.add(commit)
    return tally


def _prices(plan: Plan) -> Prices:
    """Return the GPU prices in the job of a run."""
    return prices_of(planned_job(plan).cluster)


def _attempts(ledger: Ledger) -> list[JsonObject]:
    found = []
    for name in ledger.attempts():
        try:
            found.append({"attempt": name, **ledger.read_attempt(name)})
        except (
            CorruptRun,
            FileNotFoundError,
        ) as fault:  # the others are still shown
            log.warning("the record of attempt %s is unreadable and not shown: %s", name, fault)
    return sorted(found, key=lambda attempt: str(attempt.get("started")))


def _stop_of(attempts: Sequence[JsonObject], done: np.ndarray) -> Stop | None:
    """Return why the latest attempt stopped.

    None if the shard that it held back was committed meanwhile.
    """
    stop = Stop.from_note(attempts[-1]) if attempts else None
    if stop is None or type(stop.shard) is not int or not 0 <= stop.shard < len(done):
        return None
    return None if done[stop.shard] else stop


def _drained(store: Store, attempts: Sequence[JsonObject]) -> Drain | None:
    """Return the drain request that stopped the latest attempt."""
    found = read_drain(store)
    latest = attempts[-1]["attempt"] if attempts else None
    return found if found is not None and latest in found.attempts else None


def _beats(store: Store, attempts: Sequence[JsonObject]) -> list[JsonObject]:
    """Return heartbeats of attempts that have not ended, with `age` in seconds by this clock."""
    from prefect_raybatch.driver.heartbeat import ENDED, read_beats

    now = time.time()
    known = {str(attempt["attempt"]): attempt for attempt in attempts[-ATTEMPTS_SHOWN:]}
    found = [
        {**known[name], **asdict(beat), "age": round(now - beat.at, 1)}
        for name, beat in read_beats(store, known).items()
        if beat.phase != ENDED
    ]
    return sorted(found, key=lambda beat: beat["age"])
