"""Lists the runs below an output folder, and finds the newest complete one."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from prefect_raybatch.errors import CorruptRun, NoSuchRun, RayBatchError
from prefect_raybatch.ledger.increments import has_begun
from prefect_raybatch.ledger.last_attempt import (
    ATTEMPT_FAILED,
    LastAttempt,
    last_attempt_of,
    read_last_attempt,
)
from prefect_raybatch.ledger.layout import PLAN, PRUNED
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.runs.attempts import PLANNING
from prefect_raybatch.runs.run import STORE_AWAY, run_keys, state_name
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, is_remote, open_store

_READERS = 8  # run directories read at once
COMPLETED = state_name(finished=True, begun=True)
PRUNING, DAMAGED = "half removed", "not readable"


@dataclass(frozen=True)
class RunLine:
    """A run in a list of runs, or an attempt at a run that has no plan yet (no `has_plan`).

    `run` is its directory's URI. `state` is e.g. "completed", "failed" or "not readable". `rows`
    and `shards` are planned; `committed` counts shards. `good` (answered) and `quarantined` rows
    are None until the run is complete.

    Times are in seconds since 1970. `created` is when the run was planned, or when the attempt
    began. `finished` is when the run was completed, or when the attempt ended. `first_created` is
    when the run was planned; for a repaired run, when the original run was planned.

    `parent` is set for a retry: the key of the run whose failed rows it retries. `forked_from` is
    set for a repaired run: the key of the damaged run that it continues.

    These texts may be "". `trouble` says why the directory is unreadable. `failure` says why the
    last attempt at an incomplete run failed. `command` runs it again, once `first_step` is done.
    """

    run_key: str
    run: str
    state: str
    job: str = ""
    rows: int = 0
    shards: int = 0
    committed: int = 0
    good: int | None = None
    quarantined: int | None = None
    created: float | None = None
    finished: float | None = None
    first_created: float | None = None
    parent: str | None = None
    forked_from: str | None = None
    trouble: str = ""
    failure: str = ""
    command: str = ""
    first_step: str = ""
    has_plan: bool = True

    @property
    def is_attempt(self) -> bool:
        """Return whether this is an attempt at a run that has no plan.

        The attempt is still planning, or it ended before there was a plan.
        """
        return not self.has_plan


def need_output(output: str) -> None:
    """Raise `NoSuchRun` if `output` is no folder of runs: missing, a file, or itself a run.

    An empty folder is accepted.
    """
    root = open_store(output)
    if not is_remote(root.uri) and os.path.isfile(root.uri):
        raise NoSuchRun(f"{output} is a file. Name the folder of the runs, the job's output.uri.")
    if not (_holds_anything(root) if is_remote(root.uri) else os.path.isdir(root.uri)):
        raise NoSuchRun(f"{output}: there is no such folder. Name the job's output.uri.")
    if root.holds(PLAN):
        raise NoSuchRun(
            f"{output} is itself a run. Name the folder that holds it, or show it with "
            f"`raybatch status {output}`."
        )


def list_runs(
    output: str, options: StoreOptions | None = None, job: str | None = None
) -> list[RunLine]:
    """Return the runs below `output`, newest first; with `job`, only those of the job of this name.

    Includes attempts at runs without a plan and unreadable run directories; other folders are
    skipped.
    """
    return lines_of(open_store(output, dict(options) if options else None), job)


def lines_of(root: Store, job: str | None = None) -> list[RunLine]:
    """Return the runs below `root`, as `list_runs` does."""
    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(lambda key: line_of(root, key), run_keys(root)))
    lines = [line for line in found if line is not None and (job is None or line.job == job)]
    return sorted(lines, key=recency_key, reverse=True)


def recency_key(line: RunLine) -> tuple[float, float, str]:
    """Return the sort key of a run: by the second of planning, then by completion, then by run key.

    Later runs have greater keys; a run that is not complete counts as the last to be completed.
    """
    return line.created or 0.0, line.finished or math.inf, line.run_key


def latest_complete(
    output: str, options: StoreOptions | None = None, job: str | None = None
) -> RunLine:
    """Return the complete run below `output` that finished last; with `job`, of this job only.

    `job` is the job's name. Retries of failed rows do not count. Raises `NoSuchRun` if there is
    none.
    """
    lines = list_runs(output, options, job)
    done = [line for line in lines if line.state == COMPLETED and line.parent is None]
    if not done:
        of = f" of the job {job}" if job else ""
        raise NoSuchRun(f"{output} holds no completed run{of}; it holds {len(lines)} in all")
    return max(done, key=lambda line: (line.finished or 0.0, line.run_key))


def line_of(root: Store, key: str) -> RunLine | None:
    """Return the list entry of the folder `key` below `root`; None if it is no run directory.

    An unreadable directory is returned with `trouble`. Raises only if the store is unreachable.
    """
    store = root.sub(key)
    try:
        return _line_of(store, key)
    except STORE_AWAY:
        raise
    except RayBatchError as error:
        return RunLine(key, store.uri, DAMAGED, trouble=str(error))


def _line_of(store: Store, key: str) -> RunLine | None:
    ledger = Ledger(store)
    plan, removing = ledger.load_plan(), store.holds(PRUNED)
    if plan is not None and plan.run_key != key:
        raise CorruptRun(
            f"{store.uri} is the directory of run {plan.run_key!r}, renamed or copied. Rename it "
            "back, or move the copy to another output folder under its own name"
        )
    if removing:
        return RunLine(key, store.uri, PRUNING)
    if plan is None:
        attempt = read_last_attempt(store)
        return None if attempt is None else _attempt_line(store, key, attempt)
    success = ledger.finished(plan)
    committed = plan.shards if success is not None else int(ledger.committed(plan).sum())
    attempt = None if success is not None else last_attempt_of(store)
    failure = attempt.failure if attempt is not None else ""
    state = state_name(success is not None, has_begun(ledger, plan, committed > 0))
    return RunLine(
        run_key=key,
        run=store.uri,
        state=ATTEMPT_FAILED if failure else state,
        job=plan.job_name,
        rows=plan.rows,
        shards=plan.shards,
        committed=committed,
        good=success.data if success is not None else None,
        quarantined=success.quarantine if success is not None else None,
        created=_seconds(plan.created),
        finished=success.finished or None if success is not None else None,
        first_created=_seconds(plan.first_created),
        parent=plan.parent,
        forked_from=plan.forked_from["run_key"] if plan.forked_from is not None else None,
        failure=failure,
        command=attempt.command if attempt is not None else "",
        first_step=attempt.first_step if attempt is not None else "",
    )


def _attempt_line(store: Store, key: str, attempt: LastAttempt) -> RunLine:
    if attempt.run_key != key:
        raise CorruptRun(
            f"{store.uri} has no plan, only the record of an attempt at run {attempt.run_key!r}, "
            "so it was renamed or copied. Delete it, or rename it back"
        )
    return RunLine(
        run_key=key,
        run=store.uri,
        state=attempt.outcome or PLANNING,
        job=attempt.job,
        created=attempt.started,
        finished=attempt.ended,
        failure=attempt.failure,
        command=attempt.command if attempt.outcome else "",  # else it may be at work
        first_step=attempt.first_step,
        has_plan=False,
    )


def _holds_anything(root: Store) -> bool:
    return any(next(iter(listed), None) is not None for listed in (root.folders(), root.list()))


def _seconds(created: str) -> float | None:
    """Return an ISO time as seconds since 1970; None if invalid. Without a zone, it is UTC."""
    with suppress(ValueError):
        when = datetime.fromisoformat(created)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return None
