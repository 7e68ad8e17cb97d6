"""Marks a flow run Crashed whose process is about to be ended by Ray, with the cause.

Otherwise the worker marks it, with the exit status alone. Prefect keeps the first of the two.
"""

from __future__ import annotations

import logging
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Crashed

from prefect_raybatch.bounded import within
from prefect_raybatch.flow.continuing import root_run

log = logging.getLogger(__name__)

MARK_SECONDS = 5.0  # for the calls; Ray ends the process within about ten


def active_flow_runs() -> list[UUID]:
    """Return the outermost flow run of this process, and the current one if it is another."""
    root, current = root_run(), flow_run.get_id()
    return [] if root is None else list(dict.fromkeys((root, UUID(str(current or root)))))


def mark_crashed(flow_runs: list[UUID], cause: str) -> None:
    """Mark flow runs Crashed because of `cause`; the first one is the outermost.

    A failure is logged: the worker will then report the exit status.
    """
    if not flow_runs:
        return
    text = f"{cause}. Continue with: prefect flow-run retry {flow_runs[0]}"

    def mark() -> None:
        with get_client(sync_client=True) as client:
            for run in flow_runs:
                client.set_flow_run_state(run, Crashed(message=text), force=True)

    try:
        within(MARK_SECONDS, mark)
    except Exception as error:
        log.warning("Prefect was not told of it: %s: %s", type(error).__name__, error)
