"""Says in time that a store gives no answer, which one, and what to look at."""

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
    "check that the store is up and can be reached from this machine, and its address in "
    "endpoint_url or AWS_ENDPOINT_URL"
)


class Silence:
    """What one connection knows of its store: whether it ever answered, when it was warned of."""

    def __init__(self) -> None:
        self.answered = False
        self._warned = float("-inf")

    def warn(self, place: str, endpoint: str, began: float, deadline: float, said: str) -> None:
        """Warns of a call that began at `began` and gives up at `deadline` (monotonic seconds),
        if it is time to."""
        now = time.monotonic()
        if now - began < WARN_AFTER or now - self._warned < WARN_EVERY:
            return
        self._warned = now
        log.warning(
            "%s: no good answer from %s for %.0f s (%s); asking on for %.0f s. Meanwhile %s",
            place,
            endpoint,
            now - began,
            said,
            max(0.0, deadline - now),
            CHECK,
        )

    def watched(
        self, send: Callable[[Any], Awaitable[Any]], began: float, warn: Callable[[], None]
    ) -> Callable[[Any], Awaitable[Any]]:
        """`send`, with a warning while it waits for the first answer that there ever was: a host
        that drops packets keeps a call for half a minute. Later calls may be long and well."""

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
                task.cancel()  # only needed where this call itself was cancelled

        return sent


def without_keys(url: str) -> str:
    """scheme://host:port of an endpoint, without the keys that may stand in it."""
    try:
        found = urlsplit(url)
        port = found.port or (80 if found.scheme == "http" else 443)
    except ValueError:
        return "an endpoint_url that is no URL"
    return f"{found.scheme}://{found.hostname}:{port}"
