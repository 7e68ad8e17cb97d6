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

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.sizing.cards import CARDS

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


def measured(
    sweep: ModuleType, engine: Slow, cold: bool = False, kind: str = "tiny-choice"
) -> dict[str, Any]:
    return dict(
        sweep.measured(
            engine,
            engine,
            kind=sweep.TINY[kind],
            name=kind,
            seqs=16,
            rate=100.0,
            fill=0.01,
            latency=0.01,
            seconds=0.05,
            begin=0.0,
            cold=cold,
        )
    )


def test_the_window_of_choices_waits_for_the_first_rows(sweep: ModuleType) -> None:
    """It was over before the first step of a cold engine, so that 0 rows were measured."""
    found = measured(sweep, Slow(looks=6))
    assert found["rows"] > 0 and found["seconds"] > 0


def test_answers_that_take_long_are_not_measured_as_one_wave(sweep: ModuleType) -> None:
    """Of 1,024 sequences of `chat`, 1,153 rows were one wave and its drain: 0.86 of 512's rate. A
    window right after the first answers, at 24 tokens of 128, was no better."""
    kinds = sweep.KINDS
    assert sweep.window(kinds["chat"], 5.0, 9.0, 5.0) == (False, True, 9.0)
    assert sweep.window(kinds["long"], 2.0, 22.0, 5.0) == (False, True, 1.0)
    # Prompts of which there is no end within a window, and a single step of 24 seconds.
    assert sweep.window(kinds["rag"], 45.0, 48.0, 5.0) == (True, False, 2.0)
    assert sweep.window(kinds["judge"], 23.0, 24.0, 5.0) == (True, False, 2.0)


def test_the_rate_of_whole_answers_is_that_of_steps_and_of_what_ran(
    sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,024 sequences of `chat`, 546 rows came back within 5 s of 10 that each takes: 0.96 of
    what 512 gave, where the steps of both said 1.04."""
    engine = Slow(looks=1)
    engine.ready.set()
    monkeypatch.setattr(sweep, "MOST_WARM", 0.1)
    found = measured(sweep, engine, kind="tiny-chat")
    assert found["running"] == 12 and "running" not in measured(sweep, Slow(looks=6))
    told = {"rows": 546, "steps": 72, "seconds": 5.25, "running": 1024.0, "whole": False}
    counts = {"prompt_tokens": 546 * 256, "cached_tokens": 0, "output_tokens": 546 * 128}
    monkeypatch.setattr(sweep, "answers", lambda pipes, seconds: [{**told, **counts}])
    out = tmp_path / "sweep.jsonl"
    args = argparse.Namespace(
        out=str(out), size="8b", device="cpu", device_name="H200", mps=False, seconds=5.0
    )
    args.known_kinds = sweep.KINDS
    one = sweep.Arrangement.of("1x1024")
    assert sweep.measure(args, one, None, [], "chat", 72.0, time.time() + 1e3)
    (row,) = sweep.read(args)
    assert row["rows_s"] == 104.0 and row["rate"] == row["by_steps"] == 109.714


def test_a_cold_engine_is_measured_after_its_first_rows(sweep: ModuleType) -> None:
    engine = Slow(looks=1)
    engine.ready.set()
    seen: list[int] = []
    stats = engine.stats
    engine.stats = lambda: (seen.append(engine.rows), stats())[1]  # type: ignore[method-assign]
    found = measured(sweep, engine, cold=True)
    assert found["rows"] > 0 and seen[0] == 16


def test_a_window_without_rows_is_an_error(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "MOST_FIRST", 0.0)
    engine = Slow(looks=8)  # of which the last ends the window
    assert "no row came back within" in measured(sweep, engine)["error"]


def test_the_report_says_what_was_not_measured(
    sweep: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line with 0 rows/s, as earlier sweeps wrote them, was divided by."""
    out = tmp_path / "sweep.jsonl"
    model = demo_model_path()
    about = {"size": "demo", "device": "H200", "arrangement": "1x256"}
    kind = {"prompt": 116, "shared": 0.83, "out": 3, "choice": True, "fitted": True}
    none = {**about, "kind": "company", **kind, "rows_s": 0.0, "rows": 0}
    args = argparse.Namespace(
        out=str(out),
        size="demo",
        device="gpu",
        model=model,
        max_model_len=256,
        card=CARDS["H200"],
        kinds=["company", "triage"],
        mps=False,
    )
    out.write_text(json.dumps(none) + "\n")
    sweep.report(args)
    said = capsys.readouterr().out
    assert "1x256            company    not measured: no rows" in said
    assert "no arrangement was measured, so nothing can be said of company, triage" in said
    with out.open("a") as file:  # of another way to share a GPU
        file.write(json.dumps({**none, "mps": True, "rows_s": 777.0}) + "\n")
    good = {**about, "kind": "triage", **kind, "out": 24, "choice": False, "rows_s": 400.0}
    with out.open("a") as file:
        file.write(json.dumps(good) + "\n")
    sweep.report(args)
    said = capsys.readouterr().out
    assert "company    no arrangement measured" in said and "400.0" in said
    assert "nothing can be said" not in said and "777" not in said


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
