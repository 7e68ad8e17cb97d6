"""Reports outages of Prefect's API: one line when it becomes unreachable, one when it is back."""

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

OUTAGE_SECONDS = 10.0  # seconds without an answer; a busy server may take almost as long
NO_ANSWER = (httpx.TransportError, OSError)  # raised by calls that got no answer

TRY_LATER = (408, 429)  # statuses that ask to try again later; those from 500 on are outages, too
WRONG_URL_OR_KEY = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


def is_outage(error: Exception) -> bool:
    """Return whether Prefect's API did not answer, failed, or asked to try again later."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_server_error or error.response.status_code in TRY_LATER
    return isinstance(error, httpx.TransportError) and not isinstance(error, WRONG_URL_OR_KEY)


class ApiWatch:
    """Detects outages of Prefect's API from the calls that one thread makes to it.

    The thread makes each call in a `with watch.within():` block. `look` must be called regularly
    from another thread, because Prefect's client retries for a minute before a call raises. To
    continue an outage that an earlier watch has detected, pass its start as `since`, a time on
    `clock`.
    """

    def __init__(self, clock: Callable[[], float], since: float | None = None):
        self.clock = clock
        self._since = since  # start of the first unanswered call
        self._said = False
        self._outages: list[float] = []  # seconds of each ended outage not popped yet

    @contextmanager
    def within(self) -> Iterator[None]:
        """Watch one call to the API, made in the `with` block; an exception is raised again."""
        if self._since is None:
            self._since = self.clock()
        try:
            yield
        except NO_ANSWER:
            self.look()
            raise
        except Exception:  # an error is an answer too
            self._answered()
            raise
        self._answered()

    def _answered(self) -> None:
        since, self._since = self._since, None
        if since is None:
            return
        if self._said or self.clock() - since >= OUTAGE_SECONDS:
            self._said = False
            self._outages.append(self.clock() - since)
            # Only this line reaches the page: Prefect does not resend lines that it could not send.
            log.warning(
                "Prefect was unreachable for %s. The run continued. If its deployment has a "
                "concurrency limit, its lease may have expired, and the next run may start beside "
                "it. Log lines of that time are only in the worker's log",
                duration(self.clock() - since),
            )

    def pop_outage(self) -> float | None:
        """Return the length in seconds of an outage that has ended; None if there is none.

        Each outage is returned once.
        """
        return self._outages.pop() if self._outages else None

    def look(self) -> None:
        """Log, once per outage, that the API has not answered for OUTAGE_SECONDS."""
        since = self._since
        if self._said or since is None or self.clock() - since < OUTAGE_SECONDS:
            return
        self._said = True
        log.warning(
            "Prefect's API at %s has not answered for %.0f s. The run continues, and its page is "
            "updated once the API answers",
            get_current_settings().api.url or "its embedded server",
            self.clock() - since,
        )

    def continue_outage(self) -> ApiWatch | None:
        """Return a new watch that continues an ongoing outage; None if there is none.

        Call it when the task ends. This watch then reports nothing more of that outage, though a
        thread of the task may still be in a call.
        """
        since, self._since = self._since, None
        return None if since is None else ApiWatch(self.clock, since)


_UNANSWERED: dict[str, ApiWatch] = {}  # by flow run id: watch of an outage that outlasted its task


@contextmanager
def watched(clock: Callable[[], float] = time.monotonic) -> Iterator[ApiWatch]:
    """Yield a watch that reports outages of Prefect's API during a task of a flow run.

    If the previous task of the flow run ended during an outage, this watch takes over that outage
    and its start. So the whole length is reported once the outage ends.
    """
    run = flow_run.get_id() or ""
    watch = _UNANSWERED.pop(run, None) or ApiWatch(clock)
    try:
        yield watch
    finally:
        if (left := watch.continue_outage()) is not None:
            _UNANSWERED[run] = left


class _OneLine(logging.Filter):
    """Drops Prefect's messages about unsent events, which contain the whole event."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return not (text.startswith("Unable to connect to") or "failed to process item" in text)


@contextmanager
def outages_logged_once() -> Iterator[None]:
    """Suppress the long messages of Prefect's clients about an outage during the `with` block.

    `ApiWatch` reports each outage in one line instead.
    """
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
