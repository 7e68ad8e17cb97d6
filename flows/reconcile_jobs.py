"""Brings Ray jobs and flow runs into step; deploy it with a schedule, every ten minutes or so.

    python flows/reconcile_jobs.py http://head:8265

Jobs whose flow run has ended are stopped; flow runs whose job has vanished become Crashed.
"""

from __future__ import annotations

import sys

from prefect import flow, get_run_logger

from prefect_raybatch import reconcile_jobs


@flow(name="reconcile_jobs", log_prints=False)
def reconcile(job_server: str, dry_run: bool = False) -> int:
    """Reconciles the jobs of one job server; returns how many jobs and flow runs were changed."""
    actions = reconcile_jobs(job_server, dry_run)
    for action in actions:
        get_run_logger().info("%s %s: %s", action.what, action.job, action.why)
    return sum(action.what != "kept" for action in actions)


if __name__ == "__main__":
    reconcile(sys.argv[1])
