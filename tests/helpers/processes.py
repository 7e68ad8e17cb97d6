"""Processes that a test has started, and what these have started: never the whole machine's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psutil

ENGINE = ("VLLM::", "EngineStage")


def title(process: psutil.Process) -> str:
    """A process's command line and name, empty when it has ended."""
    with suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            return " ".join([*process.cmdline(), process.name()]).strip()
    return ""


def below(pid: int, *words: str) -> list[psutil.Process]:
    """The descendants of a process whose titles hold one of the words; without words all."""
    with suppress(psutil.NoSuchProcess):
        every = psutil.Process(pid).children(recursive=True)
        return [p for p in every if any(word in title(p) for word in words or ("",)) and title(p)]
    return []


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    return [process for process in processes if title(process)]


def until(holds: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `holds` says as soon as that is something; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.1)
    return found
