"""A real Ray head with its job server, as a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from helpers.environ import clean

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def start_head(cpus: int, **env: str) -> Iterator[str]:
    """Yields the job server's URL; ends only the processes of this head.

    A raylet gives its agent 15 s to start, which a busy machine may exceed: then another try.
    """
    for tries_left in (2, 1, 0):
        folder = tempfile.mkdtemp(prefix="rb", dir="/tmp")  # short: sockets lie in it
        head, url = _launch(folder, cpus, env)
        try:
            if _is_up(head, url, Path(folder) / "head.txt"):
                yield url
                return
            if not tries_left:
                raise RuntimeError(f"no Ray head: {(Path(folder) / 'head.txt').read_text()}")
        finally:
            _end(head, folder)


def _launch(folder: str, cpus: int, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], str]:
    port, dashboard, agent, client = free_ports(4)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        f"--num-cpus={cpus}", f"--port={port}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}", "--include-dashboard=true",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={folder}",
        "--object-store-memory=300000000", "--disable-usage-stats",
    ]  # fmt: skip
    with open(f"{folder}/head.txt", "wb") as log:
        head = subprocess.Popen(
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
    return head, f"http://127.0.0.1:{dashboard}"


def _is_up(head: subprocess.Popen[bytes], url: str, log: Path, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while head.poll() is None and time.monotonic() < deadline:
        if "Ray runtime started" in log.read_text():
            try:
                with urllib.request.urlopen(f"{url}/api/jobs/", timeout=5):
                    return True
            except OSError:
                pass  # the dashboard is not there yet
        time.sleep(0.5)
    return False


def _end(head: subprocess.Popen[bytes], folder: str) -> None:
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(20)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait()
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in part for part in process.info["cmdline"] or ()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)
