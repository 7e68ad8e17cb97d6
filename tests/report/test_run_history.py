"""The history of a job: read from the records of its runs, compared run by run, shown as a page."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.nights import Nights
from helpers.reports import REPORT as WHOLE_REPORT
from helpers.small import small_run
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.api import plan_run
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.job.placeholders import dated_parts
from prefect_raybatch.ledger.layout import REPORT
from prefect_raybatch.report.advice import DEADLINE_MISSED
from prefect_raybatch.report.answers import (
    CHANCE,
    LEAST_ANSWERS,
    LEAST_MOVED,
    NO_LABEL,
    answer_counts,
    chance_of,
    chi_square_tail,
    comparable,
    shifts,
    tokens_range,
)
from prefect_raybatch.report.drift import LEAST_RUNS
from prefect_raybatch.report.html import history_html, html
from prefect_raybatch.report.plots import history_plot
from prefect_raybatch.report.records import Advice
from prefect_raybatch.report.report import markdown
from prefect_raybatch.report.run_history import (
    HistoryLine,
    HistoryPage,
    answers_table,
    headlines,
    history_markdown,
    history_rows,
    replaced_keys,
    unusual_figures,
)
from prefect_raybatch.report.verdict import LATE_REMARK, outcome_text, verdict_of
from prefect_raybatch.runs.run_history import history_of, usual_time
from prefect_raybatch.runs.status import report_of
from prefect_raybatch.stages.answer_counts import label_counts, length_counts

LABELS = ("Retail", "Finance", "Law")


# --- counts -------------------------------------------------------------------------------------


def test_answers_are_counted_by_label_or_by_length_and_end():
    assert label_counts(["Law", "Law", None, "Laws"], LABELS) == {
        "answers.label.Law": 2.0,
        "answers.label.": 2.0,
    }
    figures = length_counts([[[1]], [[1, 2, 3], [1, 2]], [[]]], ["stop", "length", None])
    assert answer_counts({**figures, "rows": 3.0}) == {
        "lengths": {"0": 1.0, "1": 1.0, "2-3": 2.0},
        "ends": {"?": 1.0, "length": 1.0, "stop": 1.0},
    }
    assert answer_counts({"answers.label.": 1.0, "answers.label.Law": 3.0}) == {
        "labels": {"Law": 3.0, NO_LABEL: 1.0}
    }
    assert [tokens_range(bits) for bits in (0, 1, 2, 11)] == ["0", "1", "2-3", "1,024-2,047"]


# --- shifts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "freedom", "chance"),  # of the tables of the chi-square distribution
    [(3.8415, 1, 0.05), (10.828, 1, 0.001), (5.9915, 2, 0.05), (16.919, 9, 0.05),
     (43.773, 30, 0.05), (124.342, 100, 0.05), (2.706, 1, 0.1), (0.0, 4, 1.0)],
)  # fmt: skip
def test_the_tail_of_chi_square(value, freedom, chance):
    assert chi_square_tail(value, freedom) == pytest.approx(chance, rel=1e-3)


def labels(*counts: float) -> dict[str, dict[str, float]]:
    return {"labels": dict(zip(LABELS, counts, strict=True))}


def test_a_shift_beyond_chance_is_named_with_what_changed():
    (shift,) = shifts(labels(300, 600, 100), labels(500, 400, 100), "monday")
    assert (shift.kind, round(shift.moved, 3)) == ("labels", 0.2) and shift.chance < CHANCE
    assert shift.line() == (
        "the labels differ from monday in 20.0% of answers: Retail 50.0% -> 30.0%, "
        "Finance 40.0% -> 60.0%"
    )


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (labels(500, 400, 100), labels(500, 400, 100)),
        (labels(505, 395, 100), labels(500, 400, 100)),  # chance
        (labels(50_500, 39_500, 10_000), labels(50_000, 40_000, 10_000)),  # certain, and small
        (labels(90, 10, 0), labels(10, 90, 0)),  # too few to say
        ({}, labels(500, 400, 100)),
        ({"lengths": {"1": 900.0}}, labels(500, 400, 100)),
    ],
)
def test_noise_and_what_cannot_be_compared_are_no_shift(now, before):
    assert shifts(now, before, "monday") == ()


def test_a_label_that_is_new_is_a_shift():
    (shift,) = shifts(labels(400, 400, 200), {"labels": {"Retail": 500.0, "Finance": 500.0}}, "m")
    assert shift.changes["Law"] == (0.0, 0.2)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=40))
def test_a_chance_is_one_whatever_was_counted(pairs):
    one, other = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    assert 0.0 <= chance_of(one, other) <= 1.0
    assert chance_of(one, other) == pytest.approx(chance_of(other, one), rel=1e-6, abs=1e-12)
    assert chance_of(one, one) == 1.0


# --- the page -----------------------------------------------------------------------------------


class Labelled(Nights):
    """Its engine answers with labels: the first `retail` rows of a hundred with Retail."""

    retail = 50

    def answer(self, prompt: str) -> str:
        number = int("".join(re.findall(r"\d+", prompt)) or 0)
        return "Retail" if number % 100 < self.retail else "Finance"


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nights alike, one whose answers shifted, one that was killed; and what is broken."""
    folder = tmp_path_factory.mktemp("week")
    nights = Labelled(folder)
    nights.write(*(f"t{i}" for i in range(400)))
    given = {"uri": str(folder / "in.parquet"), "rows_per_shard": 100}
    job = nights.job(source=given, sampling={"choice": list(LABELS)}, reuse=None)
    for key, retail in (("n1", 50), ("n2", 52), ("n3", 80)):
        nights.retail = retail
        nights.night(key, job)
    nights.stop_after = 2
    with pytest.raises(Exception):  # noqa: B017 - a kill, whatever it is called
        nights.infer(job, plan_run(job, "n4"))
    other = nights.job(name="other", reuse=None)
    plan_run(other, "o1")
    (folder / "out/broken/_raybatch").mkdir(parents=True)
    (folder / "out/broken/_raybatch/plan.json").write_text("{")
    return folder / "out"


def test_the_oldest_shown_run_is_compared_with_the_completed_one_before_a_killed_one(tmp_path):
    runs = Labelled(tmp_path)
    runs.write(*(f"t{i}" for i in range(400)))
    given = {"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 100}
    job = runs.job(source=given, sampling={"choice": list(LABELS)}, reuse=None)
    runs.night("a", job)
    runs.stop_after = 2
    with pytest.raises(Exception):  # noqa: B017 - a kill, whatever it is called
        runs.infer(job, plan_run(job, "b"))
    runs.stop_after = None
    runs.night("c", job)
    (page,) = history_of(str(tmp_path / "out"), job="nightly", most=1)
    (line,) = page.runs
    assert (line.run_key, line.is_first, line.compared) == ("c", False, True)


def page_of(week: Path) -> HistoryPage:
    (page,) = history_of(str(week), job="nightly")
    return page


def test_nights_are_read_from_their_records_and_held_against_each_other(week):
    page = page_of(week)
    assert [night.run_key for night in page.runs] == ["n4", "n3", "n2", "n1"]
    killed, shifted, alike, first = page.runs
    assert killed.state == "failed" and killed.good is None and killed.committed == 0.5
    assert (first.good, first.answers["labels"]) == (400, {"Finance": 200.0, "Retail": 200.0})
    assert alike.shifts == first.shifts == ()
    (shift,) = shifted.shifts
    assert shift.before == "n2" and shift.changes["Retail"] == (0.52, 0.8)
    assert list(page.unreadable) == ["broken"]
    assert {page.job for page in history_of(str(week))} == {"other", "nightly"}
    # The oldest that is shown is held against the one before it, too.
    (short,) = history_of(str(week), job="nightly", most=2)
    assert [night.run_key for night in short.runs] == ["n4", "n3"] and short.runs[1].shifts
    assert history_of(str(week), job="nobody")[0].runs == ()


def test_the_report_of_a_failed_run_says_so_with_the_reason_above_the_figures(week):
    failed = report_of(str(week / "n4"))
    assert failed.state == "failed" and failed.notes[0].startswith("failed during inference: ")
    text = markdown(failed)
    assert text.startswith("# nightly: failed\n")
    assert text.index("## Notes") < text.index("Rows answered") < text.index("## Stages")
    page = html(failed)
    assert '<div class="result failed">' in page and "200 of 400 rows are done" in page
    assert page.index("failed during inference") < page.index("<h2>Figures</h2>")
    assert report_of(str(week / "o1")).state == "planned"


def test_the_page_says_the_worst_first_and_shows_plots(week):
    text = history_markdown(page_of(week))
    assert text.index("n4 failed: ") < text.index("| started (UTC) |")
    assert "28.0% of labels differ" in text and "failed, 50% of shards committed" in text
    assert "broken: " in text
    assert "| Retail | 80.0% | 52.0% | 50.0% |" in text and "](data:image/svg+xml" in text
    page = history_html([page_of(week)], "now")
    for words in ("n4 failed: ", "28.0% of labels differ", "<svg", "Answers by label", "now"):
        assert words in page
    picture = history_plot(page_of(week).runs) or ""
    assert picture.count('id="part-0-run-') == 6  # three runs, twice


def test_a_report_that_is_gone_or_broken_is_named_and_the_others_stay(week, tmp_path):
    import shutil

    copy = tmp_path / "out"
    shutil.copytree(week, copy)
    (copy / "n2" / REPORT).unlink()
    (copy / "n1" / REPORT).write_text('{"run": 3}')
    _, third, second, first = page_of(copy).runs
    assert second.good == first.good == 400 and second.trouble and first.trouble
    assert third.answers and third.shifts == ()
    assert "n2: its report: " in history_markdown(page_of(copy))


def test_the_command_writes_text_html_and_json(week, tmp_path, capsys):
    def raybatch(*args: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(["history", str(week), *args])
        assert not end.value.code
        return capsys.readouterr().out

    assert "# nightly: the last 4 runs" in raybatch("--job", "nightly")
    assert "# other: the last 1 run\n" in raybatch()
    jobs = json.loads(raybatch("--json", "--job", "nightly"))["jobs"]
    assert [night["run_key"] for night in jobs[0]["runs"]] == ["n4", "n3", "n2", "n1"]
    raybatch("--html", str(tmp_path / "n.html"))
    assert "<h1>nightly</h1>" in (tmp_path / "n.html").read_text()


def test_names_of_runs_and_labels_are_harmless_and_the_page_is_bounded(tmp_path):
    odd = '<img src=x onerror="1">|`'
    counts = {"labels": {f"{odd}{i}": 300.0 for i in range(200)}}
    night = HistoryLine("n", "/r", "completed", 1.0, 60_000, 1.0, 60_000, 0, 5.0, 9.0, 1.5, counts)
    broken = {"b": odd}  # names of runs are checked, what is said of them is anybody's
    page = HistoryPage(odd, tuple(replace(night, run_key=f"n{i}") for i in range(14)), broken)
    text, html = history_markdown(page), history_html([page])
    assert "<img" not in text and "<img" not in html
    assert len(text) < 100_000 and len(html) < 150_000
    assert history_rows(page)[0]["cost"] == "1.50"
    last = answers_table(page)[-1]
    assert (last[""], last["n0"]) == ("and 192 more labels", "96.0%")
    assert LEAST_MOVED < 1 and LEAST_ANSWERS > 1


@pytest.mark.whole
def test_missing_and_new_values_of_the_input_are_read_from_the_reports(tmp_path):
    nights = Nights(tmp_path)
    source = {"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 100}
    prompt = {"template": "Say {text} {country}", "on_null": "empty"}
    job = nights.job(source=source, prompt=prompt, reuse=None)

    def night(key: str, **columns: Any) -> None:
        nights.write(*["t"] * 300, **columns)
        nights.night(key, job)

    for number in range(LEAST_RUNS):
        night(f"n{number:02d}", country=["DE"] * 180 + ["FR"] * 120)
    night("odd", country=["DE"] * 150 + ["<Mu>\n"] * 75 + [None] * 75)
    (page,) = history_of(str(tmp_path / "out"))
    assert {shift.kind: shift.changes for shift in page.runs[0].drift} == {
        "nulls": {"country": (0.0, 0.25)},
        "values": {"country": (0.0, 1 / 3)},
    }
    assert history_rows(page)[0]["answers"] == "missing values by 25.0%; new values by 33.3%"
    assert [*page.runs[0].inputs.values["text"].values()] == [300]
    assert not page.runs[1].shifts
    records = [file for file in (tmp_path / "out/odd").rglob("*.json*") if file.is_file()]
    assert records and not [file for file in records if b"Mu" in file.read_bytes()]


def test_an_output_without_runs_has_no_nights(tmp_path):
    small_run(tmp_path / "elsewhere")
    (tmp_path / "empty").mkdir()
    assert history_of(str(tmp_path / "empty")) == []
    assert history_plot(()) is None


def test_nights_whose_folders_bear_their_dates_are_on_one_page(week, tmp_path):
    first, second, *_ = sorted(night.run_key for night in page_of(week).runs)
    for folder, key in (("2026-10-31", first), ("2026-11-01", second), ("latest", second)):
        shutil.copytree(week / key, tmp_path / "out" / folder / "answers" / key)
    (page,) = history_of(f"{tmp_path}/out/{{run_date}}/answers/", job="nightly")
    assert [night.run_key for night in page.runs] == [second, first]
    (alone,) = history_of(f"{tmp_path}/out/2026-11-01/answers", job="nightly")
    assert [night.run_key for night in alone.runs] == [second]
    assert history_of(f"{tmp_path}/out/{{run_date:%Y/%m}}", job="nightly")[0].runs == ()


@pytest.mark.parametrize(
    ("uri", "base", "parts", "named"),
    [
        ("out", "out", 0, []),
        ("s3://b/out/{run_date}", "s3://b/out", 1, ["2026-11-01"]),
        ("/d/x-{run_date:%Y/%m/%d}.d/{run_key}", "/d", 4, ["x-2026", "11", "01.d", "nightly-1"]),
        ("out/a+b{run_date:%d %B}", "out", 1, ["a+b01 November"]),
        ("out/{run_date:%-d.%m}", "out", 1, ["1.11"]),
        ("out/{run_date:%F}/{run_date:%D}", "out", 4, ["2026-11-01", "11", "01", "26"]),
        ("out/{run_date:%_d.%m}", "out", 1, [" 1.11"]),
    ],
)
def test_the_folders_of_dated_outputs(uri, base, parts, named):
    found, patterns = dated_parts(uri)
    assert (found, len(patterns)) == (base, parts)
    assert all(one.fullmatch(name) for one, name in zip(patterns, named, strict=True))
    assert not any(one.fullmatch("Latest.x") for one in patterns if one.pattern != ".+")


def test_few_answers_are_not_told_as_no_shift():
    """Under LEAST_ANSWERS nothing is compared, whatever the answers are."""
    some = labels(LEAST_ANSWERS, 0, 0)
    assert comparable(some, some) and not comparable(some, labels(LEAST_ANSWERS - 1, 0, 0))
    assert not comparable(some, {"lengths": {"1": 900.0}})
    nights = (
        HistoryLine("b", "out/b", "completed", answers=some, compared=True),
        HistoryLine("few", "out/few", "completed", answers=some),
        HistoryLine("a", "out/a", "completed", answers=some, is_first=True),
    )
    page = HistoryPage("job", nights)
    texts = [row["answers"] for row in history_rows(page)]
    assert texts == ["no shift", "not compared", "no earlier run"]
    why = f"not compared: this run or the one before it has fewer than {LEAST_ANSWERS} answers"
    for text in (history_markdown(page, plots=False), history_html([page])):
        assert text.count(why) == 1
    enough = HistoryPage("job", nights[::2])
    assert "not compared" not in history_markdown(enough) + history_html([enough])


def test_the_first_line_is_the_verdict():
    assert outcome_text(600_000, 598_211, 1_789, 2460.0, 12.4) == (
        "598,211 of 600,000 rows, 1,789 in quarantine (0.3 %), 41 min 00 s, cost 12.40. "
        "Nothing to do."
    )
    assert outcome_text(1, 1, 0, 5.0, None) == "1 of 1 row, 5 s. Nothing to do."
    assert outcome_text(9, 6, 0, 5.0, None) == "6 of 9 rows, 3 left out, 5 s. Nothing to do."
    late = (Advice(DEADLINE_MISSED, "the run took 9 s", "2 engines"),)
    assert verdict_of(replace(WHOLE_REPORT, advice=late)).endswith(f"s. {LATE_REMARK}")
    assert verdict_of(WHOLE_REPORT).endswith(" s. Nothing to do.")

    def run(key: str, rows: int, state: str = "completed", **more: Any) -> HistoryLine:
        good = rows if state == "completed" else None
        return HistoryLine(key, f"out/{key}", state, rows=rows, good=good, elapsed=275.0, **more)

    usual = [run("b", 600), run("stopped", 3, "unfinished"), run("a", 610)]

    def first(line: HistoryLine) -> str:
        return headlines(HistoryPage("job", (line, *usual)))[0]

    assert first(run("c", 600)) == "Last run: 600 of 600 rows, 4 min 35 s. Nothing to do."
    assert first(run("c", 303)).endswith("Nothing to do.")
    assert first(run("c", 600, is_late=True)).endswith(f"35 s. {LATE_REMARK}")
    assert first(run("c", 60)) == (
        "Last run: 60 of 60 rows, 4 min 35 s. Far fewer rows than usual: 60; the median of the "
        "last 2 completed runs is 605. Check the input."
    )
    assert first(run("c", 600, "unfinished")) == "c is unfinished"
    assert first(replace(run("c", 600), elapsed=550.0)) == (
        "Last run: 600 of 600 rows, 9 min 10 s. At least twice the usual time: 9 min 10 s; the "
        "median of the last 2 completed runs is 4 min 35 s."
    )
    missed = HistoryLine("missed", "", "late", failure="no worker", command="start one")
    assert first(missed) == "missed is late: no worker"
    page = HistoryPage("job", (run("c", 600), missed, *usual))
    assert headlines(page)[1:] == ["missed is late: no worker"]
    assert "missed: no worker; continue with: `start one`" in history_markdown(page)
    assert (
        first(run("c", 600, "failed", failure="the disk is full")) == "c failed: the disk is full"
    )
    (row,) = history_rows(HistoryPage("job", (run("c", 60, seconds=82.0),)))
    assert (row["time"], row["work"]) == ("4 min 35 s", "1 min 22 s")


def test_a_run_and_its_repair_are_one_observation():
    def line(key, elapsed, rows=100):
        return HistoryLine(key, "", "completed", rows=rows, good=rows, elapsed=elapsed)

    runs = (line("n4", 100.0), line("n2.m1", 900.0, 10), line("n3", 30.0), line("n2", 900.0, 10))
    page = HistoryPage("job", (*runs, line("n1", 30.0)))
    assert replaced_keys(page.runs) == {"n2"}
    assert usual_time(page, "n4") == 30.0, "not between 30 and 900 seconds"
    assert unusual_figures(page, page.runs[0])[1], "100 is over twice the median of three runs"
