"""Builds the error for a location that holds no run, with the names of runs nearby."""

from __future__ import annotations

import difflib
import logging
from itertools import islice

from prefect_raybatch.errors import CorruptRun, NoSuchRun, RayBatchError
from prefect_raybatch.ledger.last_attempt import advice, read_last_attempt
from prefect_raybatch.ledger.layout import COMMITS, PLAN
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.partials import split_partial
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.storage import Store
from prefect_raybatch.words import sentence

log = logging.getLogger(__name__)

LOOKED_AT = 1000  # folders whose names are compared
RUNS_NAMED = 5  # runs that a message names


def need_plan(ledger: Ledger) -> Plan:
    """Return the plan of a run.

    Raises `NoSuchRun` if there is none, and `CorruptRun` if it cannot be read or only its commits
    are left.
    """
    plan = ledger.load_plan()
    if plan is None:
        error = no_run(ledger.store)
        plan = ledger.load_plan()  # a run that began meanwhile has commits after its plan
        if plan is None:
            raise error
    return plan


def no_run(store: Store) -> RayBatchError:
    """Return the error for a run directory without a plan, for the caller to raise.

    It is `CorruptRun` if there are commits, else `NoSuchRun` with a hint such as runs of similar
    names.
    """
    if next(iter(store.list(COMMITS)), None) is not None:
        return CorruptRun(f"{store.uri} has commits, but no {PLAN}. Restore that file")
    attempt = read_last_attempt(store)
    if attempt is not None:
        ended = attempt.failure or attempt.outcome or "planning has not finished"
        return NoSuchRun(
            f"{store.uri}: no run yet, since the last attempt wrote no plan ({ended.rstrip('.')}). "
            f"{sentence(advice(attempt.first_step, attempt.command))}{attempt.command}"
        )
    run, name = split_partial(store.uri)
    if name is not None:
        return NoSuchRun(
            f"{store.uri} is a partial result of the run in {run}. It cannot be verified, "
            "published or retried. Read its rows with open_run, or name the run"
        )
    try:
        hint = _hint(store)
    except RayBatchError as error:  # the hint is optional
        log.info("Cannot list the runs near %s: %s", store.uri, error)
        hint = ""
    return NoSuchRun(f"{store.uri} is not a run directory: it has no {PLAN}{hint}")


def _hint(store: Store) -> str:
    inside = _runs(store, list(islice(store.folders(), LOOKED_AT)))
    if inside:
        return f"; it contains the runs {', '.join(inside)}. Name one of them"
    above = store.above()
    if above is None:
        return ""
    names = list(islice(above.folders(), LOOKED_AT))
    own = store.uri.rpartition("/")[2]
    near = _runs(above, difflib.get_close_matches(own, names, RUNS_NAMED))
    if near:
        return f"; did you mean {' or '.join(near)}?"
    beside = _runs(above, names)
    return f"; runs in the same folder: {', '.join(beside)}" if beside else ""


def _runs(root: Store, names: list[str]) -> list[str]:
    """Return the first folders in `names` that hold a run, at most RUNS_NAMED.

    Looks only at the first 10 * RUNS_NAMED names.
    """
    runs = []
    for name in names[: 10 * RUNS_NAMED]:
        if not root.holds(f"{name}/{PLAN}"):
            continue
        runs.append(name)
        if len(runs) == RUNS_NAMED:
            break
    return runs
