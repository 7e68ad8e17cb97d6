"""Forks: repaired runs, which continue another run under another key.

The old run only names its fork. A reader that follows the name checks that the fork's plan names
the plan of the old run.
"""

from __future__ import annotations

import re
from contextlib import suppress

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.checks import check_run_key
from prefect_raybatch.ledger.layout import SUPERSEDED_BY
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import Plan, dump, load
from prefect_raybatch.storage import Store

_FORK = re.compile(r"(?P<base>.+)\.m(?P<number>[1-9]\d{0,3})\Z")
MOST_FORKS = 100  # forks followed one after the other


def fork_key(key: str) -> str:
    """Return the key for a repaired run: X.m1 if `key` is X, X.m2 if it is X.m1, and so on."""
    match = _FORK.match(key)
    return f"{match['base']}.m{int(match['number']) + 1}" if match else f"{key}.m1"


def continued_key(key: str) -> str | None:
    """Return the key of the run that the repaired run `key` continues.

    It follows from `key` alone: X for X.m1, X.m1 for X.m2, and so on. Returns None if `key` is not
    the key of a repaired run.
    """
    match = _FORK.match(key)
    if match is None:
        return None
    number = int(match["number"]) - 1
    return f"{match['base']}.m{number}" if number else match["base"]


def forks_of(key: str) -> int:
    """Return how many repairs, one after the other, led to run `key`: 2 for X.m2, 0 for X."""
    match = _FORK.match(key)
    return int(match["number"]) if match else 0


def original_key(plan: Plan) -> str:
    """Return the key of the run that the first repair continued: X if this run is X.m2.

    Returns the run's own key if it is no repair.
    """
    match = _FORK.match(plan.run_key) if plan.forked_from is not None else None
    return match["base"] if match else plan.run_key


def forked(plan: Plan) -> dict[str, str]:
    """Return what the plan of a run that repairs this one records as `Plan.forked_from`.

    The result is {"run_key": the run's key, "plan": the hash of its plan}.
    """
    return {"run_key": plan.run_key, "plan": plan.hash}


def supersede(ledger: Ledger, key: str) -> None:
    """Record in a damaged run that the repaired run `key` continues it."""
    put_record(ledger.store, SUPERSEDED_BY, dump({"by": key}))


def follow_forks(ledger: Ledger, plan: Plan) -> tuple[Ledger, Plan]:
    """Return (ledger, plan) of the last repaired run that continues a run.

    Returns the run itself if it was not repaired. A repaired run may have been repaired again, so
    repairs are followed one by one. Stops after 100, and before a repaired run that is missing,
    unreadable or no repair of the run before it.
    """
    return runs_to_last_fork(ledger, plan)[-1]


def key_to_continue(root: Store | None, plan: Plan, fork: str | None = None) -> str:
    """Return the key with which `raybatch run` finishes the repaired run `fork`.

    This is the key of the first run, for which {run_key} in the job stands, if it leads to `fork`:
    not if one of the runs between them was deleted. Then it is `fork`. `plan` is of `fork` or of a
    run that it continues; without `fork`, the run of `plan` is meant. `root` is the folder of runs.
    """
    fork, first = fork or plan.run_key, original_key(plan)
    if root is None or first == fork:
        return fork
    ledger = Ledger(root.sub(first))
    with suppress(CorruptRun):
        first_plan = ledger.load_plan()
        if first_plan is not None and follow_forks(ledger, first_plan)[1].run_key == fork:
            return first
    return fork


def runs_to_last_fork(ledger: Ledger, plan: Plan) -> list[tuple[Ledger, Plan]]:
    """Return (ledger, plan) of this run and of the repaired runs that `follow_forks` follows."""
    runs = [(ledger, plan)]
    while len(runs) <= MOST_FORKS and (fork := _next(*runs[-1])) is not None:
        runs.append(fork)
    return runs


def _next(ledger: Ledger, plan: Plan) -> tuple[Ledger, Plan] | None:
    try:
        key = load(read_record(ledger.store, SUPERSEDED_BY), SUPERSEDED_BY).get("by")
        root = ledger.store.above()
        if root is None or not isinstance(key, str):
            return None
        theirs = Ledger(root.sub(check_run_key(key)))
        fork_plan = theirs.load_plan()
    except (FileNotFoundError, CorruptRun, ConfigError):  # the fork's name is only a hint
        return None
    if fork_plan is None or fork_plan.forked_from != forked(plan):
        return None
    return theirs, fork_plan
