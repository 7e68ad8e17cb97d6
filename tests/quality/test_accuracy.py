"""Golden rows: the interval, the file, what the report shows, and publishing that is withheld."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.command_line import called
from helpers.engines import FakeEngine
from helpers.retries import FAILED, first_run, retried
from helpers.small import make_job

from prefect_raybatch.api import (
    dry_run,
    finalize_run,
    finalize_whole,
    infer_run,
    plan_run,
    publish_run,
)
from prefect_raybatch.errors import ConfigError, QualityTooLow
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.job_file import with_line
from prefect_raybatch.quality.accuracy import accuracy_of, interval
from prefect_raybatch.quality.golden import (
    accuracy_on,
    check_golden_columns,
    golden_numbers,
    read_golden,
)
from prefect_raybatch.quality.judgement import JudgedRow, judgement_of
from prefect_raybatch.report.html import html
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import markdown
from prefect_raybatch.report.run_history import headlines, history_markdown
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.runs.status import report_of, status
from prefect_raybatch.stages.block import Failure, with_failures

ROWS = 60


# --- the interval -------------------------------------------------------------------------------


def chance_of_at_least(right: int, rows: int, share: float) -> float:
    """Return P(X >= right) of a binomial variable, in exact arithmetic."""
    p = Fraction(share)
    terms = (comb(rows, k) * p**k * (1 - p) ** (rows - k) for k in range(right, rows + 1))
    return float(sum(terms))


@pytest.mark.parametrize(
    ("right", "rows"), [(1, 1), (1, 50), (25, 50), (49, 50), (50, 50), (93, 100), (290, 300)]
)
def test_each_end_of_the_interval_leaves_out_a_fortieth(right: int, rows: int) -> None:
    low, high = interval(right, rows)
    assert chance_of_at_least(right, rows, low) == pytest.approx(0.025, rel=1e-6)
    if right < rows:
        assert 1 - chance_of_at_least(right + 1, rows, high) == pytest.approx(0.025, rel=1e-6)
    else:
        assert high == 1.0


def test_ends_without_evidence() -> None:
    assert interval(0, 0) == (0.0, 1.0)
    low, high = interval(0, 50)
    assert low == 0.0 and 0.0 < high < 0.1


def test_the_interval_covers_the_accuracy_of_ten_thousand_nights() -> None:
    nights = np.random.default_rng(47)
    for rows in (50, 200, 1000):
        ends = np.array([interval(right, rows) for right in range(rows + 1)])
        for share in np.linspace(0.5, 0.99, 8):
            right = nights.binomial(rows, share, 10_000)
            covered = (ends[right, 0] <= share) & (share <= ends[right, 1])
            assert covered.mean() >= 0.94, (rows, share)


# --- the file -----------------------------------------------------------------------------------


def golden_file(folder: Path, text: str, name: str = "golden.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "key", "fault"),
    [
        ("", [], "has no rows"),
        ("id,answer\n", [], "has no rows"),
        ("id,label\n1,a\n", [], "no column 'answer'"),
        ("id,answer\n1,a\n", ["name"], "no column 'name'"),
        ("answer\na\n", [], "only the column 'answer'"),
        ("id,answer\n1,a\n2,\n", [], "line 3: column 'answer' is empty"),
        ("id,answer\n1,a\n1,b\n", [], "line 3: an earlier row has the same id"),
        ('id,answer\n1,"a\n', [], "cannot be read"),
        ("id,answer\n1,Law, Finance\n", [], "line 2 has more cells than there are columns"),
        ("id,answer,id\n1,a,2\n", [], "several columns 'id'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, key: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as error:
        read_golden(golden_file(tmp_path, text), {}, key, "answer")
    assert "golden.csv" in str(error.value)


def test_a_missing_file_and_a_line_that_is_no_object_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        read_golden(str(tmp_path / "none.csv"), {}, [], "answer")
    with pytest.raises(ConfigError, match="line 2 is no JSON object"):
        read_golden(golden_file(tmp_path, '{"id": 1}\n[1]\n', "g.jsonl"), {}, [], "answer")


def test_a_name_twice_in_a_line_of_json_is_refused(tmp_path: Path) -> None:
    lines = '{"id": 1, "answer": "a", "id": 2}\n'
    with pytest.raises(ConfigError, match=r"g\.jsonl .*several columns 'id'"):
        read_golden(golden_file(tmp_path, lines, "g.jsonl"), {}, [], "answer")


def test_a_line_of_json_ends_only_where_a_line_feed_is(tmp_path: Path) -> None:
    text = '{"id": "1\u2028", "answer": "a\x85b"}\r\n{"id": "2", "answer": "c"}\r\n'
    golden = read_golden(golden_file(tmp_path, text, "golden.jsonl"), {}, ["id"], "answer")
    assert list(golden.answers.values()) == ["a\x85b", "c"]


def test_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"id": 7, "ok": True, "answer": "a"}, {"id": 8, "ok": False, "answer": "b"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "g.parquet")
    lines = "\n".join(json.dumps(row) for row in rows)
    places = [
        str(tmp_path / "g.parquet"),
        golden_file(tmp_path, lines, "g.jsonl"),
        golden_file(tmp_path, "\ufeffid,ok,answer\n7,true,a\n8,false,b\n"),
    ]
    for place in places:
        answers = read_golden(place, {}, [], "answer").answers
        assert answers == {("7", "true"): "a", ("8", "false"): "b"}, place


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("g.parquet", "row 2"),
        ("g.jsonl", "line 4"),
        ("g.csv", "line 4"),
    ],
)
def test_a_wrong_row_is_named_by_its_line_or_in_parquet_by_its_number(
    tmp_path: Path, place: str, message: str
) -> None:
    rows = [{"id": 7, "answer": "a"}, {"id": 8, "answer": ""}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "g.parquet")
    golden_file(tmp_path, "\n".join(["", json.dumps(rows[0]), "", json.dumps(rows[1])]), "g.jsonl")
    golden_file(tmp_path, "id,answer\n7,a\n\n8,\n", "g.csv")
    with pytest.raises(ConfigError, match=f"{place}, {message}: column 'answer' is empty"):
        read_golden(str(tmp_path / place), {}, [], "answer")


def test_texts_of_a_csv_file_are_compared_as_the_result_has_them(tmp_path: Path) -> None:
    lines = "id,paid,answer\n1.0,True,4.0\n2,FALSE,2.50\n3,false,5\n"
    table = pa.table({"id": [1, 2, 3], "paid": [True, False, False], "answer": [4.0, 2.5, 1.0]})
    golden = read_golden(golden_file(tmp_path, lines), {}, [], "answer")
    accuracy = accuracy_on(golden, ds.dataset(table), None, "plan")
    assert (accuracy.right, accuracy.rows, accuracy.unanswered) == (2, 3, 0)
    texts = pa.table({"id": ["1.0", "2", "03"], "paid": ["True"] * 3, "answer": ["4", "2", "5"]})
    assert accuracy_on(golden, ds.dataset(texts), None, "plan").unanswered == 2  # texts stay
    numbers = golden_numbers(golden, ds.dataset(table.append_column("n", [[7, 8, 9]])), "n")
    assert numbers == {7: True, 8: True, 9: False}


def test_objects_and_lists_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    lines = '{"id": 1, "answer": {"b": 1, "a": [2, 3]}}\n{"id": 2, "answer": {"a": [1]}}\n'
    golden = read_golden(golden_file(tmp_path, lines, "g.jsonl"), {}, [], "answer")
    answers = [{"a": [2.0, 3.0], "b": 1}, {"a": [1.0], "b": None}]
    accuracy = accuracy_on(
        golden, ds.dataset(pa.table({"id": [1, 2], "answer": answers})), None, ""
    )
    assert (accuracy.right, accuracy.rows) == (2, 2)


def test_lists_in_a_csv_file_are_those_of_the_result(tmp_path: Path) -> None:
    lines = """id,answer\n1,"['a', 'b']"\n2,"[""a"",""b""]"\n3,"[""b""]"\n"""
    golden = read_golden(golden_file(tmp_path, lines), {}, [], "answer")
    result = ds.dataset(pa.table({"id": [1, 2, 3], "answer": [["a", "b"]] * 3}))
    accuracy = accuracy_on(golden, result, None, "plan")
    assert (accuracy.right, accuracy.rows) == (2, 3)


def test_a_column_that_the_first_line_lacks_is_a_key_too(tmp_path: Path) -> None:
    lines = '{"t": "x", "answer": "a"}\n{"t": "x", "lang": "de", "answer": "b"}\n'
    golden = read_golden(golden_file(tmp_path, lines, "g.jsonl"), {}, [], "answer")
    assert golden.answers == {("x", ""): "a", ("x", "de"): "b"}


def test_rows_are_found_by_key_and_equal_rows_count_once(tmp_path: Path) -> None:
    golden = read_golden(golden_file(tmp_path, "id,answer\n1,a\n2,b\n9,c\n"), {}, [], "answer")
    table = pa.table({"id": [1, 2, 2, 3, None], "answer": ["a", "x", "b", "a", "a"]})
    accuracy = accuracy_on(golden, ds.dataset(table), None, "plan")
    assert (accuracy.right, accuracy.rows, accuracy.unanswered) == (1, 2, 1)
    (wrong,) = accuracy.wrong
    assert (wrong.row, wrong.expected, wrong.answer) == ("2", "b", "x")
    with pytest.raises(ConfigError, match=r"no column 'id'.*output\.columns"):
        accuracy_on(golden, ds.dataset(table.drop_columns(["id"])), None, "plan")


@pytest.mark.parametrize(
    ("right", "rows", "least", "remedy"),
    [
        (48, 50, 0.9, "Add golden rows: 50 are too few"),
        (40, 50, 0.9, "More golden rows cannot help: 80.0% of the answers are right"),
        (45, 50, 0.9, "More golden rows cannot help: 90.0%"),  # the lower end is always below
        (0, 0, 0.9, "Correct the keys in g.csv"),
    ],
)
def test_a_remedy_asks_for_more_rows_only_where_these_can_help(
    right: int, rows: int, least: float, remedy: str
) -> None:
    assert accuracy_of("plan", right, rows, 0).remedy(least, "g.csv").startswith(remedy)
    rows_judged = [JudgedRow(True, number < right) for number in range(rows)]
    judgement = judgement_of(plan="plan", judge="j", key="k", judged=rows_judged)
    judged = {
        "Add golden rows": "Raise quality.judge.sample",
        "More golden rows": "A larger sample cannot help",
        "Correct the keys": "All its requests failed",
    }
    assert judgement.remedy(least).startswith(
        next(text for begin, text in judged.items() if remedy.startswith(begin))
    )


# --- a run --------------------------------------------------------------------------------------


def job_of(folder: Path, **quality: Any) -> BatchJob:
    path = folder / "in.parquet"
    if not path.exists():
        table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
        pq.write_table(table, path)
    return make_job(
        source={"uri": str(path)},
        engine={"model": "demo"},
        output={
            "uri": str(folder / "out"),
            "column": "answer",
            "publish": [{"format": "jsonl", "uri": str(folder / "published")}],
        },
        quality=quality,
    )


def completed(job: BatchJob, key: str) -> RunReport:
    run = plan_run(job, key)
    return finalize_run(job, run, infer_run(job, run, engine=FakeEngine))


def golden_of_run(report: RunReport, folder: Path, planted: int) -> str:
    """Write the answers of a run as golden rows, with the first `planted` of them changed."""
    rows = report.to_arrow().select(["id", "answer"]).to_pylist()
    for row in rows[:planted]:
        row["answer"] = "planted"
    lines = "\n".join(json.dumps(row) for row in rows)
    return golden_file(folder, lines, "golden.jsonl")


@pytest.mark.usefixtures("without_ray")
def test_planted_errors_are_measured_shown_and_withhold_publishing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = completed(job_of(tmp_path), "first")
    assert first.accuracy is None and "Accuracy" not in markdown(first)
    golden = golden_of_run(first, tmp_path, planted=6)

    job = job_of(tmp_path, golden=golden, at_least=0.9)
    report = completed(job, "second")
    accuracy = report.accuracy
    assert accuracy is not None
    assert (accuracy.right, accuracy.rows, accuracy.unanswered) == (first.good - 6, first.good, 0)
    assert len(accuracy.wrong) == 6 and {one.expected for one in accuracy.wrong} == {"planted"}
    for page in (markdown(report), html(report)):
        assert f"{first.good - 6} of {first.good} golden rows right" in page and "planted" in page
    (history,) = history_of(str(tmp_path / "out"), job=job.name)
    assert accuracy.short().replace("%", "") in history_markdown(history, plots=False).replace(
        "%", ""
    ).replace("\\", "")

    with pytest.raises(QualityTooLow, match=r"raybatch publish .*second --job") as error:
        publish_run(job, report.run)
    assert "golden rows" in str(error.value) and not (tmp_path / "published").exists()
    assert str(error.value).startswith(f"{report.run} was not published: its accuracy is ")
    withheld = "publishing failed: QualityTooLow: "
    (history,) = history_of(str(tmp_path / "out"), job=job.name)
    notes = report_of(report.run).notes
    texts = (status(report.run).undone, notes[-1], *headlines(history)[:1])
    assert all(withheld in text for text in texts), texts
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()), encoding="utf-8")
    code, out, err = called(capsys, "publish", report.run, "--job", path)
    assert code == 1 and f"{first.good - 6} of {first.good} golden rows right" in out
    assert "QualityTooLow" in err

    golden_of_run(first, tmp_path, planted=0)  # the file was wrong, and is corrected
    published = publish_run(job, report.run)
    assert status(report.run).undone == ""
    assert [one.rows for one in published.published] == [first.good]
    assert published.accuracy is not None and published.accuracy.right == first.good
    assert f"{first.good} of {first.good} golden rows right" in (
        Path(report.run) / "_raybatch" / "report.md"
    ).read_text(encoding="utf-8")

    golden_of_run(first, tmp_path, planted=6)  # and changed again, after the run was published
    (target,) = published.published
    with pytest.raises(QualityTooLow) as error:
        publish_run(job, report.run)
    stays = f"{report.run} stays published to {target.target}, and nothing else was published: its"
    assert str(error.value).startswith(stays)


@pytest.mark.usefixtures("without_ray")
def test_plan_says_how_many_golden_rows_are_compared_and_publish_how_many_are_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = golden_file(tmp_path, "id,answer\n1,answer 1\n2,planted\n")
    job = job_of(tmp_path, golden=golden, key=["id"])
    assert dry_run(job).golden == f'2 rows of {golden}, compared in "answer" by id'
    report = completed(job, "night")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()), encoding="utf-8")
    code, out, _ = called(capsys, "plan", path)
    line = "".join(f"golden {dry_run(job).golden}".split())
    assert code == 0 and line in "".join(out.split())  # long lines are folded
    golden_file(tmp_path, "id,answer\n1,answer 1\n2,answer 2\n")
    code, out, _ = called(capsys, "publish", report.run, "--job", path)
    assert code == 0 and "2 of 2 golden rows right" in out and "published: " in out
    assert out.index("right ") < out.index("published: ")


def test_a_golden_row_that_failed_is_wrong(tmp_path: Path) -> None:
    golden = read_golden(golden_file(tmp_path, "id,answer\n1,a\n2,b\n3,c\n4,d\n"), {}, [], "answer")
    result = ds.dataset(pa.table({"id": [1, 2], "answer": ["a", "b"]}))
    failed = ds.dataset(pa.table({"_row": [5, 6], "input": [{"id": 3}, {"id": 7}]}))
    accuracy = accuracy_on(golden, result, failed, "plan")
    assert (accuracy.right, accuracy.rows, accuracy.unanswered) == (2, 3, 1)
    assert [(one.row, one.answer) for one in accuracy.wrong] == [("3", "(failed)")]
    keyless = ds.dataset(pa.table({"input": [{"Company": "x"}]}))
    assert accuracy_on(golden, result, keyless, "plan").rows == 2


@pytest.mark.usefixtures("without_ray")
def test_golden_rows_that_fail_withhold_publishing(tmp_path: Path) -> None:
    class Fails(FakeEngine):
        def __call__(self, table: pa.Table) -> pa.Table:
            failure = Failure("engine", "ValueError", "no")
            return with_failures(super().__call__(table), [failure] * table.num_rows)

    first = completed(job_of(tmp_path), "first")
    golden = golden_of_run(first, tmp_path, planted=0)
    job = edited(
        job_of(tmp_path, golden=golden, at_least=0.5),
        {"limits.max_failed_fraction": 1.0, "quality.key": ["id"]},
        "the job",
    )
    run = plan_run(job, "second")
    report = finalize_run(job, run, infer_run(job, run, engine=Fails))
    assert report.accuracy is not None
    assert (report.accuracy.right, report.accuracy.rows) == (0, first.good)
    with pytest.raises(QualityTooLow):
        publish_run(job, report.run)


@pytest.mark.usefixtures("without_ray")
def test_a_run_that_was_not_measured_is_not_published(tmp_path: Path) -> None:
    first = completed(job_of(tmp_path), "first")
    job = job_of(tmp_path, golden=golden_of_run(first, tmp_path, planted=0), at_least=0.5)
    run = plan_run(job, "second")
    infer_run(job, run, engine=FakeEngine)
    assert finalize_whole(run.uri).accuracy is None  # without the job, nobody trusts the file
    with pytest.raises(QualityTooLow, match=r"not measured.*raybatch publish .*second --job"):
        publish_run(None, run.uri, targets_from_plan=True)
    assert publish_run(job, run.uri).published


def test_a_retry_is_published_only_if_the_accuracy_of_the_first_run_shows(tmp_path: Path) -> None:
    """Its rows are no sample of the input, so the first run's recorded accuracy counts."""
    target = {"format": "jsonl", "uri": str(tmp_path / "published")}
    for right, withheld in ((5, True), (16, False)):
        root, rows = tmp_path / str(right), [i for i in range(20) if i not in FAILED]
        lines = [f"{i},answer {i if n < right else 'x'}" for n, i in enumerate(rows)]
        golden = golden_file(tmp_path, "id,response\n" + "\n".join(lines), f"{right}.csv")
        quality = {"golden": golden, "key": ["id"], "at_least": 0.7}
        run = first_run(root, output={"publish": [target]}, quality=quality)
        job = run.job
        again = retried(retried(run.store.uri, failed={4: "EngineDied"}, job=job), job=job)
        if not withheld:
            assert publish_run(job, again).published
            continue
        with pytest.raises(QualityTooLow) as error:
            publish_run(job, again)
        whose = f"the accuracy of {run.store.uri}, whose rows it retries, is 31.2%"
        assert str(error.value).startswith(f"{again} was not published: {whose}")
        steps = [f"raybatch publish {uri} --job JOB" for uri in (run.store.uri, again)]
        assert str(error.value).endswith(f"then run: {steps[0]}, then: {steps[1]}")
        assert not (tmp_path / "published").exists()


def test_a_retry_of_a_run_that_was_not_measured_is_not_published(tmp_path: Path) -> None:
    run = first_run(
        tmp_path, output={"publish": [{"format": "jsonl", "uri": str(tmp_path / "to")}]}
    )
    golden = golden_file(tmp_path, "id,response\n1,answer 1\n")
    changes = {"quality.golden": golden, "quality.key": ["id"], "quality.at_least": 0.01}
    job = edited(run.job, changes, "the job")
    match = rf"the accuracy of {run.store.uri}, .* was not measured.*publish {run.store.uri} --job"
    with pytest.raises(QualityTooLow, match=match):
        publish_run(job, retried(run.store.uri, job=job))


@pytest.mark.usefixtures("without_ray")
def test_a_golden_file_that_vanishes_leaves_the_run_to_be_measured_later(tmp_path: Path) -> None:
    first = completed(job_of(tmp_path), "first")
    golden = Path(golden_of_run(first, tmp_path, planted=0))
    job = job_of(tmp_path, golden=str(golden))
    run = plan_run(job, "second")
    progress = infer_run(job, run, engine=FakeEngine)
    aside = golden.rename(tmp_path / "aside.jsonl")
    with pytest.raises(ConfigError, match=r"quality\.golden: no file .*Correct the path"):
        finalize_run(job, run, progress)
    assert status(run.uri).undone.startswith("accuracy not measured: ConfigError: quality.gol")
    aside.rename(golden)
    report = finalize_run(job, run)
    assert not status(run.uri).undone
    assert report.accuracy is not None and report.accuracy.right == first.good


@pytest.mark.parametrize(
    ("there", "fault"),
    [
        (["id", "label"], "no column 'answer' to compare .*Set quality.answer"),
        (
            ["answer", "label"],
            "no column 'id' to find the rows of .* by .*output.columns, or set qu",
        ),
    ],
)
def test_golden_columns_that_the_result_lacks_are_told_with_the_line(
    tmp_path: Path, there: list[str], fault: str
) -> None:
    golden = read_golden(golden_file(tmp_path, "id,answer\n1,a\n"), {}, [], "answer")
    job = tmp_path / "job.yaml"
    job.write_text("name: x\nquality:\n  golden: golden.csv\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=fault) as error:
        check_golden_columns(golden, there)
    assert with_line(str(error.value), str(job)).startswith(f"{job}: line 3: quality.golden: ")


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("columns", "quality", "named"),
    [
        ("id,answer", {"key": ["number"]}, "line 4: quality.key: {golden} has no column 'number'"),
        (
            "id,answer",
            {"key": ["id"], "answer": "label"},
            "line 5: quality.answer: {golden} has no column 'label'",
        ),
        (
            "number,answer",
            {"key": ["number"]},
            "line 4: quality.key: the result has no column 'number' to find the rows of {golden}",
        ),
        (
            "id,label",
            {"key": ["id"], "answer": "label"},
            "line 5: quality.answer: the result has no column 'label' to compare with the answers "
            "of {golden}",
        ),
    ],
)
def test_a_wrong_key_or_answer_is_reported_under_its_own_field_and_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    columns: str,
    quality: dict[str, Any],
    named: str,
) -> None:
    golden = golden_file(tmp_path, f"{columns}\n1,a\n")
    job = job_of(tmp_path, golden=golden, **quality).to_dict()
    path = tmp_path / "job.yaml"
    lines = [f"  {name}: {json.dumps(value)}" for name, value in job.pop("quality").items()]
    text = "\n".join(["quality:", *lines, yaml.safe_dump(job)])
    path.write_text("# job\n" + text, encoding="utf-8")
    code, _, err = called(capsys, "plan", path)
    wanted = f"{path}: {named.format(golden=golden)}"
    assert code == 2 and "".join(wanted.split()) in "".join(err.split()), err


@pytest.mark.usefixtures("without_ray")
def test_a_wrong_golden_file_stops_the_run_before_an_engine_starts(tmp_path: Path) -> None:
    job = job_of(tmp_path, golden=str(tmp_path / "none.csv"))
    with pytest.raises(ConfigError, match=r"quality\.golden: no file"):
        plan_run(job, "never")


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        ({"quality": {"at_least": 0.9}}, r"quality\.at_least needs quality\.golden"),
        ({"quality": {"golden": "g.xlsx"}}, r"must end in one of"),
        (
            {"quality": {"golden": "g.csv"}, "output": {"uri": "out", "compact": False}},
            r"output\.compact",
        ),
        (
            {"quality": {"golden": "g.csv"}, "engine": {"task": "embed", "model": "m"}},
            r"engine\.task embed",
        ),
        (
            {
                "quality": {"golden": "g.csv", "key": ["id"]},
                "output": {"uri": "out", "columns": ["Company"]},
            },
            r"add it to output\.columns",
        ),
        (
            {
                "quality": {"golden": "g.csv", "key": ["answer"]},
                "output": {"uri": "out", "column": "answer", "columns": ["Company"]},
            },
            r"quality\.key: 'answer' is the column of the answer",
        ),
    ],
)
def test_fields_that_do_not_go_together(groups: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make_job(**groups)


@pytest.mark.usefixtures("without_ray")
def test_a_night_of_which_no_row_is_golden_joins_no_series_and_is_withheld(tmp_path: Path) -> None:
    golden = golden_file(tmp_path, "id,answer\n700,a\n701,b\n")
    job = job_of(tmp_path, golden=golden, key=["id"], at_least=0.5)
    report = completed(job, "new")
    assert report.accuracy is not None and report.accuracy.series is None
    assert report.accuracy.text() == "unknown: none of 2 golden rows has an answer"
    helps = f"Correct the keys in {golden}, or quality.key, or remove quality.at_least, then run: "
    with pytest.raises(QualityTooLow, match=re.escape(helps)) as error:
        publish_run(job, report.run)
    assert "lower at_least" not in str(error.value)
    golden_file(tmp_path, "id,answer\n7,answer 7\n8,answer 8\n")
    assert publish_run(edited(job, {"quality.at_least": 0.1}, "the job"), report.run).published
