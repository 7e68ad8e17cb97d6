"""Where a failing night is played: a Prefect server with a worker, a Ray head, a store."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from helpers import environ
from helpers.prefect_server import Prefect, prefect_server
from helpers.ray_head import ROOT, Head, start_head
from s3server import S3Server, start_s3

from prefect_raybatch.demo.customers import write_customers
from prefect_raybatch.ledger.layout import SUCCESS
from prefect_raybatch.storage import open_store

ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass
class World:
    """Servers are started when a night first asks for them, and end with the world. `env` is
    what Prefect's server, worker and runs have beside their own variables; `given` is a server that
    is there already, with a worker of our deployments. The head says that it has `gpus`."""

    folder: Path
    stack: ExitStack = field(repr=False)
    env: dict[str, str] = field(default_factory=dict)
    given: Prefect | None = None
    gpus: int = 0

    @cached_property
    def prefect(self) -> Prefect:
        """A server with our deployments and a worker of their pool."""
        if self.given is not None:
            return self.given
        home = self.folder / "prefect"
        home.mkdir()
        made = self.stack.enter_context(prefect_server(home, **self.env))
        made.env["RAY_AUTH_MODE"] = "disabled"  # as the head
        made.deploy()
        made.work()
        return made

    @cached_property
    def head(self) -> Head:
        return self._start_head()

    def _start_head(self, port: int | None = None) -> Head:
        path = f"{ROOT}:{environ.python_path()}"
        return self.heads.enter_context(start_head(4, self.gpus, port, PYTHONPATH=path))

    @cached_property
    def heads(self) -> ExitStack:
        return self.stack.enter_context(ExitStack())

    def renew_head(self, gpus: int = 0) -> None:
        """Another head at the address of the one there, which ends."""
        self.gpus, port = gpus, int(self.head.url.rpartition(":")[2])
        self.heads.close()
        self.head = self._start_head(port)

    @cached_property
    def s3(self) -> S3Server:
        return self.stack.enter_context(start_s3(self.folder / "s3"))

    def customers(self, name: str, rows: int) -> str:
        path = self.folder / name
        write_customers(str(path), rows, 3)
        return str(path)

    def job(self, name: str, **groups: Any) -> dict[str, Any]:
        """The job of the deployment `dev` under that name, with other groups."""
        given = self.prefect.deployments["dev"]["parameters"]["job"]
        groups.setdefault("output", {"uri": str(self.folder / "out"), "column": "industry"})
        return {**given, "name": name, **groups}

    def start(self, job: dict[str, Any], key: str, **env: str) -> str:
        """A run of that job by the deployed flow; its id."""
        dev = self.prefect.deployments["dev"]["id"]
        body: dict[str, Any] = {"parameters": {"job": job, "run_key": key}}
        if env:
            body["job_variables"] = {"env": env}
        return str(self.prefect.ask(f"deployments/{dev}/create_flow_run", body)["id"])

    def ended(self, run: str, kind: str, seconds: float) -> dict[str, Any]:
        """The state of a run that must end so."""

        def look() -> dict[str, Any] | None:
            state = self.prefect.state(run)
            return state if state["type"] in ENDED else None

        state: dict[str, Any] = self.prefect.until(look, seconds, f"the end of {run}")
        assert state["type"] == kind, state
        return state

    def commits(self, key: str) -> int:
        return len(list((self.folder / "out" / key / "_raybatch/commits").glob("*.json")))

    def committed(self, run: str, there: Callable[[], object], seconds: float = 900) -> None:
        """Waits until a run that works has a commit."""

        def look() -> bool:
            state = self.prefect.state(run)
            assert state["type"] not in ENDED, state
            return bool(there())

        self.prefect.until(look, seconds, "the first commit")

    def logs(self, run: str, text: str, seconds: float) -> float:
        """Waits for a line of a run's log; the time it took."""
        began = time.monotonic()
        asked = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200, "sort": "TIMESTAMP_DESC"}

        def look() -> bool:
            return any(text in line["message"] for line in self.prefect.ask("logs/filter", asked))

        self.prefect.until(look, seconds, f"{text!r} in the log")
        return time.monotonic() - began

    def carry_out(self, command: str) -> None:
        """Types a command as the one on call does; one that starts a worker stays."""
        if " worker start " in command:
            self.prefect.start(*shlex.split(command)[1:])
            return
        done = subprocess.run(
            ["bash", "-c", command], env=self.prefect.env, cwd=self.folder,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def complete(self, key: str, seconds: float = 900) -> None:
        """Waits until the run of that key in `out`, or of that URI, is complete."""
        run = key if "://" in key else str(self.folder / "out" / key)
        store = open_store(run, self.s3.options if "://" in key else None)
        self.prefect.until(lambda: store.holds(SUCCESS), seconds, f"the result of {run}")

    def history(self, output: str = "out") -> Path:
        """The page that `raybatch history` writes."""
        page = self.folder / "history.html"
        self.carry_out(f"raybatch history {self.folder / output} --html {page}")
        return page

    def told(self, lines: int = 40) -> str:
        """The last lines of the runs' logs, for whoever asks why a night was not played."""
        if "prefect" not in self.__dict__:
            return "Prefect's server has not started"
        try:
            last = self.prefect.ask("logs/filter", {"limit": lines, "sort": "TIMESTAMP_DESC"})
        except httpx.HTTPError as error:
            return f"no logs: {error}"
        return "\n".join(f"{one['timestamp']} {one['message']}" for one in reversed(last))


@contextmanager
def new_world() -> Iterator[World]:
    """A world in a folder of its own, which ends with it."""
    with (
        tempfile.TemporaryDirectory(prefix="nights-", ignore_cleanup_errors=True) as made,
        ExitStack() as stack,
    ):
        yield World(Path(made), stack)
