"""`diff`: the sample of a finished run, asked again by another job, and what changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.nights import Killed, Nights, words
from s3server import S3Server

from prefect_raybatch.api import Sender
from prefect_raybatch.api import diff as api_diff
from prefect_raybatch.api.diff import Prepared, begin_diff, finish_diff, infer_diff, prepare_diff
from prefect_raybatch.api.sending import submission_of
from prefect_raybatch.compare.changes import Diff, changes_of, diff_of
from prefect_raybatch.compare.predicted_time import predicted_time
from prefect_raybatch.compile.job import public_job
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import ConfigError, IncompleteRun
from prefect_raybatch.job.edits import with_store_options
from prefect_raybatch.report.html import diff_html
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import duration
from prefect_raybatch.runs.finalize_run import load_report

NAMES = [f"w{n}" for n in range(40)]


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    made = Nights(tmp_path)
    made.write(*NAMES)
    made.night("n1")
    made.asked.clear()
    return made


def prepared(nights: Nights, rows: int = 12, **groups: Any) -> Prepared:
    return prepare_diff(resolve(nights.job(**groups)), str(nights.folder / "out/n1"), rows)


def compared(nights: Nights, made: Prepared) -> Diff:
    run = begin_diff(made)
    nights.infer(made.sample_job.job, run)
    return finish_diff(made, run)


OTHER = {"prompt": {"template": "Say {text} now"}}


def test_only_the_sample_is_asked_and_what_changed_is_told_row_by_row(nights):
    nights.answer = lambda prompt: (
        "other" if words(prompt) in ("w3 now", "w5 now") else f"answer to {words(prompt)[:-4]}"
    )
    found = compared(nights, prepared(nights, 40, **OTHER))
    assert (found.rows, found.changed, found.reused) == (40, 2, 0)
    assert [change.row for change in found.changes] == [3, 5]
    assert found.changes[0].input == "w3"
    assert found.changes[0].values == {"response": ("answer to w3", "other")}
    assert found.low == found.high == found.share == 0.05, "every row was asked"


def test_the_same_command_takes_the_same_rows_and_asks_no_more(nights):
    first = prepared(nights, **OTHER)
    found = compared(nights, first)
    assert len(nights.asked) == found.rows == 12
    assert found.low < found.share <= found.high
    nights.asked.clear()
    again = prepared(nights, **OTHER)
    assert (again.place, again.sample.numbers) == (first.place, first.sample.numbers)
    assert compared(nights, again) == found and nights.asked == []


def test_preparing_writes_nothing_and_says_what_the_whole_would_take(nights):
    made = prepared(nights, **OTHER)
    assert not (nights.folder / "out/_diff").exists() and nights.asked == []
    assert "12 of 40 rows" in made.lines()[0] and made.to_dict()["whole"]["rows"] == 40


def test_the_time_of_the_whole_is_predicted_by_the_rate_of_the_run(nights, monkeypatch):
    def took_80_seconds(*arguments: Any) -> RunReport:
        return replace(load_report(*arguments), seconds=80.0)

    monkeypatch.setattr("prefect_raybatch.api.diff.load_report", took_80_seconds)
    nights.write(*NAMES, *(f"more {n}" for n in range(60)))
    made = prepared(nights, **OTHER)
    assert made.full_run.rows == 100 and made.before.rows == 40
    expected = 80.0 * 100 / 40  # all rows of a new prompt are asked
    assert made.time.seconds == made.to_dict()["whole"]["seconds"] == pytest.approx(expected)
    (line,) = [line for line in made.lines() if line.startswith("time of that run: ")]
    assert line == (
        f"time of that run: about {duration(expected)} without start-up, at the rate of n1. "
        "Longer prompts or answers, or other machines, change it"
    )
    # With the run's own prompt only the new rows are asked.
    assert prepared(nights).time.seconds == pytest.approx(80.0 * 60 / 40)
    priced = prepared(nights, **OTHER, cluster={"price_per_gpu_hour": 1.0})
    assert priced.time.seconds == expected  # no price makes a run faster


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({"engine": {"max_num_seqs": 7}}, "n1 has another engine"),
        ({"cluster": {"prepare": {"concurrency": 1}}}, "n1 has another cluster"),
    ],
)
def test_the_time_is_unknown_with_another_engine(nights, groups, why):
    made = prepared(nights, **OTHER, **groups)
    assert made.time.seconds is None and made.to_dict()["whole"]["seconds"] is None
    assert f"time of that run: unknown: {why}" in made.lines()


def test_the_time_is_unknown_with_another_model_and_without_a_measured_rate(nights):
    made = prepared(nights, **OTHER)
    job, plan, before = public_job(nights.job(**OTHER)), made.member.plan, made.before
    other = {**plan.model, "identity": "another"}
    found = predicted_time(job, other, 100, plan, before)
    assert found.line() == "unknown: n1 has another model"
    reused = replace(before, reuse={"asked": 1})  # most of its seconds went into reading answers
    for odd, why in ((replace(before, seconds=0.0), "has no measured rate"), (reused, "reused")):
        found = predicted_time(job, plan.model, 100, plan, odd)
        assert found.seconds is None and found.line().startswith(f"unknown: n1 {why}")


def test_the_job_of_a_block_is_sent_to_a_job_server_without_its_keys(
    nights: Nights, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = {"uri": "s3://diff/out", "credentials_block": "aws-credentials/mine"}
    plain = nights.job(output={**output, "columns": ["text"]}, reuse=None)
    loaded = with_store_options(plain, {}, s3.options)
    nights.night("n1", loaded)
    sent = []

    def infer(job, keys, run, *_):
        sent.append(submission_of(job, keys, "http://prefect/api"))
        nights.infer(keys, run)

    monkeypatch.setattr(api_diff, "infer_in_place", infer)
    made = prepare_diff(resolve(loaded), "s3://diff/out/n1", 12)
    run = begin_diff(made)
    infer_diff(made, run, Sender(plain))
    assert finish_diff(made, run).changed == 0
    assert s3.options["secret"] not in str([sent[0].job, sent[0].env])
    assert sent[0].job["source"]["credentials_block"] == output["credentials_block"]


def test_equal_requests_are_taken_from_the_run_and_not_asked(nights):
    found = compared(nights, prepared(nights))
    assert (found.changed, found.reused, nights.asked) == (0, 12, [])


def test_a_killed_diff_resumes_without_asking_what_is_answered(nights):
    nights.stop_after = 1
    with pytest.raises(Killed):
        compared(nights, prepared(nights, **OTHER))
    nights.stop_after = None
    found = compared(nights, prepared(nights, **OTHER))
    assert found.rows == 12 and len(nights.asked) < 24


def test_failed_rows_count_on_both_sides(nights):
    nights.refuses = lambda prompt: words(prompt) == "w1 now"
    nights.answer = lambda prompt: f"answer to {words(prompt)[:-4]}"
    found = compared(nights, prepared(nights, 40, **OTHER))
    assert (found.changed, found.newly_failed, found.newly_answered) == (1, 1, 0)
    assert found.changes[0].values["response"] == ("answer to w1", "(failed)")


@pytest.mark.parametrize("function", ["skip_w1", "skip_all"])
def test_rows_that_the_new_postprocess_leaves_out_did_not_fail(nights, monkeypatch, function):
    monkeypatch.chdir(nights.folder)
    monkeypatch.syspath_prepend(nights.folder)
    Path("left_out.py").write_text(
        "def skip_w1(row):\n"
        "    return None if row['text'] == 'w1' else {'response': row['response']}\n\n\n"
        "def skip_all(row):\n"
        "    return None\n"
    )
    nights.refuses = lambda prompt: words(prompt) == "w2 now"
    nights.answer = lambda prompt: f"answer to {words(prompt)[:-4]}"
    output = {"uri": str(nights.folder / "out"), "columns": ["text"]}
    output["postprocess"] = f"left_out:{function}"
    found = compared(nights, prepared(nights, 40, **OTHER, output=output))
    changes = {change.row: change.values["response"] for change in found.changes}
    assert changes[1] == ("answer to w1", "(left out)")
    assert changes[2] == ("answer to w2", "(failed)")
    assert (found.newly_failed, len(changes)) == (1, 2 if function == "skip_w1" else 40)


def test_rows_that_failed_in_the_run_are_asked_too(tmp_path):
    nights = Nights(tmp_path, refuses=lambda prompt: words(prompt) == "w2")
    nights.write(*NAMES)
    nights.night("n1")
    nights.refuses = lambda prompt: False
    nights.answer = lambda prompt: f"answer to {words(prompt)[:-4]}"
    found = compared(nights, prepared(nights, 40, **OTHER))
    assert (found.changed, found.newly_answered) == (1, 1)
    assert [change.row for change in found.changes] == [2]


def test_a_run_without_kept_answers_is_compared_too(tmp_path):
    nights = Nights(tmp_path)
    nights.write(*NAMES)
    nights.night("n1", nights.job(reuse=None))
    nights.asked.clear()
    found = compared(nights, prepared(nights, reuse=None))
    assert (found.changed, found.reused, len(nights.asked)) == (0, 0, 12)


def test_a_column_that_the_run_does_not_keep_is_refused(tmp_path):
    nights = Nights(tmp_path)
    nights.write(*NAMES, more=list(range(40)))
    nights.night("n1")
    with pytest.raises(ConfigError, match=r"prompt\.template: .*'more'.*output\.columns"):
        prepared(nights, prompt={"template": "Say {text} {more}"})


def test_an_unfinished_run_and_an_empty_sample_are_refused(nights):
    nights.stop_after = 1
    with pytest.raises(Killed):
        nights.night("n2", nights.job(**OTHER))
    with pytest.raises(IncompleteRun):
        prepare_diff(resolve(nights.job()), str(nights.folder / "out/n2"), 5)
    with pytest.raises(ConfigError, match="--sample 0"):
        prepared(nights, 0)


def test_structured_answers_are_compared_field_by_field():
    old = [{"label": "a", "sure": True}, {"label": "b", "sure": True}, None]
    new = [{"label": "a", "sure": False}, {"label": "b", "sure": True}, None]
    changes = changes_of([4, 7, 9], ["x", "y", "z"], old, new, {})
    assert [(change.row, change.values) for change in changes] == [(4, {"sure": (True, False)})]


def test_numbers_that_are_not_a_number_before_and_after_did_not_change():
    nan, other = float("nan"), float("nan")
    old = [{"score": nan, "more": [{"a": nan}, (1, nan)]}, {"score": nan}, {"score": [nan]}]
    new = [{"score": other, "more": [{"a": other}, (1, other)]}, {"score": 0.5}, {"score": [0]}]
    changes = changes_of([4, 7, 9], ["x", "y", "z"], old, new, {})
    assert [change.row for change in changes] == [7, 9]
    assert changes[0].values["score"][1] == 0.5


@pytest.mark.parametrize(("old", "new"), [(None, {}), ({}, None)])
def test_a_row_that_failed_and_is_left_out_now_has_changed(old: Any, new: Any) -> None:
    (change,) = changes_of([4], ["x"], [old], [new], {})
    before, after = ("(failed)" if side is None else "(left out)" for side in (old, new))
    assert list(change.values.values()) == [(before, after)]
    assert changes_of([4], ["x"], [old], [old], {}) == ()


def test_the_page_escapes_what_rows_say():
    old, new = [{"response": "<b>x</b>"}], [{"response": "<script>"}]
    found = diff_of(
        run="out/n1",
        job="j",
        total=9,
        changes=changes_of([0], ["<i>"], old, new, {}),
        old=old,
        new=new,
        reused=0,
        notes=(),
    )
    page = diff_html(found.page())
    assert "<script>" not in page and "&lt;script&gt;" in page and found.line() in page
