"""What a job's targets would take, told before anything is asked."""

from __future__ import annotations

import pyarrow as pa

from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.plan.plan import with_free_names
from prefect_raybatch.publish.publish import check_publish
from prefect_raybatch.stages.result_columns import result_types


def check_targets_of(job: BatchJob, given: pa.Schema, run_key: str = "RUN_KEY") -> tuple[str, ...]:
    """A line for each target of the job, whose input has the columns `given`.

    Raises `ConfigError` for a missing library or variable, a column that a target cannot keep, or
    that does not fit the table there; `PublishFailed` for one that does not answer.
    """
    if not job.output.publish:
        return ()
    known, whole = result_types(with_free_names(job, given.names), given)
    return tuple(check_publish(job.output.publish, run_key, job.output.options, known, whole))
