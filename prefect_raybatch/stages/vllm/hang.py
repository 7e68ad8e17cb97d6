"""Detects a hung engine: it has work, but its current step has not returned for too long.

A step of vLLM can wait forever for a suspended core, a driver call or a collective. Nothing dies
then, so a check for dead processes does not detect it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from typing import NoReturn

from prefect_raybatch.stages.vllm.process_note import add_cause

log = logging.getLogger(__name__)

HANG_LOOK = 1.0  # seconds between checks
FIRST_ANSWER = 2  # times the limit, until the first answer: first steps may compile kernels
STATUS = 70  # exit status of a process that ends itself: EX_SOFTWARE of sysexits.h


class HangWatch:
    """Detects a step that has taken longer than allowed; call `look` about every second.

    `seconds` is the time limit of a step, None for no limit. It is doubled until the engine's first
    answer. Of the time between two calls, at most two seconds count: if this process was suspended,
    or got no CPU, it could not have seen the step return.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        self._step = self._waited = self._last = 0.0

    def look(self, now: float, step: float, answered: bool) -> float | None:
        """Return the time limit in seconds if the running step has exceeded it; else None.

        now: seconds of a monotonic clock. step: a number that differs for each step, 0 while the
        engine has nothing to do. answered: whether the engine has answered a request already.
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
    """Log `cause`, add it to this process's note, dump all thread stacks, and end this process.

    The whole process ends because a hung thread cannot be ended alone. Callers that wait for the
    engine are not told before. If they were, they might send further requests, and these would be
    blamed for the death of the process.
    """
    log.critical("%s; process %d ends itself and is restarted", cause, os.getpid())
    add_cause(cause)
    with contextlib.suppress(Exception):  # even if stderr is closed, the process must end
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    os._exit(STATUS)
