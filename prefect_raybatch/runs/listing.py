"""The runs below an output folder: what each is, and the newest complete one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prefect_raybatch.errors import CorruptRun, NoSuchRun
from prefect_raybatch.ledger.layout import PLAN, PRUNED
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.runs.run import run_keys, state_name
from prefect_raybatch.storage import Store, is_remote, open_store

_READERS = 8  # run directories read at once
COMPLETED = state_name(finished=True, begun=True)
PRUNING, DAMAGED = "half removed", "not readable"


@dataclass(frozen=True)
class RunLine:
    """A run as a list shows it. `rows` are planned ones, `shards` of them committed; good and
    quarantined rows are None until it is completed. `created` and `finished` are seconds since
    1970; `parent` is the run whose failed rows it retries. What is wrong with a run that is not
    readable stands in `trouble`."""

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
    parent: str | None = None
    trouble: str = ""


def need_output(output: str, options: Mapping[str, Any] | None = None) -> None:
    """Raises `NoSuchRun` where `output` is no folder of runs: nothing is there, or a file, or it
    is itself a run. A folder without runs is one."""
    root = open_store(output, dict(options) if options else None)
    if not is_remote(root.uri) and os.path.isfile(root.uri):
        raise NoSuchRun(f"{output} is a file; name the folder of the runs, the job's output.uri")
    if not (_holds_anything(root) if is_remote(root.uri) else os.path.isdir(root.uri)):
        raise NoSuchRun(f"{output}: there is no such folder; name the job's output.uri")
    if root.holds(PLAN):
        raise NoSuchRun(
            f"{output} is itself a run; name the folder that it lies in, or look at it with "
            "`raybatch status`"
        )


def list_runs(
    output: str, options: Mapping[str, Any] | None = None, job: str | None = None
) -> list[RunLine]:
    """The runs below `output`, newest first; of that job alone where one is named. A folder that is
    no run directory is not listed."""
    return lines_of(open_store(output, dict(options) if options else None), job)


def lines_of(root: Store, job: str | None = None) -> list[RunLine]:
    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(lambda key: line_of(root, key), run_keys(root)))
    lines = [line for line in found if line is not None and (job is None or line.job == job)]
    return sorted(lines, key=run_age, reverse=True)


def run_age(line: RunLine) -> tuple[float, float, str]:
    """Later ones are larger; plans tell their time in seconds."""
    return line.created or 0.0, line.finished or math.inf, line.run_key


def latest_complete(
    output: str, options: Mapping[str, Any] | None = None, job: str | None = None
) -> RunLine:
    """The completed run below `output` that finished last; not one that retries another's failed
    rows. Raises `NoSuchRun` where there is none."""
    lines = list_runs(output, options, job)
    done = [line for line in lines if line.state == COMPLETED and line.parent is None]
    if not done:
        of = f" of the job {job}" if job else ""
        raise NoSuchRun(f"{output} holds no completed run{of}; it holds {len(lines)} in all")
    return max(done, key=lambda line: (line.finished or 0.0, line.run_key))


def line_of(root: Store, key: str) -> RunLine | None:
    """The run of that key below `root`; None where there is none."""
    store = root.sub(key)
    if store.holds(PRUNED):
        return RunLine(key, store.uri, PRUNING)
    ledger = Ledger(store)
    try:
        plan = ledger.load_plan()
        if plan is None:
            return None
        success = ledger.finished(plan)
        committed = plan.shards if success is not None else int(ledger.committed(plan).sum())
    except CorruptRun as error:
        return RunLine(key, store.uri, DAMAGED, trouble=str(error))
    return RunLine(
        run_key=key,
        run=store.uri,
        state=state_name(success is not None, committed > 0),
        job=plan.job_name,
        rows=plan.rows,
        shards=plan.shards,
        committed=committed,
        good=success.data if success is not None else None,
        quarantined=success.quarantine if success is not None else None,
        created=_seconds(plan.created),
        finished=success.finished or None if success is not None else None,
        parent=plan.parent,
    )


def _holds_anything(root: Store) -> bool:
    return any(next(iter(listed), None) is not None for listed in (root.folders(), root.list()))


def _seconds(created: str) -> float | None:
    """Since 1970, of the time in a plan."""
    with suppress(ValueError):
        when = datetime.fromisoformat(created)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return None
