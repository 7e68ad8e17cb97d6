"""A judge in vLLM on a real Ray job server: a Ray job of its own, after that of the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command_line import Raybatch
from helpers.ray_head import Head

from prefect_raybatch.remote.client import JobServer

pytestmark = [pytest.mark.e2e, pytest.mark.whole, pytest.mark.timeout(900)]


def test_the_judge_is_a_second_ray_job(
    example: Raybatch, tmp_path: Path, ray_head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    judge = {"model": "demo", "engine": {"max_model_len": 256}, "sample": 20}
    judge["prompt"] = "{Company}: is {industry} right or wrong?"
    words = ["run", "companies.yaml", "--run-key", "n1", "--no-prefect"]
    fields = {
        "source.limit": 60,
        "output.uri": str(tmp_path / "out"),
        "source.uri": str(tmp_path / "companies.csv"),
        "cluster.job_server": ray_head.url,
        "cluster.prepare.concurrency": 1,  # each process of Ray imports for itself
        "quality.judge": json.dumps(judge),
    }
    for name, value in fields.items():
        words += ["--set", f"{name}={value}"]
    code, out, err = example(*words)
    assert code == 0, err[-3000:]
    (line,) = [line for line in out.splitlines() if line.startswith("judged")]
    assert "of 20 answers right" in line
    run = tmp_path / "out/n1"
    (judging,) = run.glob("_raybatch/judge/*/runs/*")
    assert judging.name == "n1-judge"
    at = {job.metadata.get("raybatch_run"): job for job in JobServer(ray_head.url).jobs()}
    assert {at[str(place)].status for place in (run, judging)} == {"SUCCEEDED"}
    assert at[str(judging)].metadata["raybatch_run_key"] == "n1-judge"
    code, out, err = example(*words)
    assert code == 0 and line in out, err[-3000:]
