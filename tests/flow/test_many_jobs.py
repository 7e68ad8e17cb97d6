"""Several jobs in one flow, in each form that Prefect has for it, with made-up engines; on real Ray
where runs work side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import FakeEngine
from helpers.prefect_server import artifacts_of
from helpers.small import make_job
from prefect import flow, task, unmapped
from prefect.client.orchestration import get_client

from prefect_raybatch import (
    BatchJob,
    batch_inference,
    finalize_run,
    infer_shards,
    plan_shards,
)
from prefect_raybatch.api import infer_run, submission
from prefect_raybatch.flow.artifacts import of_run
from prefect_raybatch.report.records import RunReport

pytestmark = pytest.mark.usefixtures("prefect_api")

ROWS = 12


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that answer at once: the one thing here that is not real."""

    def infer(job: BatchJob, run: Any, observe: Any) -> Any:
        return infer_run(job, run, observe, engine=FakeEngine)

    monkeypatch.setattr(submission, "infer_run", infer)


def job_in(folder: Path, name: str) -> BatchJob:
    table = pa.table({"id": range(ROWS), "Company": [f"{name} {i}" for i in range(ROWS)]})
    source = folder / f"{name}.parquet"
    pq.write_table(table, source)
    return make_job(
        name=name,
        source={"uri": str(source), "rows_per_shard": ROWS},
        output={"uri": str(folder / "out")},
        limits={"max_failed_rows": 1},
    )


def ended(*reports: RunReport) -> None:
    for report in reports:
        assert (report.rows, report.state) == (ROWS, "completed")
        assert Path(report.run, "_SUCCESS").exists()


@pytest.mark.whole
def test_partitions_are_mapped_beside_another_job_that_is_submitted(
    local_ray: None, tmp_path: Path
) -> None:
    """Three runs in one flow run, side by side: none shows in another's artifacts."""
    job, other = job_in(tmp_path, "mapped"), job_in(tmp_path, "submitted")
    keys = [f"part-{number}" for number in range(2)]

    @flow
    def night() -> list[RunReport]:
        run = plan_shards.submit(other, "other-key")
        last = finalize_run.submit(other, run, infer_shards.submit(other, run))
        runs = plan_shards.map(unmapped(job), keys)
        progress = infer_shards.map(unmapped(job), runs)
        return [*finalize_run.map(unmapped(job), runs, progress).result(), last.result()]

    ended(*night())
    reports = [one for one in artifacts_of("raybatch-mapped-") if one.key.endswith("-report")]
    assert len(reports) == 2
    for key in keys:
        (one,) = (a for a in reports if str(a.description).endswith(of_run(key)))
        assert f"Run `{key}`" in str(one.data)


@pytest.mark.whole
def test_an_async_flow_awaits_several_and_calls_one(local_ray: None, tmp_path: Path) -> None:
    jobs = [job_in(tmp_path, name) for name in ("alpha", "beta")]

    @flow
    async def night() -> list[RunReport]:
        both = (asyncio.to_thread(batch_inference, job, job.name) for job in jobs)
        made = await asyncio.gather(*both)
        return [batch_inference(jobs[0], "alpha"), *made]  # and finds what is done

    ended(*asyncio.run(night()))


def test_subflows_of_a_scheduled_parent_have_its_start_in_their_keys(
    without_ray: None, tmp_path: Path
) -> None:
    """Also when the parent is tried again, which makes new subflow runs: they find their runs."""
    jobs = [job_in(tmp_path, name) for name in ("morning",)]
    tries: list[list[RunReport]] = []

    @task
    def check() -> None:
        if len(tries) == 1:
            raise RuntimeError("the parent's own mistake")

    @flow(retries=1)
    def parent() -> None:
        tries.append([batch_inference(job) for job in jobs])
        check()

    state = parent(return_state=True)
    assert state.is_completed() and len(tries) == 2
    first, second = tries
    assert [r.run_key for r in first] == [r.run_key for r in second]
    with get_client(sync_client=True) as client:
        start = client.read_flow_run(UUID(str(state.state_details.flow_run_id))).expected_start_time
    assert start and [r.run_key for r in first] == [
        f"{job.name}-{start:%Y%m%dT%H%M%SZ}" for job in jobs
    ]
    ended(*first, *second)
