"""Warns early that a store does not answer, with its endpoint and what to check."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

WARN_AFTER = 15.0  # seconds of a call: a healthy store, even a throttling one, takes less
WARN_EVERY = 60.0  # seconds between two warnings, whatever number of threads are waiting
CHECK = (
    "Check that the store is up and can be reached from this machine, and its address in "
    "endpoint_url or AWS_ENDPOINT_URL"
)


class Silence:
    """State of one connection: whether its store ever answered, and when `warn` last logged."""

    def __init__(self) -> None:
        self.answered = False
        self._warned = float("-inf")

    def warn(self, place: str, endpoint: str, began: float, deadline: float, message: str) -> None:
        """Log that a call has had no valid answer for WARN_AFTER seconds or more.

        Does nothing if the call has not taken that long yet, or if the last warning is less than
        WARN_EVERY seconds ago. The call began at `began` and gives up at `deadline` (monotonic
        seconds). `message` is the last answer or error.
        """
        now = time.monotonic()
        if now - began < WARN_AFTER or now - self._warned < WARN_EVERY:
            return
        self._warned = now
        log.warning(
            "%s: no valid answer from %s for %.0f s (%s). Retrying for %.0f s. %s",
            place,
            endpoint,
            now - began,
            message,
            max(0.0, deadline - now),
            CHECK,
        )

    def watched(
        self, send: Callable[[Any], Awaitable[Any]], began: float, warn: Callable[[], None]
    ) -> Callable[[Any], Awaitable[Any]]:
        """Return `send`, extended to call `warn` if the connection's first answer is late.

        This is needed because a host that drops packets blocks a call for half a minute. After the
        first answer, calls are not watched, as they may have good reasons to take long.
        """

        async def sent(fs: object) -> Any:
            if self.answered:
                return await send(fs)
            task = asyncio.ensure_future(send(fs))
            try:
                left = began + WARN_AFTER - time.monotonic()
                if not (await asyncio.wait({task}, timeout=max(0.0, left)))[0]:
                    warn()
                return await task
            finally:
                task.cancel()  # has an effect only if this call itself was cancelled

        return sent


def without_keys(url: str) -> str:
    """Return scheme://host:port of an endpoint, without credentials in it."""
    try:
        found = urlsplit(url)
        port = found.port or (80 if found.scheme == "http" else 443)
    except ValueError:
        return "an invalid endpoint_url"
    host = f"[{found.hostname}]" if ":" in (found.hostname or "") else found.hostname
    return f"{found.scheme}://{host}:{port}"
