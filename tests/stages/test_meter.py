"""What an engine computed, from its answers to the report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
from helpers.engine_stage import LAUNCH, block, started
from helpers.engines import Stepped, completion
from helpers.reports import timed_commit

from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.ledger.stats import ShardStats, fold_stats
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.sizing.roofline import Work
from prefect_raybatch.stages.load import figures_of
from prefect_raybatch.stages.meter import Meter

__all__ = ["started"]

WORK = Work(
    layers=10.0,
    head=1.0,
    attention=0.0,
    attention_window=0.0,
    window=0,
    weights=100.0,
    kv=0.0,
    kv_window=0.0,
    peak_flops=50.0,
    peak_bytes=400.0,
)


@dataclass
class World:
    """A clock and an engine that are turned by hand; each answer takes 2 tokens of the engine."""

    now: float = 0.0
    steps: int = 0
    busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.engine: Any = Stepped(lambda requests: [completion("x") for _ in requests])
        self.engine.stats = lambda: {"steps": self.steps, "busy_s": self.busy_s}
        self.meter = Meter(WORK, lambda: self.now)

    def work(self, until: float, steps: int, busy: float, rows: int = 1) -> None:
        self.meter.run(self.engine, [None] * rows)  # type: ignore[list-item]
        self.now, self.steps, self.busy_s = until, self.steps + steps, self.busy_s + busy


def test_what_an_engine_did_for_an_earlier_run_is_not_told_by_the_next():
    world = World(now=7.0, steps=50, busy_s=5.0)
    world.meter.begin(world.engine)
    world.work(until=9.0, steps=4, busy=1.5)
    told = world.meter.take_stats(world.engine)
    assert (told.steps, told.up_s, told.idle_s) == (4, 2.0, 0.5)


def test_each_shard_tells_what_was_done_since_the_one_before():
    world = World(now=7.0)
    world.work(until=9.0, steps=4, busy=1.5, rows=2)
    first = world.meter.take_stats(world.engine)
    assert first.to_dict() == {
        "flops": 2 * (2 * 10.0 + 1.0),  # 2 of 3 tokens not cached, and 1 sampled
        "moved_bytes": 400.0,
        "peak_flops": 100.0,
        "peak_bytes": 800.0,
        "steps": 4,
        "up_s": 2.0,
        "idle_s": 0.5,
    }
    world.work(until=10.0, steps=1, busy=1.0)
    second = world.meter.take_stats(world.engine)
    assert (second.flops, second.steps, second.up_s, second.idle_s) == (21.0, 1, 1.0, 0.0)
    assert fold_stats([first, second]).up_s == 3.0


def test_another_engine_counts_from_its_start():
    world = World()
    world.work(until=2.0, steps=50, busy=2.0)
    world.meter.take_stats(world.engine)
    world.engine, world.steps, world.busy_s = World().engine, 0, 0.0
    world.engine.stats = lambda: {"steps": world.steps, "busy_s": world.busy_s}
    world.work(until=3.0, steps=3, busy=0.5)
    told = world.meter.take_stats(world.engine)
    assert (told.steps, told.idle_s) == (3, 0.5)


def test_without_a_known_card_nothing_is_told():
    meter = Meter(None)
    engine: Any = Stepped(lambda requests: [completion("x")])
    assert len(meter.run(engine, [None])) == 1  # type: ignore[list-item]
    assert meter.take_stats(engine) == ShardStats()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_block_tells_it_once_however_many_shards_it_holds(started, shards):
    stage, factory = started(
        lambda requests: [completion("x") for _ in requests], launch=replace(LAUNCH, work=WORK)
    )
    factory.made[0].stats = lambda: {"rows": 1, "refused": 0, "steps": 3, "busy_s": 0.0}
    table = stage(pa.concat_tables([block(Unit(n, 0, 2)) for n in range(shards)]))
    found = fold_stats(figures_of(table.slice(2 * n, 2))[0] for n in range(shards))
    assert found.flops == 2 * 21.0  # the second shard asks the same, and is asked once
    assert found.steps == 3


def test_a_report_says_what_the_gpus_did_and_why_they_stood():
    tally = Tally()
    for engine, began, ended in (("a:1", 0, 50), ("a:1", 50, 100), ("a:2", 10, 80)):
        up = ended - began
        stats = {
            "flops": 25.0 * up,
            "moved_bytes": 100.0 * up,
            "peak_flops": 50.0 * up,
            "peak_bytes": 400.0 * up,
            "up_s": float(up),
            "idle_s": 0.1 * up,
            "samples": float(up),
            "gpu": 0.7,
        }
        commit = timed_commit(1000.0 + began, 1000.0 + ended, **stats)
        tally.add(replace(commit, where={"engine": engine, "node": "a"}))
    # 170 engine-seconds with rows, 10 before a:2 had its first, 20 after it had its last
    assert tally.roofline() == {
        "mfu": round(0.5 * 170 / 200, 4),
        "mbu": round(0.25 * 170 / 200, 4),
        "idle_tail": 0.1,
        "idle_rows": round((17 + 10) / 200, 4),
        "idle_host": round(0.2 * 170 / 200, 4),
    }


def test_commits_of_before_say_nothing_of_it():
    tally = Tally()
    tally.add(timed_commit(1.0, 2.0))
    assert tally.roofline() == {}
