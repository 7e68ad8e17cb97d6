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
from prefect_raybatch.ledger.last_attempt import cut_to_characters
from prefect_raybatch.report.run_history import HistoryLine, HistoryPage
from prefect_raybatch.runs.attempts import key_for_start
from prefect_raybatch.storage import is_remote

log = logging.getLogger(__name__)

READ = 200  # number of newest flow runs that are read; Prefect's maximum
API_SECONDS = 10.0  # for all calls together
LATE_AFTER = 60.0  # seconds after its scheduled start at which a run is late
PENDING_AFTER = 300.0  # seconds in which a worker starts a flow run that it has taken
REASON_SHOWN = 400  # maximum characters of a reason
_ADVICE = re.compile(r"\b(?:Continue with|What to do):")  # what follows is the command
LIMIT_REACHED = "Deployment concurrency limit reached"  # how Prefect's message begins
AT_WORK = {StateType.RUNNING: "running", StateType.CANCELLING: "cancelling"}
WAITS = ("AwaitingConcurrencySlot", "the run before it is still active; it starts after that")


@dataclass(frozen=True)
class PrefectRun:
    """The latest flow run of one run key.

    `job` (a name), `output` (a URI) and `run_key` are the values in the flow run's parameters, None
    if missing there; `key` derives a missing run key from the job's name and `start`. `seconds` is
    the time spent Running. `reason` says why the flow run is not completed, "" if it is active or
    completed; `command` is what the operator can run then.
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


def runs_of_deployment() -> list[PrefectRun]:
    """Return the latest flow runs of the deployment of the current flow run, newest first.

    The list is empty without a deployment, or if Prefect does not answer, which is logged.
    """
    root = root_run()
    if root is None:
        return []

    def read() -> list[PrefectRun]:
        with get_client(sync_client=True) as client:
            deployment = client.read_flow_run(root).deployment_id
            return [] if deployment is None else _read(client, deployment)

    return _or_nothing(read)


def runs_of_all_deployments() -> list[PrefectRun]:
    """Return the latest flow runs of all deployments of `batch_inference`, newest first."""

    def read() -> list[PrefectRun]:
        with get_client(sync_client=True) as client:
            return _read(client, None)

    return _or_nothing(read)


def _or_nothing(read: Any) -> list[PrefectRun]:
    try:
        prefect_runs: list[PrefectRun] = within(API_SECONDS, read)
    except Exception as error:  # the history of the records is shown in any case
        log.warning(
            "Prefect could not be asked for runs that never started, so they are not listed: "
            "%s: %s",
            *(type(error).__name__, error),
        )
        return []
    return prefect_runs


def with_prefect_runs(
    page: HistoryPage, prefect_runs: Iterable[PrefectRun], output: str, most: int
) -> HistoryPage:
    """Return a history plus the incomplete runs that only Prefect has records of.

    Keeps the newest `most` runs. A run that is already on the `page` gets Prefect's duration if
    that is longer. If such a run has recorded neither a result nor a failure, it also gets
    Prefect's state and reason. `output` is the output URI as written in the job; flow runs of other
    jobs and outputs are ignored.
    """
    lines = {line.run_key: line for line in page.runs}
    for prefect_run in prefect_runs:
        if prefect_run.job not in (None, page.job) or not is_same_place(prefect_run.output, output):
            continue
        key = prefect_run.key(page.job)
        if key in lines:
            lines[key] = _explained(lines[key], prefect_run)
        elif prefect_run.reason:
            unstarted = HistoryLine(key, "", prefect_run.state, prefect_run.start.timestamp())
            lines[key] = _explained(unstarted, prefect_run)
    runs = sorted(lines.values(), key=lambda line: line.began or 0.0, reverse=True)
    return replace(page, runs=tuple(runs[:most]))


def pages_of_unstarted_jobs(
    pages: Sequence[HistoryPage], runs: Iterable[PrefectRun], output: str, job: str | None
) -> list[HistoryPage]:
    """Return an empty page for each job with incomplete runs in Prefect and no page in `pages`.

    Only runs with this `output` URI count. `job` limits the result to the job of that name; None
    means all jobs.
    """
    names = {
        run.job for run in runs if run.job and run.reason and is_same_place(run.output, output)
    } - {page.job for page in pages}
    return [HistoryPage(name, ()) for name in sorted(names) if job in (None, name)]


def _explained(line: HistoryLine, run: PrefectRun) -> HistoryLine:
    """Return the `line` of a run with the time that its flow run was Running, if that is longer.

    If the run recorded neither a result nor a failure, add Prefect's state, reason and command.
    """
    line = replace(line, elapsed=max(line.elapsed or 0.0, run.seconds) or None)
    if line.good is not None or line.failure or not run.state:
        return line
    return replace(line, state=run.state, failure=run.reason, command=run.command or line.command)


def is_same_place(place: str | None, output: str) -> bool:
    """Return whether two output URIs are the same; True if `place` is None.

    If both are local and one is relative, only their last path components are compared, because the
    folder to which a relative path refers is unknown.
    """
    if place is None:
        return True
    one, other = place.rstrip("/"), output.rstrip("/")
    if is_remote(one) or is_remote(other) or (isabs(one) and isabs(other)):
        return one == other
    return basename(one) == basename(other)


def _read(client: SyncPrefectClient, deployment: UUID | None) -> list[PrefectRun]:
    """Return a `PrefectRun` for each run key among the latest flow runs, newest first.

    None for `deployment` means all deployments of `batch_inference`. Of several flow runs with the
    same run key, job and output, the one that was expected to start last counts.
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
    prefect_runs: dict[tuple[str | None, str | None, str], PrefectRun] = {}
    for run in flow_runs:
        prefect_run = _prefect_run(client, run)
        if prefect_run is not None:
            prefect_runs.setdefault(
                (prefect_run.job, prefect_run.output, prefect_run.key("")), prefect_run
            )
    return list(prefect_runs.values())


def _prefect_run(client: SyncPrefectClient, run: FlowRun) -> PrefectRun | None:
    """Return the `PrefectRun` of a flow run; None if it is not due yet, or about to start."""
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
    return PrefectRun(
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
    """Return (state in one word, reason, command) of a flow run.

    `reason` says why it is not completed, and `command` is what to run then. All three are "" if
    the flow run is completed, not due yet or about to start; the last two are "" if it is running
    or being cancelled.
    """
    state, retry = run.state, f"prefect flow-run retry {run.id}"
    if state is None:
        return "", "", ""
    message = cut_to_characters(_ADVICE.split(state.message or "")[0].rstrip(" .\n"), REASON_SHOWN)
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
