"""Runs a job for many dates: one run per date, several at once, skipping completed ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import date, timedelta

from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import ConfigError, JobStopped, RayBatchError, is_transient
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.run_words import places_are_dated
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.same_job import check_same
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.listing import COMPLETED, line_of
from prefect_raybatch.runs.run import begun
from prefect_raybatch.storage import open_store

log = logging.getLogger(__name__)

NOT_BEGUN, NIGHT_FAILED, STOPPED = "not begun", "failed", "stopped"
MOST_NIGHTS = 10_000


@dataclass(frozen=True)
class NightRun:
    """A run of a backfill. `state` is that of the run, or failed or stopped by this call. Rows are
    known for a completed run, `seconds` of work also for one that this call failed. `done`: it was
    complete before. `trouble` says why it is not complete, `transient` whether a retry may help."""

    date: date
    run_key: str
    run: str
    state: str = NOT_BEGUN
    rows: int | None = None
    quarantined: int | None = None
    seconds: float | None = None
    done: bool = False
    trouble: str = ""
    transient: bool = True

    @property
    def complete(self) -> bool:
        return self.state == COMPLETED


def planned_nights(job: BatchJob, first: date, last: date) -> list[NightRun]:
    """Return the runs from `first` to `last`, both included, with the state of each. `job` has its
    credentials. Starts nothing and reads no input.

    Raises `ConfigError` for a job whose input and output are the same for every date, and for
    invalid dates.
    """
    if not places_are_dated(job):
        raise ConfigError(
            f"{job.name} has no {{run_date}} in source (uri, query, filter) or output.uri, so each "
            "date would infer the same rows. Write {run_date} where the rows of a date are."
        )
    days = (last - first).days + 1
    if not 0 < days <= MOST_NIGHTS:
        raise ConfigError(
            f"from {first} to {last} are {max(0, days):,} dates. Give a first date that is not "
            f"after the last, and at most {MOST_NIGHTS:,} dates."
        )
    return [_planned(job, first + timedelta(days=number)) for number in range(days)]


def _planned(job: BatchJob, day: date) -> NightRun:
    filled, key = begun(job, None, None, day)
    check_trust(filled)
    root = open_store(filled.output.uri, filled.output.options or None)
    night = NightRun(day, key, root.sub(key).uri)
    line = line_of(root, key)
    if line is None:
        return night
    night = replace(night, state=line.state, trouble=line.trouble or line.failure)
    if line.state != COMPLETED:
        return night
    plan = Ledger(root.sub(key)).load_plan()
    try:
        if plan is not None:
            resolved = resolve(filled)
            check_same(plan, resolved.identity, night.run)
        report = load_report(root.sub(key))
    except RayBatchError as error:
        return _failed(night, error, None)
    # What is published yet is found by the run itself, which publishes each target once.
    return _completed(night, report, done=not filled.output.publish)


def _completed(night: NightRun, report: RunReport, done: bool) -> NightRun:
    return replace(
        night,
        state=COMPLETED,
        rows=report.rows,
        quarantined=report.failed,
        seconds=report.seconds,
        done=done,
        trouble="",
    )


def _failed(night: NightRun, error: BaseException, seconds: float | None) -> NightRun:
    state = STOPPED if isinstance(error, JobStopped) else NIGHT_FAILED
    told = (getattr(error, "plain", None) or str(error)).strip() or "no message"
    lines = told.splitlines()
    more = " ..." if len(lines) > 1 else ""
    return replace(
        night,
        state=state,
        seconds=seconds,
        trouble=f"{type(error).__name__}: {lines[0]}{more}",
        transient=is_transient(error) or state == STOPPED,
    )


def backfill(
    job: BatchJob,
    nights: Sequence[NightRun],
    run_night: Callable[[NightRun], RunReport],
    at_most: int = 1,
    stop_on_failure: bool = False,
    told: Callable[[NightRun], None] = lambda night: None,
) -> list[NightRun]:
    """Run the incomplete dates in order, at most `at_most` at once; return the state of all.
    `run_night` runs one to its end, in a thread; `told` is called with each that has ended.

    A failed run stops the others only with `stop_on_failure`: active ones finish, and nothing new
    begins. A signal stops all; committed shards are kept. One Ray cluster serves all of them.
    Raises `ConfigError` for `at_most` under 1, and errors of starting the cluster.
    """
    if at_most < 1:
        raise ConfigError(f"at most {at_most} concurrent runs is none. Give 1 or more.")
    found = {night.date: night for night in nights}
    todo = [night for night in nights if not night.done]
    if not todo:
        return list(nights)
    context = copy_context()  # of before the cluster is held: runs within a run are refused
    filled = begun(job, None, None, todo[0].date)[0]
    failed = threading.Event()

    def one(night: NightRun) -> NightRun | None:
        # Looked at and set here: whoever waits for the answers hears of them after the next began.
        if failed.is_set():
            return None
        ended = _one(run_night, night)
        if stop_on_failure and not ended.complete:
            failed.set()
        return ended

    with _held(filled) as stop_others, ThreadPoolExecutor(at_most) as pool:
        work = [pool.submit(context.copy().run, one, night) for night in todo]
        try:
            for future in as_completed(work):
                if (ended := future.result()) is not None:
                    found[ended.date] = ended
                    told(ended)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_others()
            raise
    return [found[night.date] for night in nights]


def _one(run_night: Callable[[NightRun], RunReport], night: NightRun) -> NightRun:
    began = time.monotonic()
    try:
        return _completed(night, run_night(night), done=False)
    except Exception as error:
        log.info("the run of %s is not complete: %s", night.date, error)
        return _failed(night, error, round(time.monotonic() - began, 1))


@contextmanager
def _held(job: BatchJob) -> Iterator[Callable[[], None]]:
    """Hold the cluster of all runs, so that a local one is started once, and the engines between
    two runs; yields what stops the runs in it."""
    where = cluster_spec(job)
    if where.access.remote:  # the runs are jobs of their own
        yield lambda: None
        return
    from prefect_raybatch.cluster.connect import SHARED, connected
    from prefect_raybatch.cluster.sharing import User

    keeper = User(f"back-fill of {job.name}")
    with SHARED.kept_warm(), connected(where, keeper):
        yield lambda: SHARED.stop_all(but=keeper)


def nights_table(nights: Sequence[NightRun]) -> list[dict[str, str]]:
    """Return one row for each run, for display."""
    return [
        {
            "date": f"{night.date}",
            "run key": night.run_key,
            "state": f"{night.state} before" if night.done else night.state,
            "rows": _number(night.rows),
            "quarantined": _number(night.quarantined),
            "seconds": "-" if night.seconds is None else f"{night.seconds:,.1f}",
        }
        for night in nights
    ]


def summary(nights: Sequence[NightRun]) -> str:
    """Return how many are complete, in a line."""
    complete = sum(night.complete for night in nights)
    before = sum(night.done for night in nights)
    return f"{complete:,} of {len(nights):,} dates are complete, {before:,} of them were before"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
