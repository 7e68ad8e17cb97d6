"""Matches flow runs with Ray jobs: labels, cancelling, and reconciliation.

A flow run that follows a Ray job has the job's id as a label. Labels survive restarts and are
visible to every process, so `reconcile_jobs` can find the jobs that no flow run follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run, task_run
from prefect.states import Crashed, Scheduled

from prefect_raybatch.doctor.services import prefect_api
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.flow import origin  # noqa: F401  # says which jobs the policy limits
from prefect_raybatch.flow.blocks.cluster import access_of
from prefect_raybatch.flow.continuing import changed_job
from prefect_raybatch.job.cluster import Cluster, ClusterAccess
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.job.trusted_places import check_server
from prefect_raybatch.kuberay.api import KubeApi
from prefect_raybatch.kuberay.run_cluster import delete_expired
from prefect_raybatch.remote.client import JobServer, RayJob
from prefect_raybatch.remote.follower import STOP_WAIT, Owner
from prefect_raybatch.words import error_text

log = logging.getLogger(__name__)

JOB_LABEL, SERVER_LABEL, SINCE_LABEL = (
    "raybatch.job",
    "raybatch.job_server",
    "raybatch.followed_since",
)
ON_KUBERNETES = "kubernetes/"
GRACE = 900.0  # seconds that a flow run has to notice that its job has ended
SETTLE = 90.0  # seconds that a live flow run has to resubmit a job that a restarted head lost
CANCEL = 60.0  # seconds that a cancelling flow run has to stop its job
FLOW_RUNS_PAGE = 200
RESTARTS = 2  # times that a crashed flow run is rescheduled
RESTART_WITHIN = 12.0  # hours after its first crash in which a flow run is rescheduled
OUR_FLOWS = ("batch_inference", "retry_failed")
OPEN = [
    StateType.SCHEDULED,
    StateType.PENDING,
    StateType.RUNNING,
    StateType.PAUSED,
    StateType.CANCELLING,
]


def owner(retries: int = 0) -> Owner:
    """Return the current flow run as `Owner` of a Ray job.

    Outside of Prefect, the `Owner` has no id. `retries` is how often Prefect retries the task that
    follows the job.
    """
    current, api = flow_run.get_id(), prefect_api() or ""
    if current is None:
        return Owner(api=api)
    id = UUID(str(current))

    def label(labels: dict[str, Any]) -> None:
        try:
            with get_client(sync_client=True) as client:
                client.update_flow_run_labels(id, labels)
        except Exception as error:  # the job runs in any case
            log.warning("could not label the flow run with its Ray job: %s", error)

    def attached(ray_job: str, server: str) -> None:
        label({JOB_LABEL: ray_job, SERVER_LABEL: server, SINCE_LABEL: round(time.time())})

    def detached() -> None:
        label({JOB_LABEL: ""})  # Prefect cannot remove a label

    def cancelled() -> bool:
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(id).state
        except Exception as error:
            log.warning("could not read from Prefect whether the flow run was cancelled: %s", error)
            return False
        return state is not None and (state.is_cancelling() or state.is_cancelled())

    def retried() -> bool:
        return (task_run.get_run_count() or 1) <= retries

    return Owner(str(id), attached, cancelled, api, retried, detached)


@dataclass(frozen=True)
class Action:
    """An action of `reconcile_jobs` or `restart_crashed` (in a dry run: a proposed one), and why.

    `what` is stopped, crashed, restarted, deleted or kept. `job` is the id of a Ray job, the name
    of a RayCluster or, from `restart_crashed`, the name of a flow run. `flow_run` is the id of the
    flow run concerned, None if there is none.
    """

    what: str
    job: str
    flow_run: str | None
    why: str


def reconcile_jobs(
    job_server: str, dry_run: bool = False, grace: float = GRACE, settle: float = SETTLE
) -> list[Action]:
    """Reconcile the Ray jobs at `job_server` with the flow runs of this Prefect API.

    A job is stopped if its flow run has ended and no other flow run follows it. A flow run is
    marked Crashed if all of this is true:

    - It has been Running, and following its job, for over `grace` seconds.
    - The server does not know that job, or the job ended without success over `grace` seconds ago.
    - Both are still true `settle` seconds later. In that time, a live flow run submits its job
      again if the head has lost it.

    `job_server` is a URL, or the name of a saved RayCluster block (ray-cluster/NAME), whose
    credentials are then used.

    If `job_server` is kubernetes/NAMESPACE, or a block with `kubernetes`, the clusters that runs
    have created there are checked instead. A cluster is deleted if its lease has expired, because
    no live flow renews it. With `dry_run`, nothing is changed, and the returned actions are
    proposals. Raises `JobServerUnavailable`, `ClusterUnavailable` or `ConfigError`.
    """
    access = _access(job_server)
    if access.kubernetes is not None:
        return _clusters(access.kubernetes, dry_run)
    server = JobServer(str(access.job_server), access=access)
    with get_client(sync_client=True) as client:
        jobs = {
            ray_job.id: ray_job for ray_job in server.jobs() if ray_job.id.startswith("raybatch-")
        }
        following = [run for run in _open_runs(client) if _label(run, SERVER_LABEL) == server.url]
        stopped = _stop_orphans(client, server, jobs, following, dry_run)
        return stopped + _crash_stale(client, server, jobs, following, dry_run, grace, settle)


def _clusters(kubernetes: Kubernetes, dry_run: bool) -> list[Action]:
    return [
        Action("deleted" if cluster.over else "kept", cluster.name, cluster.flow_run, cluster.why)
        for cluster in delete_expired(KubeApi(kubernetes), dry_run)
    ]


def _access(job_server: str) -> ClusterAccess:
    """Return how to reach the job server or Kubernetes namespace that `job_server` names.

    It is a URL, ray-cluster/NAME or kubernetes/NAMESPACE. Raises `ConfigError` for anything else.
    """
    if job_server.startswith(ON_KUBERNETES):
        namespace = job_server.removeprefix(ON_KUBERNETES)
        try:
            # Only the namespace is used here, but the image is required.
            return ClusterAccess(kubernetes=Kubernetes(image="-", namespace=namespace))
        except ValueError:
            raise ConfigError(
                f"{job_server!r} has no namespace; write {ON_KUBERNETES}NAMESPACE"
            ) from None
    if job_server.startswith("ray-cluster/"):
        access = access_of(job_server)
        if not access.remote:
            raise ConfigError(
                f"the block {job_server} sets neither job_server nor kubernetes; set one of them"
            )
        return access
    try:
        access = Cluster(job_server=job_server).access
    except ValueError as error:
        raise ConfigError(
            f"{job_server!r} is not the URL of a job server: {error_text(error)}"
        ) from None
    check_server("job_server", job_server)
    return access


def restart_crashed(
    most: int = RESTARTS, hours: float = RESTART_WITHIN, dry_run: bool = False
) -> list[Action]:
    """Reschedule flow runs of deployments that first crashed within the last `hours`.

    Each keeps its parameters and its run key, so it continues from the committed shards. A flow run
    is left alone if it has crashed more than `most` times, or if another flow run of its run
    directory is active or has completed since it started. With `dry_run`, nothing is changed.
    """
    since = time.time() - hours * 3600
    actions = []
    with get_client(sync_client=True) as client:
        for run in _crashed_runs(client):
            if run.state is None or _changed(run) < since:
                continue
            crashes = _crashes(client, run)
            if crashes and crashes[0] < since:
                continue
            if len(crashes) > most:
                why = f"it crashed {len(crashes)} times; see its log before you retry it"
                actions.append(Action("kept", run.name, str(run.id), why))
            elif _is_continued(client, run):
                why = "another flow run is working on its run key, or has completed it"
                actions.append(Action("kept", run.name, str(run.id), why))
            else:
                if not dry_run:
                    again: Any = Scheduled(
                        message="Restarted after a crash. Committed shards are kept."
                    )
                    client.set_flow_run_state(run.id, again, force=True)
                why = f"it crashed: {run.state.message}"
                actions.append(Action("restarted", run.name, str(run.id), why))
    return actions


def _crashed_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the crashed flow runs of deployments of OUR_FLOWS, only the latest of each `_work`."""
    flow_runs = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=list(OUR_FLOWS))),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED]))
        ),
        sort=FlowRunSort.END_TIME_DESC,
        limit=FLOW_RUNS_PAGE,
    )
    newest: dict[Hashable, FlowRun] = {}
    for run in flow_runs:
        if run.deployment_id is not None:
            newest.setdefault(_work(run), run)
    return list(newest.values())


def _work(run: FlowRun) -> Hashable:
    """Return what identifies the run that a flow run works on; others with the same continue it.

    That is its flow, its name, and the name and output URI of its job. The name of a flow run is
    its run key or, for `retry_failed`, names the directory of the run that it retries.
    """
    if "run_dir" in run.parameters:
        return run.flow_id, run.name
    job = changed_job(run.parameters)
    output = job.get("output")
    uri = output.get("uri") if isinstance(output, Mapping) else None
    return run.flow_id, run.name, str(job.get("name")), str(uri).rstrip("/")


def _crashes(client: SyncPrefectClient, run: FlowRun) -> list[float]:
    """Return when the flow run crashed, in seconds since 1970, the first crash first.

    Prefect's `run_count` would not do: it leaves out the crashes before a process had begun.
    """
    states = sorted(client.read_flow_run_states(run.id), key=lambda state: state.timestamp)
    before = [None, *states]
    return [
        state.timestamp.timestamp()
        for last, state in zip(before, states, strict=False)
        if state.is_crashed() and not (last is not None and last.is_crashed())  # reported twice
    ]


def _is_continued(client: SyncPrefectClient, crashed: FlowRun) -> bool:
    """Return whether a flow run with the `_work` of `crashed` is active, or completed later.

    A flow run that completed before `crashed` started does not count: it may be an earlier retry of
    the same run. The start is compared, not the crash, because a crash may be noticed hours later.
    """
    started = crashed.start_time.timestamp() if crashed.start_time is not None else 0.0
    ours = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            name=FlowRunFilterName(any_=[crashed.name]),
            state=FlowRunFilterState(
                type=FlowRunFilterStateType(any_=[*OPEN, StateType.COMPLETED])
            ),
        ),
        sort=FlowRunSort.END_TIME_DESC,
        limit=FLOW_RUNS_PAGE,
    )
    work = _work(crashed)
    return any(
        _work(run) == work and (not _has_completed(run) or _changed(run) > started) for run in ours
    )


def _has_completed(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_completed()


def _changed(run: FlowRun) -> float:
    """Return when the flow run's state was set, in seconds since 1970; 0 without a state."""
    return run.state.timestamp.timestamp() if run.state is not None else 0.0


def _stop_orphans(
    client: SyncPrefectClient,
    server: JobServer,
    jobs: dict[str, RayJob],
    following: list[FlowRun],
    dry_run: bool,
) -> list[Action]:
    waited_for = {_label(run, JOB_LABEL) for run in following if not _cancelled_long_ago(run)}
    actions = []
    for ray_job in jobs.values():
        if not ray_job.live:
            continue
        submitter = ray_job.metadata.get("raybatch_flow_run")
        if ray_job.id in waited_for:
            actions.append(Action("kept", ray_job.id, submitter, "a flow run follows it"))
            continue
        ended, why = _has_ended(client, ray_job)
        if ended and not dry_run and not server.stop(ray_job.id, STOP_WAIT):
            why += "; it has not stopped yet"
        actions.append(Action("stopped" if ended else "kept", ray_job.id, submitter, why))
    return actions


def _has_ended(client: SyncPrefectClient, ray_job: RayJob) -> tuple[bool, str]:
    """Return (whether the flow run that submitted the job has ended for good, reason as text).

    The first value is False if Prefect does not know the flow run. It is also False if the flow run
    crashed and a retry will follow the job.
    """
    submitter = ray_job.metadata.get("raybatch_flow_run")
    if not submitter:
        return False, "it was submitted outside Prefect"
    try:
        run = client.read_flow_run(UUID(submitter))
    except (ObjectNotFound, ValueError):
        return False, "its flow run does not exist at this Prefect API"
    state = run.state
    if state is None or (not state.is_final() and not _cancelled_long_ago(run)):
        return False, "its flow run has not ended"
    if state.is_crashed() and ray_job.metadata.get("raybatch_on_crash") != "stop":
        return (
            False,
            "its flow run crashed; a retry will follow it (cluster.on_crash: reattach)",
        )
    return True, f"its flow run {run.name} is {state.name}"


def _crash_stale(
    client: SyncPrefectClient,
    server: JobServer,
    jobs: dict[str, RayJob],
    following: list[FlowRun],
    dry_run: bool,
    grace: float,
    settle: float,
) -> list[Action]:
    now = time.time()
    suspects = [
        run
        for run in following
        if _vanished(run, jobs.get(str(_label(run, JOB_LABEL))), now - grace)
    ]
    if suspects and settle and not dry_run:
        time.sleep(settle)
    actions = []
    for seen in suspects:
        run = client.read_flow_run(seen.id)
        ray_job = server.find(str(_label(run, JOB_LABEL))) if _label(run, JOB_LABEL) else None
        if not _vanished(run, ray_job, now - grace):
            continue
        status = f"is {ray_job.status}" if ray_job else "does not exist at the job server"
        why = f"its Ray job {_label(run, JOB_LABEL)} {status}, but the flow run was still Running"
        if not dry_run:
            advice = f"Committed shards are kept. Continue with: prefect flow-run retry {run.id}"
            state: Any = Crashed(message=f"{why[0].upper()}{why[1:]}. {advice}")
            client.set_flow_run_state(run.id, state, force=True)
        actions.append(Action("crashed", str(_label(run, JOB_LABEL)), str(run.id), why))
    return actions


def _vanished(run: FlowRun, ray_job: RayJob | None, before: float) -> bool:
    """Return whether the flow run is Running although its job is lost.

    True only if the flow run began before the time `before` to follow the job and to be Running: a
    retry has the label of the attempt before it, until it follows a job itself.
    """
    if not _label(run, JOB_LABEL) or run.state is None or not run.state.is_running():
        return False
    if max(float(_label(run, SINCE_LABEL) or 0), _changed(run)) > before:
        return False
    if ray_job is None:
        return True
    return not ray_job.live and ray_job.status != "SUCCEEDED" and (ray_job.ended or 0.0) < before


def _cancelled_long_ago(run: FlowRun) -> bool:
    state = run.state
    return (
        state is not None
        and state.is_cancelling()
        and time.time() - state.timestamp.timestamp() > CANCEL
    )


def _label(run: FlowRun, name: str) -> Any:
    return (run.labels or {}).get(name)


def _open_runs(client: SyncPrefectClient) -> Iterator[FlowRun]:
    """Yield active flow runs that follow a Ray job."""
    open_runs = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN)))
    offset = 0
    while True:
        page = client.read_flow_runs(
            flow_run_filter=open_runs, sort=FlowRunSort.ID_DESC, limit=FLOW_RUNS_PAGE, offset=offset
        )
        yield from (run for run in page if _label(run, JOB_LABEL))
        if len(page) < FLOW_RUNS_PAGE:
            return
        offset += FLOW_RUNS_PAGE
