"""A sample of a run's failed rows, to explain its failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from prefect_raybatch.driver.stops import Sample, Stop, failed_rows
from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.storage import open_store

log = logging.getLogger(__name__)

COMMITS_READ = 1000  # commits that are looked through for failed rows: more would take too long
FROM_A_SHARD = 5  # of one shard, so that others have their say


def failed_sample(uri: str, options: dict[str, Any] | None, most: int) -> list[Sample]:
    """Return up to `most` failed rows of a run.

    They are of the shard that crossed the error budget, which no commit covers, and of committed
    shards. Unreadable rows are left out, because the sample only explains.
    """
    try:
        return _sample(Ledger(open_store(uri, options)), most)
    except (RayBatchError, OSError) as error:
        log.warning("failed rows cannot be shown: %s: %s", type(error).__name__, error)
        return []


def last_stop(uri: str, options: dict[str, Any] | None) -> Stop | None:
    """Return why the latest attempt at a run stopped, if it was the error budget."""
    try:
        return _latest_stop(Ledger(open_store(uri, options)))
    except (RayBatchError, OSError) as error:
        log.warning("the failed rows are unknown: %s: %s", type(error).__name__, error)
        return None


def _sample(ledger: Ledger, most: int) -> list[Sample]:
    plan = ledger.load_plan()
    if plan is None:
        return []
    stop = _latest_stop(ledger)
    found = list(stop.sample[: most // 2]) if stop else []
    committed = _committed(ledger, plan)
    found += islice(committed, most - len(found))
    if stop and len(found) < most:
        found += stop.sample[most // 2 : most - len(found) + most // 2]
    return sorted(found, key=lambda one: one.row)


def _latest_stop(ledger: Ledger) -> Stop | None:
    """Return why the latest attempt stopped, if it was the error budget."""
    notes = []
    for name in ledger.attempts():
        try:
            notes.append(ledger.read_attempt(name))
        except (CorruptRun, FileNotFoundError):  # for people only: other attempts are still shown
            continue
    return Stop.from_note(max(notes, key=lambda note: str(note.get("started")))) if notes else None


def _committed(ledger: Ledger, plan: Plan) -> Iterator[Sample]:
    shards, numbers = ledger.shards(plan), partial(ledger.numbers, plan)
    for commit in islice(ledger.commits(plan, ledger.listing(plan)), COMMITS_READ):
        if commit.failed:
            start = shards[commit.shard].start
            yield from failed_rows(ledger.store, commit.pieces, start, numbers)[:FROM_A_SHARD]
