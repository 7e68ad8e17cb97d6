"""What a monitor asks, tells and logs of an attempt, with a clock turned by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.heard import Heard
from helpers.small import SmallRun, small_run

from prefect_raybatch.driver import monitor
from prefect_raybatch.driver.cost import CostMeter, Spent
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import ENDED, INFERRING, STARTING, WAITING, Heartbeat
from prefect_raybatch.driver.monitor import Monitor
from prefect_raybatch.driver.starting import Starting
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.stages.vllm.phases import Marks


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Told(Heard):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[str] = []

    def on_process_end(self, cause: str) -> None:
        self.ends.append(cause)


@dataclass
class Engines:
    """Engines that say what a test sets, and count how often they are asked for it."""

    asked: list[str] = field(default_factory=list)
    states: Mapping[str, int] = field(default_factory=lambda: {"ALIVE": 1})
    died: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    marks: Marks = field(default_factory=dict)

    def engines(self) -> Mapping[str, int]:
        self.asked.append("engines")
        return self.states

    def starts(self) -> list[Marks]:
        return [self.marks]

    def deaths(self) -> Mapping[str, tuple[int, str]]:
        self.asked.append("deaths")
        return self.died

    def server_wait(self) -> str:
        self.asked.append("server")
        return ""


@dataclass
class Watched:
    """A monitor of a small run whose clocks stand still."""

    run: SmallRun
    heard: Told
    clock: Clock
    monitor: Monitor
    progress: Progress
    noted: list[Starting]

    def commit(self, shard: int = 0) -> None:
        commit = self.run.commit(shard)
        assert commit is not None
        stats = replace(commit.stats, started=800.0, ended=950.0)
        self.progress.add(replace(commit, stats=stats), 900.0)
        self.monitor(self.progress)
        assert self.monitor.counts is not None
        self.monitor.counts = replace(self.monitor.counts, at=950.0)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    clocks = SimpleNamespace(time=lambda: 1000.0, monotonic=time.monotonic)
    monkeypatch.setattr(monitor, "time", clocks)
    run, heard, clock, noted = small_run(tmp_path), Told(), Clock(), list[Starting]()
    made = Monitor("me", run.plan, run.store, Limits(), heard, clock=clock, on_started=noted.append)
    made.starting = Starting(lambda: 500.0 + clock())
    return Watched(run, heard, clock, made, Progress(20, 4, passes=1), noted)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == monitor.__name__]


# --- the present state --------------------------------------------------------------------------

TOKENS = {"prompt_tokens_rate": 0.1, "output_tokens_rate": 0.1}
OF_ONE_COMMIT: dict[str, Any] = {
    **{"rows": 20, "shards": 4, "done": 5, "committed": 1, "rate": 0.05, "seconds_left": 300.0},
    **{"last_commit": 950.0, **TOKENS},
}


def test_before_any_count_a_beat_has_the_numbers_of_the_plan(watched: Watched) -> None:
    watched.clock.now = 3.0
    first = Heartbeat(1000.0, STARTING, rows=20, shards=4, about="cluster 3 s")
    assert watched.monitor.beat() == first
    watched.monitor.limited = lambda: "waiting 60 s: 429"
    assert watched.monitor.beat() == replace(first, phase=INFERRING, about="waiting 60 s: 429")


def test_a_beat_between_commits_has_the_present_passes_deaths_and_costs(watched: Watched) -> None:
    watched.commit()
    watched.monitor.meter = CostMeter(3600.0, gpus_an_engine=0.5)
    watched.monitor.watch(Engines(states={"ALIVE": 4}))
    for watched.clock.now in (0.0, 10.0):
        watched.monitor.look()
    costs = {"gpu_seconds": 20.0, "cost": 20.0, "cost_run": 20.0}
    beat = Heartbeat(
        **{"at": 1000.0, "phase": INFERRING, "passes": 1, "engines": {"ALIVE": 4}},
        **{**OF_ONE_COMMIT, **costs, "cost_end": 620.0},
    )
    assert watched.heard.beats[-1] == watched.monitor.beat() == beat
    watched.progress.core_deaths, watched.progress.process_deaths = 1, 2
    assert watched.monitor.beat() == replace(beat, engine_deaths=3)
    watched.progress.passes = 2
    starting = replace(beat, engine_deaths=3, passes=2, phase=STARTING, about="cluster 0 s")
    assert watched.monitor.beat() == starting
    watched.monitor.write()
    with watched.monitor:
        pass
    ended = replace(starting, phase=ENDED, about="", cost_end=20.0)
    assert watched.monitor.beat() == ended, "nothing more will be spent"


def test_a_run_that_waits_says_why_and_goes_on_with_its_start(watched: Watched) -> None:
    watched.clock.now = 2.0
    watched.monitor.set_waiting("resources of other runs")
    waiting = Heartbeat(1000.0, WAITING, rows=20, shards=4, about="resources of other runs")
    assert watched.monitor.beat() == waiting
    watched.clock.now = 9.0
    watched.monitor.set_waiting("")
    watched.clock.now = 10.0
    started = replace(waiting, phase=STARTING, about="cluster 3 s, turn 7 s")
    assert watched.monitor.beat() == started


def test_the_dashboard_of_ray_is_told_if_there_is_one(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watched.monitor.set_cluster("", dict)
    assert not messages(caplog) and watched.monitor.beat().dashboard == ""
    watched.monitor.set_cluster("http://head:8265", dict)
    assert messages(caplog) == ["Ray's dashboard: http://head:8265"]
    assert watched.monitor.beat().dashboard == "http://head:8265"


# --- questions ----------------------------------------------------------------------------------


def test_ray_is_asked_every_ten_seconds_and_at_once_about_new_engines(watched: Watched) -> None:
    first, second = Engines(), Engines(states={"ALIVE": 2})
    watched.monitor.watch(first)
    for watched.clock.now in (0.0, 9.9, 10.0, 19.9):
        watched.monitor.look()
    assert first.asked == ["engines", "server", "deaths"] * 2
    watched.monitor.watch(second)
    assert watched.monitor.beat().engines == {}, "those of the earlier engines say nothing"
    watched.monitor.look()
    assert (len(first.asked), second.asked) == (6, ["engines", "server", "deaths"])
    assert watched.monitor.beat().engines == {"ALIVE": 2}


def test_a_slow_shard_gives_the_next_ones_more_time(watched: Watched) -> None:
    watched.commit()  # it took 150 s, and 50 s passed from one commit to the next
    watched.monitor.look()
    for watched.clock.now, alarms in ((499.9, 0), (500.0, 1)):
        watched.monitor.look()
        assert watched.heard.beats[-1].alarms == alarms
    watched.commit(1)
    watched.monitor.look()
    for watched.clock.now, alarms in ((949.9, 0), (950.0, 1)):  # two commits since 900
        watched.monitor.look()
        assert watched.heard.beats[-1].alarms == alarms


def test_a_node_that_leaves_is_logged_once_each_time_it_is_drained(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    leaving = [{"b": None, "a": 30.4}, {"b": 9.0}, {"b": 8.0, "a": 7.0}]
    watched.monitor.set_cluster("", lambda: leaving.pop(0))
    for watched.clock.now in (10.0, 20.0, 30.0):
        watched.monitor.look()
    then = "its engines finish their shards in flight and get no new ones; other nodes take the "
    assert messages(caplog) == [
        f"node {node} leaves the cluster{when}: {then}remaining shards"
        for node, when in (("a", " within 30 s"), ("b", ""), ("a", " within 7 s"))
    ]


@pytest.mark.parametrize(
    ("place", "times", "told"), [("on n1", 1, " (on n1), 1 time"), ("", 3, ", 3 times")]
)
def test_deaths_after_the_first_commit_are_counted_with_what_they_cost(
    watched: Watched, caplog: pytest.LogCaptureFixture, place: str, times: int, told: str
) -> None:
    engines = Engines(died={"a": (0, place)})
    watched.monitor.watch(engines)
    watched.commit()
    watched.monitor.look_at_deaths()
    engines.died = {"a": (times, "on the node that the next process got")}
    for _ in range(2):
        watched.monitor.look_at_deaths()
    assert watched.progress.process_deaths == times
    engines.died = {"a": (times + 2, ""), "b": (1, "")}
    watched.monitor.look_at_deaths()
    assert watched.progress.process_deaths == times + 3
    assert messages(caplog)[:1] == [
        f"an engine's process died{told} so far; its shards in flight run again in the next pass"
    ]


@pytest.mark.parametrize("done", [0, 5])
def test_who_listens_is_told_once_that_the_process_will_end(watched: Watched, done: int) -> None:
    if done:
        watched.commit()
    watched.monitor.set_cluster("", dict, lambda: True)
    for ends in (0, 1, 1):
        watched.monitor.look()
        assert len(watched.heard.ends) == ends
    (cause,) = watched.heard.ends
    assert cause.startswith("Ray on this host died (its raylet process ended)")
    assert f" {done} of 20 rows are committed" in cause


def test_a_limit_on_costs_holds_before_anything_is_counted(watched: Watched) -> None:
    watched.monitor.limits = Limits(max_cost=20)
    watched.monitor.meter = CostMeter(3600.0, gpus_an_engine=1.0)
    watched.monitor.watch(Engines(states={"ALIVE": 2}))
    for watched.clock.now, is_spent in ((0.0, False), (9.9, False), (10.0, True)):
        watched.monitor.look()
        assert (watched.monitor.spent is not None) == is_spent
    assert "0 of 4 shards are committed" in str(watched.monitor.spent)


def test_a_run_that_is_whole_has_not_spent_too_much(watched: Watched) -> None:
    watched.monitor.limits = Limits(max_cost=20)
    watched.monitor.meter = CostMeter(3600.0, before=Spent(99.0, 99.0))
    for shard in range(4):
        watched.commit(shard)
    watched.monitor.look()
    assert watched.monitor.spent is None


# --- the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "noted"), [(2.0, 0), (2.1, 1)])
def test_a_start_is_noted_once_slow_engines_had_time_to_report(
    watched: Watched, after: float, noted: int
) -> None:
    watched.monitor.note_start()
    assert not watched.noted, "nothing is committed"
    watched.clock.now = 500.0 - after  # it is 1000 now
    watched.monitor.watch(Engines(marks={"imports": 1.0}))
    watched.commit()
    for _ in range(2):
        watched.monitor.look()
    assert [start.engines for start in watched.noted] == [1] * noted


def test_the_next_pass_measures_a_start_of_its_own_and_notes_the_first(watched: Watched) -> None:
    first = watched.monitor.starting
    watched.monitor.pass_began()
    assert watched.monitor.starting is first and not watched.noted
    watched.commit()
    for _ in range(2):
        watched.monitor.pass_began()
    assert watched.monitor.starting is not first and watched.noted == [first]
    assert list(watched.monitor.starting.seconds()) == ["workers"]
    watched.commit(1)
    watched.monitor.note_start()
    assert watched.noted == [first]


def test_a_start_that_cannot_be_noted_is_only_logged(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watched.monitor.on_started = lambda start: 1 / 0
    watched.commit()
    for _ in range(2):
        watched.monitor.note_start()
    assert messages(caplog) == [
        "the duration of the start could not be recorded: ZeroDivisionError: division by zero"
    ]
