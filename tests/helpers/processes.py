"""Processes that a test has started, and what these have started: never the whole machine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psutil

ENGINE = ("VLLM::", "EngineStage")
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
STROKE, PAUSE = 0.05, 0.15  # seconds of work of what is held, and between: few rows anywhere


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


def running_but_agents(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended, without Ray's agents.

    Where a cluster was killed, its agents try for a minute to report that to it, and then end.
    """
    return [one for one in processes if (name := title(one)) and not name.startswith(RAY_AGENTS)]


def until(holds: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `holds` says as soon as that is something; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.1)
    return found


@contextmanager
def held(
    find: Callable[[], list[psutil.Process]],
    committed: Callable[[], int],
    every: float = 20.0,
) -> Iterator[None]:
    """Holds a run, so that it is seen at work on a machine of any speed: begin it in here.

    Once it has committed a shard more, the processes that `find` finds, those that start meanwhile
    too, are stopped. After `every` seconds they go on, in strokes, until the next commit; `every`
    is to be well below the 60 s without a commit that are told as a stall. Fails where there are
    commits and no process was ever found.
    """
    over, ever = threading.Event(), set[psutil.Process]()

    def each(act: Callable[[psutil.Process], None], processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                act(process)

    def stop(seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            now = set(find())
            ever.update(now)
            assert ever, "a run commits, and no process is found that could be held"
            each(psutil.Process.suspend, now)
            if over.wait(min(0.5, max(0.0, until - time.monotonic()))) or time.monotonic() >= until:
                return

    def hold() -> None:
        begun, seen = False, committed()
        try:
            while not over.wait(STROKE):
                if committed() > seen:
                    stop(every)
                    begun, seen = True, committed()
                elif begun:
                    stop(PAUSE)
                each(psutil.Process.resume, ever)
        finally:
            each(psutil.Process.resume, ever)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        try:
            yield
        finally:
            over.set()
            holding.result()
