"""Heartbeats, and the threads they are written from: what a status shows of a live driver."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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
    UNHEARD,
    Counts,
    Heartbeat,
    Listener,
    Listeners,
    Ticker,
    alive,
    heartbeat_elsewhere,
    newest,
    read_heartbeats,
    to_larger_text,
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
    assert counts().rate(85.0) == counts().rate(80.0) == 30e6, "a clock that stands or was set back"


def test_a_beat_has_rounded_rates_of_its_own_phase_and_all_that_was_counted():
    figures: dict[str, Any] = {
        **{"rows": 100, "shards": 11, "done": 40, "failed": 3, "skipped": 1, "committed": 5},
        **{"passes": 6, "engine_deaths": 7, "held_back": 8, "to_larger": 9},
    }
    now = counts(
        **figures, at=100.12345, before=7, later=11, window_rows=31, prompt_tokens=401.0,
        output_tokens=83.0,
    )  # fmt: skip
    expected = Heartbeat(  # 31 rows in 15.98765 s; 33 of the rows and all tokens are of this phase
        **figures, at=100.988, rate=1.94, prompt_tokens_rate=23.6, output_tokens_rate=4.9,
        seconds_left=25.3, last_commit=100.123, phase=INFERRING, about="x",
    )  # fmt: skip
    assert Heartbeat.of(now, 100.98765, phase=INFERRING, about="x") == expected
    none_of_this_phase = Heartbeat.of(replace(now, before=40), 100.98765)
    assert (none_of_this_phase.prompt_tokens_rate, none_of_this_phase.output_tokens_rate) == (0, 0)


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


@pytest.fixture
def progress(tmp_path) -> Progress:
    """Of a phase with ten rows, of which two have failed and one was skipped, in two shards."""
    run = small_run(tmp_path)
    made = Progress(20, 4, passes=5, core_deaths=2, process_deaths=4, held_back=6)
    for shard, began in ((0, 70.0), (1, 80.0)):
        made.add(run.commit(shard, [3]), began)
    made.tally.good, made.tally.skipped = 7, 1
    made.rows_of_failed = 2
    return made


def counts_of(progress: Progress, **changed: int) -> Counts:
    tokens = progress.tally.stats
    assert tokens.prompt_tokens and tokens.output_tokens
    of_phase = Counts(
        at=90.0, rows=20, shards=4, done=10, failed=2, skipped=1, committed=2, passes=5,
        engine_deaths=6, prompt_tokens=tokens.prompt_tokens, output_tokens=tokens.output_tokens,
        commits=2, window_rows=10, window_start=70.0, held_back=6,
    )  # fmt: skip
    return replace(of_phase, **changed)


def test_counts_are_a_snapshot_of_the_progress(progress):
    assert Counts.of(progress, 90.0) == counts_of(progress)
    nothing = Counts.of(Progress(20, 4), 90.0)
    assert nothing == Counts(90.0, 20, 4, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0.0)


def test_rows_for_the_larger_model_are_no_failed_rows(progress):
    progress.passed_on = frozenset({"ValueError", "Unsure"})
    assert Counts.of(progress, 90.0) == counts_of(progress, failed=0, to_larger=2)
    progress.before = PhaseProgress(failed=5)
    assert progress.failed == 3
    progress.passed_on = frozenset({"Unsure"})
    assert Counts.of(progress, 90.0) == counts_of(progress)


@pytest.mark.parametrize(("before", "rows_of_failed", "failed"), [(3, 2, 3), (0, 9, 9), (0, 0, 2)])
def test_counts_of_a_whole_run_add_its_other_phases(progress, before, rows_of_failed, failed):
    progress.before, progress.later = PhaseProgress(7, 2, before), PhaseProgress(100, 30)
    progress.rows_of_failed = rows_of_failed
    whole = counts_of(
        progress, rows=127, done=17, shards=36, committed=4, failed=failed, before=7, later=100
    )
    assert replace(Counts.whole(progress), at=90.0) == whole


@pytest.mark.parametrize(
    ("before", "later", "unit"),
    [(0, 0, ("row", "rows")), (7, 0, ("step", "steps")), (0, 7, ("step", "steps"))],
)
def test_a_run_with_two_phases_counts_steps(before, later, unit):
    two = Progress(20, 4, before=PhaseProgress(before), later=PhaseProgress(later))
    assert two.unit == unit


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


def test_unknown_costs_and_zeros_that_older_versions_lack_are_left_out_of_a_record():
    common = {
        **{"at": 1.0, "phase": STARTING, "about": "", "dashboard": "", "engines": {}},
        **dict.fromkeys(("rows", "shards", "done", "failed", "skipped", "committed"), 0),
        **dict.fromkeys(("passes", "engine_deaths", "alarms", "held_back"), 0),
        **dict.fromkeys(("rate", "prompt_tokens_rate", "output_tokens_rate", "quiet"), 0.0),
        **{"seconds_left": None, "last_commit": None},
    }
    assert json.loads(Heartbeat(1.0).to_bytes()) == common
    costs = {"gpu_seconds": 1.0, "cost": 2.0, "cost_run": 3.0, "cost_end": 4.0, "to_larger": 5}
    assert json.loads(Heartbeat(1.0, **costs).to_bytes()) == {**common, **costs}


def test_numbers_may_be_unknown_and_names_of_states_are_cut_off():
    unknown = dict.fromkeys(("seconds_left", "last_commit", "cost", "cost_run", "cost_end"))
    value = {"at": 1.0, **unknown, "engines": {"A" * 41: 2, "B": 1.0}}
    read = Heartbeat.from_bytes(dump(value), "x")
    assert read == Heartbeat(1.0, engines={"A" * 40: 2, "B": 1})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"rate": None}, "rate"), ({"about": None}, "about"), ({"phase": "asleep"}, "phase")],
)
def test_the_error_names_the_wrong_field_of_a_beat(wrong, named):
    with pytest.raises(CorruptRun) as caught:
        Heartbeat.from_bytes(dump({"at": 1.0, **wrong}), "beat.json")
    text = f"beat.json is not a valid heartbeat: wrong value of {named}"
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("phase", "done", "committed", "corrected"),
    [(STARTING, 4, 5, True), (STARTING, 5, 5, False), (INFERRING, 4, 5, False)],
)
def test_a_beat_from_before_the_latest_commit_no_longer_says_that_engines_start(
    phase, done, committed, corrected
):
    beat = Heartbeat(1.0, phase, done=done, about="cluster 3 s", passes=2)
    now = replace(beat, phase=INFERRING, about="") if corrected else beat
    assert beat.with_committed(committed) == now


def test_texts_and_numbers_of_a_beat():
    assert [to_larger_text(rows) for rows in (0, 1, 1234)] == [
        *("", ", 1 to the larger model", ", 1,234 to the larger model"),
    ]
    assert (alive({"ALIVE": 2, "DEAD": 3}), alive({"DEAD": 3}), alive({})) == (2, 0, 0)


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
    run.store.put(heartbeat_path("z"), Heartbeat(2.0).to_bytes())
    assert read_heartbeats(run.store, ["a", "missing", "z"]) == {"z": Heartbeat(2.0)}
    assert path in caplog.text
    run.ledger.note_attempt("a", {"started": "2026"})
    assert status(str(tmp_path)).beats == ()


def test_a_follower_gets_the_newest_beat(tmp_path):
    store = small_run(tmp_path).store
    assert newest(store) is None
    for name, at in (("a", 5.0), ("b", 9.0), ("c", 7.0)):
        store.put(heartbeat_path(name), Heartbeat(at).to_bytes())
    store.put(f"{HEARTBEATS}/b copy.json", Heartbeat(99.0).to_bytes())
    assert newest(store) == Heartbeat(9.0)


@pytest.mark.parametrize(
    ("stored", "over", "is_used"),
    [
        (Heartbeat(1000.0, INFERRING), {}, True),
        (Heartbeat(940.0, INFERRING), {}, True),
        (Heartbeat(939.0, INFERRING), {}, False),
        (Heartbeat(1000.0, ENDED), {}, False),
        (Heartbeat(1000.0, ENDED), {"over": True}, True),
        (Heartbeat(939.0, ENDED), {"over": True}, False),
        (None, {}, False),
    ],
)
def test_a_follower_takes_no_beat_that_is_old_or_says_that_a_run_under_way_has_ended(
    tmp_path, monkeypatch, stored, over, is_used
):
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(time=lambda: 1000.0))
    store = small_run(tmp_path).store
    if stored is not None:
        store.put(heartbeat_path("a"), stored.to_bytes())
    of_commits = Heartbeat.of(counts(), 1000.0, phase=UNHEARD)
    assert heartbeat_elsewhere(store, counts(), **over) == (stored if is_used else of_commits)


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
