"""Engines that are forked from the process that imports vLLM answer, die and end like others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from e2e_functions import GATE, OPEN, ROWS_A_SHARD
from helpers.needs import needs_vllm

from prefect_raybatch.imports import start
from prefect_raybatch.stages.vllm import forking
from tests.helpers.processes import below, running_but_agents, title, until
from tests.helpers.small import input_rows

pytestmark = needs_vllm

ROWS = 600


def variables(**more: str) -> dict[str, str]:
    """Those of a command that imports early: an engine in this process sets the `METHOD`."""
    kept = {name: value for name, value in os.environ.items() if name != forking.METHOD}
    return {**kept, start.SWITCH: "1", **more}


def begun(run: subprocess.Popen[Any]) -> list[psutil.Process]:
    """The process that imports vLLM for a command."""
    assert run.poll() is None, "the command has ended"
    return below(run.pid, start.IMPORT_SERVER)


@pytest.mark.whole
@pytest.mark.parametrize(
    "apart",
    [
        pytest.param("0", id="core in the actor"),
        pytest.param("1", id="core apart", marks=pytest.mark.nightly),
    ],
)
def test_a_run_loses_nothing_when_a_forked_engine_is_killed(tmp_path: Path, apart: str) -> None:
    pq.write_table(input_rows(0, ROWS), tmp_path / "in.parquet")
    job = {
        "name": "forked",
        "source": {"uri": str(tmp_path / "in.parquet"), "rows_per_shard": ROWS_A_SHARD},
        "prompt": {"function": "e2e_functions:ask_at_gate"},
        "sampling": {"max_tokens": 4},
        "engine": {"model": "demo", "num_cpus": 0.5, "max_model_len": 512},
        "cluster": {"prepare": {"num_cpus": 0.5}, "finish": {"num_cpus": 0.5}},
        "output": {"uri": str(tmp_path / "out")},
        "limits": {"function_seconds": 0},  # the gate is no hanging function
    }
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "most").write_text("4")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    words = ["run", str(tmp_path / "job.yaml"), "--no-prefect", "--run-key", "key", "--json"]
    run = subprocess.Popen(
        [sys.executable, "-m", "prefect_raybatch.cli", *words],
        env=variables(VLLM_ENABLE_V1_MULTIPROCESSING=apart, **{GATE: str(gate)}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        (imports,) = until(lambda: begun(run), 120, "the imports")
        engine, *_ = until(lambda: below(imports.pid, "EngineStage"), 300, "an engine")
        assert os.getpgid(engine.pid) == engine.pid
        commits = tmp_path / "out/key/_raybatch/commits"
        until(lambda: list(commits.glob("*.json")), 300, "a commit")
        everything = [*below(run.pid), *below(imports.pid)]
        engine.send_signal(signal.SIGKILL)
        until(lambda: not title(engine), 60, "its end")
        (gate / OPEN).touch()  # most rows are left to another engine
        said, _ = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 0, said
    report = json.loads(said)  # nothing else is printed
    assert report["good"] == report["rows"] == ROWS
    until(lambda: not running_but_agents(everything), 60, "the end of all processes")


@pytest.mark.whole
def test_nothing_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefect_raybatch.cli", "demo", "--rows", "20000"]
    words = [*command, "--no-prefect", "--folder", str(tmp_path)]
    with subprocess.Popen(words, env=variables(), stdout=subprocess.DEVNULL) as run:
        (imports,) = until(lambda: begun(run), 120, "the imports")
        until(lambda: below(imports.pid, "EngineStage"), 300, "an engine")
        everything = [psutil.Process(run.pid), *below(run.pid)]
        run.kill()
    until(lambda: not running_but_agents(everything), 120, "the end of all processes")
