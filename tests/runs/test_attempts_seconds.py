"""The time that somebody was at a run, which is held against limits.deadline."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from helpers.nights import Nights
from helpers.small import small_run

from prefect_raybatch.api import finalize_run, plan_run
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import Heartbeat
from prefect_raybatch.driver.starting import Starting
from prefect_raybatch.job.edits import edited
from prefect_raybatch.ledger.increments import requests_ledger
from prefect_raybatch.ledger.layout import attempt_path, heartbeat_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.runs.attempts import AttemptLog
from prefect_raybatch.runs.run import Run
from prefect_raybatch.runs.starts import attempts_seconds, read_starts
from prefect_raybatch.runs.status import report_of
from prefect_raybatch.storage import open_store


def test_the_time_of_attempts_is_from_their_begin_to_their_last_heartbeat(tmp_path: Path) -> None:
    run = small_run(tmp_path)

    def attempt(name: str, began: float | None, beat: float | None) -> None:
        started = {} if began is None else {"started": datetime.fromtimestamp(began, UTC)}
        note = {key: value.isoformat(timespec="seconds") for key, value in started.items()}
        run.ledger.note_attempt(name, note)
        if beat is not None:
            run.store.put(heartbeat_path(name), Heartbeat(beat).to_bytes())

    assert attempts_seconds(run.ledger, run.plan) == 0.0
    attempt("first", 1000.0, 1060.0)
    attempt("beside", 1030.0, 1090.0)  # at the same time
    attempt("after", 5000.0, 5010.0)  # a pause between them is no time of the run
    attempt("silent", 9000.0, None)
    attempt("unknown", None, 9000.0)
    attempt("clock", 9000.0, 8000.0)
    assert attempts_seconds(run.ledger, run.plan) == 100.0
    run.ledger.note_attempt("odd", {"started": "yesterday"})
    run.store.put(heartbeat_path("odd"), b"{")
    run.store.put(attempt_path("damaged"), b"{")  # listed before the others
    assert attempts_seconds(run.ledger, run.plan) == 100.0


def test_a_report_says_how_long_the_attempts_took(tmp_path: Path) -> None:
    """Its asks included, where it has such."""
    nights = Nights(tmp_path)
    nights.write("a", "b", "c")
    report = nights.night("monday")
    ledger = Ledger(open_store(report.run))
    seconds = attempts_seconds(ledger, need_plan(ledger))
    assert report.elapsed == round(seconds, 1) and report.elapsed >= report.seconds - 1


def test_a_report_counts_the_engine_deaths_of_all_attempts(tmp_path: Path) -> None:
    """The attempt that ends the run knows only of its own."""
    run = small_run(tmp_path)
    for name, deaths in (("a" * 32, 2), ("b" * 32, 0), ("c" * 32, 1)):
        run.ledger.note_attempt(name, {"started": "2026-03-01T02:00:00+00:00"})
        beat = Heartbeat(1000.0, engine_deaths=deaths)
        run.store.put(heartbeat_path(name), beat.to_bytes())
    assert report_of(str(tmp_path)).engine_deaths == 3
    run.commit_all()
    job = edited(run.job, {"output.uri": str(tmp_path.parent)}, "test")
    found = Run(run.store.uri, run.plan.run_key, run.plan.hash, run.plan.rows, 4, False)
    assert finalize_run(job, found, Progress(20, 4, process_deaths=1)).engine_deaths == 3


def test_a_damaged_record_of_an_attempt_fails_no_run_that_reuses_answers(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.write("a", "b", "c")
    job = nights.job()
    run = plan_run(job, "monday")
    progress = nights.infer(job, run)
    requests = requests_ledger(open_store(run.uri))
    requests.store.put(attempt_path("f" * 32), b"{")
    report = finalize_run(job, run, progress)
    assert (report.state, report.good) == ("completed", 3)


def test_how_long_engines_took_to_start_is_recorded_unless_none_was_started(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    now = [100.0]
    starting = Starting(lambda: now[0])
    begun = AttemptLog(run.ledger, "a" * 32, {"attempt": "a" * 32, "started": "2026-03-01"})
    begun.note_start(starting)
    assert read_starts(run.ledger) == ()
    starting.enter("workers")
    starting.heard([{"imports": 102.0}])
    now[0] = 105.0
    begun.note_start(starting)
    (told,) = read_starts(run.ledger)
    assert (told.attempt, told.engines) == ("a" * 32, 1)
    assert told.seconds == {"cluster": 0.0, "workers": 2.0, "imports": 3.0}
