"""Brings Ray jobs and flow runs into step; deploy it with a schedule, every ten minutes or so.

    python flows/reconcile_jobs.py http://head:8265
    prefect deploy flows/reconcile_jobs.py:reconcile --name reaper --pool raybatch --interval 600

Jobs whose flow run has ended are stopped; flow runs whose job has vanished become Crashed. With
`restart`, flow runs of deployments that crashed are scheduled again, at most twice each: they keep
their run key, so that they go on with what is committed.
"""

from __future__ import annotations

import sys

from prefect import flow, get_run_logger

from prefect_raybatch import reconcile_jobs, restart_crashed


@flow(name="reconcile_jobs", log_prints=False)
def reconcile(job_server: str | None = None, dry_run: bool = False, restart: bool = False) -> int:
    """Reconciles the jobs of one job server, where one is named; returns how many jobs and flow
    runs were changed."""
    actions = reconcile_jobs(job_server, dry_run) if job_server else []
    actions += restart_crashed(dry_run=dry_run) if restart else []
    for action in actions:
        get_run_logger().info("%s %s: %s", action.what, action.job, action.why)
    return sum(action.what != "kept" for action in actions)


if __name__ == "__main__":
    reconcile(*sys.argv[1:2])
