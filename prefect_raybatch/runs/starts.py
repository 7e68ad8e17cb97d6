"""Durations of a run's attempts and engine starts, from attempt records and heartbeats."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime

from pydantic import TypeAdapter

from prefect_raybatch.driver.heartbeat import HEARTBEAT_SECONDS, read_heartbeats
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.ledger.increments import ledgers_of
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import JsonObject, Plan, dump
from prefect_raybatch.report.records import StartTimes
from prefect_raybatch.report.tally import covered
from prefect_raybatch.runs.drivers import read_attempts
from prefect_raybatch.stages.endpoint.limiter import LIMIT_WINDOW, TRAVEL

log = logging.getLogger(__name__)
STARTS_SHOWN = 10  # latest attempts that a report shows
_STARTS = TypeAdapter(StartTimes)


def starts_of(notes: Sequence[JsonObject]) -> tuple[StartTimes, ...]:
    """Return how long each step of starting the engines took, for the last STARTS_SHOWN attempts.

    `notes` are attempt records, oldest first. Those without valid durations are left out.
    """
    found = []
    for note in notes:
        try:
            told = {"attempt": note["attempt"], **note["start"]}
            found.append(_STARTS.validate_json(dump(told)))
        except (KeyError, TypeError, ValueError):
            continue
    return tuple(found[-STARTS_SHOWN:])


def read_starts(ledger: Ledger) -> tuple[StartTimes, ...]:
    """Return how long each step of starting the engines took, for the run's latest attempts.

    The oldest of these attempts comes first.
    """
    return starts_of(_notes(ledger))


def attempts_seconds(ledger: Ledger, plan: Plan) -> float:
    """Return the seconds in which one or more processes worked on a run or its requests phase.

    An attempt lasts from its start to its last heartbeat, including engine starts and waits.
    Attempts without a readable start or heartbeat do not count.
    """
    spans = []
    for one in ledgers_of(ledger, plan):
        began = {str(note["attempt"]): _instant(note.get("started")) for note in _notes(one)}
        for name, beat in read_heartbeats(one.store, began).items():
            if (start := began[name]) is not None:
                spans.append((start, beat.at))
    return covered([start for start, _ in spans], [end for _, end in spans])


def seconds_of_others(ledger: Ledger, attempt: str, now: float) -> float:
    """Return for how many more seconds a limit per minute must count other attempts' requests.

    Attempts other than `attempt` may have sent requests until one heartbeat interval after their
    last heartbeat. `now` is in seconds since 1970.
    """
    others = [name for name in ledger.attempts() if name != attempt]
    beats = read_heartbeats(ledger.store, others).values()
    last = max((beat.at for beat in beats), default=0.0)
    return max(0.0, min(last, now) + HEARTBEAT_SECONDS + TRAVEL + LIMIT_WINDOW - now)


def engine_deaths(ledger: Ledger) -> int:
    """Return how many engines died in all attempts, from their last heartbeats; 0 if unreadable."""
    try:
        beats = read_heartbeats(ledger.store, ledger.attempts())
    except RayBatchError as error:
        log.info("the records of attempts cannot be read: %s", error)
        return 0
    return sum(beat.engine_deaths for beat in beats.values())


def _notes(ledger: Ledger) -> list[JsonObject]:
    """Return the readable records of attempts; [] if the store fails.

    The records only inform people, so a run must not fail for them.
    """
    try:
        return read_attempts(ledger)
    except RayBatchError as error:
        log.info("the records of attempts cannot be read: %s", error)
        return []


def _instant(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
