"""Records how an attempt at a run went, even if it fails before there is a plan.

Also records which version of this package made the plan, to log when another one continues the run.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import psutil

from prefect_raybatch.errors import ConfigError, JobStopped, PlanMismatch, RayBatchError, RunDrained
from prefect_raybatch.installed import code_version
from prefect_raybatch.job.checks import NAME, check_run_key, check_uri
from prefect_raybatch.job.placeholders import date_of_key, render_text, today
from prefect_raybatch.job.secrets import MASK, hide_users
from prefect_raybatch.job.trusted_places import check_output_place, check_run_place
from prefect_raybatch.ledger.last_attempt import (
    ATTEMPT_DRAINED,
    ATTEMPT_FAILED,
    ATTEMPT_STOPPED,
    COMMAND_KEPT,
    MESSAGE_KEPT,
    LastAttempt,
    cut_to_characters,
    last_attempt_of,
    not_waiting,
    read_last_attempt,
)
from prefect_raybatch.ledger.layout import PLANNED_BY, PRUNED, SUCCESS
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.records import JsonObject, Plan, dump, load
from prefect_raybatch.runs.run import user_at_host
from prefect_raybatch.runs.typed import typed_words
from prefect_raybatch.schemes import with_account
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, join, open_store

if TYPE_CHECKING:
    from prefect_raybatch.driver.starting import Starting
    from prefect_raybatch.driver.stops import Stop

log = logging.getLogger(__name__)

PLANNING, INFERENCE, FINALIZING = "planning", "inference", "finalizing"
CLOCK_SECONDS = 10.0  # by which the start of a process and that of its attempt may seem reversed
UNNAMED = "job"  # a job whose file does not say its name


@contextmanager
def recorded_end(
    store: Store, name: str, run_key: str, phase: str, secrets: Sequence[str], begin: bool = True
) -> Iterator[None]:
    """Record an attempt of the job `name` when the block begins, and its end if the block raises.

    `phase` is PLANNING, INFERENCE or FINALIZING. `begin=False` records only the end of a block that
    raises. No end is recorded for a complete run. Texts in `secrets` are masked in the record.
    """
    attempt = _begun(run_key, name, phase, secrets)
    if begin:
        attempt.put(store)
    try:
        yield
    except BaseException as error:
        record_end(store, attempt, error, secrets)
        raise


def record_end(
    store: Store, attempt: LastAttempt, error: BaseException, secrets: Sequence[str] = ()
) -> None:
    """Record that an attempt ended with `error`.

    Does nothing if the run is complete or belongs to another job, or if another process has begun a
    later attempt.
    """
    store = not_waiting(store)
    try:
        if isinstance(error, PlanMismatch) and _is_of_another(store, attempt.job):
            return
        if store.holds(SUCCESS) or store.holds(PRUNED):
            return
        there = read_last_attempt(store)
    except RayBatchError as fault:
        log.warning("%s: the end of the attempt could not be recorded: %s", store.uri, fault)
        return
    ours = (attempt.by, attempt.pid)
    if there is not None and there.ended is None and there.started > attempt.started:
        if (there.by, there.pid) != ours:
            return
        attempt = there
    _ended(attempt, error, secrets).put(store)


def _ended(attempt: LastAttempt, error: BaseException, secrets: Sequence[str]) -> LastAttempt:
    """Return the record of an attempt that ends with `error`."""
    text = getattr(error, "plain", None) or str(error)
    return replace(
        attempt,
        ended=round(time.time(), 3),
        outcome=outcome_of(error),
        error=type(error).__name__,
        message=cut_to_characters(_masked(text, secrets), MESSAGE_KEPT),
    )


def _begun(run_key: str, name: str, phase: str, secrets: Sequence[str]) -> LastAttempt:
    """Return the record of an attempt that begins now, with the command that was typed for it."""
    command = shlex.join(typed_words())
    if command and " --run-key" not in command and command.startswith("raybatch run "):
        command = f"{command} --run-key {shlex.quote(run_key)}"
    return LastAttempt(
        *(run_key, name, phase, round(time.time(), 3), user_at_host(), os.getpid()),
        command=cut_to_characters(_masked(command, secrets), COMMAND_KEPT),
    )


@contextmanager
def recorded_measurement(
    store: Store, name: str, run_key: str, phase: str, secrets: Sequence[str]
) -> Iterator[None]:
    """Record why the block could not measure the answers of a complete run of the job `name`.

    `phase` is MEASURING or JUDGING. If the block succeeds, an earlier such record is replaced.
    """
    attempt = _begun(run_key, name, phase, secrets)
    try:
        yield
    except BaseException as error:
        _ended(attempt, error, secrets).put(store)
        raise
    before = last_attempt_of(not_waiting(store))
    if before is not None and before.phase == phase and before.outcome:
        replace(attempt, ended=round(time.time(), 3)).put(store)


def outcome_of(error: BaseException) -> str:
    """Return whether an attempt that raised `error` was drained, stopped or failed, as recorded."""
    if isinstance(error, RunDrained):
        return ATTEMPT_DRAINED
    return (
        ATTEMPT_STOPPED
        if isinstance(error, JobStopped) or not isinstance(error, Exception)
        else ATTEMPT_FAILED
    )


def record_bad_job(
    value: JsonObject,
    run_key: str | None,
    error: BaseException,
    scheduled: datetime | None = None,
    run_date: date | None = None,
) -> None:
    """Record an attempt with an invalid job; `value` is the content of its file.

    Without `run_key`, the key is that of the `scheduled` start, by default now; `run_date` is the
    value of {run_date}. Records nothing if `value` has no valid output.uri, or one that the policy
    in force does not allow.
    """
    output, source = value.get("output"), value.get("source")
    uri = output.get("uri") if isinstance(output, Mapping) else None
    name = value.get("name")
    if not isinstance(output, Mapping) or not isinstance(uri, str):
        return
    name = name if isinstance(name, str) and NAME.match(name) else UNNAMED
    options = output.get("options")
    inputs = source.get("uri") if isinstance(source, Mapping) else None
    uris = [inputs] if isinstance(inputs, str) else inputs if isinstance(inputs, list) else []
    try:
        key = run_key if run_key and NAME.match(run_key) else key_for_start(name, scheduled)
        place = render_text(check_uri(uri), key, run_date or date_of_key(key) or today())
        given = dict(options) if isinstance(options, Mapping) and options else None
        check_output_place(place, given or {})
        texts = [one for one in uris if isinstance(one, str)]
        record_without_plan(place, given, texts, name, key, error)
    except (ValueError, RayBatchError) as fault:
        log.warning("the failed attempt could not be recorded: %s", fault)


def key_for_start(name: str, start: datetime | None = None) -> str:
    """Return the run key of job `name` for the scheduled `start`, by default the current second."""
    return f"{name}-{(start or datetime.now(UTC)).astimezone(UTC):%Y%m%dT%H%M%SZ}"


def record_command(store: Store, command: str) -> None:
    """Add the command that continues the run to the record of a failed attempt, unless it has one.

    Secrets in the command are masked.
    """
    store = not_waiting(store)
    try:
        found = read_last_attempt(store)
    except RayBatchError as fault:
        log.warning("%s: the command could not be recorded: %s", store.uri, fault)
        return
    if found is not None and found.outcome == ATTEMPT_FAILED and not found.command:
        text = cut_to_characters(str(hide_users(command)), COMMAND_KEPT)
        replace(found, command=text).put(store)


def _masked(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return str(hide_users(text))


def record_without_plan(
    output: str,
    options: StoreOptions | None,
    inputs: Sequence[str],
    name: str,
    key: str,
    error: BaseException,
    secrets: Sequence[str] = (),
) -> tuple[Store, str]:
    """Record an attempt that failed without a plan; return its run directory and key.

    Raises `ConfigError` if the record would lie inside the input.
    """
    from prefect_raybatch.source import reaches

    for uri in inputs:  # a record there would be read as input
        if reaches(uri, with_account(output, options or {})):
            raise ConfigError(f"{output} is inside the input {uri}. Choose another output.uri")
    store = open_store(join(output, check_run_key(key)), dict(options) if options else None)
    check_run_place(store.uri)
    attempt = _begun(key, name, PLANNING, secrets)
    record_end(store, attempt, error, secrets)
    return store, key


def _is_of_another(store: Store, job: str) -> bool:
    plan = Ledger(store).load_plan()
    return plan is not None and plan.job_name != job


def note_planner(store: Store) -> None:
    """Record in the run directory which version of this package made the plan, unless recorded."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        record = dump({"code": code_version(), "who": user_at_host(), "at": at})
        put_record_if_absent(store, PLANNED_BY, record)
    except RayBatchError as error:  # the plan is there, and that is what counts
        log.warning("the version that made the plan could not be recorded: %s", error)


def planner_code(store: Store) -> str | None:
    """Return the version of this package that made the plan; None if it is not recorded."""
    try:
        code = load(read_record(store, PLANNED_BY), PLANNED_BY).get("code")
    except (FileNotFoundError, RayBatchError):
        return None
    return code if isinstance(code, str) else None


def compare_code(store: Store) -> None:
    """Log a warning if the plan was made by another version of this package than this one."""
    planned, own = planner_code(store), code_version()
    if planned is not None and planned != own:
        log.warning(
            "the plan was made by prefect_raybatch %s, and this process runs %s: new answers may "
            "differ from the committed ones",
            *(planned, own),
        )


def process_died(attempt: Mapping[str, object]) -> bool:
    """Return whether the process of an attempt's record ran on this host and is gone.

    False if that is unknown: on another host, or in another container with the host's name.
    """
    pid, started = attempt.get("pid"), attempt.get("started")
    here = (socket.gethostname(), pid_namespace())
    if (attempt.get("host"), attempt.get("pid_namespace")) != here or type(pid) is not int:
        return False
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        began = datetime.fromisoformat(str(started)).timestamp()
        return float(process.create_time()) > began + CLOCK_SECONDS  # its number was given anew
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False


def pid_namespace() -> str:
    """Return the namespace in which this process's id counts; "" where there are none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class AttemptLog:
    """The record of an attempt in the run directory, to which several threads add."""

    def __init__(self, ledger: Ledger, attempt: str, fields: dict[str, object]):
        self.ledger, self.attempt, self.fields = ledger, attempt, fields
        self._lock = threading.Lock()

    def note(self, **more: object) -> None:
        """Add the fields `more` (name: JSON value) to the record and write it."""
        with self._lock:
            self.fields |= more
            self.ledger.note_attempt(self.attempt, self.fields)

    def note_stop(self, stop: Stop) -> None:
        """Record why the attempt stopped.

        A store that fails is only logged, so that the run ends with its own error.
        """
        try:
            self.note(stopped=stop.to_dict())
        except RayBatchError as error:
            log.warning("the failed rows could not be recorded in the run directory: %s", error)

    def note_start(self, starting: Starting) -> None:
        """Record how long each phase of the engines' start took."""
        if starting.engines:
            self.note(start={"engines": starting.engines, "seconds": starting.seconds()})


def about_process(plan: Plan) -> dict[str, object]:
    """Return fields for an attempt's record: host, process, user, start, plan and code version."""
    user, _, host = user_at_host().rpartition("@")
    return {
        "host": host,
        "pid": os.getpid(),
        "pid_namespace": pid_namespace(),
        "user": user,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": plan.hash,
        "code": code_version(),
    }
