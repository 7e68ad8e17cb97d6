"""Drained runs: what is in flight is committed, the rest is left, and the run is resumed."""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.command_line import called
from helpers.engines import FakeEngine
from helpers.processes import until
from helpers.retries import first_run
from helpers.small import Passes, make_job, small_run
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.exceptions import CancelledRun

from prefect_raybatch import BatchJob, batch_inference
from prefect_raybatch.api import finalize_run, infer_run, plan_run, submission
from prefect_raybatch.cli.commands import exit_status
from prefect_raybatch.driver.driver import Driver, Progress
from prefect_raybatch.driver.heartbeat import Heartbeat
from prefect_raybatch.errors import ConfigError, JobStopped, RunDrained
from prefect_raybatch.flow.flows import call_flow as called_flow
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger import drains
from prefect_raybatch.ledger.drains import Draining, put_drain, read_drain
from prefect_raybatch.ledger.increments import requests_ledger
from prefect_raybatch.ledger.layout import PIECES, PLAN, commit_path, heartbeat_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.drain import drain_run
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.status import status
from prefect_raybatch.stages.block import is_passthrough, units_of
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.storage import open_store

ROWS = 60
FREE, IN_FLIGHT = 3, 3  # blocks that the engine answers at once, and those that it holds
WAITING = 40  # rows that are prepared when the run is drained


def test_a_command_whose_flow_run_is_cancelled_says_so() -> None:
    """Not with a traceback: its exit status is that of a stopped run."""

    def cancelled() -> None:
        raise CancelledRun("The run was cancelled.")

    with pytest.raises(JobStopped, match="was cancelled"):
        called_flow(cancelled)


def test_a_driver_ends_between_passes_and_keeps_what_is_committed(tmp_path):
    made = small_run(tmp_path, rows=20, per_shard=5)
    told: list[bool] = []

    class Half(Passes):
        """Gives receipts for the first two units: nothing more is begun then."""

        def __call__(self, units: Any, isolated: bool) -> Any:
            yield from super().__call__(units[:2], isolated)
            told.append(True)

    passes = Half(made)
    driver = Driver(made.plan, made.shards, made.ledger, Limits(), draining=lambda: bool(told))
    driver.resume()
    with pytest.raises(RunDrained, match=r"^drained: 2 of 4 shards are committed; 2 are left"):
        driver.run(passes, passes.quarantine)
    assert made.ledger.committed(made.plan).tolist() == [True, True, False, False]
    assert len(passes.calls) == 1


def test_a_row_that_was_alone_when_the_run_was_drained_did_not_die_again(tmp_path):
    """It had killed an engine once: what is given back must not count as the second time."""
    made = small_run(tmp_path, rows=1, per_shard=1)
    told: list[bool] = []

    def third(number: int) -> None:
        if number == 3:
            told.append(True)
            passes.silent = True  # given back without a receipt

    passes = Passes(made, poison={(0, 0)}, before=third)
    driver = Driver(made.plan, made.shards, made.ledger, Limits(), draining=lambda: bool(told))
    driver.resume()
    with pytest.raises(RunDrained, match="drained: 0 of 1 shard"):
        driver.run(passes, passes.quarantine)
    assert passes.calls[-1][1] and not passes.quarantined


def test_a_driver_looks_afresh_before_it_takes_skipped_shards_for_deaths(tmp_path):
    """Engines heard of it a moment before the driver did, whose last look is not old yet."""
    made = small_run(tmp_path, rows=1, per_shard=1)
    made.ledger.note_attempt("a", {})

    def second(number: int) -> None:
        if number == 2:  # alone, after a first death
            put_drain(made.ledger, "me@here")
            passes.silent = True

    passes = Passes(made, poison={(0, 0)}, before=second)
    draining = Draining(made.store, "a").look
    limits = Limits(engine_deaths=1)
    driver = Driver(made.plan, made.shards, made.ledger, limits, draining=draining)
    driver.resume()
    with pytest.raises(RunDrained, match="drained: 0 of 1 shard"):
        driver.run(passes, passes.quarantine)
    assert len(passes.calls) == 2 and not passes.quarantined


def test_a_word_concerns_the_attempts_that_were_there(tmp_path, monkeypatch):
    made = small_run(tmp_path)
    made.ledger.note_attempt("a", {})
    ours = Draining(made.store, "a")
    assert not ours()
    put_drain(made.ledger, "me@here")
    assert not ours()  # it looks now and then
    monkeypatch.setattr(drains, "DRAIN_LOOK", 0.0)
    assert ours() and pickle.loads(pickle.dumps(ours))()
    made.ledger.note_attempt("b", {})
    assert not Draining(made.store, "b")()
    made.store.put("_raybatch/drain.json", b"{")
    assert not Draining(made.store, "a")() and ours()


def test_only_what_is_not_complete_is_drained(tmp_path, capsys):
    made = first_run(tmp_path)
    with pytest.raises(ConfigError, match="is complete, so there is nothing to drain"):
        drain_run(made.store.uri)
    other = first_run(tmp_path, key="other", finish=False)
    code, said, _ = called(capsys, "drain", other.store.uri)
    assert code == 0 and "No active driver in the last minute" in said and "20 of 20 rows" in said
    assert exit_status(RunDrained("drained: x")) == 4


@pytest.mark.parametrize("path", [f"partial/_{'0' * 32}/_PARTIAL.json", commit_path(1)])
def test_a_run_with_a_damaged_record_is_drained(tmp_path, path):
    made = first_run(tmp_path, finish=False)
    made.ledger.note_attempt("a", {})
    made.store.put(path, b"{}")
    drained = drain_run(made.store.uri)
    assert (drained.run_key, drained.done, drained.rows) == ("key", 20, 20)
    assert Draining(made.store, "a")()


def test_the_drain_of_a_repaired_run_is_that_of_the_run_that_continues_it(tmp_path):
    made = first_run(tmp_path)
    made.store.delete([commit_path(1)])
    repair_run(made.store.uri)
    fork = Ledger(open_store(f"{made.store.uri}.m1"))
    fork.note_attempt("a", {})
    drained = drain_run(made.store.uri)
    assert (drained.run, drained.done, drained.rows) == (fork.store.uri, 15, 20)
    assert Draining(fork.store, "a")() and read_drain(made.store) is None


def test_a_driver_at_work_on_a_run_that_was_repaired_is_drained(tmp_path):
    made = first_run(tmp_path, finish=False)
    next((tmp_path / "key" / PIECES).iterdir()).unlink()
    repair_run(made.store.uri)
    fork = Ledger(open_store(f"{made.store.uri}.m1"))
    for ledger, name in ((made.ledger, "a"), (fork, "b")):
        ledger.note_attempt(name, {})
        ledger.store.put(heartbeat_path(name), Heartbeat(time.time()).to_bytes())
    drained = drain_run(made.store.uri)
    assert drained.run == fork.store.uri
    assert sorted(beat["attempt"] for beat in drained.live) == ["a", "b"]
    assert Draining(made.store, "a")() and Draining(fork.store, "b")()


def test_a_damaged_record_of_a_repaired_run_does_not_keep_the_next_run_from_draining(tmp_path):
    made = first_run(tmp_path, finish=False)
    next((tmp_path / "key" / PIECES).iterdir()).unlink()
    repair_run(made.store.uri)
    fork = Ledger(open_store(f"{made.store.uri}.m1"))
    for ledger, name in ((made.ledger, "a"), (fork, "b")):
        ledger.note_attempt(name, {})
        ledger.store.put(heartbeat_path(name), Heartbeat(time.time()).to_bytes())
    requests_ledger(made.store).store.put(PLAN, b"{")
    drained = drain_run(made.store.uri)
    assert (drained.run, [beat["attempt"] for beat in drained.live]) == (fork.store.uri, ["b"])
    assert Draining(made.store, "a")() and Draining(fork.store, "b")()


class HeldEngine(FakeEngine):
    """Answers three blocks, and the others once it has seen that the run is to be drained."""

    def __init__(self, launch: EngineLaunch):
        super().__init__(launch)
        self.launch, self.free, self.lock = launch, FREE, threading.Lock()

    def __call__(self, table: pa.Table) -> pa.Table:
        table = EngineStage.without_committed(self, table)  # type: ignore[arg-type]
        if is_passthrough(table):
            return table
        with self.lock:
            self.free -= 1
            held = self.free < 0
        if held:
            (unit,) = units_of(table)
            assert self.launch.done is not None
            until(partial(self.launch.done, unit.shard), 240, "the word to end")
        return super().__call__(table)


def job_in(folder: Path) -> BatchJob:
    """One engine that has three blocks at most, so that the others wait at its door."""
    table = pa.table(
        {
            "id": range(ROWS),
            "Company": [f"Company {i}" for i in range(ROWS)],
            "folder": [str(prepared(folder))] * ROWS,
        }
    )
    pq.write_table(table, folder / "in.parquet")
    prepared(folder).mkdir()
    return make_job(
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": 1},
        prompt={"function": "helpers.functions:noted"},
        engine={
            "model": "demo",
            "max_model_len": 64,
            "num_cpus": 1,
            "replicas": 1,
            "max_concurrent_batches": 2,
        },
        output={"uri": str(folder / "out")},
        limits={"max_failed_fraction": 0.1},
    )


def prepared(folder: Path) -> Path:
    return folder / "prepared"


def count(folder: Path) -> int:
    return len(list(folder.iterdir()))


@pytest.mark.whole
def test_a_run_is_drained_and_resumed_as_a_flow_that_is_neither_failed_nor_complete(
    prefect_api, local_ray, tmp_path, monkeypatch
):
    job, seen = job_in(tmp_path), list[Progress]()
    key = f"drained-{uuid.uuid4().hex[:8]}"  # of this test's flow run among the server's

    def drain_soon(progress: Progress) -> None:
        if progress.tally.shards >= FREE and not seen:
            seen.append(progress)
            # Many more blocks than may be between an engine and the driver wait at its door: it
            # skips them all, and none has rows.
            until(lambda: count(prepared(tmp_path)) >= WAITING, 240, "rows at the engine's door")
            assert drain_run(f"{tmp_path}/out/{key}").live

    def infer(job: BatchJob, run: Any, observe: Any) -> Any:
        def both(progress: Progress) -> None:
            observe(progress)
            drain_soon(progress)

        return infer_run(job, run, both, engine=HeldEngine)

    monkeypatch.setattr(submission, "infer_run", infer)
    with pytest.raises(RunDrained, match="drained: "):
        called_flow(batch_inference, job, key)
    run = plan_run(job, key)
    found = status(run.uri)
    assert found.state == "unfinished" and found.drained
    assert FREE <= found.committed <= FREE + IN_FLIGHT
    with get_client(sync_client=True) as client:
        named = FlowRunFilter(name=FlowRunFilterName(any_=[key]))
        (flow_run,) = client.read_flow_runs(flow_run_filter=named)
    assert flow_run.state is not None
    assert (flow_run.state.name, flow_run.state.type.value) == ("Drained", "CANCELLED")
    before = found.committed
    progress = infer_run(job, run, engine=FakeEngine)
    assert progress.resumed_shards == before and finalize_run(job, run, progress).rows == ROWS
    assert verify(open_store(run.uri)).ok and status(run.uri).drained is None
