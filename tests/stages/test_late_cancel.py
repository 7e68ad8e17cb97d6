"""A pass that ends early lets short tasks end: Ray aborts where one is cancelled as it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from helpers.processes import until
from ray.data import DataContext

from prefect_raybatch.cluster.side_by_side import run_in_parallel
from prefect_raybatch.stages import ray_internals
from prefect_raybatch.stages.ray_internals import limit_in_flight, still_running, stop_pass


def work(folder: Path, name: str, ends: bool) -> None:
    """Ends at the word of whoever looks on, or never."""
    (folder / f"begun-{name}").touch()
    while not (ends and (folder / "end").exists()):
        time.sleep(0.02)
    (folder / f"done-{name}").touch()


def stopped_in_the_middle(folder: Path, ends: bool) -> Callable[[], bool]:
    """Stops a pass of two tasks that are at work; says whether the stop is over."""

    def stage(table: pa.Table) -> pa.Table:
        work(folder, str(table["id"][0]), ends)
        return table

    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    limit_in_flight(context, 10)
    one = {"batch_size": None, "batch_format": "pyarrow"}
    with DataContext.current(context):
        dataset = ray.data.range(2, override_num_blocks=2).map_batches(stage, num_cpus=1, **one)

    def read() -> None:
        with DataContext.current(context):
            list(dataset.iter_batches(**one))

    threading.Thread(target=read, daemon=True).start()
    until(lambda: len(list(folder.glob("begun-*"))) == 2, 120, "two tasks at work")
    stop = threading.Thread(target=stop_pass, args=(dataset,), daemon=True)
    stop.start()
    return lambda: not stop.is_alive()


def test_tasks_that_end_soon_are_not_cancelled(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_internals, "END_GRACE", 600.0)
    over = stopped_in_the_middle(tmp_path, ends=True)
    time.sleep(3)  # Ray gives its own loop two before it cancels
    assert not over()
    (tmp_path / "end").touch()
    until(over, 120, "the end of the pass")
    assert len(list(tmp_path.glob("done-*"))) == 2


def test_tasks_that_do_not_end_are_cancelled(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_internals, "END_GRACE", 0.2)
    until(stopped_in_the_middle(tmp_path, ends=False), 120, "the end of the pass")
    assert not list(tmp_path.glob("done-*"))


def test_of_work_side_by_side_only_what_goes_on_is_cancelled(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_internals, "END_GRACE", 1.0)
    cancelled: list[object] = []
    monkeypatch.setattr(ray, "cancel", lambda reference, **_: cancelled.append(reference))

    def item(name: str) -> str:
        if name == "first":
            return name
        work(tmp_path, name, ends=name == "short")
        return name

    made = run_in_parallel(item, iter(["first", "short", "long"]), 3)
    assert next(made) == "first"
    until(lambda: len(list(tmp_path.glob("begun-*"))) == 2, 120, "both at work")
    (tmp_path / "end").touch()
    until(lambda: (tmp_path / "done-short").exists(), 60, "the short one's end")
    made.close()
    (reference,) = cancelled
    monkeypatch.undo()
    ray.cancel(reference, force=True)


def test_a_cluster_that_does_not_say_keeps_nothing_from_being_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ray.exceptions.RaySystemError("away")

    monkeypatch.setattr(ray, "wait", away)
    assert still_running({"a": 1}) == ["a"] and still_running([]) == []
