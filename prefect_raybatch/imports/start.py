"""Starts the process that imports vLLM for the engines of this process's local cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from prefect_raybatch.imports import launcher
from prefect_raybatch.stages.vllm import forking

log = logging.getLogger(__name__)

IMPORT_SERVER = "prefect_raybatch.imports.server"
IMPORTS_END = 10.0  # seconds to wait for a killed process
SWITCH = "RAYBATCH_IMPORT_EARLY"
"""Environment variable: "0" leaves the imports to each engine's actor."""


class ImportProcess:
    """A child process that imports vLLM and forks actors until `end`; the actors live on."""

    def __init__(self, python: str, engine: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        """Start the process with the interpreter `python`.

        It gets the environment variables in `defaults`, those of this process, and those in
        `engine`, which are the variables of an engine. Of a variable's several values, the last in
        this order counts.
        """
        self.python, self.engine = python, dict(engine)
        with contextlib.ExitStack() as undo:
            self._folder = tempfile.mkdtemp(prefix="raybatch-imports-")
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._socket = str(Path(self._folder) / "socket")
            alive, self._alive = os.pipe()
            undo.callback(os.close, self._alive)
            listener = socket.socket(socket.AF_UNIX)
            with contextlib.closing(listener), contextlib.ExitStack() as both:
                both.callback(os.close, alive)
                listener.bind(self._socket)
                listener.listen()
                self._process = subprocess.Popen(
                    [python, "-P", "-m", IMPORT_SERVER, str(listener.fileno()), str(alive)],
                    pass_fds=[listener.fileno(), alive],
                    # setproctitle overwrites the first variables of a process, and fails if the
                    # first one was changed before.
                    env={forking.FIRST_VARIABLE: "1", **defaults, **os.environ, **engine},
                    start_new_session=True,  # Ctrl-C in the terminal must not reach it
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            self._undo = undo.pop_all()

    def program(self) -> str:
        """Return the command that Ray must run in place of Python, so that the actor is forked."""
        words = [self.python, "-I", "-S", launcher.__file__, self._socket, self.python]
        return shlex.join(words)

    def end(self) -> None:
        """Kill the process, even while it imports."""
        self._process.kill()
        try:
            self._process.wait(IMPORTS_END)
        except subprocess.TimeoutExpired:  # e.g. it waits for a disk
            log.warning("process %d, which imported vLLM, does not end", self._process.pid)
        self._undo.close()


_lock = threading.Lock()
_current: ImportProcess | None = None


@contextlib.contextmanager
def import_process(
    python: str | None, engine: Mapping[str, str] | None, defaults: Mapping[str, str]
) -> Iterator[None]:
    """Fork engine actors that start on this machine from one process that imports vLLM.

    Use it in a `with` block; it applies to actors that start in the block. The process begins to
    import at once. It gets the environment variables in `defaults`, those of this process, and
    those in `engine`, which are the variables of the engines. Of a variable's several values, the
    last in this order counts. `python` is the interpreter of Ray's workers, by default this
    process's. No process starts

    - within another such block,
    - if `engine` is None: no engine starts here,
    - if the environment sets vLLM's VLLM_WORKER_MULTIPROC_METHOD,
    - or if `SWITCH` is off, or this is not Linux.
    """
    global _current
    begun: ImportProcess | None = None
    if engine is not None and _is_wanted({**os.environ, **engine}):
        with _lock:
            if _current is None:
                try:
                    _current = begun = ImportProcess(python or sys.executable, engine, defaults)
                except OSError as error:
                    log.info("engines import vLLM themselves: %s", error)
    try:
        yield
    finally:
        if begun is not None:
            with _lock:
                _current = None
            begun.end()


def _is_wanted(environment: Mapping[str, str]) -> bool:
    on = environment.get(SWITCH, "1") != "0"
    return on and sys.platform == "linux" and forking.METHOD not in environment


def actor_options(engine: Mapping[str, str] | None) -> dict[str, object]:
    """Return the options with which Ray forks an actor from the process that imports vLLM.

    {} if there is no such process, or if it was started with variables other than `engine`.
    """
    process = _current
    if process is None or engine is None or dict(engine) != process.engine:
        return {}
    return {"runtime_env": {"py_executable": process.program()}}
