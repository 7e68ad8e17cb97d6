"""The flow runs of a job as Prefect knows them, for the run history.

A scheduled run that never started, or whose process died before its run directory was known, has no
record in the output folder.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os.path import basename, isabs
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort

from prefect_raybatch.bounded import within
from prefect_raybatch.flow.continuing import command_of_new_run, root_run
from prefect_raybatch.ledger.last_attempt import cut_to_bytes
from prefect_raybatch.report.run_history import HistoryLine, HistoryPage
from prefect_raybatch.runs.attempts import key_for_start
from prefect_raybatch.storage import is_remote

log = logging.getLogger(__name__)

READ = 200  # newest flow runs that are read, Prefect's own maximum
API_SECONDS = 10.0  # for all calls together
LATE_AFTER = 60.0  # seconds after its scheduled start at which a run is late
PENDING_AFTER = 300.0  # seconds in which a worker starts a flow run that it has taken
REASON_SHOWN = 400  # characters
_ADVICE = re.compile(r"\b(?:Continue with|What to do):")  # what follows is the command
LIMIT_REACHED = "Deployment concurrency limit reached"  # how Prefect's message begins
AT_WORK = {StateType.RUNNING: "running", StateType.CANCELLING: "cancelling"}
WAITS = ("AwaitingConcurrencySlot", "the run before it is still active; it starts after that")


@dataclass(frozen=True)
class Night:
    """The latest flow run of one run key.

    `job` and `output` are those of its parameters, None for a flow without these, and `run_key` is
    None if it follows from the job's name and `start`. A flow run that is at work or completed has
    no `reason`. `seconds` is the time for which it was Running.
    """

    job: str | None
    output: str | None
    run_key: str | None
    start: datetime
    seconds: float
    state: str = ""
    reason: str = ""
    command: str = ""

    def key(self, job: str) -> str:
        return self.run_key or key_for_start(job, self.start)


def nights_of_deployment() -> list[Night]:
    """Return the latest flow runs of the deployment of the current flow run, newest first.

    An empty list without a deployment, or if Prefect does not answer, which is logged.
    """
    root = root_run()
    if root is None:
        return []

    def read() -> list[Night]:
        with get_client(sync_client=True) as client:
            deployment = client.read_flow_run(root).deployment_id
            return [] if deployment is None else _read(client, deployment)

    return _or_nothing(read)


def nights_of_jobs() -> list[Night]:
    """Return the latest flow runs of all deployments of `batch_inference`, newest first."""

    def read() -> list[Night]:
        with get_client(sync_client=True) as client:
            return _read(client, None)

    return _or_nothing(read)


def _or_nothing(read: Any) -> list[Night]:
    try:
        nights: list[Night] = within(API_SECONDS, read)
    except Exception as error:  # the history of the records is shown in any case
        log.warning(
            "Prefect could not be asked for runs that never started, so they are not listed: "
            "%s: %s",
            *(type(error).__name__, error),
        )
        return []
    return nights


def with_nights(page: HistoryPage, nights: Iterable[Night], output: str, most: int) -> HistoryPage:
    """Return the page with the runs that are known to Prefect alone, at most `most` in all.

    `output` is the output URI as written in the job.
    """
    lines = {line.run_key: line for line in page.runs}
    for night in nights:
        if night.job not in (None, page.job) or not is_same_place(night.output, output):
            continue
        key = night.key(page.job)
        if key in lines:
            lines[key] = _explained(lines[key], night)
        elif night.reason:
            unstarted = HistoryLine(key, "", night.state, night.start.timestamp())
            lines[key] = _explained(unstarted, night)
    runs = sorted(lines.values(), key=lambda line: line.began or 0.0, reverse=True)
    return replace(page, runs=tuple(runs[:most]))


def jobs_without_runs(
    pages: Sequence[HistoryPage], nights: Iterable[Night], output: str, job: str | None
) -> list[HistoryPage]:
    """Return an empty page for each other job of which Prefect knows runs that did not complete."""
    names = {
        night.job
        for night in nights
        if night.job and night.reason and is_same_place(night.output, output)
    } - {page.job for page in pages}
    return [HistoryPage(name, ()) for name in sorted(names) if job in (None, name)]


def _explained(line: HistoryLine, night: Night) -> HistoryLine:
    """Return the line of a run with what only Prefect knows: its whole time, why it ended."""
    line = replace(line, elapsed=max(line.elapsed or 0.0, night.seconds) or None)
    if line.good is not None or line.failure or not night.state:
        return line
    return replace(line, state=night.state, failure=night.reason, command=night.command)


def is_same_place(place: str | None, output: str) -> bool:
    """Return whether two output URIs are the same; of relative folders compare the last name."""
    if place is None:
        return True
    one, other = place.rstrip("/"), output.rstrip("/")
    if is_remote(one) or is_remote(other) or (isabs(one) and isabs(other)):
        return one == other
    return basename(one) == basename(other)


def _read(client: SyncPrefectClient, deployment: UUID | None) -> list[Night]:
    """Return a night for each run key, newest first.

    A run that was made up has a later flow run, which counts.
    """
    ours = FlowFilter(name=FlowFilterName(any_=["batch_inference"]))
    which = FlowRunFilterDeploymentId(is_null_=False)
    if deployment is not None:
        which = FlowRunFilterDeploymentId(any_=[deployment])
    now: Any = datetime.now(UTC)
    flow_runs = client.read_flow_runs(
        flow_filter=ours if deployment is None else None,
        flow_run_filter=FlowRunFilter(
            deployment_id=which,
            expected_start_time=FlowRunFilterExpectedStartTime(before_=now),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=READ,
    )
    nights: dict[tuple[str | None, str | None, str], Night] = {}
    for run in flow_runs:
        night = _night(client, run)
        if night is not None:
            nights.setdefault((night.job, night.output, night.key("")), night)
    return list(nights.values())


def _night(client: SyncPrefectClient, run: FlowRun) -> Night | None:
    """Return the night of a flow run; None if it is not due yet."""
    given = run.parameters
    job = given.get("job")
    job = job if isinstance(job, Mapping) else {}
    output = job.get("output")
    uri = output.get("uri") if isinstance(output, Mapping) else None
    name, key = job.get("name"), given.get("run_key")
    start: datetime | None = run.expected_start_time
    if given.get("scheduled_for"):
        with suppress(ValueError, TypeError):
            start = datetime.fromisoformat(given["scheduled_for"])
    elif given.get("run_date"):
        key = key or run.name  # the flow names itself after the key
    if start is None or run.state is None:
        return None
    state, reason, command = _outcome(client, run)
    if not reason and run.state.type in (StateType.SCHEDULED, StateType.PENDING):
        return None
    return Night(
        job=name if isinstance(name, str) else None,
        output=uri if isinstance(uri, str) else None,
        run_key=key if isinstance(key, str) and key else None,
        start=start if start.tzinfo else start.replace(tzinfo=UTC),
        seconds=run.estimated_run_time.total_seconds(),
        state=state,
        reason=reason,
        command=command,
    )


def _outcome(client: SyncPrefectClient, run: FlowRun) -> tuple[str, str, str]:
    """Return (state in one word, reason, command) of a flow run that did not complete.

    Empty texts for one that is completed or not due; one at work has a state alone.
    """
    state, retry = run.state, f"prefect flow-run retry {run.id}"
    if state is None:
        return "", "", ""
    message = cut_to_bytes(_ADVICE.split(state.message or "")[0].rstrip(" .\n"), REASON_SHOWN)
    if state.type is StateType.SCHEDULED:
        if state.name == WAITS[0]:  # Prefect tries again every half minute
            return "waiting", WAITS[1], ""
        due = run.next_scheduled_start_time or run.expected_start_time
        if due is None or time.time() - due.timestamp() < LATE_AFTER:
            return "", "", ""
        pool = run.work_pool_name
        return (
            "late",
            f"no worker of work pool {pool} has started it; it starts once there is one",
            f"prefect worker start --pool {pool}",
        )
    if state.type is StateType.PENDING:
        if time.time() - state.timestamp.timestamp() < PENDING_AFTER:
            return "", "", ""
        reason = "a worker took it, but did not start its process"
        return "pending", reason, command_of_new_run(client, run)
    if state.type is StateType.CANCELLED:
        if message.startswith(LIMIT_REACHED):
            message = "the run before it was still active"
        return str(state.name).lower(), message or "it was cancelled", retry
    if state.type is StateType.CRASHED:
        return "crashed", message or "its process or host was lost", retry
    if state.type is StateType.FAILED:
        return "failed", message or "its flow run failed", retry
    return AT_WORK.get(state.type, ""), "", ""
