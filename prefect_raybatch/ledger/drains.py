"""Drain requests: ask the active drivers of a run to finish in-flight shards and stop.

A request names attempts, so one that begins later is not affected and resumes the run. Draining
saves waiting time and cost; correctness does not depend on it, since commits alone say what is
done.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.ledger.layout import DRAIN
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.strict import Number, StrictRecord, read_json
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)

DRAIN_LOOK = 2.0  # seconds between two reads of the request by one process


@dataclass(frozen=True)
class Drain(StrictRecord):
    """`_raybatch/drain.json`: the ids of the attempts that are to stop.

    `by` is the user who asked for it (user@host), `at` the time in seconds since 1970.
    """

    attempts: tuple[str, ...]
    by: str
    at: Number


_RECORD = TypeAdapter(Drain)


def put_drain(ledger: Ledger, by: str) -> Drain:
    """Write a request that all attempts recorded so far stop; return it."""
    drain = Drain(tuple(ledger.attempts()), by, round(time.time(), 3))
    put_record(ledger.store, DRAIN, dump(asdict(drain)))
    return drain


def read_drain(store: Store) -> Drain | None:
    """Return the latest drain request, or None. Raises `CorruptRun` if it is malformed."""
    try:
        return read_json(_RECORD, read_record(store, DRAIN), DRAIN)
    except FileNotFoundError:
        return None


class Draining:
    """A callable without arguments that returns whether a drain request tells an attempt to stop.

    It reads the run directory at most every DRAIN_LOOK seconds; a copy in another process reads for
    itself. An unreachable store counts as no request.
    """

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
        """Read the request now, unless one was already seen; return whether the attempt is to stop.

        The driver calls this instead of the object itself, whose result may be DRAIN_LOOK seconds
        old. Its engines look for themselves: they may see a new request first, and then skip
        shards. With an old result, the driver would take the skipped shards for engine deaths.
        """
        if self._known:
            return True
        self._looked = time.monotonic()
        try:
            request = read_drain(self.store)
        except RayBatchError as error:
            log.info("Cannot read whether a drain was requested: %s", error)
            return False
        self._known = request is not None and self.attempt in request.attempts
        return self._known
