"""The flows of increments and of chained jobs, through Prefect, with an engine in this process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers.nights import Nights
from helpers.openai_server import openai_server
from helpers.prefect_server import ROOT
from helpers.vllm_server import MODEL, vllm_server
from helpers.without_ray import instead_of_ray

from prefect_raybatch.api import infer_run
from prefect_raybatch.demo import LABELS
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.runs.run import Run

pytestmark = pytest.mark.usefixtures("prefect_api")


class HostedToo(Nights):
    """Answers Other to every fifth prompt; a job with an endpoint asks its server."""

    def infer(self, job: BatchJob, run: Run, observe: Any = None) -> Progress:
        if job.engine.endpoint.asked:
            with pytest.MonkeyPatch.context() as patch:
                instead_of_ray(patch)
                return infer_run(job, run)
        return super().infer(job, run, observe)

    def answer(self, prompt: str) -> str:
        digest = hashlib.sha256(prompt.encode()).digest()
        return "Other" if digest[0] % 5 == 0 else "Retail"


class Echo(Nights):
    """Answers each prompt with one of the labels that its job allows."""

    labels: tuple[str, ...] = ()

    def infer(self, job: BatchJob, run: Run, observe: Any = None) -> Progress:
        self.labels = tuple(job.sampling.choice)
        return super().infer(job, run, observe)

    def answer(self, prompt: str) -> str:
        digest = hashlib.sha256(prompt.encode()).digest()
        return self.labels[int.from_bytes(digest[:4], "big") % len(self.labels)]


def check_hard_rows(folder: Path, url: str, model: str, hosted_answers: set[str]) -> list[str]:
    """Run the flow with a hosted model at that URL; return its answers to the hard rows."""
    from hosted_for_hard_rows import hosted_for_hard_rows

    day = date(2026, 1, 2)
    result = hosted_for_hard_rows(str(folder), url, model, 40, day)
    rows = pq.read_table(result).to_pylist()
    names = pq.read_table(folder / "companies.parquet")["Company"].to_pylist()
    assert [row["Company"] for row in rows] == names and len(names) == 40
    hard = [row["industry"] for row in rows if row["industry"] != "Retail"]
    assert 0 < len(hard) < 40 and set(hard) <= hosted_answers
    assert pq.read_table(hosted_for_hard_rows(str(folder), url, model, 40, day)).equals(
        pq.read_table(result)
    )
    return hard


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local engine in this process, and real HTTP to a hosted model."""
    infer = HostedToo(tmp_path).infer
    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", infer)
    monkeypatch.syspath_prepend(str(ROOT / "flows"))
    yield
    sys.modules.pop("hosted_for_hard_rows", None)


def test_a_hosted_model_answers_what_the_local_one_left_open(both: None, tmp_path: Path) -> None:
    with openai_server() as server:
        first, *_ = LABELS  # which the server answers whenever it is given labels
        hard = check_hard_rows(tmp_path, server.url, "large", {first})
    assert len(server.bodies) == len(hard)


@pytest.mark.whole
def test_the_hosted_model_is_a_real_vllm_serve(both: None, tmp_path: Path) -> None:
    with vllm_server(tmp_path) as url:
        check_hard_rows(tmp_path, url, MODEL, {*LABELS})


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Echo:
    """In place of Ray and vLLM."""
    made = Echo(tmp_path)
    monkeypatch.setattr("prefect_raybatch.api.submission.infer_run", made.infer)
    monkeypatch.syspath_prepend(str(ROOT / "flows"))
    yield made
    for name in ("nightly_increment", "chained"):
        sys.modules.pop(name, None)


def test_two_runs_ask_each_company_once(engine: Echo, tmp_path: Path) -> None:
    from nightly_increment import a_day_later, two_runs

    first, second = two_runs(str(tmp_path), 60)
    names = pq.read_table(tmp_path / "companies.parquet")["Company"].to_pylist()
    assert first.reuse["reused"] == 0 and first.reuse["asked"] + first.reuse["merged"] == 60
    assert second.rows == len(names) == sum(second.reuse[k] for k in ("asked", "merged", "reused"))
    assert 0 < second.reuse["asked"] < 12 < second.reuse["reused"]
    assert len(engine.asked) == first.reuse["asked"] + second.reuse["asked"]
    assert len(set(engine.asked)) == len(engine.asked)
    rows = pq.read_table(f"{second.run}/data").to_pylist()
    assert [row["Company"] for row in rows] == names
    by_name = {row["Company"]: row["industry"] for row in rows}
    assert all(row["industry"] == by_name[row["Company"]] for row in rows)
    assert a_day_later(names) != names


@pytest.mark.whole
def test_the_second_job_reads_what_the_first_wrote(engine: Echo, tmp_path: Path) -> None:
    from chained import chained

    report = chained(str(tmp_path), 20, date(2026, 1, 2))
    rows = pq.read_table(f"{report.run}/data").to_pylist()
    assert len(rows) == 20 and [row["_row"] for row in rows] == [row["_row_2"] for row in rows]
    assert set(rows[0]) == {"id", "Company", "response", "_row", "response_2", "_row_2"}
    assert all(row["response_2"] and row["response_2"] != row["response"] for row in rows)
    asked = len(engine.asked)
    assert chained(str(tmp_path), 20, date(2026, 1, 2)).run == report.run  # both are done
    assert len(engine.asked) == asked
