"""Forks vLLM's core from a process that has imported vLLM.

In a Ray actor vLLM spawns its core: a new Python process, which imports vLLM and torch only after
the actor has imported them (18 s each on a machine with GPUs). `begin_fork_server()` starts a fork
server (of Python's `multiprocessing`) that imports them at the same time as the actor, and
`internals.start` makes vLLM fork its core from that server. The core is forked before anything uses
CUDA, and gets the environment that its creator has at that time, like a spawned core. A core with
several GPUs spawns its workers as usual.

If the actor is itself a fork of a process that has imported vLLM (`prefect_raybatch.imports`),
`fork_server_here()` forks the server from the actor. That server imports what only the core needs,
while the actor imports what only the front needs (the part of vLLM in the actor's process).

An engine that dies is restarted from the same server, which has imported everything already.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import context, forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

from prefect_raybatch.spec.engine import EngineFields

PRELOAD = "prefect_raybatch.stages.vllm.preload"
PRELOAD_CORE = "prefect_raybatch.stages.vllm.preload_core"
CORE_APART = "VLLM_ENABLE_V1_MULTIPROCESSING"  # vLLM's: "0" keeps the core in the actor's process
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # vLLM's: how it starts processes; a user's value stays

FIRST_VARIABLE = "RAYBATCH_ENGINE"
"""Name of the variable that stays first in the environment of a core and of its workers.

setproctitle cannot set the title of a process whose first environment variable has changed. vLLM's
import changes some variables, but not this one.
"""

_T = TypeVar("_T")

CALL_SECONDS = 120.0  # time limit of a call in a forked process

_begun = False  # whether cores are forked from the server


def begin_fork_server(arguments: EngineFields) -> None:
    """Start this process's fork server; do not wait until it is ready.

    Call it before vLLM is imported. `arguments` are fields of vLLM's `EngineArgs`. Does nothing in
    these cases:
    - the server was started before;
    - vLLM's core runs in this process;
    - vLLM starts its processes in another way: bound to NUMA nodes (by another program), by Ray, or
      as VLLM_WORKER_MULTIPROC_METHOD says;
    - the system is not Linux.
    """
    global _begun
    otherwise = arguments.get("numa_bind") or arguments.get("distributed_executor_backend") == "ray"
    if _begun or not core_apart() or otherwise or METHOD in os.environ or sys.platform != "linux":
        return
    multiprocessing.set_forkserver_preload([PRELOAD, PRELOAD_CORE])
    forkserver.ensure_running()
    os.environ[METHOD] = "spawn"  # vLLM's choice in a Ray actor anyway, but with a warning
    _begun = True


def core_apart() -> bool:
    """Return whether vLLM's core runs in a separate process.

    The environment variable that CORE_APART names decides: it does if the variable is 1 or not set.
    """
    return os.environ.get(CORE_APART, "1") == "1"


def fork_server_here() -> None:
    """Start the fork server as a fork of this process, so that it has all modules imported here.

    The server also imports what only an engine's core needs, while this process continues. Call
    this before another thread starts. `begin_fork_server` then uses the running server.
    """
    multiprocessing.set_forkserver_preload([PRELOAD, PRELOAD_CORE])
    resource_tracker.ensure_running()  # not a fork, but a new program as usual
    start = util.spawnv_passfds

    def forked(path: bytes, words: Sequence[Any], kept: Sequence[int]) -> int:
        """Run the Python code `words[-1]` in a fork of this process; return the fork's id.

        Replaces `spawnv_passfds` of multiprocessing, which would run `path` with the arguments
        `words`. `kept` are the server's listening socket and the pipe whose end stops the server.
        """
        pid = os.fork()
        if pid:
            return pid
        try:
            util.spawnv_passfds = start
            _close_other_end(kept[1])
            with contextlib.suppress(ImportError):
                import setproctitle

                setproctitle.setproctitle(f"{os.fsdecode(path)} multiprocessing.forkserver")
            exec(words[-1], {})
        finally:
            os._exit(1)

    util.spawnv_passfds = forked  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start


def _close_other_end(pipe: int) -> None:
    """Close this fork's copy of the other end of `pipe`.

    The fork server ends once no process holds that end any more, so the copy would keep it alive.
    Other descriptors stay open: imports have opened some, and NVML needs them.
    """
    found = os.fstat(pipe)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if descriptor != pipe and os.path.samestat(os.fstat(descriptor), found):
                os.close(descriptor)


def take_environment(environment: Mapping[str, str]) -> None:
    """Replace this process's environment by `environment`, except the variable FIRST_VARIABLE."""
    os.environ.setdefault(FIRST_VARIABLE, "1")
    for name in [name for name in os.environ if name != FIRST_VARIABLE]:
        del os.environ[name]
    # Not FIRST_VARIABLE: setting even the same value would move it in memory.
    os.environ.update({n: value for n, value in environment.items() if n != FIRST_VARIABLE})


def context_of_core() -> ForkedContext | None:
    """Return the context that forks a core from the fork server; None if there is no server."""
    return ForkedContext() if _begun else None


class ForkedProcess(context.ForkServerProcess):
    """A process from the fork server, with the environment and output streams of its creator.

    The environment is the creator's when it calls `start`, not the server's.
    """

    _environment: dict[str, str]
    _maker: int  # process id of the creator

    def start(self) -> None:
        self._environment, self._maker = dict(os.environ), os.getpid()
        super().start()

    def run(self) -> None:
        take_environment(self._environment)
        # Ray may have redirected the actor's output to a file after the server started.
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                place = f"/proc/{self._maker}/fd/{stream}"
                opened = os.open(place, os.O_WRONLY | os.O_APPEND)
                os.dup2(opened, stream)
                os.close(opened)
        super().run()


class CallFailed(Exception):
    """A function called in a forked process has returned no result: it failed or took too long."""


class ForkedContext(context.ForkServerContext):
    """Creates processes from the fork server: vLLM's core, and one for each `call`."""

    Process = ForkedProcess

    def call(self, function: Callable[[], _T]) -> _T:
        """Call `function` in a forked process that has imported vLLM; return its result.

        vLLM's plugins are loaded there. Raises CallFailed if the process ends without a result or
        has none within CALL_SECONDS.
        """
        import cloudpickle

        receiver, sender = self.Pipe(duplex=False)
        with receiver:
            with sender:
                sent = cloudpickle.dumps(function)
                process = self.Process(target=_send_result, args=(sent, sender))
                process.start()
            try:
                if not receiver.poll(CALL_SECONDS):
                    process.kill()
                    raise TimeoutError(f"no result in {CALL_SECONDS:g} s")
                return cast(_T, receiver.recv())
            except Exception as error:  # no result in time, the process ended, or bad data
                raise CallFailed(f"process {process.pid}: {error!r}") from error
            finally:
                process.join()


def _send_result(function: bytes, sender: Connection) -> None:
    """Call the pickled `function` and send its result to `sender`; send nothing if it raises."""
    plugins: Any = importlib.import_module("vllm.plugins")
    plugins.load_general_plugins()
    sender.send(pickle.loads(function)())
