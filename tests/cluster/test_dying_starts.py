"""Engines whose processes are killed as they start: Ray ends the pass for one of them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers.engines import FineEngine, NoEngine
from helpers.small import input_rows, make_job
from ray.exceptions import ActorDiedError

from prefect_raybatch.api import infer_run, plan_run
from prefect_raybatch.driver import monitor
from prefect_raybatch.errors import EngineFailure
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.records import Receipt
from prefect_raybatch.stages.engine import EngineLaunch

STARTS = 4  # of an engine: one, and three more that Ray makes of it


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingEngine(FineEngine):
    """Notes its process and dies as it starts."""

    def __init__(self, launch: EngineLaunch):
        super().__init__(launch)
        (Path(launch.env["NOTES"]) / str(os.getpid())).touch()
        dies()


def a_job(folder: Path, **engine: Any) -> BatchJob:
    pq.write_table(input_rows(0, 40), folder / "in.parquet")
    (folder / "notes").mkdir()
    env = {"NOTES": str(folder / "notes")}
    engine = {"model": "demo", "max_model_len": 64, "num_cpus": 1, "env": env, **engine}
    return make_job(
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": 5},
        engine=engine,
        output={"uri": str(folder / "out")},
    )


def test_engines_that_die_as_they_start_are_told_as_that(
    tmp_path: Path,
    local_ray: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(monitor, "LOOK", 0.1)
    monkeypatch.setattr(monitor, "ASK_ENGINES", 0.1)
    job = a_job(tmp_path)
    with pytest.raises(EngineFailure) as caught:
        infer_run(job, plan_run(job, "key"), engine=DyingEngine)
    said = str(caught.value)
    assert len(list((tmp_path / "notes").iterdir())) == STARTS
    assert said.startswith(f"an engine's process died while starting, {STARTS} times in a row")
    assert "8 units not done" in said and "connection error code 2" in said
    assert "\n" not in said and len(said) < 600
    told = [r.getMessage() for r in caplog.records if "before its first shard" in r.getMessage()]
    # A look may see two deaths at once, and tells of them together.
    assert 0 < len(told) <= STARTS and f", {STARTS} times so far" in told[-1]
    died = {path.name for path in (tmp_path / "notes").iterdir()}
    assert set(re.findall(r"process (\d+) on node ", " ".join(told))) <= died


@pytest.mark.whole
def test_one_that_dies_as_it_starts_beside_others_costs_a_pass(
    tmp_path: Path, local_ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It blames no row, although the pass that ends may be one of units alone."""
    given, texts = Receipt.from_json, list[str]()

    def read(text: str) -> Receipt:
        texts.append(text)
        if len(texts) in (4, 7):  # as Ray Data's iterator does
            raise ActorDiedError(None)
        return given(text)

    monkeypatch.setattr(Receipt, "from_json", staticmethod(read))
    job = a_job(tmp_path)
    progress = infer_run(job, plan_run(job, "key"), engine=FineEngine)
    assert (progress.passes, progress.done, progress.engine_deaths) == (3, 40, 0)
    (why,) = progress.losses
    assert why.startswith("EngineStartDied: an engine's process died while starting, 4 times in")


def test_an_error_of_ours_in_an_engines_constructor_is_no_death(
    tmp_path: Path, local_ray: Any
) -> None:
    job = a_job(tmp_path)
    with pytest.raises(ActorDiedError, match="an engine was started"):
        infer_run(job, plan_run(job, "key"), engine=NoEngine)
