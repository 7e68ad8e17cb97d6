"""The record of the last attempt at a run, from before its plan to its end.

It informs people; correctness does not depend on it. A directory with this record and no plan is
not a run.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import ClassVar

from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun, RayBatchError, first_step
from prefect_raybatch.ledger.layout import LAST_ATTEMPT
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.ledger.strict import STRICT, Number, read_json
from prefect_raybatch.storage import Store
from prefect_raybatch.words import storable

log = logging.getLogger(__name__)

# How an attempt ended.
ATTEMPT_FAILED, ATTEMPT_STOPPED, ATTEMPT_DRAINED = "failed", "stopped", "drained"
ATTEMPT_KILLED = "killed"  # never recorded: its process died without a record of the end
# Steps of a complete run: golden rows are compared, a judge is asked, the result is published.
MEASURING, JUDGING, PUBLISHING = "measuring", "judging", "publishing"
MESSAGE_KEPT, COMMAND_KEPT = 1000, 4000  # characters
RUN_AGAIN = "run the same command or script again"  # advice if the command is unknown
RECORD_SECONDS = 5.0  # a remote store is retried so long to read or write the record


# Texts about a step of a complete run: one that was not done, and one that is in progress.
_UNDONE = {
    MEASURING: "accuracy not measured",
    JUDGING: "not judged",
    PUBLISHING: "publishing failed",
}
_UNDER_WAY = {
    MEASURING: "being measured",
    JUDGING: "being judged",
    PUBLISHING: "being published",
}


@dataclass(frozen=True)
class LastAttempt:
    """The last attempt at run `run_key` of `job`.

    `phase` is the step it reached: planning, inference or finalizing, and on a complete run
    measuring, judging or publishing. `started` and `ended` are in seconds since 1970; `ended` is
    None while it works, after a kill, and if it completed the run.

    `outcome` is failed, stopped or drained; it is "" if the attempt works or succeeded, and after a
    kill. `runs.attempts.open_step_of` returns it as killed if the process died, but this value is
    never stored. `error` is the class and `message` the text of the exception that ended the
    attempt.

    `command` runs the job again, "" if it is unknown. `by` is user@host and `pid` the process
    there, in the Linux PID namespace `pid_namespace` ("" if unknown).
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
    pid_namespace: str = ""

    @property
    def failure(self) -> str:
        """Return why the attempt failed: phase, error and message; "" if it did not fail."""
        if self.outcome != ATTEMPT_FAILED:
            return ""
        return f"{self.phase}: {self.error}: {self.message}"

    @property
    def undone(self) -> str:
        """Return which step of a complete run, such as publishing, was not done, and why.

        Returns "" if the step succeeded or is in progress, or if the run was not complete.
        """
        what = _UNDONE.get(self.phase)
        if what is None or not self.outcome:
            return ""
        why = f"{self.error}: {self.message}".removesuffix(": ")
        return f"{what}: {why if self.outcome == ATTEMPT_FAILED else self.outcome}"

    @property
    def under_way(self) -> str:
        """Return which step of a complete run is in progress, since when and where; "" if none."""
        what = _UNDER_WAY.get(self.phase)
        if what is None or self.outcome or self.ended is not None:
            return ""
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"{what} since {since} by process {self.pid} of {self.by}"

    @property
    def undone_advice(self) -> str:
        """Return `undone` followed by what a user can do."""
        return f"{self.undone.rstrip('.')}; {advice(self.first_step)}"

    @property
    def first_step(self) -> str:
        """Return what to do before the job runs again, such as "fix the cause".

        Returns "" if running it again may be enough, or if nothing is known about the error.
        """
        return first_step(self.error)

    def put(self, store: Store) -> None:
        """Write the record, replacing that of an earlier attempt.

        An error of the store is only logged: the attempt's own error matters more.
        """
        try:
            put_record(not_waiting(store), LAST_ATTEMPT, dump(asdict(self)))
        except RayBatchError as error:
            log.warning("Cannot record this attempt in %s: %s", store.uri, error)


def advice(step: str, command: str = "") -> str:
    """Return a text on how to continue a run.

    With a `command`, the text ends in a colon, and the caller must append the command. `step` is
    what to do first, or "".
    """
    if not command:
        return f"{step}, then {RUN_AGAIN}" if step else RUN_AGAIN
    return f"{step}, then run: " if step else "continue with: "


_ATTEMPT = TypeAdapter(LastAttempt)


def not_waiting(store: Store) -> Store:
    """Return a copy of a store that retries for at most RECORD_SECONDS."""
    hasty = copy.copy(store)
    hasty.retry_seconds = min(store.retry_seconds, RECORD_SECONDS)
    return hasty


def cut_to_characters(text: str, most: int) -> str:
    """Return a text as one line of at most `most` characters; one that was cut ends in `...`.

    White space becomes single blanks, and characters that cannot be stored are replaced.
    """
    text = storable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def read_last_attempt(store: Store) -> LastAttempt | None:
    """Return the record of the last attempt; None if there is none.

    Raises `CorruptRun` if it is malformed.
    """
    try:
        return read_json(_ATTEMPT, read_record(store, LAST_ATTEMPT), LAST_ATTEMPT)
    except FileNotFoundError:
        return None


def last_attempt_of(store: Store) -> LastAttempt | None:
    """Return the record of the last attempt; None if there is none or it is malformed (logged)."""
    try:
        return read_last_attempt(store)
    except CorruptRun as error:
        log.warning("Ignoring the record of the last attempt in %s: %s", store.uri, error)
        return None
