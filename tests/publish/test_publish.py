"""Publishing a finished run: once to each target, whatever is killed and whoever else publishes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from helpers.retries import FAILED, commit, end, first_run, retried
from helpers.small import input_rows, read_json
from helpers.targets import TARGETS

from prefect_raybatch.api import other_targets, publish_run
from prefect_raybatch.errors import ConfigError, CorruptRun, IncompleteRun, PublishFailed
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.placeholders import render_text
from prefect_raybatch.ledger.layout import commit_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.status import report_of
from prefect_raybatch.storage import open_store

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


def killed_at_every_step(job: BatchJob, run: Path) -> Iterator[set[str]]:
    """Publishers, each killed at the first step that none before it was killed at, until one is
    done: after each of them all steps so far."""
    seen: set[str] = set()

    def stop(step: str) -> None:
        if step not in seen:
            seen.add(step)
            raise Killed(step)

    done = False
    while not done:
        with suppress(Killed):
            publish_run(job, str(run), stop)
            done = True
        yield seen
    assert seen >= {"opened", "looked", "committed", "recording"}


@pytest.mark.parametrize("format", FORMATS)
def test_a_publisher_that_is_killed_at_every_step_leaves_no_row_twice(format, run, tmp_path):
    for seen in killed_at_every_step(made(format, run, tmp_path), run):
        if "committed" in seen:
            assert numbers(format, tmp_path) == ANSWERED, seen


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


# --- merging ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_run(tmp_path_factory.mktemp("older"), {}, text="old").store.uri)


@pytest.fixture
def older(old_run: Path, tmp_path: Path) -> Path:
    """A run that answered all of the rows."""
    return Path(shutil.copytree(old_run, tmp_path / "older/key"))


def merging(format: str, root: Path, *runs: Path) -> Iterator[BatchJob]:
    """The job of each run, which merges by id into one target."""
    place = {"uri": str(root / "lance-all")} if format == "lance" else {}
    target = TARGETS[format][0](root, mode="merge", key=["id"], **place)
    return (job_of(run, target) for run in runs)


def before(format: str, root: Path, run: Path, older: Path) -> BatchJob:
    """A target that holds other answers to the rows, which an earlier run has put there."""
    earlier, job = merging(format, root, older, run)
    publish_run(earlier, str(older))
    return job


MERGING = ["delta", "iceberg", "sql", "lance"]


@pytest.mark.parametrize("format", MERGING)
def test_a_merge_replaces_rows_of_the_same_key(format, run, older, tmp_path):
    job = before(format, tmp_path, run, older)
    publish_run(job, str(run), beside(job, run))
    rows = {row["id"]: row["response"] for row in TARGETS[format][1](tmp_path)}
    assert sorted(rows) == list(range(20))  # those that failed this time keep the answer they had
    assert all(rows[n] == ("old" if n in FAILED else "answer") + f" {n}" for n in rows)
    assert len(TARGETS[format][1](tmp_path)) == 20


@pytest.mark.parametrize("format", MERGING)
def test_a_merge_that_is_killed_at_every_step_is_there_whole_or_not_at_all(
    format, run, older, tmp_path
):
    job = before(format, tmp_path, run, older)
    old = [(n, f"old {n}") for n in range(20)]
    new = [(n, f"{'old' if n in FAILED else 'answer'} {n}") for n in range(20)]
    for seen in killed_at_every_step(job, run):
        rows = sorted((row["id"], row["response"]) for row in TARGETS[format][1](tmp_path))
        assert rows == (new if "committed" in seen else old), seen


@pytest.mark.parametrize("format", MERGING)
def test_of_two_runs_that_merge_at_once_each_key_is_there_once(format, run, older, tmp_path):
    """The other run merges between this one's look and its commit, where no table was before."""
    earlier, job = merging(format, tmp_path, older, run)
    publish_run(job, str(run), beside(earlier, older))
    rows = sorted((row["id"], row["response"]) for row in TARGETS[format][1](tmp_path))
    assert rows == [(n, f"{'old' if n in FAILED else 'answer'} {n}") for n in range(20)]


def test_a_key_that_is_not_unique_or_null_is_refused_before_anything_is_written(tmp_path):
    made_run = first_run(tmp_path / "out", {}, same=True)
    run = Path(made_run.store.uri)
    target = TARGETS["delta"][0](tmp_path, mode="merge", key=["Company"])
    with pytest.raises(ConfigError, match=r"not unique .* 1 values .*Company='the same'"):
        publish_run(job_of(run, target), str(run))
    assert not (tmp_path / "delta").exists() and not (run / "_raybatch/published").exists()


def test_a_merge_into_delta_is_looked_at_again_after_a_foreign_commit(run, older, tmp_path):
    """A row that another writer appends under one of our keys is replaced, not doubled."""
    job, tries = before("delta", tmp_path, run, older), []

    def other(step: str) -> None:
        if step == "looked":
            tries.append(step)
            if len(tries) == 1:
                place = str(tmp_path / "delta")
                there = pa.table(DeltaTable(place).to_pyarrow_table()).slice(0, 1)
                at = there.column_names.index("id")
                row = there.set_column(at, there.field(at), pa.array([99], there.field(at).type))
                write_deltalake(place, row, mode="append")  # the schema stays

    publish_run(job, str(run), other)
    assert len(tries) == 2, "the library committed a merge of what was there before"
    assert sorted(row["id"] for row in TARGETS["delta"][1](tmp_path)) == [*range(20), 99]


# --- a retry, and targets that changed ----------------------------------------------------------


def test_a_retry_publishes_its_own_rows_to_the_targets_of_its_parent(tmp_path):
    targets = [TARGETS[format][0](tmp_path) for format in FORMATS]
    parent = first_run(tmp_path / "out", output={"publish": targets})
    publish_run(None, parent.store.uri, targets_from_plan=True)
    child = retried(parent.store.uri, overrides={"output.publish": targets})
    report = publish_run(None, child, targets_from_plan=True)
    assert [one.rows for one in report.published] == [len(FAILED)] * len(FORMATS)
    for _ in range(2):
        for format in FORMATS:
            assert numbers(format, tmp_path) == list(range(20)), format
        publish_run(None, child, targets_from_plan=True)
        publish_run(None, parent.store.uri, targets_from_plan=True)


def test_another_target_under_the_same_name_is_refused(run, tmp_path):
    publish_run(made("delta", run, tmp_path), str(run))
    other = job_of(run, {"format": "delta", "uri": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=f"published under this name to delta {tmp_path}/delta"):
        publish_run(other, str(run))
    named = job_of(run, {"format": "delta", "uri": str(tmp_path / "other"), "name": "second"})
    assert [one.target for one in publish_run(named, str(run)).published] == ["delta", "second"]


def test_the_date_of_a_run_is_in_its_targets_and_in_those_of_its_retry(tmp_path):
    target = {"format": "jsonl", "uri": str(tmp_path / "lake/{run_date}")}
    job = first_run(tmp_path / "out", key="night").job
    job = BatchJob.from_dict(
        job.to_dict() | {"output": {**job.to_dict()["output"], "publish": [target]}}
    )
    run = str(tmp_path / "out/night")
    with pytest.raises(ConfigError, match="contains no date; set --run-date"):
        publish_run(job, run)
    publish_run(job, run, run_date=date(2026, 7, 1))
    assert [p.name for p in (tmp_path / "lake").iterdir()] == ["2026-07-01"]
    key = "nightly-20260702T010000Z"
    parent = first_run(tmp_path / "out", key=key, output={"publish": [target]}).store.uri
    child = retried(parent, overrides={"output.publish": [target]})
    publish_run(None, child, targets_from_plan=True)
    assert {p.name for p in (tmp_path / "lake").iterdir()} == {"2026-07-01", "2026-07-02"}


@pytest.mark.parametrize(
    "form",
    [
        "{run_date}",
        "{run_date:%Y/%m/%d}",
        "{run_date:%Y-%m}",
        "{run_key}/{run_date}",
        "{run_date:%Y/%m}/{run_date}",
    ],
)
def test_targets_have_the_date_that_the_run_used_also_if_its_key_has_another(tmp_path, form):
    """A run of 00:30 in Berlin has the date of its schedule, and a key in UTC."""
    key = "nightly-20260630T223000Z"
    target = {"format": "jsonl", "uri": f"{tmp_path}/lake/{form}"}
    used = target | {"uri": render_text(target["uri"], None, date(2026, 7, 1))}
    parent = first_run(tmp_path / "out", key=key, output={"publish": [used]})
    whole = parent.job.to_dict()
    job = BatchJob.from_dict(whole | {"output": {**whole["output"], "publish": [target]}})
    assert other_targets(job, parent.store.uri) is None
    (done,) = publish_run(job, parent.store.uri).published
    assert done.place == used["uri"].replace("{run_key}", key)
    child = retried(parent.store.uri, job=job)
    assert read_json(Path(child) / "_raybatch/plan.json")["job"]["output"]["publish"] == [used]


def test_the_date_of_a_repaired_run_is_found_beside_the_key_of_the_first_run(tmp_path):
    run = first_run(tmp_path / "out/key/2026-07-01")
    (run.root / commit_path(0)).unlink()
    repair_run(run.store.uri)
    fork = open_store(f"{run.store.uri}.m1")
    commit(Ledger(fork), run.job, 0, input_rows(0, 5), FAILED)
    end(run.job, fork.uri)
    target = {"format": "jsonl", "uri": f"{tmp_path}/lake/{{run_date}}"}
    output = {"uri": f"{tmp_path}/out/{{run_key}}/{{run_date}}", "publish": [target]}
    job = edited(run.job, {"output": output}, "job")
    (done,) = publish_run(job, fork.uri).published
    assert done.place == f"{tmp_path}/lake/2026-07-01"
    child = retried(fork.uri, job=job)
    (planned,) = read_json(Path(child) / "_raybatch/plan.json")["job"]["output"]["publish"]
    assert planned["uri"] == f"{tmp_path}/lake/2026-07-01"


def test_one_target_that_fails_takes_nothing_from_the_others(run, tmp_path):
    (tmp_path / "file").write_text("in the way")
    broken = {"format": "delta", "uri": str(tmp_path / "file")}
    with pytest.raises(PublishFailed, match=r"broken: .*data/ is complete.*raybatch publish"):
        publish_run(
            job_of(run, TARGETS["jsonl"][0](tmp_path), {**broken, "name": "broken"}), str(run)
        )
    assert [one.target for one in report_of(str(run)).published] == ["jsonl"]
    assert numbers("jsonl", tmp_path) == ANSWERED


def test_a_run_that_is_not_finished_or_names_no_target_is_not_published(run, tmp_path):
    with pytest.raises(ConfigError, match=r"no `output\.publish`"):
        publish_run(None, str(run), targets_from_plan=True)
    begun = first_run(tmp_path / "begun", finish=False)
    with pytest.raises(IncompleteRun, match="--run-key key"):
        publish_run(made("delta", run, tmp_path), begun.store.uri)


@pytest.mark.parametrize("at", [8, -300, -8])  # in a page, in the footer, in the footer's length
def test_a_damaged_result_is_not_published(run, tmp_path, at):
    path = next((run / "data").glob("*.parquet"))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRun, match=r"(not what|changed since) finalize wrote"):
        publish_run(made("delta", run, tmp_path), str(run))
    assert not (tmp_path / "delta").exists() or numbers("delta", tmp_path) == []


def test_a_run_without_answers_touches_no_target(tmp_path):
    none = first_run(tmp_path / "out", dict.fromkeys(range(20), "ValueError"))
    run = Path(none.store.uri)
    report = publish_run(made("delta", run, tmp_path), str(run))
    assert report.published[0].rows == 0 and not (tmp_path / "delta").exists()
