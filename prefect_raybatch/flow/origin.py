"""Tells whether a job came through Prefect's API, and adds a deployment's folder to `sys.path`.

Anybody who may use the API can choose the parameters of a deployment's flow runs, and of flow runs
that a block's `trigger` creates. So the operator's policy limits their jobs. It does not limit a
flow that its owner calls in their own process, from a script or by `raybatch run`.

Prefect makes the folder of a deployment's pull steps the working directory. Ray's workers can
import user functions from there, but the driver cannot until the folder is in `sys.path`. Only the
operator who deploys chooses the folder; the policy says which modules a job may name.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.runtime import flow_run

from prefect_raybatch.flow.continuing import root_run
from prefect_raybatch.policy.in_force import register_origin_check

log = logging.getLogger(__name__)

TASK_WORKER = "prefect.task_worker"  # imported only where deferred tasks are served


def comes_through_api() -> bool:
    """Return whether the current flow or task run was created through Prefect's API.

    True if that cannot be found out; False outside of Prefect.
    """
    of_flow, of_task = FlowRunContext.get(), TaskRunContext.get()
    if of_flow is None and of_task is None:
        return False
    if of_flow is None and TASK_WORKER in sys.modules:
        return True
    run = of_flow.flow_run if of_flow is not None else None
    if run is not None and (_is_scheduled(run) or run.parent_task_run_id is None):
        return _is_scheduled(run)
    if run is None and of_task is not None and of_task.task_run.flow_run_id is None:
        return False
    try:
        return _root_is_scheduled(flow_run.get_id())
    except Exception as error:  # unknown while the API is away: apply the policy
        log.warning(
            "could not read the origin of this flow run from Prefect; the policy applies to it: %s",
            error,
        )
        return True


def _is_scheduled(run: FlowRun) -> bool:
    return run.deployment_id is not None or run.work_queue_id is not None


@cache
def _root_is_scheduled(run_id: str | None) -> bool:
    """Return whether the outermost flow run has a deployment or a work queue.

    `run_id` is the id of the current flow run. It is only the cache key: Prefect is asked once for
    each flow run, although each check of a job calls this function.
    """
    with get_client(sync_client=True) as client:
        return _is_scheduled(client.read_flow_run(UUID(flow_run.get_root_flow_run_id())))


register_origin_check(comes_through_api)


def add_pull_folder() -> None:
    """Append the working directory to `sys.path` if the deployment has pull steps.

    An error of Prefect's API is only logged.
    """
    root = root_run()
    if root is None:
        return
    try:
        is_pulled = _has_pull_steps(root)
    except Exception as error:
        log.warning(
            "could not read from Prefect whether this flow run has pull steps, so functions in its "
            "folder may not be found: %s",
            error,
        )
        return
    folder = os.getcwd()
    if is_pulled and folder not in sys.path:
        sys.path.append(folder)


@cache
def _has_pull_steps(root: UUID) -> bool:
    with get_client(sync_client=True) as client:
        deployment = client.read_flow_run(root).deployment_id
        return deployment is not None and bool(client.read_deployment(deployment).pull_steps)
