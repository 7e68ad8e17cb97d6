"""A head with a job server, as far as the protocol of jobs sees it, and flows taking turns."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class Killed(BaseException):
    """kill -9: nothing that catches errors may see it."""


@dataclass
class FakeHead:
    """What `JobSubmissionClient` talks to. `gate` is called at each request, `down` of which fail
    before they have any effect and `deaf` of which lose their answer."""

    jobs: dict[str, SimpleNamespace] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    submissions: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    down: int = 0
    deaf: int = 0
    stubborn: bool = False
    gate: Callable[[str], None] = lambda name: None

    def submit_job(self, **request: Any) -> str:
        self._arrive("submit")
        id = request["submission_id"]
        if id in self.jobs:
            raise RuntimeError(
                "Request failed with status code 500: ValueError: Job with submission_id "
                f"{id} already exists."
            )
        self.submissions.append(request)
        self.started.append(id)
        self.jobs[id] = job(id, "PENDING", request.get("metadata"))
        self._answer("submitted")
        return id

    def get_job_info(self, id: str) -> Any:
        self._arrive("info")
        if id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {id} does not exist.")
        return self.jobs[id]

    def stop_job(self, id: str) -> bool:
        self._arrive("stop")
        self.stopped.append(id)
        if not self.stubborn and self.jobs[id].status in ("PENDING", "RUNNING"):
            self.jobs[id].status = "STOPPED"
        return True

    def get_job_logs(self, id: str) -> str:
        return self.log

    def list_jobs(self) -> list[Any]:
        self._arrive("list")
        return list(self.jobs.values())

    def live(self) -> list[str]:
        return [id for id, job in self.jobs.items() if job.status in ("PENDING", "RUNNING")]

    def _arrive(self, name: str) -> None:
        self.gate(name)
        if self.down:
            self.down -= 1
            raise ConnectionError("connection refused")

    def _answer(self, name: str) -> None:
        self.gate(name)
        if self.deaf:
            self.deaf -= 1
            raise ConnectionError("connection reset by peer")


def job(id: str, status: str, metadata: dict[str, str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        submission_id=id, status=status, message="", metadata=metadata or {}, end_time=None
    )


class Turns:
    """Runs functions in threads of which one moves at a time, from gate to gate, as drawn."""

    def __init__(self, draw: random.Random, kills: float):
        self.draw, self.kills = draw, kills
        self._back = threading.Semaphore(0)
        self._go: dict[int, threading.Semaphore] = {}
        self._doomed: set[int] = set()
        self.results: dict[int, Any] = {}

    def gate(self, name: str = "") -> None:
        number = getattr(threading.current_thread(), "flow", None)
        if number is None:
            return
        self._back.release()
        self._go[number].acquire()
        if number in self._doomed:
            raise Killed

    def play(self, flows: Iterable[Callable[[], Any]], tick: Callable[[], None]) -> None:
        """Moves flows until all have ended; `tick` is what the world does in between."""
        threads = {}
        for number, flow in enumerate(flows):
            self._go[number] = threading.Semaphore(0)
            threads[number] = threading.Thread(target=self._run, args=(number, flow), daemon=True)
            threads[number].flow = number  # type: ignore[attr-defined]
            threads[number].start()
        while alive := [n for n in threads if n not in self.results]:
            tick()
            number = self.draw.choice(alive)
            if self.draw.random() < self.kills:
                self._doomed.add(number)
            self._go[number].release()
            if not self._back.acquire(timeout=60):
                raise TimeoutError("a flow neither moved nor ended")
        for thread in threads.values():
            thread.join(60)

    def _run(self, number: int, flow: Callable[[], Any]) -> None:
        self._go[number].acquire()
        try:
            if number in self._doomed:
                raise Killed
            self.results[number] = flow()
        except BaseException as error:
            self.results[number] = error
        finally:
            self._back.release()
