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

from prefect_raybatch.imports import worker
from prefect_raybatch.stages.vllm import forking

log = logging.getLogger(__name__)

IMPORT_SERVER = "prefect_raybatch.imports.server"
SWITCH = "RAYBATCH_IMPORT_EARLY"
"""Environment variable: "0" leaves the imports to each engine's actor."""


class ImportProcess:
    """The process, until `end`. Actors that it has forked live on."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        """Start it with this Python and these environment variables beside the current ones."""
        self.python = python
        self._folder = tempfile.mkdtemp(prefix="raybatch-imports-")
        self._socket = str(Path(self._folder) / "socket")
        alive, self._alive = os.pipe()
        # The first variable stays as it is, so that its forks can have a title.
        env = {forking.FIRST_VARIABLE: "1", **os.environ, **environment}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._socket)
            listener.listen()
            self._process = subprocess.Popen(
                [python, "-P", "-m", IMPORT_SERVER, str(listener.fileno()), str(alive)],
                pass_fds=[listener.fileno(), alive],
                env=env,
                start_new_session=True,  # an interrupt of the terminal is not for it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        os.close(alive)

    def program(self) -> str:
        """Return the command line with which Ray starts an actor that is forked by the process."""
        words = [self.python, "-I", "-S", worker.__file__, self._socket, self.python]
        return shlex.join(words)

    def end(self) -> None:
        """End the process, also while it imports."""
        os.close(self._alive)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


_lock = threading.Lock()
_current: ImportProcess | None = None


@contextlib.contextmanager
def import_process(python: str | None, environment: Mapping[str, str] | None) -> Iterator[None]:
    """Have engines of the block that start in new actors of this machine forked from one process.

    It begins to import at once, with `environment` beside this process's variables. Within another
    such block, where the environment is None (no engine starts here), or names how vLLM makes its
    processes, it does nothing. `python` is that of Ray's workers if it is another one.
    """
    global _current
    begun: ImportProcess | None = None
    if environment is not None and _suits({**os.environ, **environment}):
        with _lock:
            if _current is None:
                try:
                    _current = begun = ImportProcess(python or sys.executable, environment)
                except OSError as error:
                    log.info("engines import vLLM themselves: %s", error)
    try:
        yield
    finally:
        if begun is not None:
            with _lock:
                _current = None
            begun.end()


def _suits(environment: Mapping[str, str]) -> bool:
    on = environment.get(SWITCH, "1") != "0"
    return on and sys.platform == "linux" and forking.METHOD not in environment


def actor_options() -> dict[str, object]:
    """Return the options for Ray with which an engine's actor is forked, none without a process."""
    process = _current
    if process is None:
        return {}
    return {"runtime_env": {"py_executable": process.program()}}
