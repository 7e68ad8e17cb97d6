"""Reports outages of Prefect's API: one line when it goes away and one when it is back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

from prefect_raybatch.report.report import duration

log = logging.getLogger(__name__)

AWAY_AFTER = 10.0  # seconds without an answer, which a busy server takes at times
NO_ANSWER = (httpx.TransportError, OSError)  # what calls raise that were not answered


class ApiWatch:
    """Watches calls made `within` it from one thread. `look` is called from another thread, because
    Prefect's client retries for a minute before a call raises."""

    def __init__(self, clock: Callable[[], float], since: float | None = None):
        self.clock = clock
        self._since = since  # when the first call began that was not answered
        self._said = False

    @contextmanager
    def within(self) -> Iterator[None]:
        if self._since is None:
            self._since = self.clock()
        try:
            yield
        except NO_ANSWER:
            self.look()
            raise
        except Exception:  # an answer, if none that helps
            self._answered()
            raise
        self._answered()

    def _answered(self) -> None:
        since, self._since = self._since, None
        if since is None:
            return
        if self._said or self.clock() - since >= AWAY_AFTER:
            self._said = False
            # It is the one line of the two that reaches the page: Prefect sends no log line twice.
            log.warning(
                "Prefect's API answers again, after %s; the run went on meanwhile and nothing is "
                "to be done. Log lines of that time are in the log of its worker alone",
                duration(self.clock() - since),
            )

    def look(self) -> None:
        """Report once that the API is away, when it is."""
        since = self._since
        if self._said or since is None or self.clock() - since < AWAY_AFTER:
            return
        self._said = True
        log.warning(
            "Prefect's API at %s has not answered for %.0f s; the run goes on, and its page is "
            "brought up to date when it answers again",
            get_current_settings().api.url or "its embedded server",
            self.clock() - since,
        )

    def left_over(self) -> ApiWatch | None:
        """Return the watch for the next task if the API is away as this one ends. This watch
        reports nothing more, because a thread of the task may still be in a call."""
        since, self._since = self._since, None
        return None if since is None else ApiWatch(self.clock, since)


_UNANSWERED: dict[str, ApiWatch] = {}  # by flow run: what a task of it left to the next one


@contextmanager
def watched(clock: Callable[[], float] = time.monotonic) -> Iterator[ApiWatch]:
    """Yield the watch of a task. It continues that of an earlier task of the flow run if the API
    was away as that ended; otherwise nobody would report that it is back, and for how long it was
    away."""
    run = flow_run.get_id() or ""
    watch = _UNANSWERED.pop(run, None) or ApiWatch(clock)
    try:
        yield watch
    finally:
        if (left := watch.left_over()) is not None:
            _UNANSWERED[run] = left


class _OneLine(logging.Filter):
    """Shortens Prefect's messages about events that could not be sent, which contain the whole
    event."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return not (text.startswith("Unable to connect to") or "failed to process item" in text)


@contextmanager
def said_once() -> Iterator[None]:
    """Keep Prefect's clients from reporting at length, each for itself, that the API is away."""
    added = _OneLine()
    loggers = [logging.getLogger(name) for name in ("prefect.events.clients", "prefect._internal")]
    loggers.append(logging.getLogger("prefect._internal.concurrency"))
    for logger in loggers:
        logger.addFilter(added)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(added)
