"""Says what `raybatch run` would do with a run key, from the records of the run alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.driver.cost import check_cost
from prefect_raybatch.errors import CostExceeded, PlanMismatch
from prefect_raybatch.ledger.forks import follow_forks
from prefect_raybatch.ledger.increments import OF_LARGER, increment_of
from prefect_raybatch.ledger.last_attempt import last_attempt_of
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.published import unpublished_labels
from prefect_raybatch.ledger.records import JsonObject, Plan, dump
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.quality.judgement import read_judgement
from prefect_raybatch.runs.attempts import open_step_of
from prefect_raybatch.runs.drivers import driver_state
from prefect_raybatch.runs.plan_run import check_same_job
from prefect_raybatch.runs.run import run_store
from prefect_raybatch.runs.status import Status, live_beats, status
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted, some_are

NextAction = Literal["begin", "resume", "finish", "nothing", "refuse", "wait"]


@dataclass(frozen=True)
class NextStep:
    """What `raybatch run` would do with the run key of the run directory `run`.

    `action` is "begin", "resume", "finish" (all shards are committed), "nothing" (the run is
    complete), "refuse" (the job differs from the run's plan, or the run reached its cost limit) or
    "wait" (a driver is at work). `lines` are sentences about it. For "resume", "finish" and "wait",
    `rows_left` is the number of uncommitted rows, and `reads_copy` says whether the run reads a
    copy of the input in its directory.
    """

    action: NextAction
    run: str
    run_key: str
    lines: tuple[str, ...]
    rows_left: int | None = None
    reads_copy: bool = False

    @property
    def infers(self) -> bool:
        """Return whether the command would infer rows."""
        return self.action in ("begin", "resume")


def next_step_of(resolved: Resolved, run_key: str) -> NextStep:
    """Return what `raybatch run` would do with this job and run key; writes nothing.

    Raises `CorruptRun` if the records are unreadable, and the store's errors.
    """
    job = resolved.job
    ledger = Ledger(run_store(job.output, run_key))
    plan, uri = ledger.load_plan(), ledger.store.uri
    if plan is None:
        ledger.finished()  # raises for a _SUCCESS without a plan, as a run does
        lines = ("begins a new run", *_of_unplanned(ledger.store, job.name))
        return NextStep("begin", uri, run_key, lines)
    try:
        check_same_job(plan, resolved, uri)
    except PlanMismatch as error:
        return NextStep("refuse", uri, run_key, (f"refuses: {error}",))
    later, plan = follow_forks(ledger, plan)
    repaired = (f"continues {later.store.uri}, the repaired run",) if later is not ledger else ()
    if (success := later.finished(plan)) is not None:
        lines = (*repaired, *_of_finished(resolved, later.store, success))
        return NextStep("nothing", later.store.uri, run_key, lines)
    state = status(later.store.uri, job.output.options or None)
    if beats := live_beats(state):
        lines = (*repaired, *_of_driver(beats[0], state, plan, job.cluster.access.remote))
        rows_left = state.rows - state.done
        return NextStep("wait", later.store.uri, run_key, lines, rows_left, plan.snapshot)
    if (pending := _pending(state, plan)) and (over := _over_cost(resolved, state, pending)):
        return NextStep("refuse", later.store.uri, run_key, (*repaired, f"refuses: {over}"))
    lines = (*repaired, _left(state, plan), *_of_last(state))
    action: NextAction = "resume" if pending else "finish"
    rows_left = state.rows - state.done
    return NextStep(action, later.store.uri, run_key, lines, rows_left, plan.snapshot)


def _of_unplanned(store: Store, job: str) -> Iterator[str]:
    """Yield a sentence on how an attempt at a run of this job failed before there was a plan."""
    attempt = last_attempt_of(store)
    if attempt is not None and attempt.job == job and attempt.failure:
        yield f"the last attempt failed during {attempt.failure}"


def _over_cost(resolved: Resolved, state: Status, pending: int) -> str:
    """Return the error text if the cost limit forbids inferring `pending` more shards, else ""."""
    try:
        shards = state.shards + (state.first_phase.shards if state.first_phase is not None else 0)
        committed = max(0, shards - pending)
        check_cost(resolved.job.limits, state.cost, shards, committed, state.currency)
    except CostExceeded as error:
        return str(error)
    return ""


def _of_finished(resolved: Resolved, store: Store, success: Success) -> Iterator[str]:
    when = datetime.fromtimestamp(success.finished, UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield (
        f"infers nothing: the run is complete since {when}. For new answers use another --run-key"
    )
    if targets := unpublished_labels(store, resolved.job.output.publish):
        yield f"publishes the result to {', '.join(targets)}"
    last = open_step_of(store)
    if last is not None and last.under_way:
        yield (
            f"it is {last.under_way}. Wait for its end, unless that process is gone: a second "
            "command repeats work"
        )
    if resolved.job.quality.judge.asked and read_judgement(store) is None:
        yield "asks the judge about the answers"
    if last is not None and last.undone:
        yield last.undone_advice


def _of_driver(beat: JsonObject, state: Status, plan: Plan, remote: bool) -> Iterator[str]:
    """Yield sentences on what the command would do beside the driver that sent heartbeat `beat`.

    `remote`: runs are submitted as Ray jobs, so `raybatch run` would only follow the driver.
    """
    does = "follows the driver" if remote else "begins a second driver beside the one"
    heard = f"{_place(beat)}, heard {beat['age']:.0f} s ago"
    yield f"{does} at work ({heard}). {_committed(state, plan)}"
    drains = [one.drained for one in _states(state) if one.drained is not None]
    drained = [drain for drain in drains if beat["attempt"] in drain.attempts]
    if drained:
        yield (
            f"{drained[0].by} asked it to finish the shards in flight and stop. Wait for its end; "
            "the same command then resumes the run"
        )
    elif not remote:
        yield "wait for its end: a second driver is safe, but repeats work"


def _place(beat: JsonObject) -> str:
    return f"host {beat.get('host')}, process {beat.get('pid')}"


def _of_last(state: Status) -> Iterator[str]:
    """Yield sentences on how the last attempt ended; none if that is unknown."""
    for one in _states(state):
        for beat in one.beats[:1]:
            if driver_state(beat) == "died" and beat["attempt"] == one.attempts[-1]["attempt"]:
                yield f"the driver died ({_place(beat)}): it ended without a report"
    if state.failure:
        yield f"the last attempt failed during {state.failure}"
    for one in _states(state):
        if one.drained is not None:
            yield f"the last attempt was drained by {one.drained.by}"
        if one.stopped is not None:
            yield f"the last attempt stopped: {one.stopped.line()}"


def _states(state: Status) -> tuple[Status, ...]:
    """Return the state of the run, and of its first phase if this has begun but is not complete."""
    asks = state.first_phase
    return (state,) if asks is None or asks.state == "completed" else (state, asks)


def _phases(state: Status, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Yield (name, pending shards, shards) of each phase; the name is "" if there is only one."""
    increment = increment_of(plan)
    if increment is None or increment.asks is None:
        yield "", state.pending, state.shards
        return
    names = (
        ("first model", "larger model") if increment.ledger == OF_LARGER else ("requests", "rows")
    )
    if state.first_phase is None:
        shards = Plan.from_bytes(dump(increment.asks)).shards
        yield names[0], shards, shards
    else:
        yield names[0], state.first_phase.pending, state.first_phase.shards
    yield names[1], state.pending, state.shards


def _pending(state: Status, plan: Plan) -> int:
    return sum(pending for _, pending, _ in _phases(state, plan))


def _committed(state: Status, plan: Plan) -> str:
    """Return e.g. `3 of 4 rows are committed`; for two phases, committed shards of each phase."""
    phases = tuple(_phases(state, plan))
    if len(phases) == 1:
        return f"{some_are(state.done, state.rows, 'row')} committed"
    parts = [
        f"{shards - pending:,} of {counted(shards, 'shard')} of the {name}"
        for name, pending, shards in phases
    ]
    return f"{' and '.join(parts)} are committed"


def _left(state: Status, plan: Plan) -> str:
    """Return which shards are pending, by phase, e.g. `resumes 3 of 4 shards`.

    If none is, says that only the result and the report are to be written.
    """
    if not _pending(state, plan):
        return "infers nothing: all shards are committed. Writes the result and the report"
    parts = [
        f"{pending:,} of {counted(shards, 'shard')}{f' of the {name}' if name else ''}"
        for name, pending, shards in _phases(state, plan)
        if pending
    ]
    answered = state.first_model is not None and not state.first_model.pending
    done = "; the first model has answered all rows" if answered else ""
    return f"resumes {' and '.join(parts)}{done}"
