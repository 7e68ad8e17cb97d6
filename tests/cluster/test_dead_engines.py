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
from helpers.heard import Heard
from helpers.small import input_rows, make_job

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.driver import monitor
from prefect_raybatch.errors import EngineFailure
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.layout import commit_path
from prefect_raybatch.result.verify import verify
from prefect_raybatch.stages.block import is_passthrough
from prefect_raybatch.stages.engine import EngineLaunch
from prefect_raybatch.storage import open_store

ROWS = 60
STARTS = 4  # of the process of an actor: one, and three more that Ray makes of it
LIVES = "lives"  # a word for each process in the order of their starts, the last one for all others


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalEngine(FineEngine):
    """Lives as the next word in LIVES says: `start` dies as it starts, `work` with its first block,
    a number with the block after so many; `well` never dies."""

    def __init__(self, launch: EngineLaunch):
        super().__init__(launch)
        folder = Path(launch.env["NOTES"])
        words = launch.env[LIVES].split()
        number = len(list(folder.iterdir()))
        (folder / f"{number}-{os.getpid()}").touch()
        word, self.answered = words[min(number, len(words) - 1)], 0
        if word == "start":
            die()
        self.most = {"work": 0, "well": ROWS}[word] if not word.isdigit() else int(word)

    def __call__(self, table: pa.Table) -> pa.Table:
        if not is_passthrough(table) and self.answered >= self.most:
            die()
        self.answered += 1
        return super().__call__(table)


class DeadlyRows(FineEngine):
    """Dies of the rows whose ids are in DEADLY."""

    DEADLY = {ROWS - 2, ROWS - 1}

    def __call__(self, table: pa.Table) -> pa.Table:
        if not is_passthrough(table) and self.DEADLY & set(table["id"].to_pylist()):
            die()
        return super().__call__(table)


def job_in(folder: Path, lives: str, shard_rows: int = 1, **limits: Any) -> BatchJob:
    pq.write_table(input_rows(0, ROWS), folder / "in.parquet")
    (folder / "notes").mkdir()
    env = {"NOTES": str(folder / "notes"), LIVES: lives}
    return make_job(
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": shard_rows},
        engine={
            "model": "demo",
            "max_model_len": 64,
            "num_cpus": 1,
            "replicas": 1,
            "max_concurrent_batches": 2,
            "env": env,
        },
        output={"uri": str(folder / "out")},
        limits={"max_failed_rows": 1, **limits},
    )


def starts(folder: Path) -> int:
    return len(list((folder / "notes").iterdir()))


@pytest.mark.whole
def test_a_run_goes_on_with_another_engine_once_ray_restarts_one_no_more(
    tmp_path: Path, local_ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice at work and twice as it starts again: it is dead with no block in it."""
    monkeypatch.setattr(monitor, "LOOK", 0.1)
    monkeypatch.setattr(monitor, "ASK_ENGINES", 0.1)
    job = job_in(tmp_path, "3 start work start well")
    run = plan_run(job, "key")
    seen = Heard()
    progress = infer_run(job, run, seen, engine=MortalEngine)
    assert progress.done == ROWS and progress.tally.failed == 0
    assert progress.engine_deaths == STARTS
    assert starts(tmp_path) > STARTS
    assert any(beat.engine_deaths for beat in seen.beats), "told while it runs"
    assert finalize_run(job, run, progress).rows == ROWS and verify(open_store(run.uri)).ok


@pytest.mark.whole
def test_a_run_ends_with_engine_failure_where_engines_die_for_ever(
    tmp_path: Path, local_ray: Any
) -> None:
    job = job_in(tmp_path, "3 work start")
    run = plan_run(job, "key")
    with pytest.raises(EngineFailure, match="died"):
        infer_run(job, run, engine=MortalEngine)
    assert 2 * STARTS <= starts(tmp_path) < 10 * STARTS


@pytest.mark.whole
def test_a_run_that_has_only_rows_left_that_kill_engines_quarantines_them(
    tmp_path: Path, local_ray: Any
) -> None:
    job = job_in(tmp_path, "well", shard_rows=(ROWS - 2) // 2, max_failed_rows=2)
    run = plan_run(job, "key")
    infer_run(job, run, engine=FineEngine)
    Path(run.uri, commit_path(2)).unlink()
    progress = infer_run(job, run, engine=DeadlyRows)
    assert progress.done == ROWS and progress.tally.failed == len(DeadlyRows.DEADLY)
    report = finalize_run(job, run, progress)
    assert report.failures and all("EngineDied" in failure for failure in report.failures)
