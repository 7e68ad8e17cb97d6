"""Imports vLLM, then forks Ray workers that have it imported already.

Run as `python -P -m prefect_raybatch.imports.server LISTENER ALIVE` with two inherited descriptors:
a listening UNIX socket, and the read end of a pipe whose other end closes when this process is no
longer needed. What it has forked lives on.

A fork must not inherit a CUDA context or a thread of Python's. If an import has made one, this
process ends, and the workers that wait for it start as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn, cast

from prefect_raybatch.imports.launcher import IMPORTS_WAIT, WorkerCall, receive, reply
from prefect_raybatch.stages.vllm import forking

LOADED_BY = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that say from where modules and libraries are loaded."""


def main(listener: int, alive: int) -> None:
    """Import, then serve calls until the pipe `alive` closes."""
    loaded_by = [os.environ.get(name) for name in LOADED_BY]
    for descriptor in (listener, alive):  # not for programs that an import starts
        os.set_inheritable(descriptor, False)
    signal.alarm(int(IMPORTS_WAIT))  # ends this process, also where an import hangs
    _import_engine()
    signal.alarm(0)
    apart = forking.core_apart()
    # Nobody waits for the workers, so the kernel may forget them. Not before: the imports would
    # take every program that fails for one that succeeds.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=listener) as door:
        if not _may_fork():
            return
        events = select.poll()
        for descriptor in (listener, alive):
            events.register(descriptor, select.POLLIN)
        while all(descriptor != alive for descriptor, _ in events.poll()):
            with contextlib.suppress(OSError), door.accept()[0] as caller:
                if (call := _forked_for(caller, loaded_by)) is not None:
                    os.close(door.detach())
                    os.close(alive)
                    _become(call, caller, apart)


def _import_engine() -> None:
    """Import what an engine's processes need, but not Ray, which must be loaded in the fork.

    When it is loaded, Ray reads from the environment for which job the process is. Of vLLM's
    modules one looks for Ray, for engines over several nodes, which are not started from here.
    """
    sys.modules["ray"] = cast(ModuleType, None)  # so it is not found
    try:
        importlib.import_module(forking.PRELOAD)
    finally:
        del sys.modules["ray"]


def _may_fork() -> bool:
    """Return whether a fork of this process inherits neither a CUDA context nor a thread."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    return not cuda and threading.active_count() == 1


def _forked_for(caller: socket.socket, loaded_by: Sequence[str | None]) -> WorkerCall | None:
    """Fork the worker that `caller` asks for; return the call in the fork, and None here.

    Without a fork for a worker that would load other modules or libraries than this process has:
    its variables `LOADED_BY` differ. The fork keeps what imports have opened: NVML fails in one
    whose /dev/nvidia* descriptors are closed.
    """
    call = receive(caller)
    if call is None:
        return None
    pid = -1
    try:
        if [call.environment.get(name) for name in LOADED_BY] == loaded_by:
            pid = os.fork()
    finally:
        if pid:  # here, or no fork was made
            for descriptor in call.streams:
                os.close(descriptor)
    return None if pid else call


def _become(call: WorkerCall, caller: socket.socket, apart: bool) -> NoReturn:
    """Be the worker in this process, a fork: its streams, environment, folder and program.

    `apart`: the core of its engine gets a process. Ends as the program does, with all that was
    registered for the end of the process. If it ends before the reply, the caller starts a worker
    itself.
    """
    try:
        _take_over(call)
        reply(caller)
        caller.close()
        if apart:
            forking.fork_server_here()
        from prefect_raybatch.stages.ray_internals import title_forked_worker

        title_forked_worker()
        sys.argv = call.words
        runpy.run_path(call.words[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    sys.exit(0)


def _take_over(call: WorkerCall) -> None:
    """Give this process the streams, limits, folder and environment of a call."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(call.streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.setpgid(0, 0)  # Ray ends the whole group of a worker that has ended
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = call.files if most == resource.RLIM_INFINITY else min(call.files, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(call.oom)
    os.chdir(call.folder)
    forking.take_environment(call.environment)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
