"""How a stage calls a user's function, and what it protects its process from."""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefect_raybatch.job.functions import load_function
from prefect_raybatch.stages.calls.apart import START_SECONDS, Apart, raised
from prefect_raybatch.stages.calls.child import shown

SLACK = 1.0  # seconds between two settings of the alarm, which costs more than a light function
STDERR = 2  # Ray's log of the worker
Function = Callable[[object], object]


@dataclass(frozen=True)
class Calls:
    """`seconds` is the time for a row, None for any.

    `apart`: in a process of its own, where anything that a row does to it is that row's failure; a
    row may end `deaths` of them.

    In the stage's own process, a function that ends or hangs it takes the block along: the alarm
    ends the process, and the block is retried in a pass that calls functions apart.
    """

    seconds: float | None = None
    apart: bool = False
    deaths: int = 1

    @contextlib.contextmanager
    def function(self, name: str, field: str) -> Iterator[Function]:
        """Yield the function `name` of a job's `field`, callable with a row inside the block."""
        if self.apart:
            yield Apart(name, field, self.seconds, self.deaths)
            return
        alarm = _Alarm(self.seconds)
        try:
            alarm.set(START_SECONDS)  # for the import of its module
            yield _guarded(load_function(name, field), alarm)
        finally:
            alarm.off()


HERE = Calls()


def _guarded(function: Function, alarm: _Alarm) -> Function:
    def call(row: object) -> object:
        alarm.set()
        try:
            return function(row)
        except Exception:
            raise
        except BaseException as error:
            if _ends_process(error):
                raise
            raise raised(type(error).__name__, shown(error)) from error

    return call


def _ends_process(error: BaseException) -> bool:
    """Return whether an exception came from a signal and not from the function.

    Signals are Ctrl-C, a task that Ray cancels, or a stopping node. If it was the function after
    all, calling functions apart shows it.
    """
    return isinstance(error, KeyboardInterrupt) or hasattr(error, "ray_terminate_msg")


class _Alarm:
    """Ends this process, dumping all thread stacks, once a row takes longer than `seconds`.

    It needs no interpreter, so it also works if a function holds the lock forever.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.last = seconds, float("-inf")

    def set(self, least: float | None = None) -> None:
        """Start the timer; `least` allows at least that many seconds until the next call."""
        now = time.monotonic()
        if self.seconds is None or now - self.last < SLACK:
            return
        seconds = max(self.seconds, least or 0.0)
        faulthandler.dump_traceback_later(seconds + SLACK, exit=True, file=STDERR)
        self.last = now if least is None else float("-inf")

    def off(self) -> None:
        if self.seconds is not None:
            faulthandler.cancel_dump_traceback_later()
