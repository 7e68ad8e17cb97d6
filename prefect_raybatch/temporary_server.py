"""Prefect's temporary server, which Prefect starts for a flow if no API URL is set.

Prefect starts it as an ordinary child process. So a Ctrl-C in the terminal ends the server together
with the flow, which then waits minutes for the missing API; and if the flow is killed, the server
goes on running.
"""

from __future__ import annotations

import subprocess
from types import ModuleType
from typing import Any

from prefect_raybatch.proxies import bypass_for_local_addresses


def guard_temporary_server(server: ModuleType) -> None:
    """Shield Prefect's server from signals and proxies, and end it when this process ends.

    `server` is the module `prefect.server.api.server`, which starts the server. An import hook
    calls this function when Prefect imports that module, which is before code of a flow runs.
    """
    bypass_for_local_addresses()
    vars(server)["subprocess"] = _Subprocess()
    started = server.SubprocessASGIServer().server_process
    if started is not None and started.poll() is None:
        _end_with_us(started.pid)


class _Subprocess:
    """Stands in for the module `subprocess` in Prefect's server, with our `Popen`."""

    def __getattr__(self, name: str) -> object:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        """Start a process in its own group, because terminals and `timeout` signal whole groups."""
        process: subprocess.Popen[Any] = subprocess.Popen(*arguments, process_group=0, **options)
        _end_with_us(process.pid)
        return process


_WATCHERS: list[subprocess.Popen[bytes]] = []  # referenced here to keep their pipes open


def _end_with_us(pid: int) -> None:
    """Start a watcher process that kills `pid` when this process ends, however it ends.

    The watcher reads from a pipe, which the kernel closes when this process ends. After a normal
    exit there is nothing to kill, because Prefect's own handler has ended `pid`. Another process
    may have its id by then. So the watcher works in the folder /proc/PID, which is empty once the
    original process has ended.
    """
    script = "trap '' INT TERM; cat > /dev/null; test -e stat && kill $0"
    _WATCHERS.append(
        subprocess.Popen(
            ["sh", "-c", script, str(pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=f"/proc/{pid}",
            start_new_session=True,
        )
    )
