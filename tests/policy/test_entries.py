"""Every way by which a job or a run directory comes in asks the policy."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from helpers.small import small_run

from prefect_raybatch.api import (
    default_run_key,
    dry_run,
    finalize_partial,
    finalize_whole,
    infer_run,
    plan_run,
    planned_runs,
    publish_run,
    record_unplanned,
)
from prefect_raybatch.api.retry import plan_retry
from prefect_raybatch.api.submission import infer_in_place
from prefect_raybatch.api.tune import tune
from prefect_raybatch.doctor import CheckContext
from prefect_raybatch.doctor.places import check_policy
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.flow import reconcile, tasks
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.policy.in_force import STRICT_POLICY, owner_policy, policy_applied
from prefect_raybatch.remote.__main__ import work
from prefect_raybatch.runs import attempts
from prefect_raybatch.runs.open_run import open_run
from prefect_raybatch.runs.run import run_of

JOB, RUN = r"source\.uri: .* may not read", r"run directory: .* may not (read|write)"
ELSEWHERE = {"endpoint_url": "http://evil.example.com"}
ENTRIES: dict[str, tuple[Callable[[Any, Any, str], Any], str]] = {
    "default_run_key": (lambda job, run, uri: default_run_key(job), JOB),
    "plan_run": (lambda job, run, uri: plan_run(job, "k"), JOB),
    "dry_run": (lambda job, run, uri: dry_run(job), JOB),
    "tune": (lambda job, run, uri: tune(job, 1), JOB),
    "infer_run": (lambda job, run, uri: infer_run(job, run), JOB),
    "infer_in_place": (lambda job, run, uri: infer_in_place(job, job, run), RUN),
    "publish_run": (lambda job, run, uri: publish_run(job, uri), RUN),
    "finalize_partial": (lambda job, run, uri: finalize_partial(uri), RUN),
    "finalize_whole": (lambda job, run, uri: finalize_whole(uri), RUN),
    "open_run": (lambda job, run, uri: open_run(uri), RUN),
    "plan_retry": (lambda job, run, uri: tasks.plan_retry.fn(uri), RUN),
    "planned_runs": (
        lambda job, run, uri: planned_runs(dated(job), date(2026, 1, 1), date(2026, 1, 1)),
        JOB,
    ),
    "with_blocks": (
        lambda job, run, uri: tasks.with_blocks(with_output(job, credentials_block="secret/a")),
        r"output\.credentials_block: .* may not name the Prefect block secret/a",
    ),
    "plan_retry with options": (
        lambda job, run, uri: plan_retry(uri, job=with_output(job, options=ELSEWHERE)),
        r"output\.options\.endpoint_url: .* may not name the host evil\.example\.com",
    ),
    "open_run of none": (lambda job, run, uri: open_run(f"{uri}/none", partial=True), RUN),
    "reconcile_jobs": (
        lambda job, run, uri: reconcile.reconcile_jobs("http://169.254.169.254:80"),
        r"job_server: .* may not name the host 169\.254\.169\.254:80",
    ),
}


def with_output(job: BatchJob, **fields: Any) -> BatchJob:
    return job.model_copy(update={"output": job.output.model_copy(update=fields)})


def dated(job: BatchJob) -> BatchJob:
    source = job.source.model_copy(update={"uri": "/etc/{run_date}.csv"})
    return job.model_copy(update={"source": source})


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_refuses_what_the_policy_does_not_allow(tmp_path: Path, entry: str) -> None:
    made = small_run(tmp_path)
    run = run_of(made.store, made.plan, made.ledger)
    call, words = ENTRIES[entry]
    before = sorted(tmp_path.rglob("*"))
    with policy_applied(STRICT_POLICY), pytest.raises(ConfigError, match=words):
        call(made.job, run, str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "fields", [{}, {"options": ELSEWHERE}, {"uri": "s3://evil"}, {"credentials_block": "secret/a"}]
)
def test_a_failure_is_recorded_nowhere_that_the_policy_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """The record is written before there is a plan, where and with what keys the job says."""
    (tmp_path / "out").mkdir()
    job = with_output(small_run(tmp_path / "run").job, uri=f"{tmp_path}/out")
    wanted = with_output(job, **fields)
    monkeypatch.setattr(attempts, "open_store", lambda *given: pytest.fail(f"asked: {given}"))
    with policy_applied(STRICT_POLICY):
        assert record_unplanned(wanted, "k", ConfigError("refused")) is None
    monkeypatch.undo()
    assert list((tmp_path / "out").iterdir()) == []
    for key in ("../k", "a/b", "a\n", "k" * 200):  # no name of a folder, of its owner neither
        assert record_unplanned(job, key, ConfigError("refused")) is None
    assert list((tmp_path / "out").iterdir()) == []
    assert record_unplanned(job, "k", ConfigError("refused")) is not None


def test_nothing_is_shown_of_the_output_of_a_job_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of nights is read from the output, which the job chooses."""
    shown: list[object] = []
    monkeypatch.setattr(tasks, "is_explained", lambda error: True)
    monkeypatch.setattr(tasks, "show_history", lambda *given, **more: shown.append(given))
    job = small_run(tmp_path).job
    for policy, times in ((STRICT_POLICY, 0), (owner_policy(), 1)):
        with (
            policy_applied(policy),
            pytest.raises(ConfigError),
            tasks.failed_run_shown(job, "k"),
        ):
            raise ConfigError("refused")
        assert len(shown) == times


def test_a_ray_job_is_limited_by_the_policy_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the run directory chooses the job that lies there."""
    small_run(tmp_path)
    monkeypatch.delenv("RAYBATCH_POLICY")
    with pytest.raises(ConfigError, match=r"run directory: .* may not write"):
        work(str(tmp_path), 1)


def test_doctor_prints_the_policy_and_whether_it_allows_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_run(tmp_path).job
    (tmp_path / "policy.yaml").write_text("hosts: [a.com]\nkubernetes: {max_workers: 3}\n")
    monkeypatch.setenv("RAYBATCH_POLICY", str(tmp_path / "policy.yaml"))
    first, second = check_policy(CheckContext(job, lambda given: given))
    assert first.mark == "pass" and str(tmp_path / "policy.yaml") in first.found
    assert "hosts: a.com; " in first.found and "kubernetes.max_workers: 3" in first.found
    assert second.mark == "warn" and "may not read" in second.found
    monkeypatch.delenv("RAYBATCH_POLICY")
    (only,) = check_policy(CheckContext(job, lambda given: given))
    assert "the built-in policy" in only.found and "may use only secrets: " in only.found
