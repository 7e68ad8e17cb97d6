"""Engines that outlast their command, with real Ray: a later command uses them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.engines import NotedEngine
from helpers.environ import clean, python_path
from helpers.processes import running, title, until
from helpers.small import input_rows, job_dict

from prefect_raybatch.standby.claim import standing_clusters, stop_clusters

SCRIPT = """
import sys
from prefect_raybatch import BatchJob
from prefect_raybatch.api import infer_run, plan_run
from prefect_raybatch.standby.claim import engines_outlast
from test_outlast import GatedEngine

job = BatchJob.from_yaml(sys.argv[1])
with engines_outlast(2, 600.0):
    progress = infer_run(job, plan_run(job, sys.argv[2]), engine=GatedEngine)
print(progress.done)
"""


class GatedEngine(NotedEngine):
    """Answers no block while there is a gate."""

    def __call__(self, table: pa.Table) -> pa.Table:
        gate = Path(self.spec.env["GATE"])
        if gate.exists():
            self.note("waits")
            gate.read_text()  # a pipe that nobody writes to
        return super().__call__(table)


@dataclass
class Commands:
    """Runs commands that share a folder for temporary files, and so a standing cluster."""

    folder: Path
    short: str

    def begin(self, key: str) -> subprocess.Popen[str]:
        env = clean() | {"PYTHONPATH": python_path(), "TMPDIR": self.short}
        env |= {"RAY_TMPDIR": self.short, "PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, "-c", SCRIPT, str(self.folder / "job.yaml"), key]
        with (self.folder / f"{key}.txt").open("w") as log:
            return subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.folder
            )

    def run(self, key: str) -> None:
        """Run to the end, and see that all rows are done."""
        with self.begin(key) as process:
            done = process.communicate()[0]
        assert done.strip() == "20", (self.folder / f"{key}.txt").read_text()

    def notes(self) -> list[dict[str, object]]:
        file = self.folder / "notes"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def count(self, what: str) -> int:
        return Counter(note["what"] for note in self.notes())[what]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    pq.write_table(input_rows(0, 20), tmp_path / "in.parquet")
    env = {"ENGINE_NOTES": str(tmp_path / "notes"), "GATE": str(tmp_path / "gate")}
    job = job_dict(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 10},
        output={"uri": str(tmp_path / "out")},
        cluster={"prepare": {"concurrency": 1}},  # each process of Ray imports for itself
        engine={"model": "demo", "max_model_len": 256, "env": env},
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    short = tempfile.mkdtemp(prefix="rb", dir="/tmp")  # short: sockets lie in it
    monkeypatch.setattr(tempfile, "tempdir", short)
    yield Commands(tmp_path, short)
    stop_clusters()
    shutil.rmtree(short, ignore_errors=True)


def of_keeper() -> list[psutil.Process]:
    """The keeper of the standing cluster, and all processes below it."""
    (found,) = standing_clusters()
    keeper = psutil.Process(found.pid)
    return [keeper, *keeper.children(recursive=True)]


@pytest.mark.whole
def test_the_next_command_uses_the_engine_until_it_is_stopped(commands: Commands) -> None:
    commands.run("first")
    commands.run("second")
    assert (commands.count("started"), commands.count("taken over")) == (1, 1)
    assert len({note["pid"] for note in commands.notes()}) == 1
    (found,) = standing_clusters()
    assert [engine.model for engine in found.engines] == ["demo"] and found.used_by is None
    processes = of_keeper()
    assert stop_clusters() == (1, [])
    until(lambda: not running(processes), 60, "the end of the cluster")


@pytest.mark.whole
def test_engines_survive_a_killed_command_but_not_their_keeper(commands: Commands) -> None:
    commands.run("first")
    os.mkfifo(commands.folder / "gate")
    with commands.begin("second") as killed:
        until(lambda: commands.count("waits"), 120, "a block in the engine")
        stuck = commands.notes()[-1]["pid"]
        assert standing_clusters()[0].used_by == killed.pid
        killed.kill()
    until(lambda: standing_clusters()[0].used_by is None, 60, "the release of the cluster")
    (commands.folder / "gate").unlink()
    commands.run("second")  # with another engine: blocks of the killed command are in this one
    last = commands.notes()[-1]
    assert last["what"] == "started" and last["pid"] != stuck
    keeper, *_ = processes = of_keeper()
    engines = [one for one in processes if "ray::EngineHost" in title(one)]
    assert len(engines) == 1
    keeper.send_signal(signal.SIGKILL)
    until(lambda: not running([keeper, *engines]), 60, "the end of the engine")
    assert standing_clusters() == []
