"""A real Prefect server and worker for tests, as processes with a database of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from helpers.environ import clean, dying_with_us
from helpers.ports import free_ports

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
COMMAND = Path(__file__).with_name("prefect_command.py")
POOL = "raybatch"


class Prefect:
    """A server with a database of its own, and commands against it."""

    def __init__(self, home: Path) -> None:
        (self.port,) = free_ports()
        self.url = f"http://127.0.0.1:{self.port}/api"
        kept = clean()
        self.env = {
            **kept,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")])),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        self.home, self.started = home, list[subprocess.Popen[bytes]]()
        self.worker = 0
        self.deployments: dict[str, dict[str, Any]] = {}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.home / f"{arguments[0]}.log").open("ab")
        process = subprocess.Popen(
            dying_with_us(sys.executable, str(COMMAND), *arguments), env=self.env, cwd=ROOT,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def serve(self) -> subprocess.Popen[bytes]:
        """Starts the server, and waits for it."""
        server = self.start("server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        self.until(lambda: self.ask("health"), 300, "the server")  # of a busy machine
        return server

    def call(self, *arguments: str) -> str:
        done = subprocess.run(
            ["prefect", *arguments], env=self.env, cwd=ROOT, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, path: str, body: Any = None) -> Any:
        """The API's answer; asked again while it says 503 (its SQLite is locked), as Prefect's own
        client does."""
        method = "GET" if body is None else "POST"
        for pause in (0.5, 1.0, 2.0, 4.0, 0.0):
            answer = httpx.request(method, f"{self.url}/{path}", json=body, timeout=120)
            if answer.status_code != 503:
                break
            time.sleep(pause)
        answer.raise_for_status()
        return answer.json()

    def until(self, look: Callable[[], Any], seconds: float, what: str) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if value := look():
                    return value
            time.sleep(0.5)
        logs = [path.read_text()[-3000:] for path in self.home.glob("*.log")]
        pytest.fail(f"{what} did not come within {seconds:g} s:\n" + "\n".join(logs))

    def state(self, run: str) -> dict[str, Any]:
        return dict(self.ask(f"flow_runs/{run}")["state"])

    def stop(self) -> None:
        for process in reversed(self.started):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def deploy(self) -> dict[str, dict[str, Any]]:
        """Deploys deployments/prefect.yaml to a new work pool, with the policy of the tests; the
        deployments by their names, which `deployments` keeps."""
        self.call("work-pool", "create", POOL, "--type", "process")
        text = (ROOT / "deployments/prefect.yaml").read_text(encoding="utf-8")
        shipped = "{{ $PWD }}/deployments/policy.yaml"
        assert shipped in text
        made = self.home / "prefect.yaml"
        made.write_text(text.replace(shipped, os.environ["RAYBATCH_POLICY"]), encoding="utf-8")
        self.call("--no-prompt", "deploy", "--all", "--prefect-file", str(made))
        found = self.ask("deployments/filter", {})
        self.deployments = {i["name"]: i for i in found if i["work_pool_name"] == POOL}
        return self.deployments

    def work(self) -> None:
        """Starts a worker of the pool; `worker` is its process id."""
        self.worker = self.start("worker", "start", "--pool", POOL, "--name", "test").pid


@contextmanager
def settings_for(server: Prefect) -> Iterator[None]:
    """This process's flows run against a server, which has all they sent when this ends."""
    with temporary_settings({PREFECT_API_URL: server.url}):
        yield
        APILogWorker.drain_all(timeout=120)
        EventsWorker.drain_all(timeout=120)


def artifacts_of(prefix: str) -> list[Artifact]:
    """The artifacts on this process's server whose keys begin so: others know the server too."""
    keys = ArtifactFilter(key=ArtifactFilterKey(like_=f"{prefix}%"))
    with get_client(sync_client=True) as client:
        return client.read_artifacts(artifact_filter=keys)


def events_of(resource: str) -> list[dict[str, Any]]:
    """The events on this process's server of the resources whose names begin so, latest first."""
    asked = {"filter": {"resource": {"id_prefix": [resource]}}, "limit": 50}
    answer = httpx.post(f"{PREFECT_API_URL.value()}/events/filter", json=asked, timeout=120)
    found: list[dict[str, Any]] = answer.raise_for_status().json()["events"]
    return found


@contextmanager
def prefect_server(home: Path, **env: str) -> Iterator[Prefect]:
    """A server that answers, with these variables beside; it and all that was started with it is
    gone at the end."""
    made = Prefect(home)
    made.env |= env
    try:
        made.serve()
        yield made
    finally:
        made.stop()
