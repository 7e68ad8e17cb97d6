"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

# Above those of Ray's workers, and below those that the kernel gives to connections: one of these
# may be taken before its server is there, or while it is started again, even by the connection that
# waits for it.
LOWEST, HIGHEST = 20_000, 32_000


def free_ports(count: int = 1) -> list[int]:
    """Ports side by side that nobody has."""
    for _ in range(1000):
        first = random.SystemRandom().randrange(LOWEST, HIGHEST)
        found = list(range(first, first + count))
        with ExitStack() as stack:
            try:
                for port in found:
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return found
    raise RuntimeError(f"no {count} free ports between {LOWEST} and {HIGHEST}")
