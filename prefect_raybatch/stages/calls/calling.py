"""How a stage calls a user's function: what it may do to its row, and what not to its process."""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.job.functions import load_function
from prefect_raybatch.stages.calls.apart import START_SECONDS, Apart, raised
from prefect_raybatch.stages.calls.child import shown

SLACK = 1.0  # seconds between two settings of the alarm, which costs more than a light function
STDERR = 2  # Ray's log of the worker
Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Calls:
    """`seconds` a function may take for a row, None any. `apart`: in a process of its own, where
    what a row does to it is the row's failure; a row may end `deaths` of them.

    Not apart, a function that ends or hangs its process takes the block along: the alarm ends the
    process, and the block comes again in a pass that calls functions apart.
    """

    seconds: float | None = None
    apart: bool = False
    deaths: int = 1

    @contextlib.contextmanager
    def function(self, name: str, field: str) -> Iterator[Function]:
        """The function `name` of a job's `field`, callable with a row inside of the block."""
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
    def call(row: object) -> Any:
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
    """Whether it came from a signal (Ctrl-C, a task that Ray cancels, a node that stops) and not
    from the function. Should it be the function's after all, it shows where functions run apart."""
    return isinstance(error, KeyboardInterrupt) or hasattr(error, "ray_terminate_msg")


class _Alarm:
    """Ends this process, showing where each thread is, once a row takes longer than `seconds`.

    Needs no interpreter: it also strikes where a function holds that for ever.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.last = seconds, float("-inf")

    def set(self, least: float | None = None) -> None:
        """From now on; a longer time than a row's may be given, at `least`, until the next call."""
        now = time.monotonic()
        if self.seconds is None or now - self.last < SLACK:
            return
        seconds = max(self.seconds, least or 0.0)
        faulthandler.dump_traceback_later(seconds + SLACK, exit=True, file=STDERR)
        self.last = now if least is None else float("-inf")

    def off(self) -> None:
        if self.seconds is not None:
            faulthandler.cancel_dump_traceback_later()
