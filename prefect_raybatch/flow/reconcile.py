"""Matches flow runs with Ray jobs: labels, cancelling, and reconciliation.

A flow run that follows a job has the job's id as a label. Labels survive restarts and every process
sees them, so `reconcile_jobs` can tell a job that somebody waits for from one that nobody does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
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
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.job.cluster_access import ClusterAccess
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.job.trusted_places import check_server
from prefect_raybatch.kuberay.api import KubeApi
from prefect_raybatch.kuberay.run_cluster import delete_expired
from prefect_raybatch.remote.follower import STOP_WAIT, Owner
from prefect_raybatch.remote.server import JobServer, RayJob

log = logging.getLogger(__name__)

JOB_LABEL, SERVER_LABEL, SINCE_LABEL = (
    "raybatch.job",
    "raybatch.job_server",
    "raybatch.followed_since",
)
ON_KUBERNETES = "kubernetes/"
GRACE = 900.0  # seconds after which a flow run has had time to notice that its job is over
SETTLE = 90.0  # seconds in which a live flow submits anew what a restarted head has forgotten
CANCEL = 60.0  # seconds after which a cancelling flow run should have stopped its job
FLOW_RUNS_PAGE = 200
RESTARTS = 2  # times that a crashed flow run is scheduled again
RESTART_WITHIN = 12.0  # hours after which a night that crashed is a person's to look at
OUR_FLOWS = ("batch_inference", "retry_failed")
OPEN = [
    StateType.SCHEDULED,
    StateType.PENDING,
    StateType.RUNNING,
    StateType.PAUSED,
    StateType.CANCELLING,
]


def owner(retries: int = 0) -> Owner:
    """Return the current flow run as the follower of a job; a nameless one outside Prefect. Its
    task is retried `retries` times."""
    current, api = flow_run.get_id(), prefect_api() or ""
    if current is None:
        return Owner(api=api)
    id = UUID(str(current))

    def attached(ray_job: str, server: str) -> None:
        try:
            with get_client(sync_client=True) as client:
                client.update_flow_run_labels(
                    id, {JOB_LABEL: ray_job, SERVER_LABEL: server, SINCE_LABEL: round(time.time())}
                )
        except Exception as error:  # the API may be away for a moment; the job runs all the same
            log.warning("the flow run was not labelled with its job: %s", error)

    def cancelled() -> bool:
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(id).state
        except Exception as error:
            log.warning("Prefect does not say whether the flow run was cancelled: %s", error)
            return False
        return state is not None and (state.is_cancelling() or state.is_cancelled())

    def retried() -> bool:
        return (task_run.get_run_count() or 1) <= retries

    return Owner(str(id), attached, cancelled, api, retried)


@dataclass(frozen=True)
class Action:
    """What was done (or, in a dry run, would be): `what` is stopped, crashed, restarted, deleted or
    kept; `job` is the Ray job, the run key of what is restarted, or the RayCluster."""

    what: str
    job: str
    flow_run: str | None
    why: str


def reconcile_jobs(
    job_server: str, dry_run: bool = False, grace: float = GRACE, settle: float = SETTLE
) -> list[Action]:
    """Reconcile the Ray jobs at `job_server` with the flow runs of this Prefect API.

    Stops jobs whose flow run has ended and which no other flow run follows. Flow runs that are
    still Running `grace` seconds after their job ended without success, or whose job the server
    does not learn of within `settle` seconds, become Crashed. A saved RayCluster block
    (ray-cluster/NAME) can stand for the server and its credentials.

    kubernetes/NAMESPACE, or a block with `kubernetes`, stands for the clusters that runs have
    created there: those whose lease has expired, because no live flow renews it, are deleted.
    Raises `JobServerUnavailable`, `ClusterUnavailable`, `ConfigError`.
    """
    access = _access(job_server)
    if access.kubernetes is not None:
        return _clusters(access.kubernetes, dry_run)
    server = JobServer(str(access.job_server), access=access)
    with get_client(sync_client=True) as client:
        known = {
            ray_job.id: ray_job for ray_job in server.jobs() if ray_job.id.startswith("raybatch-")
        }
        following = [run for run in _open_runs(client) if _label(run, SERVER_LABEL) == server.url]
        stopped = _orphans(client, server, known, following, dry_run)
        return stopped + _widows(client, server, known, following, dry_run, grace, settle)


def _clusters(made: Kubernetes, dry_run: bool) -> list[Action]:
    return [
        Action("deleted" if one.over else "kept", one.name, one.flow_run, one.why)
        for one in delete_expired(KubeApi(made), dry_run)
    ]


def _access(job_server: str) -> ClusterAccess:
    """Return the job server of that URL or block, or the namespace of clusters on Kubernetes."""
    if job_server.startswith(ON_KUBERNETES):
        namespace = job_server.removeprefix(ON_KUBERNETES)
        try:
            # Of a cluster that is there already nothing but its place is asked.
            return ClusterAccess(kubernetes=Kubernetes(image="-", namespace=namespace))
        except ValueError:
            raise ConfigError(
                f"{job_server!r} names no namespace; write {ON_KUBERNETES}NAMESPACE"
            ) from None
    if job_server.startswith("ray-cluster/"):
        access = access_of(job_server)
        if not access.remote:
            raise ConfigError(
                f"the block {job_server} has no job_server and no kubernetes; name one that has"
            )
        return access
    try:
        access = Cluster(job_server=job_server).access
    except ValueError as error:
        raise ConfigError(f"{job_server!r} is no job server: {error}") from None
    check_server("job_server", job_server)
    return access


def restart_crashed(
    most: int = RESTARTS, hours: float = RESTART_WITHIN, dry_run: bool = False
) -> list[Action]:
    """Reschedule crashed flow runs of deployments. Each keeps its parameters and its run key, so it
    continues from what is committed. Takes only those that crashed within the last `hours`, each at
    most `most` times, and none whose run key another flow run works on."""
    since = time.time() - hours * 3600
    actions = []
    with get_client(sync_client=True) as client:
        for run in _crashed_runs(client):
            if run.state is None or run.state.timestamp.timestamp() < since:
                continue
            if run.run_count > most:
                why = f"it crashed {run.run_count} times; a person must look at it"
                actions.append(Action("kept", run.name, str(run.id), why))
            elif _at_work(client, run.name):
                why = "another flow run works on its run key"
                actions.append(Action("kept", run.name, str(run.id), why))
            else:
                if not dry_run:
                    again: Any = Scheduled(message="It crashed; it goes on where it was.")
                    client.set_flow_run_state(run.id, again, force=True)
                why = f"it crashed: {run.state.message}"
                actions.append(Action("restarted", run.name, str(run.id), why))
    return actions


def _crashed_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the latest crashed flow runs of our flows that have a deployment, one for each run
    key."""
    found = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=list(OUR_FLOWS))),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED]))
        ),
        sort=FlowRunSort.END_TIME_DESC,
        limit=FLOW_RUNS_PAGE,
    )
    newest: dict[str, FlowRun] = {}
    for run in found:
        if run.deployment_id is not None:
            newest.setdefault(run.name, run)
    return list(newest.values())


def _at_work(client: SyncPrefectClient, run_key: str) -> bool:
    """Return whether a flow run of that run key, which is its name, is active or has completed."""
    ours = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            name=FlowRunFilterName(any_=[run_key]),
            state=FlowRunFilterState(
                type=FlowRunFilterStateType(any_=[*OPEN, StateType.COMPLETED])
            ),
        ),
        limit=1,
    )
    return bool(ours)


def _orphans(
    client: SyncPrefectClient,
    server: JobServer,
    known: dict[str, RayJob],
    following: list[FlowRun],
    dry_run: bool,
) -> list[Action]:
    waited_for = {_label(run, JOB_LABEL) for run in following if not _cancelled_long_ago(run)}
    actions = []
    for ray_job in known.values():
        if not ray_job.live:
            continue
        submitter = ray_job.metadata.get("raybatch_flow_run")
        if ray_job.id in waited_for:
            actions.append(Action("kept", ray_job.id, submitter, "a flow run follows it"))
            continue
        ended, why = _has_ended(client, ray_job)
        if ended and not dry_run and not server.stop(ray_job.id, STOP_WAIT):
            why += "; it does not stop"
        actions.append(Action("stopped" if ended else "kept", ray_job.id, submitter, why))
    return actions


def _has_ended(client: SyncPrefectClient, ray_job: RayJob) -> tuple[bool, str]:
    """Return (whether the flow run that submitted the job has ended for good, why)."""
    submitter = ray_job.metadata.get("raybatch_flow_run")
    if not submitter:
        return False, "it was submitted outside of Prefect"
    try:
        run = client.read_flow_run(UUID(submitter))
    except (ObjectNotFound, ValueError):
        return False, "this Prefect API does not know its flow run"
    state = run.state
    if state is None or (not state.is_final() and not _cancelled_long_ago(run)):
        return False, "its flow run has not ended"
    if state.is_crashed() and ray_job.metadata.get("raybatch_on_crash") != "stop":
        return False, "its flow run crashed; the next try follows it (cluster.on_crash: reattach)"
    return True, f"its flow run {run.name} is {state.name}"


def _widows(
    client: SyncPrefectClient,
    server: JobServer,
    known: dict[str, RayJob],
    following: list[FlowRun],
    dry_run: bool,
    grace: float,
    settle: float,
) -> list[Action]:
    now = time.time()
    left = [
        run
        for run in following
        if _vanished(run, known.get(str(_label(run, JOB_LABEL))), now - grace)
    ]
    if left and settle and not dry_run:
        time.sleep(settle)
    actions = []
    for seen in left:
        run = client.read_flow_run(seen.id)
        ray_job = server.find(str(_label(run, JOB_LABEL)))
        if not _vanished(run, ray_job, now - grace):
            continue
        said = f"is {ray_job.status}" if ray_job else "is not known to the job server"
        why = f"the Ray job {_label(run, JOB_LABEL)} {said}, and nobody has noticed"
        if not dry_run:
            client.set_flow_run_state(
                run.id,
                Crashed(message=f"{why}. What is committed is kept; run it again to continue."),
                force=True,
            )
        actions.append(Action("crashed", str(_label(run, JOB_LABEL)), str(run.id), why))
    return actions


def _vanished(run: FlowRun, ray_job: RayJob | None, before: float) -> bool:
    if (
        run.state is None
        or not run.state.is_running()
        or float(_label(run, SINCE_LABEL) or 0) > before
    ):
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
    """Yield active flow runs that follow a job."""
    wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN)))
    offset = 0
    while True:
        page = client.read_flow_runs(
            flow_run_filter=wanted, sort=FlowRunSort.ID_DESC, limit=FLOW_RUNS_PAGE, offset=offset
        )
        yield from (run for run in page if _label(run, JOB_LABEL))
        if len(page) < FLOW_RUNS_PAGE:
            return
        offset += FLOW_RUNS_PAGE
