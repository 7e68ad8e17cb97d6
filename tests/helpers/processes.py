"""Processes that a test has started, and what these have started: never the whole machine's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def slowed(
    processes: list[psutil.Process],
    enough: Callable[[], bool] = lambda: False,
    share: float = 0.1,
) -> Iterator[None]:
    """Lets them work that share of each second, so that what they do is seen while it lasts, and no
    more at all once it is `enough`."""
    over = threading.Event()

    def each(act: Callable[[psutil.Process], None]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                act(process)

    def pause() -> None:
        try:
            while not over.wait(share):
                each(psutil.Process.suspend)
                over.wait(1.0 - share)
                while enough() and not over.wait(0.1):
                    pass
                each(psutil.Process.resume)
        finally:
            each(psutil.Process.resume)

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
