"""The record of the last attempt at a run, from before its plan to its end.

It is for people; correctness does not depend on it. A directory with this record and no plan is not
a run.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import asdict, dataclass
from typing import ClassVar

from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.ledger.layout import LAST_ATTEMPT
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.strict import STRICT, Number, read_json
from prefect_raybatch.storage import Store
from prefect_raybatch.words import storable

log = logging.getLogger(__name__)

ATTEMPT_FAILED, ATTEMPT_STOPPED, ATTEMPT_DRAINED = (
    "failed",
    "stopped",
    "drained",
)  # how an attempt ended
MESSAGE_KEPT, COMMAND_KEPT = 1000, 4000  # characters
RECORD_SECONDS = 5.0  # the longest that a remote store is asked to take the record


@dataclass(frozen=True)
class LastAttempt:
    """An attempt at run `run_key` of `job`.

    `phase` is planning, inference or finalizing. `started` and `ended` are seconds since 1970;
    `ended` is None while it works or if it was killed. `command` runs it again.
    """

    __pydantic_config__: ClassVar = {**STRICT, "extra": "ignore"}

    run_key: str
    job: str
    phase: str
    started: Number
    by: str
    pid: int
    ended: Number | None = None
    outcome: str = ""
    error: str = ""
    message: str = ""
    command: str = ""

    @property
    def failure(self) -> str:
        """Return why it failed, in one line; "" if it did not."""
        if self.outcome != ATTEMPT_FAILED:
            return ""
        return f"{self.phase}: {self.error}: {self.message}"

    def put(self, store: Store) -> None:
        """Write the record over that of an earlier attempt.

        A store that refuses it is logged: the attempt's own error matters more.
        """
        try:
            put_record(not_waiting(store), LAST_ATTEMPT, dump(asdict(self)))
        except RayBatchError as error:
            log.warning("Cannot record this attempt in %s: %s", store.uri, error)


_ATTEMPT = TypeAdapter(LastAttempt)


def not_waiting(store: Store) -> Store:
    """Return a store with short timeouts, to read and write this record."""
    hasty = copy.copy(store)
    hasty.retry_seconds = min(store.retry_seconds, RECORD_SECONDS)
    return hasty


def cut_to_bytes(text: str, most: int) -> str:
    """Return a text in one line, of at most `most` characters, that every store and page takes."""
    text = storable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def read_last_attempt(store: Store) -> LastAttempt | None:
    """Return the record, or None where there is none. Raise `CorruptRun` if it is malformed."""
    try:
        return read_json(_ATTEMPT, read_record(store, LAST_ATTEMPT), LAST_ATTEMPT)
    except FileNotFoundError:
        return None


def last_attempt_of(store: Store) -> LastAttempt | None:
    """Return the last attempt at a run that has a plan.

    A malformed record is logged and counts as none.
    """
    try:
        return read_last_attempt(store)
    except CorruptRun as error:
        log.warning("Ignoring the record of the last attempt in %s: %s", store.uri, error)
        return None
