"""Calls a user's function from a stage, and guards the stage against hangs and exits."""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefect_raybatch.job.functions import load_function
from prefect_raybatch.stages.calls.child import shown
from prefect_raybatch.stages.calls.isolated import START_SECONDS, IsolatedFunction, raised

SLACK = 1.0  # seconds between restarts of the alarm: one takes longer than a fast function
STDERR = 2  # Ray's log of the worker
Function = Callable[[object], object]


@dataclass(frozen=True)
class Calls:
    """How a stage calls user functions. `seconds` is the time limit for a row, None: no limit.

    `in_child`: functions run in a child process, so that a function that ends or hangs the process
    fails only its row. The row fails once `deaths` child processes have ended during it.

    Without `in_child`, functions run in the stage's own process. If a function ends that process,
    or hangs until an alarm ends it, the whole block is lost and retried in a pass with `in_child`.
    """

    seconds: float | None = None
    in_child: bool = False
    deaths: int = 1

    @contextlib.contextmanager
    def function(self, name: str, field: str) -> Iterator[Function]:
        """Yield the function `name` of a job's `field`; call it with rows in the `with` block."""
        if self.in_child:
            yield IsolatedFunction(name, field, self.seconds, self.deaths)
            return
        alarm = _Alarm(self.seconds)
        try:
            alarm.set(START_SECONDS)  # for the import of its module
            yield _guarded(load_function(name, field), alarm)
        finally:
            alarm.off()


CALLS_IN_PROCESS = Calls()


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

    The signals come from Ctrl-C, a task that Ray cancels, or a stopping node. If the function
    itself raised such an exception, the retry in a child process shows it.
    """
    return isinstance(error, KeyboardInterrupt) or hasattr(error, "ray_terminate_msg")


class _Alarm:
    """Ends this process, dumping all thread stacks, once a row takes longer than `seconds`.

    It runs in C (faulthandler), so it also works if the function never releases the GIL.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.last = seconds, float("-inf")

    def set(self, least: float | None = None) -> None:
        """Restart the timer with `seconds`, or with `least` if that is longer.

        To save time, a call within `SLACK` seconds of the last restart does nothing, so the timer
        runs for `SLACK` seconds more than asked. After a restart with `least`, the next call always
        restarts the timer.
        """
        now = time.monotonic()
        if self.seconds is None or now - self.last < SLACK:
            return
        seconds = max(self.seconds, least or 0.0)
        faulthandler.dump_traceback_later(seconds + SLACK, exit=True, file=STDERR)
        self.last = now if least is None else float("-inf")

    def off(self) -> None:
        if self.seconds is not None:
            faulthandler.cancel_dump_traceback_later()
