"""The flows of increments and of chained jobs, through Prefect, with an engine in this process."""

from __future__ import annotations

import hashlib
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers.nights import Nights
from helpers.prefect_server import ROOT

from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.runs.run import Run

pytestmark = pytest.mark.usefixtures("prefect_api")


class Echo(Nights):
    """Answers each prompt with one of the labels that its job allows."""

    labels: tuple[str, ...] = ()

    def infer(self, job: BatchJob, run: Run, observe: Any = None) -> Progress:
        self.labels = tuple(job.sampling.choice)
        return super().infer(job, run, observe)

    def answer(self, prompt: str) -> str:
        digest = hashlib.sha256(prompt.encode()).digest()
        return self.labels[int.from_bytes(digest[:4], "big") % len(self.labels)]


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
