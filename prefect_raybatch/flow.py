"""The flow `batch_inference`: plan, infer, finalize."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from prefect_raybatch import runs
from prefect_raybatch.job import BatchJob
from prefect_raybatch.records import RunReport
from prefect_raybatch.tasks import finalize_run, infer_shards, plan_shards, with_blocks


@flow(name="batch_inference", flow_run_name="{job.name}", persist_result=False)
def batch_inference(job: BatchJob, run_key: str | None = None) -> RunReport:
    """Asks a model about every row of a table and writes the answers, each row exactly once.

    Args:
        job: What to read, what to ask, where to write.
        run_key: Name of the run's directory under output.uri. The same key continues or returns
            a run; by default the job's name and the scheduled start of the outermost flow run.
    """
    key = run_key or runs.default_run_key(with_blocks(job), scheduled_start())
    run = plan_shards(job, key)
    progress = infer_shards(job, run)
    return finalize_run(job, run, progress)


def scheduled_start() -> datetime | None:
    """When the outermost flow run was to start: a retry of a parent makes new subflow runs, and
    they must find the same run directory. None outside a flow run."""
    root = flow_run.get_root_flow_run_id()
    if root is None:
        return None
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(str(root))).expected_start_time
