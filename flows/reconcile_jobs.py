"""Reconcile Ray jobs and flow runs; deploy it with a schedule, about every ten minutes.

    python flows/reconcile_jobs.py http://head:8265
    prefect deploy flows/reconcile_jobs.py:reconcile --name reaper --pool raybatch --interval 600

Stops jobs without an active flow run, and marks flow runs Crashed that lost their job. With
`restart`, reschedules crashed flow runs of deployments, at most twice each. They keep their run
key, so they continue from the committed shards.
"""

from __future__ import annotations

import sys

from prefect import flow, get_run_logger

from prefect_raybatch import reconcile_jobs, restart_crashed


@flow(name="reconcile_jobs", log_prints=False)
def reconcile(job_server: str | None = None, dry_run: bool = False, restart: bool = False) -> int:
    """Reconcile the jobs of a job server, if one is named.

    Returns how many jobs and flow runs were changed.
    """
    actions = reconcile_jobs(job_server, dry_run) if job_server else []
    actions += restart_crashed(dry_run=dry_run) if restart else []
    for action in actions:
        get_run_logger().info("%s %s: %s", action.what, action.job, action.why)
    return sum(action.what != "kept" for action in actions)


if __name__ == "__main__":
    reconcile(*sys.argv[1:2])
