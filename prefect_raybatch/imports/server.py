"""Imports vLLM, then forks Ray workers, which thus have vLLM imported already.

Run as `python -P -m prefect_raybatch.imports.server LISTENER ALIVE` with two inherited descriptors:
a listening UNIX socket, and the read end of a pipe whose other end closes when this process is no
longer needed. The workers that it has forked live on.

A fork must not inherit a CUDA context or a Python thread. If an import here has created one, this
process ends, and the workers that wait for it start as usual. Modules that only the fork server of
a vLLM core imports are not checked here: a test shows that they create neither.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import NoReturn, cast

from prefect_raybatch.imports.launcher import IMPORTS_WAIT, WorkerCall, receive, reply
from prefect_raybatch.stages.vllm import forking, internals
from prefect_raybatch.uncollected import import_all

LOADED_BY = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that say from where modules and libraries are loaded."""
LIST_PACKAGES = """
import json, sys
from importlib import metadata
json.dump(metadata.packages_distributions(), sys.stdout)
"""


def main(listener: int, alive: int) -> None:
    """Import vLLM, then fork a worker for each call, until the pipe `alive` closes.

    `listener` is the descriptor of the socket for calls. Returns at once if the imports left a
    thread or a CUDA context, which a fork must not inherit.
    """
    loaded_by = [os.environ.get(name) for name in LOADED_BY]
    events = select.poll()
    for descriptor in (listener, alive):
        os.set_inheritable(descriptor, False)  # not for programs that an import starts
        events.register(descriptor, select.POLLIN)
    apart = forking.core_apart()
    signal.alarm(int(IMPORTS_WAIT))  # ends this process if an import hangs
    # Stop at the first call, or when the pipe closes: a worker and its core's fork server then
    # import the rest at the same time. If the core shares the worker's process, nothing could run
    # beside it, so everything is imported here.
    _import_engine(stop=lambda: apart and bool(events.poll(0)))
    signal.alarm(0)
    # Nobody waits for the workers, so the kernel may reap them. Set only now: during the imports,
    # every program that fails would seem to succeed.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=listener) as door:
        if not _may_fork():
            return
        while all(descriptor != alive for descriptor, _ in events.poll()):
            with contextlib.suppress(OSError), door.accept()[0] as caller:
                if (call := _forked_for(caller, loaded_by)) is not None:
                    os.close(door.detach())
                    os.close(alive)
                    _become(call, caller, apart)


def _import_engine(stop: Callable[[], bool]) -> None:
    """Import the modules that an engine's processes need, except Ray.

    Imports the modules that vLLM's front end and core share, then those of each. Stops as soon as
    `stop()` is true; each fork then imports the remaining ones itself. A fork must import Ray
    itself, because Ray reads at import from the environment which job the process belongs to. One
    of vLLM's modules tries to import Ray for engines on several nodes; no such engine is started
    from here.
    """
    sys.modules["ray"] = cast(ModuleType, None)  # so it is not found
    try:
        with _packages_listed_beside():
            importlib.import_module(forking.PRELOAD)
            import_all((*internals.FRONT_MODULES, *internals.CORE_MODULES), stop)
            gc.freeze()
    finally:
        del sys.modules["ray"]


@contextlib.contextmanager
def _packages_listed_beside() -> Iterator[None]:
    """List the installed packages in another process during the `with` block, which imports vLLM.

    On import, transformers calls `importlib.metadata.packages_distributions`, which takes up to 2
    seconds where hundreds of packages are installed, because it reads files of each. In the block,
    that function returns the list of the other process; if that process failed, it makes the list
    itself.
    """
    words = [sys.executable, "-P", "-c", LIST_PACKAGES]
    none = subprocess.DEVNULL
    list_here = metadata.packages_distributions
    with subprocess.Popen(words, stdin=none, stdout=subprocess.PIPE, stderr=none) as lister:

        @functools.cache
        def listed() -> Mapping[str, list[str]]:
            found, _ = lister.communicate()
            return json.loads(found) if lister.returncode == 0 else list_here()

        metadata.packages_distributions = listed
        try:
            yield
        finally:
            metadata.packages_distributions = list_here
            lister.kill()  # in case no import needed its list


def _may_fork() -> bool:
    """Return whether a fork of this process inherits neither a CUDA context nor a thread."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    return not cuda and threading.active_count() == 1


def _forked_for(caller: socket.socket, loaded_by: Sequence[str | None]) -> WorkerCall | None:
    """Fork the worker that the launcher at `caller` requests.

    Returns the request in the fork, and None in this process. Forks only if the worker's values of
    the variables `LOADED_BY` equal this process's values, `loaded_by`. Otherwise the worker would
    load other modules or libraries. The fork keeps the descriptors that imports have opened: NVML
    fails in a fork whose /dev/nvidia* descriptors are closed.
    """
    call = receive(caller)
    if call is None:
        return None
    pid = -1
    try:
        if [call.environment.get(name) for name in LOADED_BY] == loaded_by:
            pid = os.fork()
    finally:
        if pid:  # this is not the fork, or there is none
            for descriptor in call.streams:
                os.close(descriptor)
    return None if pid else call


def _become(call: WorkerCall, caller: socket.socket, apart: bool) -> NoReturn:
    """Turn this process, a fork, into the worker: reply to `caller`, then run the call's program.

    `apart` says whether vLLM's core will run in a separate process. This process exits when the
    program ends, and runs its exit handlers. If it ends before the reply, the launcher starts a
    worker itself.
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
