"""Runs a user's function in the child process that `isolated.WorkerProcess` starts.

Imports almost nothing, because such a process is started in the middle of a block.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import cast

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.functions import load_function

IDLE = 60.0  # seconds without a row after which a child exits
ERROR_TEXT = 500  # characters of an error's message
HEADER = struct.Struct("!Q")  # length in bytes of the message that follows
PR_SET_PDEATHSIG = 1
READY, REFUSED, BEGUN, GAVE, RAISED = range(5)


def serve(fd: int, parent: int, field: str) -> None:
    """Call a function for each row received over socket `fd`, then end this process.

    The process ends when the socket is closed, or after IDLE seconds without a row. The first
    message is the function's name, or the function itself (pickled). `field` is the job field that
    names the function; errors mention it. `parent` is the id of the process that sends the rows.

    Returns only if the function cannot be loaded, after reporting the error to `parent`.
    """
    _end_with(parent)
    _watch_for_orphans()
    faulthandler.enable()  # a segmentation fault shows in the worker's log where it was
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.set_inheritable(fd, False)
    wire = socket.socket(fileno=fd)
    try:
        function = load_function(cast(str, _next(wire)), field)
    except ConfigError as error:
        _send(wire, REFUSED, str(error))
        return
    _send(wire, READY)
    with contextlib.suppress(OSError):
        while (row := _next(wire)) is not None:
            _send(wire, BEGUN)
            wire.sendall(_call(function, row))
    sys.stdout.flush()
    os._exit(0)  # not held up by threads that a function has left


def _end_with(parent: int) -> None:
    """Have the kernel kill this process once the thread that started it ends, even during a row.

    `parent` is the id of that thread's process. If that process has ended, end this one at once.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux; elsewhere this process ends when it reads the next row
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _watch_for_orphans() -> None:
    """Start a watcher process that kills the children of this process once this process has ended.

    The parent-death signal does not reach these children. Does nothing on kernels without
    pidfd_open (before Linux 5.3).
    """
    try:
        watched = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return
    leader = os.getpid()
    first = os.fork()
    if first:
        os.close(watched)
        os.waitpid(first, 0)
        return
    try:
        os.setsid()  # another process group, so that the watcher does not kill itself
        if os.fork() == 0:  # an orphan: Ray kills a worker's children when the worker ends
            _kill_after(watched, leader)
    finally:
        os._exit(0)


def _kill_after(watched: int, leader: int) -> None:
    """Wait for the end of process `leader` (its pidfd is `watched`); kill its process group."""
    # Close the socket and the worker's log: others wait for the last process that holds them open.
    os.dup2(watched, 0)
    # Only descriptors that are open: in a container, a thousand million may be allowed, and without
    # close_range in Python and the kernel they would be closed one by one.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 0:
            with contextlib.suppress(OSError):
                os.close(fd)
    select.select([0], [], [])
    with contextlib.suppress(OSError):  # no process is left
        os.killpg(leader, signal.SIGKILL)


def shown(error: BaseException) -> str:
    """Return the beginning of an error's message, even if its `__str__` fails."""
    try:
        return str(error)[:ERROR_TEXT]
    except Exception:
        return "its message cannot be shown"


def _call(function: Callable[[object], object], row: object) -> bytes:
    """Call the function; return its result or its exception as a message to send."""
    me = os.getpid()
    try:
        answer = _frame(GAVE, function(row))
    except BaseException as error:
        answer = _frame(RAISED, type(error).__name__, shown(error))
    if os.getpid() != me:  # a fork of this process that the function made
        os._exit(0)
    return answer


def _next(wire: socket.socket) -> object:
    """Return the next message, unpickled; None if the other side closed the socket.

    Raises TimeoutError after `IDLE` seconds without a message.
    """
    wire.settimeout(IDLE)
    header = _exactly(wire, HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    data = _exactly(wire, size)
    wire.settimeout(None)  # the parent may be stopped for a while
    return pickle.loads(data)


def _exactly(wire: socket.socket, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size and (part := wire.recv(min(size - len(data), 1 << 20))):
        data += part
    return data


def _send(wire: socket.socket, *message: object) -> None:
    wire.sendall(_frame(*message))


def _frame(*message: object) -> bytes:
    data = pickle.dumps(message)
    return HEADER.pack(len(data)) + data
