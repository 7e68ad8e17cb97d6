"""A plugin of pytest: a test that pytest-timeout ends for hanging also shows its child processes.
Their stacks are not ours to read; what each was doing is often said by its command and state."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from types import FrameType
from typing import Any

import psutil
import pytest

from .processes import below, title

MOST_SHOWN = 40


SEEN = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, Any, Any]:
    """Look at the children as soon as the time is up: the test ends them on its way out."""
    done = yield
    ends = signal.getsignal(signal.SIGALRM)

    def look_and_end(number: int, frame: FrameType | None) -> None:
        item.stash[SEEN] = children()
        if callable(ends):
            ends(number, frame)

    signal.signal(signal.SIGALRM, look_and_end)
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if SEEN in item.stash:
        report.sections.append(("Child processes when the time was up", item.stash[SEEN]))
    return report


def children() -> str:
    """Return a line for each process below this one: its id, parent, state and command."""
    lines = []
    for process in below(os.getpid()):
        try:
            lines.append(f"{process.pid} of {process.ppid()}, {process.status()}: {title(process)}")
        except psutil.NoSuchProcess:
            continue
    if len(lines) > MOST_SHOWN:
        lines[MOST_SHOWN:] = [f"and {len(lines) - MOST_SHOWN} more"]
    return "\n".join(lines) or "none"
