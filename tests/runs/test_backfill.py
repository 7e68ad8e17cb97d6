"""Backfill: a run per date; complete runs are skipped, failed ones are reported."""

from __future__ import annotations

import json
import threading
import time
from concurrent import futures
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.command_line import called
from helpers.engines import FakeEngine
from helpers.prefect_server import artifacts_of
from helpers.retries import first_run
from helpers.small import job_dict
from prefect.artifacts import TableArtifact

from prefect_raybatch import BatchJob
from prefect_raybatch.api import (
    backfill,
    finalize_run,
    infer_run,
    plan_run,
    planned_runs,
    resolve_run,
    submission,
)
from prefect_raybatch.cluster.connect import CLUSTER_SESSION
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.errors import ConfigError, IncompleteRun
from prefect_raybatch.flow.flows import backfill_job
from prefect_raybatch.job.edits import edited
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.backfill import DatedRun, summary
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.storage import open_store

FIRST = date(2026, 11, 1)
ROWS = 12


def day(number: int) -> date:
    return FIRST + timedelta(days=number - 1)


def write_job(folder: Path, days: int = 4, missing: int | None = None, **groups: Any) -> Path:
    for number in range(1, days + 1):
        if number != missing:
            table = pa.table({"id": range(ROWS), "Company": [f"{number} {i}" for i in range(ROWS)]})
            pq.write_table(table, folder / f"{day(number)}.parquet")
    source = {"uri": f"{folder}/{{run_date}}.parquet", "rows_per_shard": ROWS}
    value = job_dict(
        **{"source": source, "output": {"uri": f"{folder}/out"}, "limits": {"max_failed_rows": 1}}
        | groups
    )
    (folder / "job.yaml").write_text(yaml.safe_dump(value), encoding="utf-8")
    return folder / "job.yaml"


class Beside:
    """Counts the runs that work at once; fakes the engine, the one thing that is not real."""

    def __init__(self) -> None:
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.clusters: set[str] = set()

    def infer(self, job: BatchJob, run: Any, observe: Any) -> Any:
        import ray

        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if ray.is_initialized():
                self.clusters.add(ray.get_runtime_context().gcs_address)
        try:
            time.sleep(0.2)
            return infer_run(job, run, observe, engine=FakeEngine)
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Beside:
    found = Beside()
    monkeypatch.setattr(submission, "infer_run", found.infer)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


@pytest.mark.whole
def test_every_night_is_run_failed_ones_stop_no_other_and_done_ones_are_left(
    local_ray, tmp_path, capsys, beside
):
    path = write_job(tmp_path, missing=2)
    asked = ("backfill", path, "--from", day(1), "--to", day(4))
    code, said, _ = called(capsys, *asked, "--dry-run")
    assert code == 0 and said.count("not started") == 4 and not (tmp_path / "out").exists()
    code, said, _ = called(capsys, *asked, "--at-most", "2")
    assert code == 1 and "3 of 4 dates are complete" in said
    assert "SourceError" in said and "2026-11-02.parquet" in said
    assert beside.most <= 2 and len(beside.clusters) == 1
    keys = [f"nightly-202611{number:02}T000000Z" for number in range(1, 5)]
    assert all(key in said for key in keys)
    for key in (keys[0], keys[2], keys[3]):
        assert verify(open_store(f"{tmp_path}/out/{key}")).ok
    write_job(tmp_path)  # the second one has come
    code, said, _ = called(capsys, *asked, "--json")
    found = json.loads(said)
    assert code == 0 and [night["done"] for night in found["runs"]] == [True, False, True, True]
    assert {night["rows"] for night in found["runs"]} == {ROWS}
    assert called(capsys, *asked)[0] == 0 and "4 of them were before" in called(capsys, *asked)[1]


def test_the_flow_is_failed_until_all_are_complete_and_its_table_is_an_artifact(
    prefect_api, without_ray, tmp_path, beside
):
    job = BatchJob.from_yaml(write_job(tmp_path, 3, missing=1, name="filled"))
    with pytest.raises(IncompleteRun, match=r"2 of 3 dates are complete(.|\n)*2026-11-01"):
        backfill_job(job, day(1), day(3), at_most=2)
    write_job(tmp_path, 3)
    made = backfill_job(job, day(1), day(3), overrides={"limits.max_failed_rows": 2})
    assert [row["state"] for row in made] == ["completed", "completed before", "completed before"]
    with pytest.raises(ConfigError, match="max_faild"):
        backfill_job(job, day(1), day(3), overrides={"limits.max_faild_rows": 2})
    tables = artifacts_of("raybatch-filled-backfill")
    assert len(tables) == 2 and json.loads(str(tables[-1].data))[0]["rows"] in ("-", f"{ROWS}")


def test_a_table_that_prefect_refuses_stops_no_date(
    prefect_api, without_ray, tmp_path, beside, monkeypatch, caplog
):
    def refuses(self: Any, **_: Any) -> Any:
        raise RuntimeError("413 Payload Too Large")

    monkeypatch.setattr(TableArtifact, "create", refuses)
    job = BatchJob.from_yaml(write_job(tmp_path, 2, name="refused"))
    made = backfill_job(job, day(1), day(2))
    assert [row["state"] for row in made] == ["completed", "completed"]
    assert "raybatch-refused-backfill in Prefect: RuntimeError: 413" in caplog.text


# --- without Ray --------------------------------------------------------------------------------


@pytest.fixture
def nights(tmp_path) -> tuple[BatchJob, list[DatedRun]]:
    job = BatchJob.from_yaml(write_job(tmp_path, cluster={"job_server": "http://head:8265"}))
    return job, planned_runs(job, day(1), day(4))


def test_a_failure_may_stop_what_has_not_begun(nights, monkeypatch):
    job, planned = nights
    begun: list[date] = []

    def fails(night: DatedRun) -> Any:
        begun.append(night.date)
        raise ConfigError("it cannot work\nat all")

    def late(work: Any) -> Any:  # who hears of it last is not who must stop the next one
        futures.wait(work, 60)
        return futures.as_completed(work)

    monkeypatch.setattr("prefect_raybatch.runs.backfill.as_completed", late)
    found = backfill(job, planned, fails, stop_on_failure=True)
    assert begun == [day(1)]
    assert found[0].state == "failed"
    assert found[0].trouble == "ConfigError: it cannot work ..." and not found[0].transient
    assert found[-1].state == "not started" and summary(found).startswith("0 of 4")


def test_what_is_interrupted_begins_nothing_new(nights, monkeypatch):
    job, planned = nights
    begun: list[date] = []
    called_off = threading.Event()

    def watched(work: Any) -> Any:
        work[-1].add_done_callback(lambda last: called_off.set())
        return futures.as_completed(work)

    def works(night: DatedRun) -> Any:
        begun.append(night.date)
        if night.date == day(2):
            assert called_off.wait(60)
        raise ConfigError("no")

    def told(night: DatedRun) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prefect_raybatch.runs.backfill.as_completed", watched)
    with pytest.raises(KeyboardInterrupt):
        backfill(job, planned, works, observe=told)
    assert begun in ([day(1)], [day(1), day(2)])


def test_one_cluster_is_held_and_its_runs_are_stopped_with_it(tmp_path, monkeypatch, local_ray):
    job = BatchJob.from_yaml(write_job(tmp_path))
    ended = threading.Event()

    def works(night: DatedRun) -> Any:
        from prefect_raybatch.cluster.connect import connected
        from prefect_raybatch.cluster.sharing import Tenant

        user = Tenant("a run")
        with connected(cluster_spec(job), user):
            ended.set()
            assert user.stopped.wait(60)
            error = user.halted()
            assert error is not None
            raise error

    seen: list[Any] = []
    real = CLUSTER_SESSION.stop_all

    def stop_all(but: Any = None) -> None:
        seen.append(but)
        real(but=but)

    planned = planned_runs(job, day(1), day(2))
    monkeypatch.setattr(CLUSTER_SESSION, "stop_all", stop_all)

    def interrupted(work: Any) -> Any:
        assert ended.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr("prefect_raybatch.runs.backfill.as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backfill(job, planned, works)
    assert seen


@pytest.mark.parametrize(
    ("uri", "first", "last", "said"),
    [
        (
            "in.parquet",
            1,
            2,
            r"no \{run_date\} in source .*, so each date would infer",
        ),
        ("{run_date}.parquet", 2, 1, "are 0 dates. Give a first date that is not after"),
    ],
)
def test_what_is_no_back_fill_is_refused_at_once(tmp_path, uri, first, last, said, capsys):
    path = write_job(tmp_path, source={"uri": f"{tmp_path}/{uri}"})
    with pytest.raises(ConfigError, match=said):
        planned_runs(BatchJob.from_yaml(path), day(first), day(last))
    code, _, told = called(capsys, "backfill", path, "--from", day(first), "--to", day(last))
    assert code == 2 and "ConfigError" in told


JUDGE = {"endpoint": {"url": "http://judge", "model": "large"}, "prompt": "Is {answer} right?"}


@pytest.mark.parametrize("quality", [{}, {"golden": "golden.csv"}, {"judge": JUDGE}])
def test_a_date_that_may_still_be_judged_or_measured_is_not_done(without_ray, tmp_path, quality):
    job = BatchJob.from_yaml(write_job(tmp_path, 1))
    filled, key = resolve_run(job, None, None, day(1))
    run = plan_run(filled, key)
    finalize_run(filled, run, infer_run(filled, run, engine=FakeEngine))
    (night,) = planned_runs(edited(job, {"quality": quality}, "the job"), day(1), day(1))
    assert night.complete and night.done is (quality == {})


def test_a_run_of_another_job_is_not_taken_for_done(tmp_path):
    job = BatchJob.from_yaml(write_job(tmp_path))
    first_run(tmp_path / "out", key="nightly-20261101T000000Z")
    (night,) = planned_runs(job, day(1), day(1))
    assert (night.state, night.done) == ("failed", False) and "PlanMismatch" in night.trouble


SCHEDULED = "nightly-20261101T013000Z"


@pytest.mark.parametrize("finished", [True, False])
def test_a_date_that_its_schedule_ran_is_continued_under_the_key_of_that_run(
    without_ray, tmp_path, finished
):
    job = BatchJob.from_yaml(write_job(tmp_path, 2))
    filled, _ = resolve_run(job, SCHEDULED, None, day(1))
    run = plan_run(filled, SCHEDULED)
    if finished:
        finalize_run(filled, run, infer_run(filled, run, engine=FakeEngine))
    first, second = planned_runs(job, day(1), day(2))
    assert (first.run_key, first.run, first.done) == (SCHEDULED, run.uri, finished)
    assert first.state == ("completed" if finished else "planned")
    assert (second.run_key, second.state) == ("nightly-20261102T000000Z", "not started")


def test_a_complete_run_of_the_date_counts_more_than_a_started_one(without_ray, tmp_path):
    job = BatchJob.from_yaml(write_job(tmp_path, 1))
    filled, key = resolve_run(job, None, None, day(1))
    plan_run(filled, key)  # a backfill that was stopped
    run = plan_run(filled, SCHEDULED)
    finalize_run(filled, run, infer_run(filled, run, engine=FakeEngine))
    (night,) = planned_runs(job, day(1), day(1))
    assert (night.run_key, night.done) == (SCHEDULED, True)


def test_a_date_whose_run_was_repaired_is_that_of_the_repaired_run(without_ray, tmp_path):
    job = BatchJob.from_yaml(write_job(tmp_path, 1))
    filled, key = resolve_run(job, None, None, day(1))
    run = plan_run(filled, key)
    finalize_run(filled, run, infer_run(filled, run, engine=FakeEngine))
    Path(run.uri, "data/part-00000.parquet").unlink()
    repair_run(run.uri)
    (night,) = planned_runs(job, day(1), day(1))
    assert (night.run_key, night.state, night.done) == (f"{key}.m1", "planned", False)
    repaired = plan_run(filled, key)
    assert repaired.run_key == night.run_key
    finalize_run(filled, repaired, infer_run(filled, repaired, engine=FakeEngine))
    (night,) = planned_runs(job, day(1), day(1))
    assert (night.run_key, night.done) == (f"{key}.m1", True)


def test_a_repaired_run_of_another_start_of_the_date_is_continued(without_ray, tmp_path):
    job = BatchJob.from_yaml(write_job(tmp_path, 1))
    filled, _ = resolve_run(job, SCHEDULED, None, day(1))
    run = plan_run(filled, SCHEDULED)
    finalize_run(filled, run, infer_run(filled, run, engine=FakeEngine))
    Path(run.uri, "data/part-00000.parquet").unlink()
    repair_run(run.uri)
    (night,) = planned_runs(job, day(1), day(1))
    assert (night.run_key, night.state, night.done) == (f"{SCHEDULED}.m1", "planned", False)
