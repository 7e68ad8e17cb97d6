"""Is an engine hung? When it was given work and no step of it has returned for too long.

A step of vLLM can wait for ever: for a core that was stopped, a driver call or a collective that
never ends. Nothing dies then, so nobody who looks for dead processes sees it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from typing import NoReturn

log = logging.getLogger(__name__)

HANG_LOOK = 1.0  # seconds between looks
FIRST_ANSWER = 2  # times as long is allowed until the first answer: first steps may compile kernels
STATUS = 70  # exit status of a process that ends itself: an internal error, in sysexits


class HangWatch:
    """Says, asked about every second, how long a step may take when one has taken longer.

    `seconds`: the time a step may take, twice that until the engine has given its first answer;
    None: any time. A process that was itself stopped, or got no CPU, could not have seen a step
    return: between two looks no more than two seconds count.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        self._step = self._waited = self._last = 0.0

    def look(self, now: float, step: float, answered: bool) -> float | None:
        """Seconds that are allowed, when the step that is running has taken them; else None.

        now: seconds of a clock that does not jump. step: anything that is another for each step,
        0 while the engine has nothing to do.
        """
        if step != self._step or not step:
            self._step, self._waited = step, 0.0
        else:
            self._waited += min(now - self._last, 2 * HANG_LOOK)
        self._last = now
        if self.seconds is None:
            return None
        allowed = self.seconds if answered else FIRST_ANSWER * self.seconds
        return allowed if self._waited >= allowed else None


def end_process(cause: str) -> NoReturn:
    """Ends this process, since a thread of it cannot be ended, after showing where each one is.

    At once, before anybody is told: work that comes in the meantime would be blamed for the death.
    """
    log.critical("%s; its process %d ends itself, to be started anew", cause, os.getpid())
    with contextlib.suppress(Exception):  # even if stderr is closed, the process must end
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    os._exit(STATUS)
