"""A process that runs a job over a batch API: real driver, stages and HTTP, and no Ray.

    python -m helpers.batch_driver JOB KEY

All shards are in flight at once, as on Ray, and the server is asked often.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.small import receipts
from helpers.without_ray import instead_of_ray
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.stages.hosted_batches import shard

POLL, LOOK = 0.05, 0.25  # seconds


def all_at_once(self: Pipeline, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
    self.on_pass()
    first, spec, finish = self.stages(isolated)
    engine = self.engine(spec)
    tasks = self.read_tasks(units, isolated)
    blocks = [table for task in tasks for table in self.reader.read(task)]
    with ThreadPoolExecutor(len(blocks)) as pool:
        for table in pool.map(lambda block: finish(engine(first(block))), blocks):
            yield from receipts(table)
    engine.close()


def main(path: str, key: str) -> None:
    patch = pytest.MonkeyPatch()
    instead_of_ray(patch)
    patch.setattr(Pipeline, "__call__", all_at_once)
    patch.setattr(shard, "FIRST_POLL", POLL)
    patch.setattr(shard, "LIST_LOOK_EVERY", LOOK)
    job = BatchJob.from_yaml(path)
    run = plan_run(job, key)
    report = finalize_run(job, run, infer_run(job, run))
    print(report.good, report.failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
