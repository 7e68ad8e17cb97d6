"""Engines may run ahead of the commits only so far, whatever the stage behind them does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    BackpressurePolicy,
)

from prefect_raybatch.stages.ray_internals import limit_in_flight, stop_pass

BLOCKS, LIMIT = 20, 3


class Engine:
    """Notes each block when it comes in."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __call__(self, table: pa.Table) -> pa.Table:
        (self.folder / f"in-{table['id'][0]}").touch()
        return table


def slow(table: pa.Table, folder: str, patience: float) -> pa.Table:
    """Behind the engine: notes how many blocks the engine has been given that are not done, and
    waits at most so many seconds until it was once more than the limit."""
    place, until = Path(folder), time.monotonic() + patience

    def found() -> int:
        return len(list(place.glob("in-*"))) - len(list(place.glob("out-*")))

    while (ahead := found()) <= LIMIT and most(place) <= LIMIT and time.monotonic() < until:
        time.sleep(0.02)
    (place / f"ahead-{ahead}").touch()
    (place / f"out-{table['id'][0]}").touch()
    return table


def most(folder: Path) -> int:
    return max((int(path.name[len("ahead-") :]) for path in folder.glob("ahead-*")), default=0)


class Starved(BackpressurePolicy):
    """Lets nothing start, as budgets do on a small machine: Ray then starts what it can anyway."""

    def can_add_input(self, op: Any) -> bool:
        return False


def ahead(
    folder: Path, blocks: int | None, *policies: type[BackpressurePolicy], patience: float = 0.1
) -> int:
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    if blocks is not None:
        limit_in_flight(context, blocks)
        key = ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY
        context.set_config(key, [*context.get_config(key), *policies])
    one: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}
    with DataContext.current(context):
        found = (
            ray.data.range(BLOCKS, override_num_blocks=BLOCKS)
            .map_batches(
                Engine,
                fn_constructor_args=[str(folder)],
                compute=ActorPoolStrategy(size=1),
                num_cpus=0.5,
                **one,
            )
            .map_batches(slow, fn_args=[str(folder), patience], num_cpus=1, concurrency=1, **one)
        )
        assert sum(batch.num_rows for batch in found.iter_batches(**one)) == BLOCKS
    return most(folder)


def test_engines_wait_for_the_stage_behind_them(local_ray: None, tmp_path: Path) -> None:
    free, held = tmp_path / "free", tmp_path / "held"
    free.mkdir()
    held.mkdir()
    assert ahead(free, None, patience=60) > LIMIT  # what Ray does by itself
    assert ahead(held, LIMIT) <= LIMIT


@pytest.mark.whole
def test_they_wait_where_ray_starts_a_stage_against_all_limits(
    local_ray: None, tmp_path: Path
) -> None:
    assert ahead(tmp_path, LIMIT, Starved) <= LIMIT


class Skips:
    """Answers the first blocks, and gives the others on without their rows, as an engine does with
    the shards of a run that is drained."""

    def __call__(self, table: pa.Table) -> pa.Table:
        return table if table["id"][0].as_py() < LIMIT else table.slice(0, 0)


def as_it_is(table: pa.Table) -> pa.Table:
    return table


def test_blocks_without_rows_do_not_close_the_window(local_ray: None) -> None:
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    limit_in_flight(context, LIMIT)
    one: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}
    with DataContext.current(context):
        found = (
            ray.data.range(BLOCKS, override_num_blocks=BLOCKS)
            .map_batches(Skips, compute=ActorPoolStrategy(size=1), num_cpus=0.5, **one)
            .map_batches(as_it_is, num_cpus=1, **one)
        )
        with ThreadPoolExecutor(1) as pool:
            rows = pool.submit(lambda: sum(b.num_rows for b in found.iter_batches(**one)))
            try:
                assert rows.result(timeout=120) == LIMIT
            finally:
                stop_pass(found)
