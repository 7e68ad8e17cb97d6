"""The program with which Ray starts an engine's actor: has it forked, or becomes Python itself.

Run as `python -I -S launcher.py SOCKET PYTHON PROGRAM ...`: it asks the process that listens at
SOCKET for a fork that runs PROGRAM, and ends when the fork does. If no process answers within
`IMPORTS_WAIT`, or the fork ends before it runs PROGRAM, the launcher executes `PYTHON PROGRAM ...`,
as Ray would have done. It imports only the standard library, so it costs some hundredths of a
second.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass

IMPORTS_WAIT = 120.0
"""Seconds that imports may take, and that a worker waits for them.

Less than the time in which a worker of a local cluster must report itself to Ray
(`REGISTER_SECONDS` in `cluster.ray_process`).
"""

CALL_WAIT = 10.0  # seconds that a call may take once the server has accepted it
ALIVE_EVERY = 0.5  # seconds between checks of a process on kernels without pidfd_open
FORK_REQUEST = b"r"  # sent on accept, so that nothing is forked for a caller that has given up
SIZE = struct.Struct("!Q")  # 8 bytes: the length of a call, or the process id in the reply


@dataclass(frozen=True)
class WorkerCall:
    """A request to fork a worker: its command line (`words`), environment and working folder.

    `files` is its limit of open files and `oom` its oom_score_adj, as Ray has set them for the
    calling process. `streams` are descriptors for stdin, stdout and stderr.
    """

    words: list[str]
    environment: dict[str, str]
    folder: str
    files: int
    oom: str
    streams: list[int]


def receive(caller: socket.socket) -> WorkerCall | None:
    """Tell the launcher at the socket `caller` to send its request, and return the request.

    None if the request is invalid or does not arrive in time.
    """
    caller.settimeout(CALL_WAIT)
    caller.sendall(FORK_REQUEST)
    streams: list[int] = []
    try:
        head, streams, _, _ = socket.recv_fds(caller, SIZE.size, 3)
        body = _read(caller, SIZE.unpack(head)[0])
        return WorkerCall(**json.loads(body), streams=list(streams))
    except (OSError, ValueError, TypeError, struct.error):
        for descriptor in streams:
            os.close(descriptor)
        return None


def reply(caller: socket.socket) -> None:
    """Tell the launcher at `caller` that this process is its fork and about to run the program.

    Raises OSError if the launcher has given up.
    """
    caller.sendall(SIZE.pack(os.getpid()))


def forked_worker(path: str, words: list[str]) -> int | None:
    """Have the server at socket `path` fork a process to run a command; return its process id.

    The command is `words`, a program and its arguments. The fork gets this process's environment,
    folder, streams and limits. Returns None if the server forks nothing. Raises OSError if no reply
    comes within `CALL_WAIT` seconds; the fork may be running then.
    """
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(IMPORTS_WAIT)
        try:
            server.connect(path)
            if server.recv(1) != FORK_REQUEST:
                return None
        except OSError:
            return None
        server.settimeout(CALL_WAIT)
        with open("/proc/self/oom_score_adj") as file:
            oom = file.read()
        call = {
            "words": words,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "oom": oom,
        }
        body = json.dumps(call).encode()
        socket.send_fds(server, [SIZE.pack(len(body))], [0, 1, 2])
        server.sendall(body)
        answer = _read(server, SIZE.size)
        return int(SIZE.unpack(answer)[0]) if answer else None


def wait_for(pid: int) -> None:
    """Wait until a process has ended, whether it is a child of this one or not."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        if (handle := _handle_of(pid)) is not None:
            select.select([handle], [], [])
            return
        while True:
            os.kill(pid, 0)
            time.sleep(ALIVE_EVERY)


def _handle_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends.

    None on a kernel before 5.3, or in a sandbox that lacks the call. Raises ProcessLookupError if
    the process has ended.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def _read(connection: socket.socket, size: int) -> bytes:
    """Read `size` bytes from a socket; return fewer only if the other side closes it."""
    parts = []
    while size and (part := connection.recv(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main(path: str, python: str, words: list[str]) -> None:
    """Run `words` in a fork and wait for its end; without a fork, become `python` and run them.

    `path` is the socket of the process that forks, `words` a program and its arguments.
    """
    pid = forked_worker(path, words)
    if pid is None:
        os.execv(python, [python, *words])
    wait_for(pid)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
