"""A run that goes on in another's place: what it is called, and how it is found.

The old run says only where to go on, and says it to be helpful: who follows looks whether the run
there was forked from the very plan that he came from.
"""

from __future__ import annotations

import re

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.checks import check_run_key
from prefect_raybatch.ledger.layout import SUPERSEDED_BY
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import Plan, dump, load

_FORK = re.compile(r"(?P<base>.+)\.m(?P<number>[1-9]\d{0,3})\Z")
MOST_FORKS = 100  # that are followed one after the other


def fork_key(key: str) -> str:
    """The key of the run that takes the place of run `key`."""
    match = _FORK.match(key)
    return f"{match['base']}.m{int(match['number']) + 1}" if match else f"{key}.m1"


def forks_of(key: str) -> int:
    """Return how many runs, one after the other, run `key` takes the place of."""
    match = _FORK.match(key)
    return int(match["number"]) if match else 0


def forked(plan: Plan) -> dict[str, str]:
    """How a fork names the run that it takes the place of."""
    return {"run_key": plan.run_key, "plan": plan.hash}


def supersede(ledger: Ledger, key: str) -> None:
    """Notes in a run that run `key` beside it goes on in its place."""
    put_record(ledger.store, SUPERSEDED_BY, dump({"by": key}))


def follow_forks(ledger: Ledger, plan: Plan) -> tuple[Ledger, Plan]:
    """The run that goes on in the place of this one; this one where there is none."""
    for _ in range(MOST_FORKS):
        found = _next(ledger, plan)
        if found is None:
            break
        ledger, plan = found
    return ledger, plan


def _next(ledger: Ledger, plan: Plan) -> tuple[Ledger, Plan] | None:
    try:
        key = load(read_record(ledger.store, SUPERSEDED_BY), SUPERSEDED_BY).get("by")
        root = ledger.store.above()
        if root is None or not isinstance(key, str):
            return None
        theirs = Ledger(root.sub(check_run_key(key)))
        found = theirs.load_plan()
    except (FileNotFoundError, CorruptRun, ConfigError):  # only advice, so none is no fault
        return None
    if found is None or found.forked_from != forked(plan):
        return None
    return theirs, found
