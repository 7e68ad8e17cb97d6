"""Runs a job for many dates: one run per date, several at once, skipping completed ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from datetime import date

from prefect_raybatch.errors import CorruptRun, JobStopped, RayBatchError, is_transient
from prefect_raybatch.ledger.forks import follow_forks
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.same_job import check_same
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.listing import COMPLETED, DAMAGED, PRUNING, RunLine, line_of
from prefect_raybatch.runs.run import STORE_AWAY, run_keys
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.run import Identity
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)

_READERS = 8  # plans read at once
NOT_STARTED, DATE_FAILED, STOPPED = "not started", "failed", "stopped"
_interrupted: ContextVar[threading.Event | None] = ContextVar("interrupted", default=None)


@dataclass(frozen=True)
class DatedRun:
    """The run for one date of a backfill; `run` is its directory's URI.

    `state` is the state of the run directory, or "failed" or "stopped" if the run ended so in this
    backfill. `done`: the run was complete before this backfill, and the job has no golden rows,
    judge or publish targets, so it is skipped. `rows`, `quarantined` and `seconds` (duration) are
    known for a complete run; for one that failed in this backfill, `seconds` is known too.
    `trouble` says why the run is not complete, or "". `transient`: a retry may help.
    """

    date: date
    run_key: str
    run: str
    state: str = NOT_STARTED
    rows: int | None = None
    quarantined: int | None = None
    seconds: float | None = None
    done: bool = False
    trouble: str = ""
    transient: bool = True

    @property
    def complete(self) -> bool:
        return self.state == COMPLETED


def plans_below(root: Store) -> list[Plan]:
    """Return the readable plans of the runs below `root`, without retries, newest first."""

    def plan_of(key: str) -> Plan | None:
        try:
            return Ledger(root.sub(key)).load_plan()
        except STORE_AWAY:
            raise
        except RayBatchError:  # not readable; the list of runs shows it
            return None

    with ThreadPoolExecutor(_READERS) as pool:
        plans = [plan for plan in pool.map(plan_of, run_keys(root)) if plan is not None]
    runs = [plan for plan in plans if plan.parent is None]
    return sorted(runs, key=lambda plan: (plan.created, plan.run_key), reverse=True)


def dated_run(
    root: Store,
    key: str,
    day: date,
    identity: Callable[[], Identity],
    plans: Callable[[], Sequence[Plan]],
    has_later_steps: bool,
) -> DatedRun:
    """Return the run of the date `day`, with its state.

    Returns the first of these runs below `root` that exists:
    1. the run `key`, if it is complete,
    2. the newest complete run with the current job's fingerprint, e.g. one that a schedule started,
    3. the run `key`,
    4. the newest run with the current job's fingerprint.
    If none exists, the state is NOT_STARTED. A repaired run takes the place of the damaged run that
    it continues.

    `plans` returns the plans of the runs below `root`, `identity` the current job's identity, which
    has its fingerprint. A complete run `key` with another fingerprint gets the state "failed", and
    so does a run whose records are unreadable. Other complete runs are `done`, unless the job is
    measured, judged or published after completion (`has_later_steps`). Raises only if the store is
    unreachable.
    """
    run = DatedRun(day, key, root.sub(key).uri)
    try:
        line = line_of(root, _latest_repair(root, key))
        if line is None or line.state != COMPLETED:
            line = _line_of_same_job(root, line, identity, plans())
        if line is None:
            return run
        trouble = line.trouble or line.failure
        run = DatedRun(day, line.run_key, line.run, state=line.state, trouble=trouble)
        if line.state != COMPLETED:
            return run
        plan = Ledger(root.sub(line.run_key)).load_plan()
        if plan is not None:
            check_same(plan, identity(), run.run)
        report = load_report(root.sub(line.run_key))
    except STORE_AWAY:
        raise
    except RayBatchError as error:
        return _failed(run, error, None)
    return _completed(run, report, done=not has_later_steps)


def _line_of_same_job(
    root: Store, line: RunLine | None, identity: Callable[[], Identity], plans: Sequence[Plan]
) -> RunLine | None:
    """Return the newest complete run of the job, else `line`, else the job's newest run, or None.

    A run is of the job if its plan has the job's fingerprint. `line` is the run under the key of
    the date, None if there is none. `plans` are newest first.
    """
    if not plans:
        return line
    fingerprint = identity().fingerprint
    same = [plan.run_key for plan in plans if plan.fingerprint == fingerprint]
    keys = dict.fromkeys(_latest_repair(root, key) for key in same)
    lines = [found for key in keys if (found := line_of(root, key)) is not None]
    complete = [found for found in lines if found.state == COMPLETED]
    begun = [found for found in lines if found.state not in (PRUNING, DAMAGED)]
    return next(iter([*complete, *([line] if line is not None else begun)]), None)


def _latest_repair(root: Store, key: str) -> str:
    """Return the key of the last repaired run that continues run `key`; `key` if there is none."""
    ledger = Ledger(root.sub(key))
    with suppress(CorruptRun):  # the list of runs shows it
        plan = ledger.load_plan()
        if plan is not None:
            return follow_forks(ledger, plan)[1].run_key
    return key


def _completed(run: DatedRun, report: RunReport, done: bool) -> DatedRun:
    return replace(
        run,
        state=COMPLETED,
        rows=report.rows,
        quarantined=report.failed,
        seconds=report.seconds,
        done=done,
        trouble="",
    )


def _failed(run: DatedRun, error: BaseException, seconds: float | None) -> DatedRun:
    state = STOPPED if isinstance(error, JobStopped) else DATE_FAILED
    text = (getattr(error, "plain", None) or str(error)).strip() or "no message"
    lines = text.splitlines()
    more = " ..." if len(lines) > 1 else ""
    return replace(
        run,
        state=state,
        seconds=seconds,
        trouble=f"{type(error).__name__}: {lines[0]}{more}",
        transient=is_transient(error) or state == STOPPED,
    )


def run_dates(
    cluster: ClusterSpec,
    runs: Sequence[DatedRun],
    run_date: Callable[[DatedRun], RunReport],
    at_most: int,
    stop_on_failure: bool,
    observe: Callable[[DatedRun], None],
) -> list[DatedRun]:
    """Run the dates that are not `done` on one cluster; return `runs` in order, with new states.

    `run_date` performs the run of one date; up to `at_most` of these calls run at once. With
    `stop_on_failure`, no date begins after one has failed. `observe` is called with each run that
    ends.
    """
    latest = {run.date: run for run in runs}
    context = copy_context()  # before the cluster is held: runs within a run are refused
    failed, interrupted = threading.Event(), threading.Event()
    context.run(_interrupted.set, interrupted)

    def run_one(run: DatedRun) -> DatedRun | None:
        # Checked and set in this thread: the main thread may get a result after the next began.
        if failed.is_set():
            return None
        ended = _ended(run_date, run)
        if stop_on_failure and not ended.complete:
            failed.set()
        return ended

    with _held(cluster) as stop_others, ThreadPoolExecutor(at_most) as pool:
        work = [pool.submit(context.copy().run, run_one, run) for run in runs if not run.done]
        try:
            for future in as_completed(work):
                if (ended := future.result()) is not None:
                    latest[ended.date] = ended
                    observe(ended)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            interrupted.set()
            stop_others()
            raise
    return [latest[run.date] for run in runs]


def interruptible_sleep(seconds: float) -> None:
    """Sleep for `seconds`; raise `KeyboardInterrupt` if the backfill is interrupted meanwhile.

    The runs of a backfill work in threads, but Ctrl-C reaches only the main thread of the process.
    Outside a backfill, this is an ordinary sleep.
    """
    interrupted = _interrupted.get()
    if interrupted is None:
        time.sleep(seconds)
    elif interrupted.wait(seconds):
        raise KeyboardInterrupt


def _ended(run_date: Callable[[DatedRun], RunReport], run: DatedRun) -> DatedRun:
    began = time.monotonic()
    try:
        return _completed(run, run_date(run), done=False)
    except Exception as error:
        log.info("the run of %s is not complete: %s", run.date, error)
        return _failed(run, error, round(time.monotonic() - began, 1))


@contextmanager
def _held(cluster: ClusterSpec) -> Iterator[Callable[[], None]]:
    """Keep a local cluster and its engines running for the whole block; yield a function.

    The function stops all runs on the cluster. If each run is a Ray job of its own, nothing is kept
    and the function does nothing.
    """
    if cluster.access.remote:  # each run is a job of its own
        yield lambda: None
        return
    from prefect_raybatch.cluster.connect import CLUSTER_SESSION, connected
    from prefect_raybatch.cluster.sharing import Tenant

    keeper = Tenant(f"backfill of {cluster.name}")
    with CLUSTER_SESSION.kept_warm(), connected(cluster, keeper):
        yield lambda: CLUSTER_SESSION.stop_all(but=keeper)


def dates_table(runs: Sequence[DatedRun]) -> list[dict[str, str]]:
    """Return one {column title: text} for each run, for display."""
    return [
        {
            "date": f"{run.date}",
            "run key": run.run_key,
            "state": f"{run.state} before" if run.done else run.state,
            "rows": _number(run.rows),
            "quarantined": _number(run.quarantined),
            "seconds": "-" if run.seconds is None else f"{run.seconds:,.1f}",
        }
        for run in runs
    ]


def summary(runs: Sequence[DatedRun]) -> str:
    """Return a line that says how many dates are complete.

    It also says how many of them were complete before the backfill.
    """
    complete = sum(run.complete for run in runs)
    before = sum(run.done for run in runs)
    return f"{complete:,} of {len(runs):,} dates are complete, {before:,} of them were before"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
