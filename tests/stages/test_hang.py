"""Engines that hang: nothing dies, and no step returns."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import fake_vllm
from helpers.fake_vllm import SLOW, SLOW_S, STOPS
from helpers.small import input_rows, make_job

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.compile.job import compile_job, size_spec
from prefect_raybatch.errors import EngineStartError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.result.verify import verify
from prefect_raybatch.sizing.sizes import Capacity, sizes_of
from prefect_raybatch.stages.block import is_passthrough
from prefect_raybatch.stages.engine import EngineStage, engine_launch
from prefect_raybatch.stages.vllm import engine_errors
from prefect_raybatch.stages.vllm.hang import HANG_LOOK, STATUS, HangWatch
from prefect_raybatch.stages.vllm.process_note import START, ProcessNote
from prefect_raybatch.stages.vllm.stepper import EngineDied, Request, SteppedEngine
from prefect_raybatch.storage import open_store

ROOT = Path(__file__).parents[2]
# Seconds that a step may take: more than count where this process got no CPU between two looks.
LIMIT = 2.5 * HANG_LOOK


# --- the watch ----------------------------------------------------------------------------------


def looks(watch: HangWatch, start: float, steps: list[float], answered: bool = True) -> list[Any]:
    """What the watch says, asked once a second."""
    return [watch.look(start + second, step, answered) for second, step in enumerate(steps)]


def test_a_step_that_lasts_is_a_hang_and_one_that_returns_is_not() -> None:
    assert looks(HangWatch(5), 100, [7.0] * 7) == [None] * 5 + [5, 5]
    assert looks(HangWatch(5), 100, [7.0] * 5 + [8.0] * 5 + [9.0] * 5) == [None] * 15


def test_an_engine_with_nothing_to_do_never_hangs() -> None:
    watch = HangWatch(5)
    assert looks(watch, 100, [0.0] * 50) == [None] * 50
    assert looks(watch, 150, [7.0] * 5) == [None] * 5  # nor is its rest counted afterwards


def test_the_first_steps_may_take_twice_as_long() -> None:
    assert looks(HangWatch(5), 100, [7.0] * 11, answered=False) == [None] * 10 + [10]


def test_without_a_limit_a_step_may_take_any_time() -> None:
    assert looks(HangWatch(None), 100, [7.0] * 5000) == [None] * 5000


def test_time_in_which_this_process_was_stopped_itself_does_not_count() -> None:
    watch = HangWatch(10)
    assert watch.look(100, 7.0, True) is None
    assert watch.look(5000, 7.0, True) is None
    assert looks(watch, 5001, [7.0] * 8) == [None] * 7 + [10]


# --- the stepper, over a core in a process of its own -------------------------------------------


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install_for(monkeypatch)


@pytest.fixture
def start(vllm: None) -> Iterator[Callable[[float | None], SteppedEngine]]:
    engines: list[SteppedEngine] = []

    def make(hang_seconds: float | None) -> SteppedEngine:
        engines.append(SteppedEngine({"apart": True}, hang_seconds))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stopped(pid: int) -> bool:
    return not gone(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED


def wait_until(true: Callable[[], bool], seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.05)
    return true()


@pytest.mark.parametrize("answers", [0, 1])
def test_a_core_that_stops_for_ever_is_killed_and_every_caller_woken(
    start: Callable[..., SteppedEngine], answers: int
) -> None:
    engine = start(LIMIT)
    core = engine._engine.engine_core
    processes = [core.process.pid, core.worker]
    for _ in range(answers):
        assert engine.run([Request([1])])[0].token_ids == [fake_vllm.ANSWER]
    deaths: list[str] = []
    left: list[int] = []

    def call(tokens: list[int]) -> None:
        try:
            engine.run([Request(tokens)] * 30)
        except EngineDied as death:
            deaths.append(str(death))
            left.extend(pid for pid in processes if not gone(pid))

    callers = [threading.Thread(target=call, args=([t],)) for t in (STOPS, 1, 2)]
    began = time.monotonic()
    callers[0].start()
    # The others come while it is stopped: before, they would be answered.
    assert wait_until(lambda: stopped(core.process.pid))
    for caller in callers[1:]:
        caller.start()
    for caller in callers:
        caller.join(120)
    # Until the first answer twice the time is allowed.
    allowed = LIMIT if answers else 2 * LIMIT
    assert len(deaths) == 3 and set(deaths) == {f"hung: no step returned for {allowed:g} s"}
    assert not any(caller.is_alive() for caller in callers)
    assert time.monotonic() - began >= allowed
    assert left == []  # the memory is free before anybody is told
    with pytest.raises(EngineDied, match="hung"):
        engine.run([Request([1])])
    assert engine.stats()["died"].startswith("hung")
    assert wait_until(lambda: not engine._thread.is_alive())
    # The next one in this process works.
    assert start(LIMIT).run([Request([1])])[0].error is None


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (fake_vllm.DIES, r"ended with exit code -4 \(SIGILL: illegal instruction.* AMX"),
        (
            fake_vllm.WORKER_DIES,
            r"^Worker proc VllmWorker-0 died .*exit code: -4.*\(SIGILL: .*AMX",
        ),
        (
            fake_vllm.FAILS,
            r"^ValueError: no kernel image for this device$",
        ),
    ],
    ids=["core", "worker", "error"],
)
def test_a_death_names_its_signal_or_the_error_in_the_engines_log(
    start: Callable[..., SteppedEngine], token: int, told: str
) -> None:
    engine = start(None)
    for row in ([1], [fake_vllm.UNFORMED]):
        assert engine.run([Request(row)])[0].token_ids == [fake_vllm.ANSWER]
    with pytest.raises(EngineDied, match=told) as death:
        engine.run([Request([token])])
    assert "prompt_token_ids" not in str(death.value)
    assert engine_errors.PLACE not in os.environ


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("Failed core proc(s): {'EngineCore': -4}"),
            "'EngineCore': -4} (SIGILL: ",
        ),
        (
            RuntimeError("Failed core proc(s): {'EngineCore': 1}"),
            "'EngineCore': 1}: ValueError: no",
        ),
        (ValueError("no such model"), "no such model"),
    ],
)
def test_a_start_that_fails_tells_what_only_the_engines_log_has(
    vllm: None, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(args: Any) -> Any:
        if "1}" in str(error):
            core = multiprocessing.get_context("fork").Process(target=fake_vllm.log_and_end)
            core.start()
            core.join()
        raise error

    monkeypatch.setattr(fake_vllm.LLMEngine, "from_engine_args", fail)
    with pytest.raises(type(error)) as raised:
        SteppedEngine({})
    assert told in str(raised.value)


def test_neither_slow_steps_nor_a_rest_is_a_hang(start: Callable[..., SteppedEngine]) -> None:
    engine = start(LIMIT)
    rows = math.ceil(LIMIT / SLOW_S) + 1
    assert len(engine.run([Request([SLOW])] * rows)) == rows  # longer in all than the limit
    time.sleep(LIMIT + 2 * HANG_LOOK)
    assert len(engine.run([Request([SLOW])])) == 1
    assert engine.stats()["died"] is None


def test_without_a_limit_a_stopped_core_is_waited_for(
    start: Callable[..., SteppedEngine],
) -> None:
    engine = start(None)
    answers: list[Any] = []
    requests = [Request([STOPS]), Request([1])]
    caller = threading.Thread(target=lambda: answers.extend(engine.run(requests)))
    caller.start()
    core = psutil.Process(engine._engine.engine_core.process.pid)
    assert wait_until(lambda: stopped(core.pid))
    caller.join(3 * HANG_LOOK)
    assert caller.is_alive() and engine.stats()["died"] is None
    core.resume()
    caller.join(120)
    assert [answer.error for answer in answers] == [None, None]


# --- the stepper, over a core in its own process ------------------------------------------------

IN_PROCESS = """
    import threading
    from helpers import fake_vllm
    fake_vllm.install()
    from prefect_raybatch.stages.vllm.stepper import Request, SteppedEngine
    engine = SteppedEngine({}, LIMIT)
    print(len(engine.run([Request([1])] * 5)), flush=True)
    engine.run([Request([fake_vllm.STOPS])])
    print("came back", flush=True)
"""


def run_in_process(code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-c", f"LIMIT = {LIMIT}\n{textwrap.dedent(code)}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_process_that_holds_the_hung_core_ends_itself_and_says_where_it_hung() -> None:
    found = run_in_process(IN_PROCESS)
    assert found.returncode == STATUS, found.stderr
    assert found.stdout.split() == ["5"]
    assert f"hung: no step returned for {LIMIT:g} s; process" in found.stderr
    assert 'fake_vllm.py", line' in found.stderr and "in compute" in found.stderr


GPU_LOST = """
    from helpers import fake_vllm
    fake_vllm.install()
    from prefect_raybatch.stages.vllm import internals
    from prefect_raybatch.stages.vllm.stepper import EngineDied, Request, SteppedEngine
    def fail():
        raise ValueError("no kernel image")
    for lost in (False, True):
        engine = SteppedEngine({}, LIMIT)
        print(len(engine.run([Request([1])] * 5)), flush=True)
        internals.gpu_is_lost = lambda: lost
        engine._engine.step = fail
        try:
            engine.run([Request([1])])
        except EngineDied:
            print("died", flush=True)
"""


def test_a_process_whose_core_lost_its_gpu_ends_itself_and_says_why() -> None:
    """After a kernel's error, CUDA refuses this process each further engine."""
    found = run_in_process(GPU_LOST)
    assert found.returncode == STATUS, found.stderr
    assert found.stdout.split() == ["5", "died", "5"]
    assert "the engine died: ValueError: no kernel image" in found.stderr


START_HANGS = """
    import os, threading
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ENGINE_READY_TIMEOUT_S": "0.1"}
    from helpers import fake_vllm
    fake_vllm.install()
    from prefect_raybatch.stages.vllm import internals
    from prefect_raybatch.stages.vllm.process_note import START, ProcessNote
    from prefect_raybatch.stages.vllm.stepper import SteppedEngine
    internals.start = lambda arguments: threading.Event().wait()
    ProcessNote(os.environ["ATTEMPT"]).write(START)
    SteppedEngine({}, LIMIT)
"""


def test_a_start_that_hangs_in_this_process_ends_it_and_its_successor_knows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("ATTEMPT", "a")
    found = run_in_process(START_HANGS)
    assert found.returncode == STATUS, found.stderr
    left = ProcessNote("a").read_predecessor()
    assert left is not None and left.doing == START
    assert left.cause == "the engine's start hung: it was not over after 0.1 s"


# --- a run --------------------------------------------------------------------------------------


def test_the_time_allowed_is_the_jobs() -> None:
    size = sizes_of(size_spec(make_job()), 100, 50, Capacity(16, 0, 1, "here"))
    for given, seconds in (({}, 600), ({"hang_seconds": 42}, 42)):
        assert engine_launch(compile_job(make_job(limits=given)), {}, size).hang_seconds == seconds
    for never in (0, None):
        job = make_job(limits={"hang_seconds": never})
        assert engine_launch(compile_job(job), {}, size).hang_seconds is None
        assert BatchJob.from_dict(job.to_dict()).limits.hang_seconds == 0


class HangsInProcess(EngineStage):
    """The real stage and stepper over a vLLM that hangs, each time, on the block with one row."""

    AT = 4

    def start(self) -> None:
        fake_vllm.install()
        super().start()

    def arguments(self) -> dict[str, Any]:
        return {}

    def __call__(self, table: pa.Table) -> pa.Table:
        if not is_passthrough(table) and self.AT in table["id"].to_pylist():
            fake_vllm.compute = lambda tokens: time.sleep(3600)  # type: ignore[assignment]
        return super().__call__(table)


@pytest.mark.whole
def test_a_row_that_hangs_its_process_each_time_ends_in_quarantine(
    tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no pass leaves an actor behind that keeps its CPU or GPU from the next one."""
    kept: list[dict[str, int]] = []
    whole = Pipeline.__call__

    def watched(self: Pipeline, units: Any, isolated: bool) -> Any:
        yield from whole(self, units, isolated)
        wait_until(lambda: not self.engines())  # one that is kept stays until the run's end
        kept.append(self.engines())

    monkeypatch.setattr(Pipeline, "__call__", watched)
    pq.write_table(input_rows(0, 6), tmp_path / "in.parquet")
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 1},
        engine={"model": "demo", "max_model_len": 64, "num_cpus": 1},
        output={"uri": str(tmp_path / "out")},
        limits={"max_failed_rows": 1, "engine_deaths": 1, "hang_seconds": LIMIT},
    )
    run = plan_run(job, "key")
    progress = infer_run(job, run, engine=HangsInProcess)
    assert len(kept) > 1 and not any(kept), kept
    report = finalize_run(job, run, progress)
    assert (report.good, report.failed) == (5, 1)
    (row,) = pq.read_table(tmp_path / "out/key/_quarantine").to_pylist()
    assert (row["stage"], row["error"], row["_row"]) == ("engine", "EngineDied", HangsInProcess.AT)
    assert verify(open_store(run.uri)).ok


class DiesInProcess(HangsInProcess):
    """As above, over a vLLM that knows an instruction too much: each step ends its process."""

    def __call__(self, table: pa.Table) -> pa.Table:
        return EngineStage.__call__(self, table)

    def start(self) -> None:
        super().start()
        fake_vllm.compute = lambda tokens: os.kill(os.getpid(), signal.SIGILL)  # type: ignore


@pytest.mark.whole
def test_an_engine_that_takes_its_process_with_it_in_each_first_step_ends_the_run(
    tmp_path: Path, local_ray: None
) -> None:
    pq.write_table(input_rows(0, 6), tmp_path / "in.parquet")
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 1},
        engine={"model": "demo", "max_model_len": 64, "num_cpus": 1},
        output={"uri": str(tmp_path / "out")},
    )
    run = plan_run(job, "key")
    with pytest.raises(EngineStartError, match="ended with SIGILL: illegal instruction"):
        infer_run(job, run, engine=DiesInProcess)
