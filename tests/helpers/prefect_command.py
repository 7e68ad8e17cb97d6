"""`prefect`, whose server does not hang as automations are written.

On SQLite that of Prefect 3.7.7 then waits within its own event loop for a lock, which the loop's
look at the automations every five seconds may hold: it never answers again, whoever shares it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from importlib.metadata import entry_points
from typing import Any

TASKS = set[asyncio.Task[None]]()


def soon(work: Coroutine[Any, Any, None]) -> None:
    """In place of waiting for it: the server's loop works it off."""
    task = asyncio.get_running_loop().create_task(work)
    TASKS.add(task)
    task.add_done_callback(TASKS.discard)


if __name__ == "__main__":
    if sys.argv[1:2] == ["server"]:
        from prefect.server.events.models import automations

        if not hasattr(automations, "run_coro_as_sync"):
            sys.exit("this Prefect writes automations in another way: is this of use still?")
        automations.run_coro_as_sync = soon  # type: ignore[assignment]
    (program,) = entry_points(group="console_scripts", name="prefect")
    program.load()()
