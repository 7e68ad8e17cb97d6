"""The sweep of arrangements ends in a rate or says plainly that there is none."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # it imports others
    return benchmark("sweep", monkeypatch)


class Slow:
    """An engine whose first rows come back only after so many looks at its figures, and its
    stage: what compiles a grammar before its first step."""

    def __init__(self, looks: int) -> None:
        self.looks, self.rows, self.lock = looks, 0, threading.Lock()
        self.ready = threading.Event()

    def __call__(self, table: pa.Table) -> pa.Table:
        self.ready.wait(60)
        with self.lock:
            self.rows += table.num_rows
        time.sleep(0.001)
        return table

    def stats(self) -> dict[str, int]:
        with self.lock:
            rows = self.rows
        self.looks -= 1
        if self.looks <= 0:
            self.ready.set()
        names = ("rows", "prompt_tokens", "cached_tokens", "output_tokens", "steps")
        return dict.fromkeys(names, rows)

    def load(self) -> dict[str, int]:
        return {"running": 12}


class Rows:
    """Prompts of one length to draw from."""

    def rows(self, count: int) -> tuple[Any, list[int]]:
        return pa.array([[1, 2, 3]] * count, pa.list_(pa.int32())), [40] * count


def measured(
    sweep: ModuleType, engine: Slow, cold: bool = False, kind: str = "tiny-choice"
) -> dict[str, Any]:
    return dict(
        sweep.measured(
            engine,
            engine,
            Rows(),
            kind=sweep.TINY[kind],
            seqs=16,
            seconds=0.05,
            most_warm=60.0,
            begin=0.0,
            cold=cold,
        )
    )


def test_a_window_begins_once_as_many_rows_came_back_as_run_at_once(sweep: ModuleType) -> None:
    found = measured(sweep, Slow(looks=6))
    assert found["rows"] > 0 and found["seconds"] > 0
    assert found["warm"] >= 2 and found["running"] == 12


def test_the_rate_of_whole_answers_is_that_of_steps_and_of_what_ran(sweep: ModuleType) -> None:
    """Of 1,024 sequences of `chat`, 546 rows came back within 5 s of 10 that each takes: 0.96 of
    what 512 gave, where the steps of both said 1.04."""
    told = {"rows": 546, "steps": 72, "seconds": 5.25, "running": 1024.0, "limited": "scheduler"}
    counts = {"prompt_tokens": 546 * 256, "cached_tokens": 0, "output_tokens": 546 * 128}
    shares = dict.fromkeys(("warm", "front_cpu", "core_cpu"), 1.0)
    row = sweep.summed(sweep.KINDS["chat"], [{**told, **counts, **shares}])
    assert row["rows_s"] == 104.0 and row["by_steps"] == 109.714


def test_a_cold_engine_is_measured_after_its_first_rows(sweep: ModuleType) -> None:
    engine = Slow(looks=1)
    engine.ready.set()
    seen: list[int] = []
    stats = engine.stats
    engine.stats = lambda: (seen.append(engine.rows), stats())[1]  # type: ignore[method-assign]
    found = measured(sweep, engine, cold=True)
    assert found["rows"] > 0 and seen[0] == 16


def test_first_rows_get_answers_of_all_lengths(sweep: ModuleType) -> None:
    """Otherwise they come back in waves, of which a window holds one more or one less."""
    feeder = sweep.Feeder(None, sweep.TINY["tiny-text"], Rows(), 64)
    lengths = [json.loads(feeder.fields(number, 12))["max_tokens"] for number in range(6)]
    assert lengths == [2, 4, 8, 10, 12, 12]


def test_what_is_there_already_is_left_out(sweep: ModuleType, tmp_path: Path) -> None:
    """Also what failed; and launches whose engines did not start."""
    out = tmp_path / "sweep.jsonl"
    args = argparse.Namespace(out=str(out), kinds=["record", "free"], only="")
    todo = sweep.Sweep(args, "8b", "", tmp_path, 0.0, None)
    assert todo.wanted("1x1024") == ["record", "free"]
    lines = [
        {"size": "8b", "arrangement": "1x1024", "kind": "record", "error": "died"},
        {"size": "8b", "arrangement": "2x512", "kind": sweep.START, "error": "does not fit"},
        {"size": "05b", "arrangement": "1x1024", "kind": "free", "rows_s": 1.0},
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert todo.wanted("1x1024") == ["free"] and todo.wanted("2x512") == []
    args.only = "record"
    assert todo.wanted("1x1024") == [] and todo.wanted("1x256") == ["record"]


def test_engines_find_the_service_by_which_they_compute_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mps = benchmark("mps", monkeypatch)
    control = tmp_path / mps.CONTROL
    control.write_text(f'#!/bin/sh\necho "$* $(cat) ${mps.PIPES}" >> {tmp_path}/told\n')
    control.chmod(0o755)
    monkeypatch.delenv(mps.PIPES, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with mps.side_by_side(True):
        pipes = os.environ[mps.PIPES]
        assert Path(pipes).is_dir()
    assert mps.PIPES not in os.environ and not Path(pipes).exists()
    begun, ended = (tmp_path / "told").read_text().splitlines()
    assert begun.split() == ["-d", pipes] and ended.split() == ["quit", pipes]
    with mps.side_by_side(False):
        assert mps.PIPES not in os.environ
    monkeypatch.setattr(mps, "CONTROL", "nvidia-no-such-control")
    with pytest.raises(SystemExit, match="comes with NVIDIA's driver"), mps.side_by_side(True):
        pass
