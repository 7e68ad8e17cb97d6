"""What a report and a status say, from commits of known times and counts."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest
from helpers.reports import COMMIT, REPORT
from helpers.reports import timed_commit as commit
from helpers.small import small_run

from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.records import Commit
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.html import html
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import (
    build,
    cached_share,
    duration,
    failure_table,
    markdown,
    start_table,
)
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.runs.starts import STARTS_SHOWN, starts_of


def tally(*commits: Commit) -> Tally:
    made = Tally()
    for one in commits:
        made.add(one)
    return made


def test_counts_are_by_positions():
    made = tally(COMMIT, COMMIT)
    assert (made.good, made.failed, made.skipped, made.rows, made.shards) == (6, 2, 2, 10, 2)
    assert made.failures == {FailureKey("engine", "ValueError", "no | pipe"): 2}


def test_working_time_leaves_out_the_sleep_between_attempts():
    """Killed at 10, resumed a day later: the rate is of the work."""
    made = tally(commit(0, 6), commit(4, 10), commit(86_400, 86_410))
    assert made.busy_seconds == 20


def test_the_steady_rate_leaves_out_the_start():
    made = tally(commit(0, 50), commit(40, 55), commit(50, 60))
    assert made.steady_rate == 20 / 10
    assert tally(commit(0, 50)).steady_rate == 10 / 50  # no steady state in one shard
    assert tally().steady_rate == 0


def test_the_steady_rate_leaves_out_the_sleep_between_attempts():
    made = tally(*(commit(t, t + 10) for t in (0, 10, 20, 86_400, 86_410, 86_420)))
    assert made.steady_rate == 1.0


def test_a_clock_that_was_set_back_leaves_a_rate_unknown():
    """The figures of a commit never change: a report that failed on them would fail for ever."""
    made = tally(commit(100, 95), commit(101, 96), commit(102, 97))
    assert made.steady_rate == 0


@pytest.mark.parametrize("seed", range(10))
def test_times_that_overlap_count_once(seed):
    rng = random.Random(seed)
    times = [(at, at + rng.randrange(1, 9)) for at in (rng.randrange(60) for _ in range(12))]
    made = tally(*(commit(start, end) for start, end in times))
    assert made.busy_seconds == len({s for start, end in times for s in range(start, end)})
    first = min(end for _, end in times)
    later = {s for start, end in times for s in range(max(start, first), end)}
    assert made.steady_rate == (10 * (len(times) - 1) / len(later))  # 10 rows each


def test_a_tally_takes_few_bytes_a_shard():
    made, one = Tally(), commit(0, 10, prepare_s=1.0, engine_s=2.0)
    tracemalloc.start()
    for _ in range(10_000):
        made.add(one)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100 * 10_000


def test_stages_have_time_rate_and_balance():
    made = tally(
        commit(0, 4, prepare_s=1.0, engine_s=2.0, finish_s=0.5),
        commit(0, 4, prepare_s=1.0, engine_s=6.0, finish_s=0.5),
    )
    stages = {s.name: s for s in made.stages()}
    assert list(stages) == ["prepare", "engine", "finish"]
    engine = stages["engine"]
    assert (engine.tasks, engine.rows, engine.seconds, engine.rows_per_s) == (2, 20, 8.0, 2.5)
    assert engine.balance == pytest.approx(4 / 6, abs=0.001)
    assert stages["prepare"].balance == 1.0


def test_a_report_of_commits(tmp_path):
    run = small_run(tmp_path)
    for shard in range(4):
        run.commit(shard, failed=[0] if shard == 1 else [])
    made = Tally()
    for one in run.ledger.commits(run.plan, run.ledger.listing(run.plan)):
        made.add(one)
    report = build("/r", run.plan, made, "completed", resumed_shards=1, notes=["a note"])
    assert (report.rows, report.good, report.failed, report.shards) == (20, 19, 1, 4)
    assert report.tokens == {
        "prompt_tokens": 57.0,  # three a good row, as the fake engine says
        "cached_tokens": 19.0,
        "output_tokens": 19.0,
        "cut_off": 0.0,
        "cut_off_structured": 0.0,
        "deduplicated": 0.0,
        "truncated": 0.0,
    }
    assert report.failures == {"engine|ValueError|refused": 1}
    assert RunReport.from_bytes(report.to_bytes()) == report
    page = markdown(report)
    for text in ("Input rows | 20", "quarantine | 1 (5.00%)", "33% of prompt tokens", "- a note"):
        assert text in page
    assert "| 1 | engine | ValueError | refused |" in page


def test_foreign_text_cannot_break_the_page():
    evil = "a|b|<script>alert(1)</script>\n# title | " + "x" * 1000
    from dataclasses import replace

    page = markdown(replace(REPORT, failures={evil: 3}))
    assert "<script>" not in page and "\n# title" not in page
    (line,) = [line for line in page.splitlines() if "alert" in line]
    assert len(line) < 300
    assert line.replace("\\|", "").count("|") == 5  # four cells, whatever the message holds


def test_failures_are_the_commonest_first_and_odd_keys_are_shown():
    rows = failure_table({"a|B|c": 1, "engine|Err|x | y": 1200, "odd": 5})
    assert rows == [
        {"rows": "1,200", "stage": "engine", "error": "Err", "message": "x | y"},
        {"rows": "5", "stage": "odd", "error": "", "message": ""},
        {"rows": "1", "stage": "a", "error": "B", "message": "c"},
    ]
    assert reports.table_lines([]) == ["(none)"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (0.04, "0.1 s"),
        (0.42, "0.4 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_cached_share_of_nothing():
    assert cached_share({}) == "-"
    assert cached_share({"prompt_tokens": 4, "cached_tokens": 1}) == "25% of prompt tokens"


def test_requests_that_were_not_sent_as_they_stood_are_told(tmp_path):
    plan = small_run(tmp_path).plan
    quiet = markdown(build("/r", plan, tally(commit(0, 1, deduplicated=0)), "completed"))
    assert "Duplicate requests" not in quiet and "truncated" not in quiet
    told = build("/r", plan, tally(commit(0, 1, deduplicated=3, truncated=1200)), "completed")
    page = markdown(told)
    assert "| Duplicate requests | 3, inferred once per shard |" in page
    assert "| Prompts truncated | 1,200 |" in page


def test_the_starts_of_attempts_are_a_table_and_survive_the_record():
    notes = [
        {"attempt": "a" * 32, "start": {"engines": 2, "seconds": {"weights": 2.5, "cluster": 3}}},
        {"attempt": "b" * 32, "start": {"engines": 1, "seconds": {"cluster": 1.0}}},
        {"attempt": "c" * 32},  # of a version that noted none, or of one that committed nothing
        {"attempt": "d" * 32, "start": {"engines": "many"}},
        {"attempt": "e" * 32, "start": None},
    ]
    made = replace(REPORT, starts=starts_of(notes))
    assert RunReport.from_bytes(made.to_bytes()) == made
    first, second = start_table(made)
    figures = {"engines": "2", "cluster s": "3.0", "weights s": "2.5", "total s": "5.5"}
    assert first == {"attempt": "a" * 8, **figures}
    assert list(first) == ["attempt", *figures]  # in the order in which they come
    assert (second["weights s"], second["total s"]) == ("-", "1.0")
    assert "## Start-up" in markdown(made) and "<h2>Start-up</h2>" in html(made)
    assert "## Start" not in markdown(REPORT) and "starts" not in REPORT.to_dict()
    assert len(starts_of(notes[:1] * 30)) == STARTS_SHOWN
