"""The scheduled start of a flow run, and its date in the time zone of the schedule."""

from __future__ import annotations

from datetime import UTC, date, datetime, tzinfo
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.runtime import flow_run


def scheduled_start() -> datetime | None:
    """Return the scheduled start of the outermost flow run; None outside a flow run.

    The start of the current flow run is not used: a retry of the outermost one creates new subflow
    runs, which must find the same run directory.
    """
    root = flow_run.get_root_flow_run_id()
    if root is None:
        return None
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(str(root))).expected_start_time


def scheduled_date(start: datetime) -> date:
    """Return the date of a scheduled start in the time zone of this flow run's schedule.

    In summer, 01:00 in Berlin is still the day before in UTC. With UTC dates, a schedule at that
    time would repeat one date and skip another when clocks change.
    """
    return start.astimezone(_zone()).date()


def _zone() -> tzinfo:
    root = flow_run.get_root_flow_run_id()
    if root is None:
        return UTC
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(str(root)))
        if run.deployment_id is None:
            return UTC
        return zone_of(run, client.read_deployment(run.deployment_id))


def zone_of(run: FlowRun, deployment: DeploymentResponse) -> tzinfo:
    """Return the time zone of the schedule that created the flow run.

    If no schedule created it, return the zone that all schedules of its deployment have. If there
    are none, or their zones differ, return UTC.
    """
    zones = {item.id: getattr(item.schedule, "timezone", None) for item in deployment.schedules}
    creator = run.created_by.id if run.created_by is not None else None
    names = {zones[creator]} if creator in zones else set(zones.values())
    name = names.pop() if len(names) == 1 else None
    return UTC if name is None else ZoneInfo(name)
