"""Publishing a finished run: once to each target, whatever is killed and whoever else publishes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.retries import FAILED, first_run
from helpers.small import read_json
from helpers.targets import TARGETS

from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.runs.publish_run import publish_run
from prefect_raybatch.runs.status import report_of

ANSWERED = [n for n in range(20) if n not in FAILED]
FORMATS = sorted(TARGETS)


class Killed(BaseException):
    """As a signal would, it passes by whatever catches exceptions."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_run(tmp_path_factory.mktemp("finished")).store.uri)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "out/key")
    return tmp_path / "out/key"


def job_of(run: Path, *targets: dict[str, Any]) -> BatchJob:
    value = read_json(run / "_raybatch/plan.json")["job"]
    value["output"] = {**value["output"], "publish": list(targets)}
    return BatchJob.from_dict(value)


def made(format: str, run: Path, root: Path, **more: Any) -> BatchJob:
    return job_of(run, TARGETS[format][0](root, **more))


def numbers(format: str, root: Path) -> list[int]:
    return sorted(row["_row"] for row in TARGETS[format][1](root))


def steps_of(job: BatchJob, run: Path) -> list[str]:
    seen: list[str] = []
    publish_run(job, str(run), seen.append)
    return seen


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_is_published_once_however_often_it_is_asked(format, run, tmp_path):
    job = made(format, run, tmp_path)
    report = publish_run(job, str(run))
    assert numbers(format, tmp_path) == ANSWERED
    (one,) = report.published
    assert (one.target, one.format, one.rows) == (format, format, len(ANSWERED))
    assert publish_run(job, str(run)).published == (one,)
    (run / f"_raybatch/published/{format}.json").unlink()  # the target itself knows
    assert publish_run(job, str(run)).published[0].version == one.version
    assert numbers(format, tmp_path) == ANSWERED
    row = next(row for row in TARGETS[format][1](tmp_path) if row["_row"] == 5)
    assert (row["id"], row["Company"], row["response"]) == (5, "Company 5", "answer 5")
    assert row["tags"] == (["t5"] if format != "sql" else '["t5"]')
    assert f"Published: {format}" in (run / "_raybatch/report.md").read_text()
    assert report_of(str(run)).published[0].target == format


@pytest.mark.parametrize("format", FORMATS)
def test_a_publisher_that_is_killed_at_any_step_leaves_no_row_twice(format, finished, tmp_path):
    """Each step is where one is killed; the next one brings the rows there once."""
    trial = tmp_path / "count"
    shutil.copytree(finished, trial / "key")
    steps = len(steps_of(made(format, trial / "key", trial), trial / "key"))
    assert steps >= 4
    for killed_at in range(steps):
        root = tmp_path / str(killed_at)
        shutil.copytree(finished, root / "key")
        job, seen = made(format, root / "key", root), []

        def stop(step: str, at: int = killed_at, seen: list[str] = seen) -> None:
            seen.append(step)
            if len(seen) > at:
                raise Killed(step)

        with pytest.raises(Killed):
            publish_run(job, str(root / "key"), stop)
        publish_run(job, str(root / "key"))
        assert numbers(format, root) == ANSWERED, f"killed at {seen[-1]}"


def beside(job: BatchJob, run: Path) -> Callable[[str], None]:
    """A second publisher, which does all of its work when the first has looked and sees nothing."""
    done: list[str] = []

    def other(step: str) -> None:
        if step == "looked" and not done:
            done.append(step)
            publish_run(job, str(run))

    return other


@pytest.mark.parametrize("format", FORMATS)
def test_of_two_publishers_at_once_one_brings_the_rows(format, run, tmp_path):
    job = made(format, run, tmp_path)
    report = publish_run(job, str(run), beside(job, run))
    assert numbers(format, tmp_path) == ANSWERED
    assert len(report.published) == 1
