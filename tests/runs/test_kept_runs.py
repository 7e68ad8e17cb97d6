"""Run directories that version 0.1 wrote: shown, finished, verified and retried by this one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.in_process import infer
from helpers.retries import numbers
from helpers.small import read_json

from prefect_raybatch.driver.heartbeat import Beat
from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Commit, Plan, Receipt, digest
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.plan.resolved import resolve
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.result.verify import verify
from prefect_raybatch.result.verify_chain import verify_chain
from prefect_raybatch.runs.finalize_run import finalize_run
from prefect_raybatch.runs.plan_run import plan_run
from prefect_raybatch.runs.retry import Nothing, Retry, plan_retry
from prefect_raybatch.runs.status import report_of, status
from prefect_raybatch.storage import open_store

DATA = Path(__file__).parents[1] / "data"
KEPT = DATA / "runs-0.1"
PLANS = sorted(KEPT.glob("*/_raybatch/plan.json"))
COMMITS = sorted(KEPT.glob("*/_raybatch/commits/*.json"))
FAILED = {  # of `finished`
    "AnswerCutOff": [2],
    "EngineDied": [9],
    "RuntimeError": [11],
    "ValueError": [13, 14],
    "PromptTooLong": [17],
}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs, in the folder that their jobs were written for."""
    shutil.copytree(KEPT, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(DATA)
    return tmp_path / "runs"


def job_of(run: Path, **groups: Any) -> BatchJob:
    return BatchJob.from_dict({**read_json(run / "_raybatch/plan.json")["job"], **groups})


# --- records ------------------------------------------------------------------------------------


def test_every_kind_of_record_is_kept():
    assert len(PLANS) == 3 and len(COMMITS) == 12


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.parts[-3])
def test_a_plan_is_written_as_it_was(path):
    data = path.read_bytes()
    plan = Plan.from_bytes(data)
    assert plan.to_bytes() == data and plan.hash == digest(data)


@pytest.mark.parametrize("path", COMMITS, ids=lambda p: f"{p.parts[-4]}-{p.stem}")
def test_a_commit_is_written_as_it_was(path):
    data = path.read_bytes()
    assert Commit.from_bytes(data).to_bytes() == data


def test_receipts_are_written_as_they_were():
    lines = (DATA / "receipts-0.1.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 18
    for line in lines:
        assert Receipt.from_json(line).to_json() == line


@pytest.mark.parametrize("key", ["finished", "finished.r1"])
def test_the_records_of_an_end_are_written_as_they_were(key):
    ours = KEPT / key
    plan = Plan.from_bytes((ours / "_raybatch/plan.json").read_bytes())
    data = (ours / "_raybatch/report.json").read_bytes()
    assert RunReport.from_bytes(data).to_bytes() == data
    data = (ours / "_SUCCESS").read_bytes()
    assert Success.from_bytes(data, plan, key).to_bytes() == data


@pytest.mark.parametrize("path", sorted(KEPT.glob("*/_raybatch/heartbeats/*")), ids=str)
def test_a_heartbeat_is_written_as_it_was(path):
    data = path.read_bytes()
    assert Beat.from_bytes(data, "beat").to_bytes() == data


# --- runs ---------------------------------------------------------------------------------------


def test_their_jobs_have_the_fingerprint_they_had(kept):
    for key in ("finished", "unfinished"):
        plan = Ledger(open_store(str(kept / key))).load_plan()
        job = job_of(kept / key)
        resolved = resolve(job)
        assert (resolved.fingerprint, resolved.parts) == (plan.fingerprint, plan.parts)


def test_a_finished_run_is_shown(kept):
    found = status(str(kept / "finished"))
    assert (found.state, found.good, found.quarantined, found.skipped) == ("completed", 13, 6, 1)
    assert sum(found.failures.values()) == 6
    report = report_of(str(kept / "finished"))
    assert report.to_bytes() == (kept / "finished/_raybatch/report.json").read_bytes()


def test_an_unfinished_run_is_shown_with_what_stopped_it(kept):
    found = status(str(kept / "unfinished"))
    assert (found.state, found.committed, found.pending) == ("unfinished", 4, 3)
    assert found.stopped is not None and found.stopped.held_back == 1
    assert [one.row for one in found.stopped.sample] == [17]
    assert len(found.attempts) == 2
    report = report_of(str(kept / "unfinished"))
    assert (report.good, report.failed, report.skipped) == (8, 3, 1)
    assert report.figures["running"] == 3.0 and report.workers[0].name == "node-1:4242"


@pytest.mark.parametrize("key", ["finished", "finished.r1"])
def test_a_finished_run_is_verified(kept, key):
    found = verify(open_store(str(kept / key)))
    assert found.ok, found
    assert verify_chain(open_store(str(kept)), "finished").ok


def test_the_plan_says_which_folder_holds_the_failed_rows(kept):
    """And not what happens to be there."""
    (kept / "finished/quarantine").rename(kept / "finished/_quarantine")
    faults = verify(open_store(str(kept / "finished"))).faults
    assert faults[0].startswith("quarantine/part-00000.parquet: the file is missing")
    path = kept / "finished/_SUCCESS"
    path.write_text(path.read_text().replace('"quarantine/', '"_quarantine/'))
    with pytest.raises(CorruptRun, match="the files of this plan are in data and quarantine"):
        status(str(kept / "finished"))
    data = PLANS[0].read_bytes().replace(b'"rows":', b'"quarantine":"failed","rows":', 1)
    with pytest.raises(CorruptRun, match=r"plan\.json is malformed: quarantine is 'failed'"):
        Plan.from_bytes(data)


def test_an_unfinished_run_is_finished(kept):
    job = job_of(kept / "unfinished", limits={"max_failed_rows": 20})
    before = {path.name: path.read_bytes() for path in kept.glob("unfinished/*/commits/*")}
    run = plan_run(job, "unfinished")
    assert (run.shards, run.finished) == (7, False)
    progress, asked = infer(job, run, refused=frozenset({13}))
    assert (progress.resumed_shards, asked) == (4, 3)
    report = finalize_run(job, run, progress)
    assert (report.good, report.failed, report.skipped) == (14, 5, 1)
    assert verify(open_store(run.uri)).ok
    assert sorted(numbers(run.uri) + numbers(run.uri, "quarantine") + [5]) == list(range(20))
    for name, data in before.items():
        assert (kept / "unfinished/_raybatch/commits" / name).read_bytes() == data


def test_a_finished_run_and_its_retry_are_retried(kept):
    first = plan_retry(str(kept / "finished"))
    assert isinstance(first, Retry) and first.run.rows == 4
    again = plan_retry(str(kept / "finished.r1"))
    assert isinstance(again, Retry) and again.run.rows == 1
    for retry in (first, again):
        finalize_run(retry.job, retry.run, infer(retry.job, retry.run)[0])
    # Row 11 is not liked by its function, 17 is as long as before.
    rest = plan_retry(str(kept / "finished.r2"), ["RuntimeError"])
    assert isinstance(rest, Retry) and rest.run.rows == 1
    assert isinstance(plan_retry(str(kept / "finished.r3")), Nothing)
    assert numbers(again.run.uri) == [14] and numbers(first.run.uri) == [2, 9]
    found = verify_chain(open_store(str(kept)), "finished")
    assert not found.ok and "finished.r4" in str(found), "the last retry is not finished"


@pytest.mark.parametrize("error", FAILED)
def test_each_class_of_failure_can_be_asked_for(kept, error):
    if error == "ValueError":
        with pytest.raises(ConfigError, match=r"taken by finished\.r1, and some failed again"):
            plan_retry(str(kept / "finished"), [error])
    else:
        asked = plan_retry(str(kept / "finished"), [error])
        assert isinstance(asked, Retry) and asked.run.rows == len(FAILED[error])
