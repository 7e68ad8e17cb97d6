"""How long the attempts at a run took to their first commit, by their notes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.report.records import StartTimes

log = logging.getLogger(__name__)
STARTS_SHOWN = 10  # attempts of a report, the latest
_STARTS = TypeAdapter(StartTimes)


def starts_of(notes: Sequence[Mapping[str, Any]]) -> tuple[StartTimes, ...]:
    """Of attempts' notes (with `attempt`, their name) in order, the latest; what a note does not
    tell, or tells wrongly, is left out."""
    found = []
    for note in notes:
        try:
            told = {"attempt": note["attempt"], **note["start"]}
            found.append(_STARTS.validate_json(dump(told)))
        except (KeyError, TypeError, ValueError):
            continue
    return tuple(found[-STARTS_SHOWN:])


def read_starts(ledger: Ledger) -> tuple[StartTimes, ...]:
    """The same, of the notes that are in a run directory."""
    notes = []
    try:
        for name in ledger.attempts():
            notes.append({**ledger.read_attempt(name), "attempt": name})
    except (RayBatchError, FileNotFoundError) as error:  # for people alone: no run fails of it
        log.info("the notes of attempts cannot be read: %s", error)
    return starts_of(sorted(notes, key=lambda note: str(note.get("started"))))
