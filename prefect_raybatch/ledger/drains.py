"""A word to those who work on a run: begin nothing more, commit what is in flight, and end.

It names attempts, so whoever begins later is not concerned: the run is resumed without taking
anything back. For who waits and pays, never for correctness: commits say what is done.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pydantic import TypeAdapter

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.ledger.layout import DRAIN
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.strict import STRICT, Number, read_json
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)

DRAIN_LOOK = 2.0  # seconds between two looks of one process


@dataclass(frozen=True)
class Drain:
    """`_raybatch/drain.json`: the attempts that are to end; `by` is user@host, `at` seconds since
    1970."""

    __pydantic_config__: ClassVar = STRICT

    attempts: tuple[str, ...]
    by: str
    at: Number


_RECORD = TypeAdapter(Drain)


def put_drain(ledger: Ledger, by: str) -> Drain:
    """Tells all attempts that there are to end."""
    made = Drain(tuple(ledger.attempts()), by, round(time.time(), 3))
    put_record(ledger.store, DRAIN, dump(asdict(made)))
    return made


def read_drain(store: Store) -> Drain | None:
    """The latest word; None where there was none. Raises `CorruptRun`."""
    try:
        return read_json(_RECORD, read_record(store, DRAIN), DRAIN)
    except FileNotFoundError:
        return None


class Draining:
    """Whether an attempt is to end; looks into the run directory every DRAIN_LOOK seconds at most.
    A copy in another process looks for itself. A store that is away says nothing."""

    def __init__(self, store: Store, attempt: str) -> None:
        self.store, self.attempt = store, attempt
        self._known, self._looked = False, float("-inf")

    def __reduce__(self) -> tuple[Any, ...]:
        return Draining, (self.store, self.attempt)

    def __call__(self) -> bool:
        if time.monotonic() - self._looked >= DRAIN_LOOK:
            self.look()
        return self._known

    def look(self) -> bool:
        """Look now. A driver must: the engines may have seen the request a moment ago and skipped
        shards because of it, which it would take for deaths."""
        if self._known:
            return True
        self._looked = time.monotonic()
        try:
            found = read_drain(self.store)
        except RayBatchError as error:
            log.info("whether the run is to be drained cannot be told: %s", error)
            return False
        self._known = found is not None and self.attempt in found.attempts
        return self._known
