"""A process that runs a job with a hosted model: real driver, stages and HTTP, and no Ray.

    python -m helpers.endpoint_driver JOB KEY

Prints the report's rows at the end.
"""

from __future__ import annotations

import sys

import pytest

from helpers.without_ray import instead_of_ray
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.job.batch_job import BatchJob


def main(path: str, key: str) -> None:
    instead_of_ray(pytest.MonkeyPatch())
    job = BatchJob.from_yaml(path)
    run = plan_run(job, key)
    report = finalize_run(job, run, infer_run(job, run))
    print(report.good, report.failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
