"""The phases of an engine's start: heard in vLLM's log, also of its processes, and told."""

from __future__ import annotations

import logging
import logging.config
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.engine_stage import LAUNCH, block
from helpers.engines import Factory, Stepped, completion
from helpers.heard import wait_for

from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages import engine as stage
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.vllm import phases, plugin, stepper
from prefect_raybatch.stages.vllm.phases import Marks, StartMarks

LOADS, COMPILES = "Starting to load model %s...", "Model loading took %s GiB memory"
READY = "%s KV cache size: 9 tokens"


@pytest.fixture
def vllm_log() -> Iterator[logging.Logger]:
    log = logging.getLogger("vllm")
    before, handlers = log.level, list(log.handlers)
    log.setLevel(logging.INFO)
    yield log
    log.setLevel(before)
    log.handlers[:] = handlers


def says(*lines: str, configures: bool = False) -> None:
    """What a process of vLLM does: loads our plugin, perhaps configures its loggers, then logs."""
    plugin.register()
    if configures:  # vLLM 0.32, in the process of an engine's core
        loggers = {"vllm": {"level": "INFO", "handlers": [], "propagate": False}}
        logging.config.dictConfig(
            {"version": 1, "disable_existing_loggers": False, "loggers": loggers}
        )
    for line in lines:
        logging.getLogger("vllm.v1.worker").info(line, "x")


def test_phases_of_this_process_and_of_one_below_it_are_heard(vllm_log: logging.Logger) -> None:
    marks, began = StartMarks(), time.time()
    with marks.capture_phases():
        says("Initializing a V1 LLM engine %s", LOADS)
        assert set(marks.read()) == {"imports", "weights"}
        below = multiprocessing.get_context("fork").Process(
            target=says, args=(COMPILES, READY), kwargs={"configures": True}
        )
        below.start()
        below.join(120)
        told = marks.read()
        assert set(told) == {"imports", "weights", "compile", "graphs"}
    says(LOADS)  # later, when nobody listens any more
    marks.stepped(time.time())
    told = marks.read()
    assert set(told) == {*phases.ENGINE_PHASES, "stepped"}
    assert began - 1 < told["imports"] <= told["weights"] <= told["stepped"] <= time.time()


FACTORIES = """
import logging
from prefect_raybatch.stages.vllm.log_tap import listen_to_vllm

def wrapped(make, name):
    def factory(*arguments, **options):
        record = make(*arguments, **options)
        setattr(record, name, True)
        return record
    return factory

heard = []
logging.basicConfig(level=logging.INFO, format="%(message)s %(before)s %(after)s")
logging.setLogRecordFactory(wrapped(logging.getLogRecordFactory(), "before"))  # Ray's
listen_to_vllm("a", lambda record: heard.append(("a", record.msg, record.before)))
listen_to_vllm("b", lambda record: 1 / 0)
logging.setLogRecordFactory(wrapped(logging.getLogRecordFactory(), "after"))  # vLLM's
logging.getLogger("vllm.core").info("one")
logging.getLogger("vllms").info("of another")
listen_to_vllm("a", None)
logging.getLogger("vllm").info("two")
assert heard == [("a", "one", True)], heard
"""


def test_factories_of_log_records_before_and_after_ours_are_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FACTORIES], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines == ["one True True", "of another True True", "two True True"]


class Told:
    def __init__(self) -> None:
        self.all: list[tuple[str, Marks]] = []

    def __call__(self, engine: str, marks: Marks) -> None:
        self.all.append((engine, marks))


class Stepping(Stepped):
    """Says when its first step was over, as a `SteppedEngine` does."""

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "stepped_at": time.time() if self.rows else 0.0}


class Starts(Factory):
    """Engines whose start logs what vLLM logs."""

    def __call__(self, *arguments: Any) -> Stepped:
        says(LOADS, COMPILES, READY)
        made = super().__call__(*arguments)
        return Stepping(made.answer)


def test_an_engine_stage_tells_how_far_it_has_come(
    vllm_log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    monkeypatch.setattr(phases, "REPORT_SECONDS", 0.01)
    monkeypatch.setattr(
        stepper, "SteppedEngine", Starts(lambda asked: [completion("x") for _ in asked])
    )
    spec = EngineLaunch(LAUNCH.model, LAUNCH.sampling, LAUNCH.arguments, tell=told)
    made = EngineStage(spec)
    wait_for(lambda: told.all and "first step" in told.all[-1][1])
    assert "stepped" not in told.all[-1][1]
    made(block(Unit(0, 0, 2)))
    wait_for(lambda: "stepped" in told.all[-1][1])
    assert {engine for engine, _ in told.all} == {told.all[0][0]}
    assert set(told.all[-1][1]) == {*phases.ENGINE_PHASES, "stepped"}


def tellers() -> int:
    return sum(thread.name == "raybatch-start" for thread in threading.enumerate())


def test_a_start_that_is_over_without_a_step_is_told_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = [lambda asked: [completion("x") for _ in asked]] * 2
    monkeypatch.setattr(stepper, "SteppedEngine", Factory(*never))
    wait_for(lambda: tellers() == 0)
    made = EngineStage(EngineLaunch(LAUNCH.model, LAUNCH.sampling, LAUNCH.arguments, tell=Told()))
    assert tellers() == 1
    made.engine = None  # it died before its first step
    assert made.ready() is not None
    wait_for(lambda: tellers() == 1)
    made.close()
    wait_for(lambda: tellers() == 0)


def test_an_engine_that_does_not_start_ends_the_telling(
    vllm_log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    monkeypatch.setattr(stage, "PAUSE", 0)
    monkeypatch.setattr(stepper, "SteppedEngine", Factory(ValueError("wrong")))
    EngineStage(EngineLaunch(LAUNCH.model, LAUNCH.sampling, LAUNCH.arguments, tell=told))
    wait_for(lambda: tellers() == 0)
    assert all(set(marks) == {"imports"} for _, marks in told.all)


def test_who_cannot_be_told_costs_nothing(
    vllm_log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(engine: str, marks: Marks) -> None:
        raise ConnectionError("the head is gone")

    monkeypatch.setattr(
        stepper, "SteppedEngine", Starts(lambda asked: [completion("x") for _ in asked])
    )
    made = EngineStage(EngineLaunch(LAUNCH.model, LAUNCH.sampling, LAUNCH.arguments, tell=away))
    assert made(block(Unit(0, 0, 2))).num_rows == 2
