"""The program with which Ray starts an engine's actor: has it forked, or becomes Python itself.

Run as `python -I -S worker.py SOCKET PYTHON PROGRAM ...`: it asks the process that listens at
SOCKET for a fork that runs PROGRAM, and lives as long as the fork. Nothing answers there, or not
within `IMPORTS_WAIT`: it executes `PYTHON PROGRAM ...`, as Ray would have done. It uses the
standard library alone, so that it costs some hundredths of a second.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
from dataclasses import dataclass

IMPORTS_WAIT = 500.0
"""Seconds to wait for the imports, which take minutes from a slow disk; less than Ray gives a
worker of a local cluster to report itself (`REGISTER_SECONDS` in `cluster.ray_process`)."""

MAY_ASK = b"r"
SIZE = struct.Struct("!Q")  # of a request in bytes, and the process id that answers it


@dataclass(frozen=True)
class WorkerCall:
    """A worker to be forked: its words of the command line, environment, folder and streams."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]


def receive(caller: socket.socket) -> WorkerCall | None:
    """Return the request of a caller, which is told first that it may ask; None if it has gone."""
    caller.sendall(MAY_ASK)
    caller.settimeout(IMPORTS_WAIT)
    head, streams, _, _ = socket.recv_fds(caller, SIZE.size, 3)
    body = _read(caller, SIZE.unpack(head)[0]) if len(head) == SIZE.size else b""
    if not body or len(streams) != 3:
        for descriptor in streams:
            os.close(descriptor)
        return None
    return WorkerCall(**json.loads(body), streams=list(streams))


def reply(caller: socket.socket, pid: int) -> None:
    """Tell the caller the process id of its fork."""
    caller.sendall(SIZE.pack(pid))


def forked_worker(path: str, words: list[str]) -> int | None:
    """Return the process id of a fork that runs `words`; None if nothing answers at `path`.

    Its environment, folder and streams are those of this process.
    """
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(IMPORTS_WAIT)
            server.connect(path)
            if server.recv(1) != MAY_ASK:
                return None
            asked = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
            body = json.dumps(asked).encode()
            socket.send_fds(server, [SIZE.pack(len(body))], [0, 1, 2])
            server.sendall(body)
            return int(SIZE.unpack(_read(server, SIZE.size))[0])
    except (OSError, struct.error):
        return None


def wait_for(pid: int) -> None:
    """Return when a process has ended, be it a child or not."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it has ended already
        return
    select.select([handle], [], [])


def _read(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes, or fewer if the other side closes."""
    parts = []
    while size and (part := connection.recv(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main(path: str, python: str, words: list[str]) -> None:
    """Run `words` in a fork, or else in this process by `python`."""
    pid = forked_worker(path, words)
    if pid is None:
        os.execv(python, [python, *words])
    wait_for(pid)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
