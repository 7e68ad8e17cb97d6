"""limits.min_rows: an input with too few rows fails before an engine starts."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import called
from helpers.nights import Nights
from helpers.small import make_job

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.cli.drive import unusual_of
from prefect_raybatch.cli.ending import show_ending
from prefect_raybatch.errors import SourceError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.runs.run import Run


def job_of(folder: Path, least: int, uri: Path, **source: Any) -> BatchJob:
    return make_job(
        source={"uri": str(uri), **source},
        engine={"model": "demo"},
        output={"uri": str(folder / "out")},
        limits={"min_rows": least},
    )


def test_too_few_rows_fail_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("Company\n" + "Acme\n" * 60)

    def planned(key: str, least: int, **source: Any) -> Run:
        return plan_run(job_of(tmp_path, least, path, **source), key)

    with pytest.raises(SourceError, match=r"the input has 60 rows, but limits\.min_rows is 500"):
        planned("few", 500)
    assert planned("enough", 60).rows == 60
    assert planned("trial", 500, limit=20).rows == 20, "whoever sets a limit wants few rows"


def test_a_dry_run_names_too_few_rows_as_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("Company\n" + "Acme\n" * 60)
    few = job_of(tmp_path, 500, path)
    (problem,) = dry_run(few).problems
    assert problem.startswith("the input has 60 rows, but limits.min_rows is 500. Complete the ")
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(few.to_dict()), encoding="utf-8")
    code, out, _ = called(capsys, "plan", job)
    assert code == 1 and "problem: the input has 60 rows" in out
    assert not dry_run(job_of(tmp_path, 60, path)).problems
    assert not dry_run(job_of(tmp_path, 500, path, limit=20)).problems


def test_a_number_of_rows_that_is_only_estimated_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "in.csv.gz"
    path.write_bytes(gzip.compress(b"Company\n" + b"Acme\n" * 60))
    found = dry_run(job_of(tmp_path, 5000, path))
    assert found.rows_guessed and not found.problems
    (warning,) = [text for text in found.sizing.warnings if "min_rows" in text]
    rows = f"{found.rows:,} row{'s' if found.rows > 1 else ''}"
    assert warning.startswith(f"the input has about {rows}, but limits.min_rows is 5,000")


def test_the_last_lines_of_a_run_say_that_it_has_far_fewer_rows_than_usual(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nights = Nights(tmp_path)
    nights.write(*(f"t{i}" for i in range(20)))
    job = nights.job(reuse=None)
    assert unusual_of(job, nights.night("n1", job)) == []
    nights.write("t1")
    report = nights.night("n2", job)
    (line,) = unusual_of(job, report)
    assert line.startswith("Far fewer rows than usual: 1; ")
    show_ending(report, unusual=[line])
    assert f"\nunusual {line}\n" in capsys.readouterr().out
    limited = nights.job(reuse=None, source={"uri": str(tmp_path / "in.parquet"), "limit": 1})
    assert unusual_of(limited, report) == []
