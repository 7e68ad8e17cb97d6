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

from prefect_raybatch.errors import (
    ConfigError,
    JobStopped,
    PlanMismatch,
    PublishFailed,
    QualityTooLow,
    RayBatchError,
    RunDrained,
)
from prefect_raybatch.installed import code_version
from prefect_raybatch.job.checks import NAME, check_run_key, check_uri
from prefect_raybatch.job.placeholders import date_of_key, render_text, today
from prefect_raybatch.job.secrets import MASK, hide_users
from prefect_raybatch.job.trusted_places import check_output_place, check_run_place
from prefect_raybatch.ledger.last_attempt import (
    ATTEMPT_DRAINED,
    ATTEMPT_FAILED,
    ATTEMPT_KILLED,
    ATTEMPT_STOPPED,
    COMMAND_KEPT,
    MESSAGE_KEPT,
    PUBLISHING,
    LastAttempt,
    advice,
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
from prefect_raybatch.words import sentence

if TYPE_CHECKING:
    from prefect_raybatch.driver.starting import Starting
    from prefect_raybatch.driver.stops import Stop

log = logging.getLogger(__name__)

PLANNING, INFERENCE, FINALIZING = "planning", "inference", "finalizing"
CLOCK_SECONDS = 10.0  # a process may seem to start up to this long after its attempt
UNNAMED = "job"  # name of a job whose file has no valid name


@contextmanager
def recorded_end(
    store: Store, name: str, run_key: str, phase: str, secrets: Sequence[str], begin: bool = True
) -> Iterator[None]:
    """Record an attempt of the job `name` when the block begins, and its end if the block raises.

    `phase` is PLANNING, INFERENCE or FINALIZING. With `begin=False`, the attempt is recorded only
    if the block raises. If the block raises although the run is already complete, its end is not
    recorded. Texts in `secrets` are masked.
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
    """Record that an attempt ended with `error`. Faults of the store are only logged.

    Does nothing if the run is complete, if another process began a later attempt that has not
    ended, or if `error` is a `PlanMismatch` because the run belongs to another job. Texts in
    `secrets` are masked.
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
    """Return `attempt` with its end: time, outcome and `error`.

    Texts in `secrets` are masked in the error's message.
    """
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
        pid_namespace=pid_namespace(),
    )


@contextmanager
def recorded_step(
    store: Store, name: str, run_key: str, phase: str, secrets: Sequence[str]
) -> Iterator[None]:
    """Record the beginning and the end of the block, which does a step of a complete run.

    `name` is the job's name, `phase` MEASURING, JUDGING or PUBLISHING. Texts in `secrets` are
    masked. If another step of the run is recorded as not done, that record is replaced only if this
    step fails. A `ConfigError` of publishing is not recorded: the command was wrong, not the run.
    Most errors get a note. It says that the result is complete and how to continue.
    """
    attempt, before = _begun(run_key, name, phase, secrets), open_step_of(store)
    is_shown = before is None or before.phase == phase
    if is_shown:
        attempt.put(store)
    try:
        yield
    except BaseException as error:
        ended = _ended(attempt, error, secrets)
        if phase != PUBLISHING or not isinstance(error, ConfigError):
            ended.put(store)
        elif is_shown:
            (before or replace(attempt, ended=ended.ended)).put(store)
        if not isinstance(error, (QualityTooLow, PublishFailed)):  # these say what to do
            again = f"{sentence(advice(ended.first_step, ended.command))}{ended.command}"
            error.add_note(f"The result of {store.uri} is complete. {again}")
        raise
    last = last_attempt_of(not_waiting(store)) if is_shown else None
    if last is not None and last.phase == phase:  # else another process has begun another step
        replace(attempt, ended=round(time.time(), 3)).put(store)


def open_step_of(store: Store) -> LastAttempt | None:
    """Return the record of the last attempt if it is a step of a complete run that is not done yet.

    The steps are measuring, judging and publishing. The step may be in progress or may have ended
    too early. If the attempt's process died in the step, the returned record has the outcome
    ATTEMPT_KILLED. Returns None if the step is done, or if the attempt did something else.
    """
    attempt = last_attempt_of(store)
    if attempt is not None and attempt.under_way and process_died(_process_of(attempt)):
        attempt = replace(attempt, outcome=ATTEMPT_KILLED)
    return attempt if attempt is not None and (attempt.under_way or attempt.undone) else None


def _process_of(attempt: LastAttempt) -> dict[str, object]:
    """Return the fields of an attempt that `process_died` needs."""
    return {
        "host": attempt.by.rpartition("@")[2],
        "pid": attempt.pid,
        "pid_namespace": attempt.pid_namespace,
        "started": datetime.fromtimestamp(attempt.started, UTC).isoformat(),
    }


def outcome_of(error: BaseException) -> str:
    """Return the outcome to record for an attempt that raised `error`.

    It is drained, stopped or failed.
    """
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
    """Record an attempt that failed because its job is invalid; `value` is the job file's content.

    Without a valid `run_key`, the run key is made from the job's name and a time: `scheduled`, else
    midnight of `run_date`, else now. `run_date` fills in {run_date} in output.uri; by default it is
    the date in the run key, else today. Does nothing if `value` has no output.uri. Only logs a
    warning if output.uri is invalid or not allowed by the policy, or if the store fails.
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
    start = scheduled or midnight(run_date)
    try:
        key = run_key if run_key and NAME.match(run_key) else key_for_start(name, start)
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


def midnight(day: date | None) -> datetime | None:
    """Return the time at which `day` begins in UTC; None without a day."""
    return None if day is None else datetime(day.year, day.month, day.day, tzinfo=UTC)


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
    """Record that an attempt failed with `error` before the run had a plan.

    Returns (store of the run directory, run key). `output` is output.uri and `options` are its
    store options, `inputs` the input's URIs, `name` the job's name, `key` the run key. Texts in
    `secrets` are masked. Raises `ConfigError` if the run directory would lie inside the input.
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
    except RayBatchError as error:  # the run needs only the plan
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
    """Return whether an attempt's process is gone, by its record `attempt`.

    Returns False if that is unknown: the process ran on another host or in another container.
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
        return float(process.create_time()) > began + CLOCK_SECONDS  # the pid is reused
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False


def pid_namespace() -> str:
    """Return the id of the Linux PID namespace of this process; "" on other systems."""
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
        """Record why the attempt stopped. A fault of the store is only logged."""
        try:
            self.note(stopped=stop.to_dict())
        except RayBatchError as error:
            log.warning("the failed rows could not be recorded in the run directory: %s", error)

    def note_start(self, starting: Starting) -> None:
        """Record how long each step of starting the engines took.

        Records nothing if no engine was started.
        """
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
