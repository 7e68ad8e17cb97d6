"""Ends a cancelled flow run whose worker did not notice the cancellation.

A worker stops looking for cancellations when Prefect's API was unreachable for about a minute. The
flow run would then stay Cancelling and work to its end.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State

from prefect_raybatch.flow.away import NO_ANSWER
from prefect_raybatch.flow.continuing import root_run

log = logging.getLogger(__name__)

CANCEL_LOOK = 15.0  # seconds between looks at the state
CANCEL_GRACE = 30.0  # seconds in which a worker that notices a cancellation ends the process
ENDED_BY_ITSELF = (
    "Its worker did not notice the cancellation, so the run ended itself. Committed shards are "
    "kept."
)

NOTICED: set[UUID] = set()  # flow runs that this process ends


class CancelWatch:
    """Ends this process if its outermost flow run was cancelled.

    Call `look` every CANCEL_LOOK seconds.
    """

    def __init__(self, grace: float = CANCEL_GRACE, clock: Callable[[], float] = time.monotonic):
        self.run, self.grace, self.clock = root_run(), grace, clock
        self._since: float | None = None  # when the flow run was first found Cancelling

    def look(self) -> None:
        """Send SIGTERM to this process if its flow run has been Cancelling for `grace` seconds.

        Does so once, and only if the process handles SIGTERM.
        """
        if self.run is None or self.run in NOTICED:
            return
        state = None
        with suppress(*NO_ANSWER):
            state = _state_of(self.run)
        if state is None or not state.is_cancelling():
            return
        now = self.clock()
        self._since = now if self._since is None else self._since
        # Without a handler the signal would end the process without its `finally` clauses.
        if now - self._since < self.grace or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            return
        NOTICED.add(self.run)
        log.warning("the flow run is Cancelling, but its worker does not end it; ending it here")
        os.kill(os.getpid(), signal.SIGTERM)


def ended_by_cancellation() -> bool:
    """Return whether this process ended the current flow run because it was cancelled."""
    return root_run() in NOTICED


def _state_of(run: UUID) -> State | None:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run).state
