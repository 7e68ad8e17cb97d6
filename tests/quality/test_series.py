"""Series of accuracy and agreement over runs: each run counts once, however it was finished."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.checked_nights import ROWS, CheckedNights

from prefect_raybatch.api import finalize_run, finalize_whole, plan_run, publish_run
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.edits import render_placeholders
from prefect_raybatch.quality import alarm
from prefect_raybatch.quality.agreement import read_agreement
from prefect_raybatch.quality.alarm import ShareSeries
from prefect_raybatch.report.html import html
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import markdown
from prefect_raybatch.report.run_history import headlines, history_rows
from prefect_raybatch.report.verdict import DISAGREEMENT_REMARK, FALLEN_REMARK, LOST_ALARM_REMARK
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.storage import open_store


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckedNights:
    monkeypatch.setattr(alarm, "BASELINE_RUNS", 2)
    return CheckedNights(tmp_path)


def agreement(report: RunReport) -> ShareSeries:
    assert report.agreement is not None
    return report.agreement.series


def accuracy(report: RunReport) -> ShareSeries:
    assert report.accuracy is not None and report.accuracy.series is not None
    return report.accuracy.series


def test_a_fallen_agreement_is_shown_and_is_no_fallen_accuracy(nights: CheckedNights) -> None:
    job = nights.measured()
    for key in ("n1", "n2", "n3"):
        report = nights.night(key, job)
        assert not any(one.rings for one in report.series.values())
    nights.different = ROWS // 2
    report = nights.night("n4", job)
    series = agreement(report)
    assert (series.baseline, series.right, series.rows) == (2, 2 * ROWS, 2 * ROWS)
    assert series.after == ((ROWS, ROWS), (ROWS // 2, ROWS)) and series.rings
    assert series.runs == ("n1", "n2", "n3", "n4") == accuracy(report).runs
    assert not accuracy(report).rings
    for page in (markdown(report), html(report)):
        assert "Agreement over time, larger model" in page and "the agreement fell" in page
    (history,) = history_of(str(nights.folder / "out"), job="nightly")
    assert [row["agreement e-value"] for row in history_rows(history)] == [
        f"{series.short()} (alarm)",
        agreement(finalize_run(job, plan_run(job, "n3"))).short(),
        "baseline 2 of 2",
        "baseline 1 of 2",
    ]
    assert all("/" not in row["e-value"] for row in history_rows(history))
    line = headlines(history)[0]
    assert DISAGREEMENT_REMARK in line and FALLEN_REMARK not in line
    assert finalize_run(job, plan_run(job, "n4")) == report


def test_another_model_or_rule_begins_a_new_baseline_and_another_number_of_checks_does_not(
    nights: CheckedNights,
) -> None:
    nights.night("n1", nights.checked())
    fewer = nights.checked().output.escalate.model_dump(exclude_unset=True)
    report = nights.night("n2", nights.checked(escalate={**fewer, "check": 40}))
    assert (agreement(report).baseline, agreement(report).rows) == (2, ROWS + 40)
    other = {**fewer, "to": {"model": str(_copied_model(nights.folder))}}
    assert agreement(nights.night("n3", nights.checked(escalate=other))).runs == ("n3",)


def test_another_golden_file_says_which_alarm_it_ends_and_the_first_one_goes_on_when_it_is_back(
    nights: CheckedNights,
) -> None:
    job, golden = nights.measured(), nights.folder / "golden.jsonl"
    text = golden.read_text()
    for key in ("n1", "n2"):
        nights.night(key, job)
    nights.different, nights.only_larger = ROWS // 2, True
    rang = accuracy(nights.night("n3", job))
    assert rang.rings
    golden.write_text(text.replace('"car"', '"cat"', 1))
    for key, number in (("n4", 1), ("n5", 2)):
        series = accuracy(nights.night(key, job))
        assert (series.runs[-1], series.baseline, series.later) == (key, number, 0)
        assert series.lost_alarm and series.text() == (
            f"run {number} of the 2 that later ones are compared with, because golden rows or "
            "judge changed after run n3; the alarm rang in run n3"
        )
    (history,) = history_of(str(nights.folder / "out"), job="nightly")
    assert LOST_ALARM_REMARK in headlines(history)[0]
    assert history_rows(history)[2]["e-value"] == f"{rang.short()} (alarm)"
    assert not accuracy(nights.night("n6", job)).lost_alarm  # its baseline is complete
    golden.write_text(text)
    back = accuracy(nights.night("n7", job))
    assert back.runs == ("n1", "n2", "n3", "n7") and back.rings


def test_a_run_measured_again_with_another_file_ends_the_series_that_loses_it(
    nights: CheckedNights,
) -> None:
    """Else whoever measures bad runs again would choose which runs the series compares."""
    job, golden = nights.measured(), nights.folder / "golden.jsonl"
    text, other = golden.read_text(), golden.read_text().replace('"car"', '"cat"', 1)
    for key in ("n1", "n2"):
        nights.night(key, job)
    nights.different, nights.only_larger = ROWS // 2, True
    bad = nights.night("n3", job)
    assert accuracy(bad).rings
    golden.write_text(other)
    with pytest.raises(ConfigError, match="nowhere to publish"):
        publish_run(job, bad.run)  # measures again
    anew = accuracy(load_report(open_store(bad.run)))
    assert (anew.runs, anew.baseline, anew.replaced_alarm) == (("n3",), 1, "n3")
    golden.write_text(text)
    back = accuracy(nights.night("n4", job))
    assert (back.runs, back.baseline, back.replaces) == (("n4",), 1, "n3")
    assert back.lost_alarm and back.replaced_alarm == "n3"
    assert accuracy(nights.night("n5", job)).runs == ("n4", "n5")


def test_a_run_of_another_file_that_is_measured_again_joins_no_later_series(
    nights: CheckedNights,
) -> None:
    job, golden = nights.measured(), nights.folder / "golden.jsonl"
    text = golden.read_text()
    golden.write_text(text.replace('"car"', '"cat"', 1))
    first = nights.night("n1", job)
    golden.write_text(text)
    assert accuracy(nights.night("n2", job)).runs == ("n2",)
    with pytest.raises(ConfigError, match="nowhere to publish"):
        publish_run(job, first.run)  # measures it by the file of n2
    assert accuracy(nights.night("n3", job)).runs == ("n2", "n3")


def _copied_model(folder: Path) -> Path:
    import shutil

    from prefect_raybatch.demo import demo_model_path

    copy = folder / "larger"
    shutil.copytree(demo_model_path(), copy)
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    return copy


def test_a_repaired_run_counts_once_in_the_place_of_the_original(nights: CheckedNights) -> None:
    job = nights.measured()
    for key in ("n1", "n2"):
        nights.night(key, job)
    later = nights.night("n3", job)
    (part,) = (nights.folder / "out/n2/data").glob("*.parquet")
    part.unlink()
    fork = repair_run(str(nights.folder / "out/n2"))
    assert fork.run_key == "n2.m1"
    nights.only_larger = True
    repaired = nights.night("n2", job)
    nights.only_larger = False
    assert repaired.run_key == "n2.m1" and repaired.cascade[0].checked == ROWS
    last = nights.night("n4", job)
    for series in (agreement, accuracy):
        assert series(repaired).runs == ("n1", "n2") and series(repaired).rows == 2 * ROWS
        assert series(later).runs == ("n1", "n2", "n3")
        assert series(last).runs == ("n1", "n2", "n3", "n4")


def test_a_run_finished_without_its_job_joins_the_series(nights: CheckedNights) -> None:
    job = nights.checked()
    first = nights.night("n1", job)
    run = plan_run(job, "n2")
    nights.infer(job, run)
    report = finalize_whole(run.uri)
    assert agreement(report).runs == ("n1", "n2") and agreement(first).runs == ("n1",)
    assert finalize_whole(run.uri) == report
    assert agreement(nights.night("n3", job)).runs == ("n1", "n2", "n3")


def test_a_run_whose_earlier_ones_lie_elsewhere_is_counted_by_the_next(
    nights: CheckedNights,
) -> None:
    job = nights.checked("out/{run_date}")
    keys = [f"nightly-2026110{day}T000000Z" for day in (1, 2, 3)]
    nights.dated(keys[0], job)
    filled = render_placeholders(job, keys[1])
    run = plan_run(filled, keys[1])
    nights.infer(filled, run)
    assert finalize_whole(run.uri).agreement is None, "the plan does not know of {run_date}"
    report = nights.dated(keys[2], job)
    assert agreement(report).runs == tuple(keys)
    assert agreement(finalize_run(filled, run, None, job.output.uri)).runs == tuple(keys[:2])


def test_a_run_that_is_measured_after_a_later_one_counts_once(nights: CheckedNights) -> None:
    job = nights.measured()
    nights.night("n1", job)
    run = plan_run(job, "n2")
    nights.infer(job, run)
    finalize_whole(run.uri)  # not measured: without the job, nobody trusts the golden file
    assert accuracy(nights.night("n3", job)).runs == ("n1", "n3")
    assert accuracy(finalize_run(job, run)).runs == ("n1", "n2")
    assert accuracy(nights.night("n4", job)).runs == ("n1", "n3", "n2", "n4")
    assert accuracy(nights.night("n5", job)).runs == ("n1", "n3", "n2", "n4", "n5")


def test_a_damaged_record_is_left_out(nights: CheckedNights) -> None:
    job = nights.checked()
    nights.night("n1", job)
    place = nights.folder / "out/n1/_raybatch/agreement.json"
    record = read_agreement(open_store(str(nights.folder / "out/n1")))
    assert record is not None and replace(record, agreed=1) != record
    place.write_bytes(place.read_bytes()[:-9])
    assert agreement(nights.night("n2", job)).runs == ("n2",)
