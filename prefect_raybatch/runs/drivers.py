"""Finds out from the heartbeats of a run's attempts which drivers are at work on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from prefect_raybatch.driver.heartbeat import ENDED, SILENT_AFTER, read_heartbeats
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.increments import requests_ledger
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import JsonObject
from prefect_raybatch.runs.attempts import process_died
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)

DriverState = Literal["at work", "died", "silent"]
ATTEMPTS_SHOWN = 20  # attempts whose heartbeats are looked at, the latest


def read_attempts(ledger: Ledger) -> list[JsonObject]:
    """Return the records of all attempts, oldest first; unreadable ones are left out (logged)."""
    found = []
    for name in ledger.attempts():
        try:
            found.append({**ledger.read_attempt(name), "attempt": name})
        except (CorruptRun, FileNotFoundError) as fault:  # the others are still shown
            log.warning("the record of attempt %s is unreadable and left out: %s", name, fault)
    return sorted(found, key=lambda attempt: str(attempt.get("started")))


def most_gpus(attempts: Sequence[JsonObject]) -> int:
    """Return the most GPUs that one of the `attempts` had, by their records; 0 if unknown."""
    return max((n for one in attempts if isinstance(n := one.get("gpus"), int)), default=0)


def unended_beats(store: Store, attempts: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the latest heartbeat of each attempt that has not reported its end, newest first.

    Only the last ATTEMPTS_SHOWN of `attempts` are looked at. Each dict has the fields of the
    attempt's record and its heartbeat, `age` (seconds since the heartbeat by this machine's clock)
    and `died` (its process is known to have ended).
    """
    now = time.time()
    known = {str(attempt["attempt"]): attempt for attempt in attempts[-ATTEMPTS_SHOWN:]}
    found = [
        {
            **known[name],
            **asdict(beat),
            "age": round(now - beat.at, 1),
            "died": process_died(known[name]),
        }
        for name, beat in read_heartbeats(store, known).items()
        if beat.phase != ENDED
    ]
    return sorted(found, key=lambda beat: beat["age"])


def driver_state(beat: JsonObject) -> DriverState:
    """Return the state of the driver that sent a heartbeat, which `unended_beats` returned.

    "died" if its process is known to have ended, else "at work" or, if the heartbeat is old,
    "silent".
    """
    if beat["died"]:
        return "died"
    return "at work" if beat["age"] <= SILENT_AFTER else "silent"


def beats_at_work(store: Store) -> list[JsonObject]:
    """Return the heartbeats of drivers at work on a run or its first phase, newest first.

    `store` is the run's directory. Reads the records anew.
    """
    ledgers = Ledger(store), requests_ledger(store)
    beats = (beat for one in ledgers for beat in unended_beats(one.store, read_attempts(one)))
    live = [beat for beat in beats if driver_state(beat) == "at work"]
    return sorted(live, key=lambda beat: float(beat["age"]))


def has_driver(store: Store) -> bool:
    """Return whether a driver works on the run in the directory `store`.

    A driver that works on the run's first phase counts, too. That phase has a directory of its own
    below the run's.
    """
    return bool(beats_at_work(store))
