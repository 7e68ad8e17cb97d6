"""Engines whose processes end again and again, until Ray restarts them no more."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import FineEngine
from helpers.small import input_rows, make_job

from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import EngineFailure
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.finalize_run import finalize_run
from prefect_raybatch.runs.infer_run import infer_run
from prefect_raybatch.runs.plan_run import plan_run
from prefect_raybatch.stages.block import passes_by
from prefect_raybatch.stages.engine import EngineSpec
from prefect_raybatch.storage import open_store

ROWS = 60
LIVES = "lives"  # a word for each process in the order of their starts, the last one for all others


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalEngine(FineEngine):
    """Lives as the next word in LIVES says: `start` dies as it starts, `work` with its first block,
    a number with the block after so many, `row-N` with each block that holds row N or a later one;
    `well` never dies."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        folder = Path(spec.env["NOTES"])
        words = spec.env[LIVES].split()
        number = len(list(folder.iterdir()))
        (folder / f"{number}-{os.getpid()}").touch()
        self.word, self.answered = words[min(number, len(words) - 1)], 0
        if self.word == "start":
            die()

    def __call__(self, table: pa.Table) -> pa.Table:
        if not passes_by(table):
            if self.word == "work" or (self.word.isdigit() and self.answered >= int(self.word)):
                die()
            first = self.word.removeprefix("row-")
            if first != self.word and max(table["id"].to_pylist()) >= int(first):
                die()
        self.answered += 1
        return super().__call__(table)


def job_in(folder: Path, lives: str, **limits: Any) -> BatchJob:
    pq.write_table(input_rows(0, ROWS), folder / "in.parquet")
    (folder / "notes").mkdir()
    env = {"NOTES": str(folder / "notes"), LIVES: lives}
    return make_job(
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": 1},
        engine={
            "model": "demo",
            "max_model_len": 64,
            "num_cpus": 1,
            "replicas": 1,
            "max_concurrent_batches": 2,
            "env": env,
        },
        output={"uri": str(folder / "out")},
        limits={"max_failed": 1.0, **limits},
    )


def starts(folder: Path) -> int:
    return len(list((folder / "notes").iterdir()))


@pytest.mark.parametrize(
    ("lives", "deaths"),
    [
        ("3 start work start well", 4),  # all that Ray restarts are used up, with no unit in flight
        ("3 work work work well", 4),  # likewise, at work
        ("3 work 5 start work 5 start start well", 8),
    ],
)
def test_a_run_goes_on_with_another_engine_once_ray_restarts_one_no_more(
    tmp_path: Path, local_ray: Any, lives: str, deaths: int
) -> None:
    job = job_in(tmp_path, lives)
    run = plan_run(job, "key")
    seen: list[Progress] = []
    progress = infer_run(job, run, seen.append, engine=MortalEngine)
    assert progress.done == ROWS and progress.tally.failed == 0
    assert progress.engine_deaths == deaths
    assert starts(tmp_path) > deaths
    assert finalize_run(job, run, progress).rows == ROWS and verify(open_store(run.uri)).ok


@pytest.mark.parametrize("lives", ["3 start", "3 work", "work", "3 work start"])
def test_a_run_ends_with_engine_failure_where_engines_die_for_ever(
    tmp_path: Path, local_ray: Any, lives: str
) -> None:
    job = job_in(tmp_path, lives)
    run = plan_run(job, "key")
    with pytest.raises(EngineFailure, match="died"):
        infer_run(job, run, engine=MortalEngine)
    assert starts(tmp_path) < 80
