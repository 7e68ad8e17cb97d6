"""When a run stalls, with a clock turned by hand; and once with a real engine that hangs."""

from __future__ import annotations

import logging
import queue
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import FakeEngine
from helpers.heard import Heard, counts, wait_for
from helpers.small import input_rows, make_job, small_run

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.driver import monitor, stall
from prefect_raybatch.driver.cost import CostMeter
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import INFERRING, WAITING
from prefect_raybatch.driver.monitor import Monitor, probe
from prefect_raybatch.driver.stall import Flowing, Stall, StallWatch, interruptible, starts
from prefect_raybatch.errors import CostExceeded, EngineFailure, StoreUnavailable
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.layout import COMMITS
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.runs.status import status
from prefect_raybatch.stages.block import is_passthrough
from prefect_raybatch.stages.endpoint.limiter import LIMIT_LOG_SECONDS, Limiter


def watch(**limits) -> StallWatch:
    return StallWatch(Limits(**limits), 0.0)


# --- how long is too long -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "longest", "limit"),
    [(1.0, 5.0, 60.0), (30.0, 40.0, 300.0), (5.0, 100.0, 300.0), (5.9, 19.0, 60.0)],
)
def test_the_limit_fits_the_measured_rate(every, longest, limit):
    found = watch()
    found.look(0.0, counts(), 1)
    now = counts(at=1000.0, window_start=1000.0 - 20 * every, commits=20)
    assert found.limit(now, longest) == pytest.approx(limit)


def test_settings_replace_what_is_measured():
    found = watch(stall_seconds=7.5, stall_start_seconds=100.0)
    found.look(0.0, counts(commits=0), 1)
    assert found.limit(counts(commits=0)) == 100.0
    found.look(1.0, counts(), 1)
    assert found.limit(counts(), longest=1e6) == 7.5


def test_warnings_come_at_growing_intervals_and_end_when_commits_flow():
    found, seen = watch(stall_seconds=10.0), []
    for now in range(0, 200):
        stalled = found.look(float(now), counts(), 1)
        if stalled:
            seen.append((now, stalled.number, stalled.starting))
    assert seen == [(10, 1, False), (20, 2, False), (40, 3, False), (80, 4, False), (160, 5, False)]
    assert found.look(200.0, counts(committed=5), 1) == Flowing(200.0)
    assert found.look(201.0, counts(committed=5), 1) is None
    assert found.look(209.9, counts(committed=5), 1) is None
    assert found.look(210.0, counts(committed=5), 1) == Stall(10.0, 10.0, 1, False)


def test_engines_have_longer_to_start_in_each_pass():
    found = watch(stall_seconds=10.0, stall_start_seconds=50.0)
    none_yet = counts(commits=0)  # what earlier attempts committed says nothing of these engines
    assert found.look(0.0, none_yet, 0) is None
    assert found.look(1.0, none_yet, 1) is None
    assert found.look(50.0, none_yet, 1) is None
    assert found.look(51.0, none_yet, 1) == Stall(50.0, 50.0, 1, True)
    assert found.look(60.0, counts(committed=5), 1) == Flowing(59.0)
    assert found.look(69.0, counts(committed=5), 1) is None
    assert found.look(69.5, counts(committed=5), 2) is None  # pass 2: engines start again
    assert found.look(119.0, counts(committed=5), 2) is None
    assert found.look(119.5, counts(committed=5), 2).starting
    found.look(120.0, counts(committed=6, passes=2), 2)
    assert not found.starting


def test_a_new_pass_ends_a_stall_without_a_word():
    found = watch(stall_seconds=10.0, stall_start_seconds=50.0)
    found.look(0.0, counts(), 1)
    assert found.look(10.0, counts(), 1) == Stall(10.0, 10.0, 1, False)
    assert found.look(11.0, counts(), 2) is None
    assert (found.alarms, found.since) == (0, 11.0)
    assert found.look(61.0, counts(), 2) == Stall(50.0, 50.0, 1, True)


@pytest.mark.parametrize(
    ("commits", "passes", "begun", "starting"),
    [(0, 1, 1, True), (1, 1, 1, False), (1, 1, 2, True), (1, 2, 1, False)],
)
def test_engines_start_until_a_commit_of_their_pass(commits, passes, begun, starting):
    assert starts(counts(commits=commits, passes=passes), begun) == starting


def test_a_run_that_is_whole_does_not_stall():
    found = watch(stall_seconds=1.0)
    found.look(0.0, counts(committed=10), 1)
    assert found.look(1000.0, counts(committed=10), 1) is None


# --- what is said -------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stalled(tmp_path: Path, **limits) -> tuple[Monitor, Clock, Heard]:
    run, heard, clock = small_run(tmp_path), Heard(), Clock()
    run.commit(0)
    states = {"ALIVE": 1, "RESTARTING": 1}
    made = Monitor("me", run.plan, run.store, Limits(**limits), heard, lambda: states, clock)
    made(Progress(20, 4, passes=1))
    made.look()
    return made, clock, heard


def test_a_stall_says_what_engines_and_store_are_doing(tmp_path, caplog):
    made, clock, heard = stalled(tmp_path, stall_start_seconds=30.0)
    made.write()
    clock.now = 31.0
    made.look()
    (told,) = [r.getMessage() for r in caplog.records if r.name.startswith("prefect_raybatch")]
    for text in (
        "no shard was committed for 31 s, where 30 s are allowed until the first of a pass",
        "0 of 4 shards, pass 1",
        "1 alive, 1 restarting",
        "a listing took 0.0",
        "the last heartbeat was written 31 s ago",
    ):
        assert text in told
    assert (heard.beats[-1].phase, heard.beats[-1].alarms) == (WAITING, 1)
    assert heard.beats[-1].about == told and heard.beats[-1].quiet == 31.0
    assert made.failure is None
    made.counts = counts(committed=1, rows=20, shards=4)
    made.look()
    assert "commits flow again after 31 s" in caplog.text
    assert (heard.beats[-1].alarms, heard.beats[-1].about) == (0, "")


def test_a_store_that_does_not_answer_is_named(tmp_path):
    store = small_run(tmp_path).store

    def away(prefix="", recursive=True):
        assert prefix == COMMITS
        raise StoreUnavailable("503 for a minute")
        yield

    store.list = away
    assert "a listing failed after 0.0 s: 503 for a minute" in probe(store)


def test_a_store_without_commits_answers_as_well(tmp_path):
    assert probe(small_run(tmp_path).store).startswith("a listing took ")


@pytest.mark.parametrize(
    ("states", "written", "engines", "heard_of"),
    [
        ({}, None, "none alive", "no heartbeat was written yet"),
        (
            {"DEAD": 1, "ALIVE": 2},
            1.6,
            "2 alive, 1 dead",
            "the last heartbeat was written 29 s ago",
        ),
        (None, None, "none known (last known; Ray did not answer: OSError: gone)", "no heartbeat"),
    ],
)
def test_a_stall_can_end_the_run_and_says_all_that_is_known(
    tmp_path, states, written, engines, heard_of
):
    def answer() -> dict[str, int]:
        if states is None:
            raise OSError("gone")
        return states

    def broken(*_):
        raise ConnectionResetError("by peer")

    run, heard, clock = small_run(tmp_path), Heard(), Clock()
    limits = Limits(stall_start_seconds=30.0, fail_on_stall=True)
    made = Monitor("me", run.plan, run.store, limits, heard, answer, clock)
    progress = Progress(20, 4, passes=1)
    made(progress)
    progress.core_deaths, progress.process_deaths = 1, 2
    made.look()
    if written is not None:
        clock.now = written
        made.write()
    made.store.list = broken
    clock.now = 30.57
    made.look()
    text = (
        "no shard was committed for 31 s, where 30 s are allowed until the first of a pass "
        f"(0 of 4 shards, pass 1, 3 engine deaths). Engines: {engines}. Store: listing it failed: "
        f"ConnectionResetError: by peer; {heard_of}"
    )
    beat = heard.beats[-1]
    assert beat.about.startswith(text)
    assert (beat.phase, beat.alarms, beat.quiet) == (WAITING, 1, 30.6)
    failure = made.failure
    assert isinstance(failure, EngineFailure) and failure.transient
    assert str(failure) == (
        f"{beat.about}. limits.fail_on_stall ends the run. Committed shards are kept; run the same "
        "command again to continue"
    )
    clock.now = 60.0
    made.look()
    assert heard.beats[-1].alarms == 2 and made.failure is failure


@pytest.mark.parametrize(
    "why", ["1 batch, 200 of 1,000 requests done", "no answer from the server for 75 s (503)"]
)
def test_a_run_that_waits_for_its_server_says_so_and_does_not_stall(tmp_path, why):
    made, clock, heard = stalled(tmp_path, stall_start_seconds=30.0, fail_on_stall=True)
    batches = [why]
    made.server_wait = lambda: batches[0]
    for clock.now in (20.0, 3_600.0):
        made.look()
        assert (heard.beats[-1].phase, heard.beats[-1].alarms) == (WAITING, 0)
        assert heard.beats[-1].about == batches[0] and made.failure is None
    batches[0] = ""
    for clock.now in (3_611.0, 3_650.0):
        made.look()
    assert heard.beats[-1].alarms == 1 and made.failure is not None


def test_a_wait_that_the_limits_of_a_hosted_model_impose_is_no_stall(tmp_path):
    made, clock, heard = stalled(tmp_path, stall_start_seconds=30.0, fail_on_stall=True)
    waits = ["waiting 3600 s: 429"]
    made.limited = lambda: waits[0]
    for clock.now in (20.0, 3_600.0):
        made.look()
        assert (heard.beats[-1].phase, heard.beats[-1].alarms) == (INFERRING, 0)
        assert heard.beats[-1].about == waits[0] and made.failure is None
    waits[0] = ""
    for clock.now in (3_611.0, 3_650.0):
        made.look()
    assert heard.beats[-1].alarms == 1 and made.failure is not None


@pytest.mark.parametrize("limit", [None, 60])
def test_short_waits_for_a_limit_are_no_stall_however_many_they_are(tmp_path, limit):
    """The server answers each request by 429, or our own limit lets one leave each second."""
    made, clock, heard = stalled(tmp_path, stall_start_seconds=30.0, fail_on_stall=True)
    limiter = Limiter(limit, None, 4, 600.0, clock)
    made.limited = lambda: limiter.usage().waits
    for _ in range(600):
        wait, number = limiter.ask(1)
        if number:
            signal = "limited" if limit is None else "answered"
            limiter.settle(number, signal, None, 0.0 if limit else 0.4, "429")
        clock.now += wait or 0.5
        made.look()
        assert (heard.beats[-1].alarms, made.failure) == (0, None)
    assert clock.now > 100
    clock.now += LIMIT_LOG_SECONDS
    limiter.settle(0, "answered")
    for _ in range(3):
        made.look()
        clock.now += 31.0
    assert heard.beats[-1].alarms and made.failure is not None


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_cluster_that_does_not_answer_keeps_neither_stalls_nor_costs_from_being_seen(
    tmp_path, monkeypatch, caplog, how
):
    monkeypatch.setattr(monitor, "ANSWER", 0.2)
    asked: list[str] = []
    waited: list[str] = []
    limits = {"stall_start_seconds": 30.0, "fail_on_stall": True, "max_cost": 1.0}
    made, clock, heard = stalled(tmp_path, **limits)
    made.meter = CostMeter(price=3600.0, gpus_an_engine=1.0)
    made.look()
    gate = threading.Event()

    def away(name: str) -> Any:
        asked.append(name)
        if how == "fails":
            raise ConnectionError("the head is gone")
        gate.wait(300)
        waited.append(name)
        return {}

    for name in ("engines", "leaving", "deaths", "starts"):
        setattr(made, name, partial(away, name))
    made.store.list = lambda prefix="", recursive=True: away("store")
    for at in (11.0, 31.0, 42.0, 53.0):
        clock.now = at
        made.look()
    assert not waited  # those that hang still do
    assert isinstance(made.failure, EngineFailure)
    assert "1 alive, 1 restarting (last known; Ray did not answer: " in str(made.failure)
    assert isinstance(made.spent, CostExceeded)
    assert heard.beats[-1].gpu_seconds == 53.0 and heard.beats[-1].alarms == 1
    if how == "hangs":
        assert sorted(asked) == ["deaths", "engines", "leaving", "starts", "store"]
    assert caplog.text.count("Ray does not report its engines") == 1
    gate.set()
    made.engines = lambda: {"ALIVE": 2}

    def answered() -> bool:  # once those that hung have ended
        clock.now += 11.0
        made.look()
        return heard.beats[-1].engines == {"ALIVE": 2}

    wait_for(answered)


@pytest.mark.parametrize("hangs", ["starts", "note"])
def test_a_note_of_the_start_that_hangs_keeps_neither_driver_nor_watch_waiting(
    tmp_path, monkeypatch, hangs
):
    monkeypatch.setattr(monitor, "ANSWER", 0.2)
    monkeypatch.setattr(monitor, "LATE_PHASE_SECONDS", -1.0)
    made, clock, heard = stalled(tmp_path, stall_start_seconds=30.0, fail_on_stall=True)
    gate, went_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> Any:
        gate.wait(300)
        went_on.set()
        return []

    made.starts = wait if hangs == "starts" else list
    made.on_started = wait if hangs == "note" else lambda starting: None
    made.starting.end()
    clock.now = 31.0
    made.look()  # the watch asks
    assert isinstance(made.failure, EngineFailure) and heard.beats[-1].alarms == 1
    made.noted = False
    made.note_start()  # and the driver as it ends
    assert not went_on.is_set()
    gate.set()
    assert went_on.wait(60)


# --- ending a pass that hangs -------------------------------------------------------------------

UNITS = [Unit(0, 0, 5)]


def test_an_interruptible_pass_gives_on_what_comes_and_what_is_raised():
    def passes(units, isolated):
        assert (units, isolated) == (UNITS, True)
        assert threading.current_thread().daemon, "a pass that hangs would keep the process alive"
        yield Receipt(0, "a")
        yield Receipt(1, "a")
        raise ValueError("from Ray")

    def stop():
        raise AssertionError("there is nothing to stop")

    given = interruptible(passes, lambda: EngineFailure("never asked for"), stop)
    found = given(UNITS, True)
    assert [next(found).shard, next(found).shard] == [0, 1]
    with pytest.raises(ValueError, match="from Ray"):
        next(found)
    assert list(interruptible(lambda *_: iter(()), lambda: None, stop)(UNITS, False)) == []


@pytest.mark.parametrize("how", ["stall", "error of the driver"])
def test_a_pass_that_is_given_up_is_stopped(how, monkeypatch):
    monkeypatch.setattr(stall, "STALL_LOOK", 0.02)
    gate, ended = threading.Event(), threading.Event()

    def passes(units, isolated):
        try:
            yield Receipt(0, "a")
            gate.wait(120)
        finally:
            ended.set()

    failure = EngineFailure("stalled") if how == "stall" else None
    found = interruptible(passes, lambda: failure, gate.set)(UNITS, False)
    assert next(found).shard == 0
    if how == "stall":
        with pytest.raises(EngineFailure, match="stalled"):
            next(found)
    else:
        found.close()
    assert ended.wait(60)


def test_a_pass_that_waits_with_a_receipt_ends_once_it_is_given_up(monkeypatch):
    waits, ended = threading.Event(), threading.Event()

    class Receipts(queue.Queue):
        def put(self, item, *args, **kwargs):
            if item.shard == 2:  # the call blocks, since shard 1 is not taken
                waits.set()
            super().put(item, *args, **kwargs)

    def passes(units, isolated):
        try:
            yield from (Receipt(shard, "a") for shard in range(3))
        finally:
            ended.set()

    monkeypatch.setattr(stall, "STALL_LOOK", 0.02)
    monkeypatch.setattr(queue, "Queue", Receipts)
    found = interruptible(passes, lambda: None, lambda: None)(UNITS, False)
    assert next(found).shard == 0
    assert waits.wait(60)
    found.close()
    assert ended.wait(60)


def test_a_stop_that_hangs_does_not_hold_up_the_end(monkeypatch, caplog):
    """Nor the error that the pass is given up for, nor one of the stop itself."""
    monkeypatch.setattr(stall, "STALL_LOOK", 0.02)
    monkeypatch.setattr(stall, "GIVE_UP", 0.2)
    monkeypatch.setattr(stall, "STOP", 0.2)
    gate, went_on = threading.Event(), threading.Event()

    def passes(units, isolated):
        gate.wait(300)
        yield Receipt(0, "a")

    def stop():
        gate.wait(300)
        went_on.set()

    with pytest.raises(EngineFailure, match="stalled"):
        next(interruptible(passes, lambda: EngineFailure("stalled"), stop)(UNITS, False))
    assert not went_on.is_set()
    assert "Ray did not stop the abandoned pass: no answer within 0.2 s" in caplog.text
    gate.set()
    assert went_on.wait(60)


class HangingEngine(FakeEngine):
    """Hangs in the block that holds one row, as long as a file is there."""

    AT = 22
    FAILS = -1
    GATE = Path("/nowhere")

    def __call__(self, table: pa.Table) -> pa.Table:
        gate = Path(self.spec.env["GATE"])
        while not is_passthrough(table) and self.AT in table["id"].to_pylist() and gate.exists():
            time.sleep(0.1)
        return super().__call__(table)


@pytest.mark.whole
def test_a_real_run_with_an_engine_that_hangs_is_reported_ended_and_resumed(
    tmp_path, local_ray, caplog, monkeypatch
):
    monkeypatch.setattr(monitor, "HEARTBEAT_SECONDS", 0.5)
    caplog.set_level(logging.WARNING)
    pq.write_table(input_rows(0, 40), tmp_path / "in.parquet")
    gate = tmp_path / "gate"
    gate.touch()
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 5},
        engine={"model": "demo", "max_model_len": 64, "num_cpus": 1, "env": {"GATE": str(gate)}},
        output={"uri": str(tmp_path / "out")},
        limits={"stall_seconds": 2.0, "stall_start_seconds": 900.0, "fail_on_stall": True},
    )
    run = plan_run(job, "key")
    heard = Heard()
    with pytest.raises(EngineFailure, match=r"no shard was committed for .* where 2 s are allowed"):
        infer_run(job, run, heard, engine=HangingEngine)
    kept = status(run.uri).committed
    assert 0 < kept < 8
    assert "Engines: 1 alive" in caplog.text and "a listing took" in caplog.text
    assert any(beat.alarms for beat in heard.beats)
    wait_for(lambda: not [t for t in threading.enumerate() if t.name == "raybatch-pass"])
    gate.unlink()
    # The caller's cluster is free again: the engine that hung has left its CPU.
    patient = with_fields(job.to_dict(), {"limits.stall_seconds": 60.0})
    progress = infer_run(BatchJob.from_dict(patient), run, engine=HangingEngine)
    assert (progress.done, progress.resumed_shards) == (40, kept)
    assert finalize_run(job, run, progress).good == 40
