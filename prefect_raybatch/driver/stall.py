"""Stall detection: when no shard has been committed for too long, and what to do then."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.bounded import within
from prefect_raybatch.driver.driver import RunPass
from prefect_raybatch.driver.heartbeat import Counts
from prefect_raybatch.errors import EngineFailure, RayBatchError
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.records import Receipt, Unit

log = logging.getLogger(__name__)

LEAST_PAUSE = 60.0  # seconds: shorter pauses are normal
INTERVALS = 10  # allowed pause, in mean times between commits
PAUSE_FACTOR = 3  # the same in times of the slowest shard: engines may begin and end together
STALL_LOOK = 1.0  # seconds between looks whether a stalled run is to fail
STOP = 5.0  # seconds that an abandoned pass may take to end
GIVE_UP = 30.0  # seconds that the call may take which makes Ray end that pass


@dataclass(frozen=True)
class Stall:
    """No commit for `seconds`, longer than the allowed `limit`.

    This is the `number`th warning of this stall. `starting` is true until the first commit of this
    pass.
    """

    seconds: float
    limit: float
    number: int
    starting: bool


@dataclass(frozen=True)
class Flowing:
    """Commits resumed after `seconds` without one."""

    seconds: float


def starts(counts: Counts, passes: int) -> bool:
    """Return whether the engines of the current pass are still starting: it has no commit yet.

    `counts` were taken at the latest commit, `passes` is the number of passes begun. Commits of
    earlier attempts do not count.
    """
    return not counts.commits or passes > counts.passes


class StallWatch:
    """Reports when a run stalls and when it resumes; call `look` about every second.

    It warns at the limit, then at 2, 4, 8, ... times the limit. A new pass starts new engines, so
    limits.stall_start_seconds applies until its first commit. Times are seconds of a monotonic
    clock that the caller supplies.
    """

    def __init__(self, limits: Limits, now: float):
        self.limits = limits
        self.since = now
        self.starting = True
        self.alarms = 0
        self._seen = (-1, -1)  # commits, passes

    def limit(self, counts: Counts, longest: float = 0.0) -> float:
        """Return the seconds without a commit that are allowed now.

        `longest` is the duration in seconds of this attempt's slowest shard.
        """
        if self.starting:
            return float(self.limits.stall_start_seconds)
        if self.limits.stall_seconds is not None:
            return self.limits.stall_seconds
        between = (counts.at - counts.window_start) / counts.commits if counts.commits else 0.0
        return max(LEAST_PAUSE, INTERVALS * between, PAUSE_FACTOR * longest)

    def look(
        self, now: float, counts: Counts, passes: int, longest: float = 0.0
    ) -> Stall | Flowing | None:
        """Return a `Stall` when a limit is passed, `Flowing` when commits resume, else None.

        `counts` were taken at the latest commit, `passes` is the number of passes begun, `longest`
        the duration in seconds of this attempt's slowest shard.
        """
        self.starting = starts(counts, passes)
        before, self._seen = self._seen, (counts.committed, passes)
        waited, alarms = now - self.since, self.alarms
        if before != self._seen:
            self.since, self.alarms = now, 0
            return Flowing(waited) if alarms and before[0] != counts.committed else None
        limit = self.limit(counts, longest)
        if counts.committed >= counts.shards or waited < limit * 2**alarms:
            return None
        self.alarms += 1
        return Stall(waited, limit, self.alarms, self.starting)


_END = object()


def interruptible(
    run_pass: RunPass,
    failure: Callable[[], EngineFailure | None],
    stop: Callable[[], None],
    halted: Callable[[], RayBatchError | None] = lambda: None,
) -> RunPass:
    """Wrap a pass so that errors returned by `failure()` and `halted()` end it.

    `failure()` is called while the pass waits for a receipt, `halted()` also between receipts. Ray
    cannot be interrupted from outside, so the pass runs in a separate thread. If the pass is
    abandoned, `stop` is called and must make it end. A thread that still does not end is left
    running.
    """

    def passing(units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
        started = _PassInThread(run_pass, units, isolated)
        try:
            while True:
                over_now = halted()
                if over_now is not None:
                    raise over_now
                try:
                    item = started.take()
                except queue.Empty:
                    error = failure()
                    if error is not None:
                        raise error from None
                    continue
                if item is _END:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            started.leave(stop)

    return passing


class _PassInThread:
    """Runs a pass in a separate thread, which waits with each receipt until `take` is called."""

    def __init__(self, run_pass: RunPass, units: Sequence[Unit], isolated: bool) -> None:
        self._receipts: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._left = threading.Event()
        self._ended = False
        context = copy_context().run  # log lines from there belong to the same flow run
        work = (self._pump, run_pass, units, isolated)
        self._thread = threading.Thread(
            target=context, args=work, name="raybatch-pass", daemon=True
        )
        self._thread.start()

    def take(self) -> Any:
        """Return the next receipt, `_END`, or the exception that ended the pass.

        Raises `queue.Empty` if there is none within STALL_LOOK seconds.
        """
        item = self._receipts.get(timeout=STALL_LOOK)
        self._ended = item is _END or isinstance(item, BaseException)
        return item

    def leave(self, stop: Callable[[], None]) -> None:
        """Accept no more receipts; call `stop` to end the pass, unless it has ended."""
        self._left.set()
        if not self._ended:
            _give_up(stop)
            self._thread.join(STOP)  # it should release Ray's objects before the run leaves Ray

    def _pump(self, run_pass: RunPass, units: Sequence[Unit], isolated: bool) -> None:
        end: Any = _END
        try:
            for receipt in run_pass(units, isolated):
                if not self._give(receipt):
                    return
        except BaseException as error:
            end = error
        self._give(end)

    def _give(self, item: object) -> bool:
        """Hand an item to `take`; return False if the pass was abandoned."""
        while not self._left.is_set():
            try:
                self._receipts.put(item, timeout=STALL_LOOK)
                return True
            except queue.Full:
                continue
        return False


def _give_up(stop: Callable[[], None]) -> None:
    try:
        within(GIVE_UP, stop)
    except TimeoutError as error:
        log.warning(
            "Ray did not stop the abandoned pass: %s; the run ends without waiting for it", error
        )
