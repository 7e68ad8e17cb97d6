"""Differences between a job and its run's plan that a person accepted, with both values.

The rows of such a run were not all inferred in the same way, so its report lists the differences.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.records import JsonObject, dump
from prefect_raybatch.ledger.strict import Number, StrictRecord, read_json

if TYPE_CHECKING:
    from prefect_raybatch.ledger.ledger import Ledger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accepted(StrictRecord):
    """An accepted difference: a field of the fingerprint, with its value in plan and job.

    `old` is the plan's value, `new` the job's, as text cut to 120 characters. `by` is the person
    who accepted the difference (user@host), `at` when, in seconds since 1970.
    """

    field: str
    old: str
    new: str
    by: str
    at: Number

    def __str__(self) -> str:
        return f"{self.field}: {self.old} -> {self.new}, accepted by {self.by}"


_RECORDS = TypeAdapter(tuple[Accepted, ...])


def accepted_note(accepted: Iterable[Accepted]) -> dict[str, Any]:
    """Return {"accepted": differences}; {} if there are no differences.

    The caller merges it into the record of an attempt or of a Ray job.
    """
    differences = [asdict(one) for one in accepted]
    return {"accepted": differences} if differences else {}


def accepted_in(note: JsonObject, what: str) -> tuple[Accepted, ...]:
    """Return the accepted differences between job and plan that a record holds; () if none.

    `note` is the record, into which the result of `accepted_note` was merged. `what` names it in
    messages. Raises `CorruptRun` if the differences are malformed.
    """
    return read_json(_RECORDS, dump(note.get("accepted") or []), f"accepted in {what}")


def all_accepted(ledger: Ledger) -> tuple[Accepted, ...]:
    """Return the differences between job and plan that attempts accepted: each once, oldest first.

    A missing or damaged record of an attempt is logged and left out.
    """
    differences: dict[tuple[str, str, str], Accepted] = {}
    for name in ledger.attempts():
        try:
            noted = accepted_in(ledger.read_attempt(name), f"attempt {name}")
        except (CorruptRun, FileNotFoundError) as fault:
            log.warning("Cannot read which differences attempt %s accepted: %s", name, fault)
            continue
        for one in noted:
            key = one.field, one.old, one.new
            if key not in differences or one.at < differences[key].at:
                differences[key] = one
    return tuple(sorted(differences.values(), key=lambda one: (one.at, one.field)))
