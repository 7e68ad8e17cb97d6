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
from contextlib import contextmanager
from pathlib import Path

import psutil

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
    """Yields the job server's URL; ends only the processes of this head."""
    folder = tempfile.mkdtemp(prefix="rb", dir="/tmp")  # short: sockets lie in it
    port, dashboard, agent, client = free_ports(4)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PREFECT_"))}
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
            env={**kept, "PATH": path, "RAY_AUTH_MODE": "disabled", **env},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{dashboard}"
    try:
        _wait_for(f"{url}/api/version", head, 120)
        _wait_for(f"{url}/api/jobs/", head, 120)
        yield url
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(20)
        except subprocess.TimeoutExpired:
            head.kill()
        for process in psutil.process_iter(["cmdline"]):
            if any(folder in part for part in process.info["cmdline"] or ()):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str, head: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as error:
            if head.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the Ray head did not start: {error}") from error
            time.sleep(0.5)
