"""Prefect's temporary server, which a flow starts where no API URL is set.

Prefect starts it as an ordinary child process. A terminal's Ctrl-C then ends it together with the
flow, which waits minutes for an API that is gone, and it outlives a flow that is killed.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from functools import cache

from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE


def start_temporary_server() -> None:
    """Start the server out of reach of Ctrl-C if a flow would start it; else do nothing."""
    if PREFECT_API_URL.value() or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        return
    from prefect.server.api.server import SubprocessASGIServer

    def start() -> None:
        # A child inherits the blocked signals of the thread that starts it, and keeps them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            SubprocessASGIServer().start()
        except Exception as error:  # for the caller, unless Ctrl-C has ended its wait
            errors.append(error)

    errors: list[Exception] = []
    starter = threading.Thread(target=start, name="raybatch-prefect-server", daemon=True)
    starter.start()
    starter.join()
    if errors:
        raise errors[0]
    end_temporary_server_with_us()


def end_temporary_server_with_us() -> None:
    """See to it that the server of this process, if it has one, ends when this process does."""
    if PREFECT_API_URL.value():
        return
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer().server_process
    if server is not None:
        _end_with_us(server.pid)


@cache
def _end_with_us(pid: int) -> None:
    """Start a process that waits for the end of this one, however it ends, and then ends `pid`.

    The pipe that it reads from is closed by the kernel. Prefect's own exit handler comes first in
    an ordinary end, so `kill` may find nothing.
    """
    script = "trap '' INT TERM; cat > /dev/null; kill $0 2> /dev/null"
    subprocess.Popen(["sh", "-c", script, str(pid)], stdin=subprocess.PIPE, start_new_session=True)
