"""What a run says of its start: phases with seconds, until its first commit."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from helpers.heard import counts
from helpers.small import Passes, small_run

from prefect_raybatch.driver import monitor
from prefect_raybatch.driver.driver import Driver
from prefect_raybatch.driver.heartbeat import INFERRING, STARTING, Heartbeat
from prefect_raybatch.driver.monitor import Monitor
from prefect_raybatch.driver.starting import Starting
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.stages.vllm.phases import ON_TURN


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_phases_follow_each_other_and_the_last_one_goes_on(clock: Clock) -> None:
    start = Starting(clock)
    clock.now += 3
    assert start.text() == "cluster 3 s"
    start.again()
    clock.now += 2
    assert start.text() == "cluster 3 s, workers 2 s"
    engine = {"imports": 1004.0}
    start.heard([engine])
    clock.now = 1012.0
    assert start.seconds() == {"cluster": 3.0, "workers": 1.0, "imports": 8.0}
    start.heard([{**engine, "weights": 1010.0, "compile": 1011.0, "graphs": 1015.5}])
    clock.now = 1016.0
    told = "cluster 3 s, workers 1 s, imports 6 s, weights 1 s, compile 4 s, graphs 0 s"
    assert start.text() == told


def test_seconds_have_one_decimal(clock: Clock) -> None:
    start = Starting(clock)
    clock.now += 1.26
    assert start.seconds() == {"cluster": 1.3}
    start.again()
    clock.now += 0.75
    start.heard([{"imports": 1001.5}])
    assert start.seconds() == {"cluster": 1.3, "workers": 0.2, "imports": 0.5}


def test_a_phase_counts_from_the_moment_at_which_it_begins(clock: Clock) -> None:
    start = Starting(clock)
    start.again()
    clock.now = 1004.0
    start.heard([{"imports": 990.0, "weights": 1000.0, "compile": 1003.0, "graphs": 1004.0}])
    # `imports` of these prewarmed engines ended as the run got them; `graphs` begins now.
    phases = {"workers": 0.0, "weights": 3.0, "compile": 1.0, "graphs": 0.0}
    assert start.seconds() == {"cluster": 0.0, **phases}


def test_at_the_first_commit_the_start_is_over(clock: Clock) -> None:
    start = Starting(clock)
    start.again()
    clock.now += 9
    assert start.ended is None
    start.end()
    clock.now += 100
    start.end()  # of a later commit
    assert start.ended == 1009.0
    start.heard([{"imports": 1002.0, "first step": 1005.0, "stepped": 1008.0}])
    seconds = {"cluster": 0.0, "workers": 2.0, "imports": 3.0, "first step": 3.0, "rows": 1.0}
    assert start.seconds() == seconds and sum(seconds.values()) == 9


def test_waiting_for_a_turn_counts_for_itself(clock: Clock) -> None:
    start = Starting(clock)
    for phase in (ON_TURN, "cluster"):
        clock.now += 4
        start.enter(phase)
    clock.now += 1
    start.again()
    clock.now += 2
    assert start.seconds() == {"cluster": 5.0, "turn": 4.0, "workers": 2.0}


def test_of_several_engines_the_one_least_far_is_told(clock: Clock) -> None:
    start = Starting(clock)
    start.again()
    ready = {"imports": 1001.0, "weights": 1002.0, "first step": 1003.0, "stepped": 1004.0}
    start.heard([ready, {"imports": 1001.0, "weights": 1005.0}])
    clock.now += 10
    told = "cluster 0 s, workers 1 s, imports 4 s, weights 5 s"
    assert start.text() == f"{told} (1 of 2 engines ready)"
    start.heard([{"imports": 1001.0, "weights": at} for at in (1003.0, 1005.0, 1004.0)])
    assert start.text() == f"{told} (0 of 3 engines ready)", "the one that is there last"


def test_a_later_pass_starts_engines_anew_and_no_cluster(clock: Clock) -> None:
    start = Starting(clock)
    clock.now += 3
    start.again()
    start.heard([{"imports": 1004.0}])
    clock.now += 30
    start.again()
    clock.now += 2
    assert start.text() == "workers 2 s"


def test_what_engines_did_before_the_run_had_them_is_not_what_it_waited_for(clock: Clock) -> None:
    start = Starting(clock)
    clock.now += 2
    start.again()
    ahead = {"imports": 960.0, "weights": 980.0, "graphs": 1001.0}
    start.heard([ahead])
    clock.now += 3
    assert start.seconds() == {"cluster": 2.0, "workers": 0.0, "graphs": 3.0}
    start.heard([{**ahead, "first step": 1004.0, "stepped": 1006.0}])
    clock.now += 2
    assert start.text() == "cluster 2 s, workers 0 s, graphs 2 s, first step 2 s, rows 1 s"


def test_clocks_that_differ_give_no_negative_seconds(clock: Clock) -> None:
    start = Starting(clock)
    start.again()
    clock.now += 5
    start.heard([{"imports": 1100.0}])  # of a node that is ahead
    assert start.text() == "cluster 0 s, workers 5 s"
    start.heard([{"imports": 900.0, "weights": 950.0}])  # of one that is behind
    assert min(start.seconds().values()) == 0.0


def test_a_monitor_tells_the_start_while_it_lasts_and_notes_it_once(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "LATE_PHASE_SECONDS", 0.0)
    run, told = small_run(tmp_path), []
    watch = Monitor("me", run.plan, run.store, Limits(), lambda progress: None)
    watch.starts = lambda: [{"imports": watch.starting.clock() - 0.5}]
    watch.on_started = lambda start: told.append((start.engines, list(start.seconds())))
    assert watch.beat().phase == STARTING and watch.beat().about == "cluster 0 s"
    driver = Driver(run.plan, run.shards, run.ledger, Limits(), watch)
    driver.resume()
    watch.pass_began()
    watch.look()
    assert watch.beat().about.endswith(", imports 0 s")
    driver.run(Passes(run), Passes(run).quarantine)
    for _ in range(3):
        watch.look()
    assert told == [(1, ["cluster", "workers", "imports"])]
    watch.note_start()
    assert (watch.beat().phase, watch.beat().about) == (INFERRING, "")
    assert len(told) == 1


def test_an_engine_that_dies_before_a_shard_came_through_is_warned_of_at_once(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "ASK_ENGINES", 0.0)
    run = small_run(tmp_path)
    watch = Monitor("me", run.plan, run.store, Limits(), lambda progress: None)
    driver = Driver(run.plan, run.shards, run.ledger, Limits(), watch)
    driver.resume()
    watch.pass_began()
    seen: list[Any] = [
        {},
        {"a": (0, "process 7 on node n1"), "b": (0, "")},
        {"a": (1, "process 8 on node n2"), "b": (0, "process 9 on node n1")},
        {"a": (1, "process 8 on node n2"), "b": (0, "process 9 on node n1")},
        {"a": (2, ""), "b": (0, "process 9 on node n1"), "c": (1, "")},
    ]
    for found in seen:
        watch.deaths = lambda found=found: found
        watch.look()
    messages = [r.getMessage() for r in caplog.records]
    said = [text for text in messages if "died before its first shard" in text]
    assert [text.partition("first shard")[2].partition(" so far")[0] for text in said] == [
        " (process 7 on node n1), 1 time",
        " (process 8 on node n2), 2 times",
        ", 1 time",
    ]
    assert all("out of memory; see `dmesg` there" in text for text in said)
    watch.deaths = lambda: 1 / 0
    watch.look()
    driver.run(Passes(run), Passes(run).quarantine)
    watch.deaths = lambda: {"b": (1, "")}  # told with the shards it cost
    watch.look()
    assert sum("died before its first shard" in r.getMessage() for r in caplog.records) == 3


def test_engines_that_died_in_an_earlier_run_of_the_process_are_not_counted(
    tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    class Engines:
        died: ClassVar = {"earlier": (1, "process 3 on node n1")}

        def deaths(self) -> dict[str, tuple[int, str]]:
            return dict(self.died)

        engines = dict
        starts = list
        server_wait = str

    run = small_run(tmp_path)
    watch = Monitor("me", run.plan, run.store, Limits(), lambda progress: None)
    driver = Driver(run.plan, run.shards, run.ledger, Limits(), watch)
    progress = driver.resume()
    watch(progress)
    watch.look()  # while the run joins the cluster, before it has engines
    watch.watch(Engines())
    watch.look()
    watch.pass_began()
    watch.look_at_deaths()
    assert progress.engine_deaths == 0 and "died" not in caplog.text
    Engines.died["own"] = (1, "process 7 on node n1")
    watch.look_at_deaths()
    assert progress.engine_deaths == 1 and "(process 7 on node n1), 1 time so far" in caplog.text


def test_a_beat_that_counts_a_commit_never_says_that_engines_start(tmp_path) -> None:
    run = small_run(tmp_path)
    watch = Monitor("me", run.plan, run.store, Limits(), lambda progress: None)
    driver = Driver(run.plan, run.shards, run.ledger, Limits(), watch)
    driver.resume()
    watch.pass_began()
    assert watch.beat().phase == STARTING
    driver.run(Passes(run), Passes(run).quarantine)
    told = watch.beat()  # before the thread that looks has looked
    assert (told.phase, told.committed) == (INFERRING, run.plan.shards)


def test_a_cluster_that_cannot_be_asked_costs_only_the_note(tmp_path) -> None:
    run = small_run(tmp_path)
    watch = Monitor("me", run.plan, run.store, Limits(), lambda progress: None)

    def gone() -> list[dict[str, float]]:
        raise ConnectionError("the head is gone")

    watch.starts = gone
    watch.pass_began()
    watch.look()  # which tells of stalls, too
    driver = Driver(run.plan, run.shards, run.ledger, Limits(), watch)
    driver.resume()
    driver.run(Passes(run), Passes(run).quarantine)
    watch.note_start()


def test_pages_and_terminals_show_it() -> None:
    from prefect_raybatch.flow.page import live_rows, progress_line

    none = counts(commits=0, window_rows=0, done=0, committed=0)
    beat = Heartbeat.of(none, 100.0, phase=STARTING, about="cluster 3 s, imports 9 s")
    assert "starting engines: cluster 3 s, imports 9 s, 2 failed" in progress_line(beat)
    assert live_rows(beat)[0]["now"] == "starting engines: cluster 3 s, imports 9 s"
