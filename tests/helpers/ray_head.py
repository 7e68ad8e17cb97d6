"""A real Ray head with its job server, as a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from helpers.environ import clean, dying_with_us
from helpers.ports import free_ports
from helpers.processes import below

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Head:
    """Where a head is found: its job server, the address that drivers connect to, and the process
    below which all of its own are."""

    url: str
    address: str
    pid: int


@contextmanager
def start_head(
    cpus: int, gpus: int = 0, dashboard: int | None = None, **env: str
) -> Iterator[Head]:
    """Ends only the processes of this head. `dashboard` is the port of its job server.

    A raylet gives its agent 15 s to start, which a busy machine may exceed: then another try.
    """
    for tries_left in (2, 1, 0):
        folder = tempfile.mkdtemp(prefix="rb", dir="/tmp")  # short: sockets lie in it
        process, head = _launch(folder, cpus, gpus, dashboard, env)
        try:
            if _is_up(process, head.url, Path(folder) / "head.txt"):
                yield head
                return
            if not tries_left:
                raise RuntimeError(f"no Ray head: {(Path(folder) / 'head.txt').read_text()}")
        finally:
            _end(process, folder)


def _launch(
    folder: str, cpus: int, gpus: int, dashboard: int | None, env: dict[str, str]
) -> tuple[subprocess.Popen[bytes], Head]:
    port, free, agent, client = free_ports(4)
    dashboard = dashboard or free
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = dying_with_us(
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        f"--num-cpus={cpus}", f"--num-gpus={gpus}", f"--port={port}",
        f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}", "--include-dashboard=true",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={folder}",
        "--object-store-memory=300000000", "--disable-usage-stats",
        "--no-monitor", "--include-log-monitor=false",  # nobody scales it or hears its workers
    )  # fmt: skip
    with open(f"{folder}/head.txt", "wb") as log:
        process = subprocess.Popen(
            command,
            env={
                **clean(),
                "PATH": path,
                "PYTHONUNBUFFERED": "1",
                "RAY_AUTH_MODE": "disabled",
                **env,
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return process, Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", process.pid)


def _is_up(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if "Ray runtime started" in log.read_text():
            try:
                with urllib.request.urlopen(f"{url}/api/jobs/", timeout=5):
                    return True
            except urllib.error.HTTPError as error:
                return error.code == 401  # it is there and wants a token
            except OSError:
                pass  # the dashboard is not there yet
        time.sleep(0.5)
    return False


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    """Ends the head and all below it at once: nobody misses what a raylet would still tell it."""
    every = below(process.pid)
    process.kill()
    process.wait()
    for left in psutil.process_iter(["cmdline"]):
        if any(folder in part for part in left.info["cmdline"] or ()):
            every.append(left)
    for left in every:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    shutil.rmtree(folder, ignore_errors=True)
