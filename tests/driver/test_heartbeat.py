"""Heartbeats, and the threads they are written from: what a status shows of a live driver."""

from __future__ import annotations

import contextvars
import logging
import re
import threading
import time

import pytest
from helpers.heard import Heard, counts, wait_for
from helpers.small import Passes, SmallRun, small_run, success_of

from prefect_raybatch.cli import commands as cli
from prefect_raybatch.driver import heartbeat, monitor
from prefect_raybatch.driver.driver import Driver, PhaseProgress, Progress
from prefect_raybatch.driver.heartbeat import (
    ENDED,
    INFERRING,
    STARTING,
    Counts,
    Heartbeat,
    Listener,
    Listeners,
    Ticker,
    newest,
    read_heartbeats,
)
from prefect_raybatch.driver.monitor import Monitor
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.layout import HEARTBEATS, heartbeat_path
from prefect_raybatch.ledger.records import dump
from prefect_raybatch.runs.status import status

# --- the record ---------------------------------------------------------------------------------


def test_rates_and_time_left_come_from_the_latest_commits_and_fall_without_any():
    now = Heartbeat.of(counts(), 100.0)
    assert (now.rate, now.seconds_left) == (2.0, 30.0)
    assert (now.prompt_tokens_rate, now.output_tokens_rate) == (20.0, 4.0)
    assert Heartbeat.of(counts(), 115.0).rate == 1.0
    first = Heartbeat.of(counts(commits=0, window_rows=0), 100.0)
    assert (first.rate, first.seconds_left, first.last_commit) == (0.0, None, None)


def test_counts_are_those_of_the_progress(tmp_path):
    run = small_run(tmp_path)
    seen: list[Counts] = []
    passes = Passes(run, failed={(1, 2)})
    limits = Limits(max_failed_fraction=0.5)
    driver = Driver(
        run.plan, run.shards, run.ledger, limits, lambda progress: seen.append(Counts.of(progress))
    )
    driver.resume()
    progress = driver.run(passes, passes.quarantine)
    assert [c.done for c in seen] == [5, 10, 15, 20]
    last = seen[-1]
    assert (last.failed, last.committed, last.commits, last.window_rows) == (1, 4, 4, 20)
    assert last.output_tokens == (progress.tally.stats.output_tokens or 0) > 0


def test_a_beat_says_all_that_was_counted():
    names = "rows shards done failed skipped committed passes engine_deaths held_back to_larger"
    numbers = {name: at for at, name in enumerate(names.split(), start=1)}
    beat = Heartbeat.of(counts(**numbers), 100.0)
    assert {name: getattr(beat, name) for name in numbers} == numbers


def test_counts_of_a_whole_run_add_its_other_phases(tmp_path):
    run = small_run(tmp_path)
    passes = Passes(run, failed={(1, 2)})
    driver = Driver(run.plan, run.shards, run.ledger, Limits(max_failed_fraction=0.5))
    driver.resume()
    progress = driver.run(passes, passes.quarantine)
    progress.before, progress.later = PhaseProgress(7, 2, failed=3), PhaseProgress(100, 30)
    whole = Counts.whole(progress)
    assert (whole.rows, whole.done, whole.before, whole.later) == (127, 27, 7, 100)
    assert (whole.shards, whole.committed, whole.failed) == (36, 6, 3)


def test_listeners_are_all_told_of_everything_in_their_order():
    heard: list[tuple[str, object]] = []

    class Named(Listener):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, progress: Progress) -> None:
            heard.append((self.name, progress))

        def on_heartbeat(self, beat: Heartbeat) -> None:
            heard.append((self.name, beat))

        def on_process_end(self, cause: str) -> None:
            heard.append((self.name, cause))

        def on_judge(self, uri: str) -> None:
            heard.append((self.name, uri))

    every = Listeners([Named("a"), lambda progress: heard.append(("b", progress)), Named("c")])
    progress, beat = Progress(1, 1), Heartbeat(1.0)
    every(progress)
    every.on_heartbeat(beat)
    every.on_process_end("killed")
    every.on_judge("s3://b/judge")
    assert heard[:3] == [("a", progress), ("b", progress), ("c", progress)]
    told = (beat, "killed", "s3://b/judge")
    assert heard[3:] == [(name, what) for what in told for name in "ac"]


def test_a_beat_survives_its_record():
    beat = Heartbeat.of(
        counts(), 100.0, phase=INFERRING, engines={"ALIVE": 2}, about="x", quiet=1.5
    )
    assert Heartbeat.from_bytes(beat.to_bytes(), "x") == beat


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"at": "now"},
        {"at": True},
        {"at": 1.0, "phase": "[red]boo"},
        {"at": 1.0, "engines": ["ALIVE"]},
        {"at": 1.0, "engines": {"ALIVE": "many"}},
        {"at": 1.0, "about": 3},
        {"at": 1.0, "rate": None},
        {"at": 1.0, "surprise": 1},
    ],
)
def test_what_is_no_beat_is_left_out_and_stops_no_status(tmp_path, value, caplog):
    run = small_run(tmp_path)
    path = heartbeat_path("a")
    run.store.put(path, dump(value))
    with pytest.raises(CorruptRun, match="heartbeat"):
        Heartbeat.from_bytes(dump(value), path)
    assert read_heartbeats(run.store, ["a", "missing"]) == {}
    assert path in caplog.text
    run.ledger.note_attempt("a", {"started": "2026"})
    assert status(str(tmp_path)).beats == ()


def test_a_follower_gets_the_newest_beat(tmp_path):
    store = small_run(tmp_path).store
    assert newest(store) is None
    for name, at in (("a", 5.0), ("b", 9.0), ("c", 7.0)):
        store.put(heartbeat_path(name), Heartbeat(at).to_bytes())
    assert newest(store).at == 9.0


# --- the thread ---------------------------------------------------------------------------------


def test_a_ticker_goes_on_after_errors_says_each_once_and_works_once_more_at_the_end(caplog):
    calls: list[int] = []

    def work() -> None:
        calls.append(len(calls))
        if len(calls) < 4:
            raise RuntimeError(f"away {len(calls) // 3}")

    with Ticker("the test", 0.005, work):
        wait_for(lambda: len(calls) >= 6)
    done = len(calls)
    assert not any(thread.name == "the test" for thread in threading.enumerate())
    said = [r.getMessage() for r in caplog.records if "the test" in r.getMessage()]
    assert len(said) == 2 and "away 0" in said[0] and "away 1" in said[1]
    with Ticker("never", 1000.0, lambda: calls.append(-1)):
        pass
    assert calls[-1] == -1 and len(calls) == done + 1


def test_the_last_work_begins_after_the_end_was_asked_for():
    begun: list[float] = []
    busy = threading.Event()

    def work() -> None:
        begun.append(time.monotonic())
        busy.set()
        time.sleep(0.2)

    with Ticker("busy", 0.001, work):
        assert busy.wait(60)
        end = time.monotonic()
    assert begun[-1] > end


def test_a_ticker_has_the_context_of_who_starts_it():
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    name.set("flow run 7")
    seen: list[str] = []
    with Ticker("context", 1000.0, lambda: seen.append(name.get())):
        name.set("other")
    assert seen == ["flow run 7"]


def test_work_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(heartbeat, "JOIN_SECONDS", 0.2)
    gate, at_work = threading.Event(), threading.Event()

    def work() -> None:
        at_work.set()
        gate.wait()

    with Ticker("hangs", 0.001, work):
        assert at_work.wait(60)
    gate.set()


# --- a live driver ------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "LOOK", 0.02)
    monkeypatch.setattr(monitor, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(monitor, "ASK_ENGINES", 0.0)


def watched(run: SmallRun, heard: Heard, **kwargs) -> Monitor:
    return Monitor("me", run.plan, run.store, kwargs.pop("limits", Limits()), heard, **kwargs)


def beat_of(run: SmallRun) -> Heartbeat | None:
    return read_heartbeats(run.store, ["me"]).get("me")


def test_a_heartbeat_goes_on_while_nothing_is_committed(tmp_path, quick):
    run, heard = small_run(tmp_path), Heard()
    gate = threading.Event()

    def passes(units, isolated):
        for number, unit in enumerate(units):
            if number == 2:
                gate.wait(120)
            yield run.receipt(unit)

    watch = watched(run, heard, engines=lambda: {"ALIVE": 1})
    driver = Driver(run.plan, run.shards, run.ledger, Limits(), watch)
    driver.resume()
    run.ledger.note_attempt("me", {"host": "h", "pid": 7, "started": "2026"})
    watch(driver.progress)
    with watch:
        wait_for(lambda: (b := beat_of(run)) and b.phase == STARTING)
        thread = threading.Thread(target=driver.run, args=(passes, Passes(run).quarantine))
        thread.start()
        first = wait_for(lambda: (b := beat_of(run)) and b.committed == 2 and b)
        later = wait_for(lambda: (b := beat_of(run)) and b.at > first.at and b)
        assert (later.phase, later.committed, later.passes) == (INFERRING, 2, 1)
        assert later.engines == {"ALIVE": 1} and later.rate < first.rate
        (shown,) = status(str(tmp_path)).beats
        assert (shown["host"], shown["pid"], shown["committed"]) == ("h", 7, 2)
        assert 0 <= shown["age"] < 60
        gate.set()
        thread.join(120)
    last = beat_of(run)
    assert (last.phase, last.done) == (ENDED, 20)
    assert status(str(tmp_path)).beats == ()
    assert heard.progress == [0, 5, 10, 15, 20]
    assert heard.beats[-1].phase == ENDED and heard.beats[-1].done == 20


def test_the_death_of_ray_on_this_host_is_told_once_before_the_process_ends(tmp_path, caplog):
    run, died = small_run(tmp_path), [False]
    watch = watched(run, Heard())
    watch.set_cluster("", dict, lambda: died[0])
    progress = Progress(20, 4)
    progress.tally.add(run.commit(0))
    watch(progress)
    watch.look()
    for _ in range(3):
        died[0] = True
        watch.look()
    lines = [r.getMessage() for r in caplog.records if "Ray on this host died" in r.getMessage()]
    (line,) = lines
    assert "5 of 20 rows are committed" in line
    caplog.clear()
    watch.set_cluster("", dict, lambda: False)
    watch.look()
    watch.set_cluster("", dict, lambda: True)  # once: as Ray is stopped
    watch.look()
    assert not caplog.messages


def test_a_silent_attempt_is_shown_as_one(tmp_path, capsys):
    run = small_run(tmp_path)
    for name, age in (("old", 3600), ("new", 3)):
        run.ledger.note_attempt(name, {"host": name, "pid": 1, "started": "2026"})
        beat = Heartbeat(time.time() - age, phase=INFERRING, passes=1, engines={"ALIVE": 2})
        run.store.put(heartbeat_path(name), beat.to_bytes())
    with pytest.raises(SystemExit):
        cli.main(["status", str(tmp_path)])
    told = capsys.readouterr().out
    assert re.search(r"new:1, heartbeat \d+ s ago: inferring, pass 1, 2 engines", told)
    assert "old:1, no heartbeat for 1 h 00 min; it may be dead" in told
    assert "time left" not in told  # nothing is committed yet
    run.commit(0)
    assert status(str(tmp_path)).seconds_left is not None
    with pytest.raises(SystemExit):
        cli.main(["status", str(tmp_path)])
    assert "time left" in capsys.readouterr().out
    dead = Heartbeat(time.time() - 3600, phase=INFERRING, passes=1, engines={"ALIVE": 2})
    run.store.put(heartbeat_path("new"), dead.to_bytes())
    assert status(str(tmp_path)).seconds_left is None
    run.commit_all()
    assert len(status(str(tmp_path)).beats) == 2
    run.ledger.succeed(success_of(run, compact=False))
    assert status(str(tmp_path)).beats == ()


def test_a_store_that_is_away_stops_no_run(tmp_path, quick, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    run, heard = small_run(tmp_path), Heard()

    def away(path, data):
        raise OSError("no route to the store")

    monkeypatch.setattr(run.store, "put", away)
    with watched(run, heard):
        wait_for(lambda: "no route" in caplog.text)
        wait_for(lambda: len(heard.beats) > 3)
    assert caplog.text.count("no route") == 1
    assert not list(run.store.list(HEARTBEATS))
