"""Makes the folder of a deployment's pull steps importable, where its user functions are.

Prefect makes it the working directory, which Ray's workers can import from, but not the driver.
Only the operator who deploys chooses the folder; the policy says which modules a job may name.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from uuid import UUID

from prefect.client.orchestration import get_client

from prefect_raybatch.flow.continuing import root_run

log = logging.getLogger(__name__)


def add_pull_folder() -> None:
    """Add the working directory to `sys.path`, last, if pull steps of the deployment chose it."""
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
