"""Ray's workers as forks of a process that has imported what each of them imports.

A worker that imports Ray Data and the stages by itself takes two seconds of a core, and the tests
start hundreds. Ray reads the number of a worker's job when it is imported, so that there is such a
process for each job.

Run as `python -m helpers.ray_workers start FOLDER WORDS ...`: as `ray start WORDS ...`, with such
workers; a socket lies in FOLDER.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prefect_raybatch.imports import launcher
from prefect_raybatch.imports.launcher import WorkerCall, receive
from prefect_raybatch.imports.server import become_worker
from prefect_raybatch.stages.vllm import forking

BEFORE_RAY = ["pandas", "pyarrow.dataset", "pyarrow.parquet", "prefect_raybatch.source"]
WITH_RAY = [
    "ray.data",
    "pytest",  # engines of tests come from modules that import it
    "prefect_raybatch.api",
    "prefect_raybatch.stages.engine",
    "prefect_raybatch.stages.finish",
    "prefect_raybatch.stages.prepare",
    "prefect_raybatch.stages.read",
]
LARGEST = 1 << 20  # bytes of a call
# Ray runs this in place of Python; its first word is the worker's program.
PROGRAM = """#!{python} -IS
import runpy, sys
sys.argv = [{launcher!r}, {socket!r}, {python!r}, *sys.argv[1:]]
runpy.run_path({launcher!r}, run_name="__main__")
"""


def start_server(folder: str) -> str:
    """Start the process from which workers are forked until this process ends.

    Return the program that Ray must run in place of Python.
    """
    place, program = f"{folder}/workers", f"{folder}/python"
    text = PROGRAM.format(python=sys.executable, launcher=launcher.__file__, socket=place)
    Path(program).write_text(text)
    os.chmod(program, 0o700)
    alive, _ = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        kept = (listener.fileno(), alive)
        subprocess.Popen(
            [sys.executable, "-P", "-m", "helpers.ray_workers", "serve", *map(str, kept)],
            pass_fds=kept,
            env={forking.FIRST_VARIABLE: "1", **os.environ},
            stdin=subprocess.DEVNULL,
        )
    os.close(alive)
    return program


def running_workers_by(program: str) -> Callable[..., Any]:
    """Return a function that replaces Ray's `services.start_ray_process`.

    A node that it starts runs `program` for its workers.
    """
    from ray._private import services

    start = services.start_ray_process

    def started(command: list[str], *more: Any, **options: Any) -> Any:
        before, after = (f"--python_worker_command={p} " for p in (sys.executable, program))
        return start([word.replace(before, after) for word in command], *more, **options)

    return started


def serve(listener: int, alive: int) -> None:
    """Fork a worker for each call at the socket `listener`, until the pipe `alive` closes."""
    for descriptor in (listener, alive):
        os.set_inheritable(descriptor, False)
    load(BEFORE_RAY)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    jobs: dict[tuple[str, ...], socket.socket] = {}
    with socket.socket(fileno=listener) as door:
        events = select.poll()
        for descriptor in (listener, alive):
            events.register(descriptor, select.POLLIN)
        while all(descriptor != alive for descriptor, _ in events.poll()):
            with suppress(OSError), door.accept()[0] as caller:
                if (call := receive(caller)) is None:
                    continue
                raylets = [word for word in call.words if word.startswith("--raylet-name=")]
                job = (*raylets, call.environment.get("RAY_JOB_ID", ""))
                if job not in jobs:
                    jobs[job], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    if not os.fork():
                        for mine in (*jobs.values(), door, caller):
                            mine.close()
                        fork_for_job(theirs, call.environment)
                    theirs.close()
                body = json.dumps({**asdict(call), "streams": []}).encode()
                socket.send_fds(jobs[job], [body], [caller.fileno(), *call.streams])
                for descriptor in call.streams:
                    os.close(descriptor)


def fork_for_job(calls: socket.socket, environment: dict[str, str]) -> None:
    """Become the process of one job: import Ray, then fork a worker for each call."""
    forking.take_environment(environment)
    load_ray()
    while True:
        body, descriptors, _, _ = socket.recv_fds(calls, LARGEST, 4)
        if not body:
            os._exit(0)
        first, *streams = descriptors
        with socket.socket(fileno=first) as caller:
            if not os.fork():
                calls.close()
                call = WorkerCall(**{**json.loads(body), "streams": streams})
                become_worker(call, caller, apart=False)
        for descriptor in streams:
            os.close(descriptor)


def load_ray() -> None:
    """Import Ray Data and the stages without a random number of Ray's C++ code.

    That would be the seed of all forks, which would give different objects the same id. A class of
    an actor takes one where it is defined.
    """
    from ray import actor

    kind = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: kind(os.urandom(kind.size())))
    load(WITH_RAY)
    actor.ActorClassID = kind


def load(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)


def main(what: str, *words: str) -> None:
    if what == "serve":
        serve(*map(int, words))
        return
    from ray._private import services
    from ray.scripts import scripts

    services.start_ray_process = running_workers_by(start_server(words[0]))
    sys.argv = ["ray", "start", *words[1:]]
    scripts.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
