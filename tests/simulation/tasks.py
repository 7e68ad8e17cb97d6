"""Ray below the package's own `run_in_parallel`: items worked on by processes of their own.

A worker may crash or stop like any process. Ray then begins its item anew elsewhere, also where it
only takes a worker for lost that wakes later; and workers may outlive a driver that died, or gave
up, for any time.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Imported while `ray` is the real one: what the cluster below stands for is no package.
import prefect_raybatch.stages.ray_internals  # noqa: F401

from .scheduler import Process, Promise, Scheduler

CPUS = (0, 0, 2)  # that a process finds on its cluster; 0 is no cluster


class WorkerCrashed(Exception):
    """What Ray says when an item's last worker has died."""


class Reference:
    """An item under way. Sets of them have the same order in every process."""

    def __init__(self, number: int, scheduler: Scheduler, owner: Process, left: int) -> None:
        self.number, self.owner, self.left = number, owner, left
        self.promise = Promise(scheduler)
        self.workers: list[Process] = []
        self.work: Callable[[], Any] = lambda: None

    def __hash__(self) -> int:
        return self.number

    def done(self) -> bool:
        return self.promise.done()


class _AnyOf:
    def __init__(self, references: Sequence[Reference]) -> None:
        self.references = references

    def done(self) -> bool:
        return any(reference.done() for reference in self.references)


class Cluster:
    """What `import ray` gives. `begin` starts a process; its draws move no other decision."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.rng = random.Random(f"{scheduler.seed} tasks")
        self.begin: Callable[[Process, Callable[[], object]], None] = scheduler.start
        self.under_way: list[Reference] = []
        self.begun = 0

    # --- what the package calls -----------------------------------------------------------------

    def is_initialized(self) -> bool:
        return False

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        def made(function: Callable[..., Any]) -> Any:
            cluster = self

            class Remote:
                @staticmethod
                def remote(shared: Any, item: Any) -> Reference:
                    return cluster.submit(function, shared, item, options["max_retries"])

            return Remote

        return made

    def wait(
        self,
        references: Sequence[Reference],
        num_returns: int,
        timeout: float | None = None,
        fetch_local: bool = True,
    ) -> tuple[list[Reference], list[Reference]]:
        if timeout is not None:
            self.scheduler.sleep(timeout)
            over = [reference for reference in references if reference.done()]
            return over, [reference for reference in references if not reference.done()]
        assert num_returns == 1
        self.scheduler.wait(_AnyOf(references))
        done = sorted((r for r in references if r.done()), key=hash)
        first = self.rng.choice(done)
        return [first], [reference for reference in references if reference is not first]

    def get(self, reference: Reference) -> Any:
        return reference.promise.result()

    def cancel(self, reference: Reference, recursive: bool) -> None:
        if not self.scheduler.process.dead:
            self._give_up(reference)

    @contextmanager
    def workers_for(self, job: Any, size: int, made: str = "result") -> Iterator[int]:
        """In place of the package's, to which rows of a schedule are too few for a cluster."""
        yield self.rng.choice(CPUS)

    # --- what happens there ---------------------------------------------------------------------

    def submit(
        self, function: Callable[..., Any], shared: Any, item: Any, retries: int
    ) -> Reference:
        self.begun += 1
        reference = Reference(self.begun, self.scheduler, self.scheduler.process, retries)
        sent = pickle.dumps(item)
        reference.work = lambda: function(shared, pickle.loads(sent))
        self.under_way.append(reference)
        self._work(reference)
        return reference

    def _work(self, reference: Reference) -> None:
        owner, again = reference.owner, len(reference.workers)
        name = f"task {reference.number}{chr(39) * again} of {owner}"
        worker = Process(name, owner.disturbed)
        worker.file_bytes = getattr(owner, "file_bytes", 1)  # type: ignore[attr-defined]
        worker.other_pyarrow = self.rng.random() < 0.3  # type: ignore[attr-defined]
        reference.workers.append(worker)

        def work() -> None:
            try:
                made, error = pickle.loads(pickle.dumps(reference.work())), None
            except Exception as raised:
                made, error = None, raised
            if reference.done():  # another worker was taken for this one
                return
            if error is None:
                reference.promise.set_result(made)
            else:
                reference.promise.set_exception(error)

        self.begin(worker, work)

    def lost(self, process: Process) -> None:
        """Called when `process` crashed or stopped: it may have been a worker, or have had some."""
        for reference in self.under_way:
            if process is reference.owner and process.dead:
                self._give_up(reference)
            ours = process in reference.workers[-1:] and not reference.done()
            if ours and (process.dead or self.rng.random() < 0.5):
                self._again(reference)
        self.under_way = [reference for reference in self.under_way if not reference.done()]

    def _again(self, reference: Reference) -> None:
        if not reference.left:
            return reference.promise.set_exception(WorkerCrashed(f"task {reference.number}"))
        reference.left -= 1
        self._work(reference)

    def _give_up(self, reference: Reference) -> None:
        """Nothing of it begins any more; what works on it ends, or goes on unseen."""
        reference.left = 0
        if reference.done():
            return
        for worker in reference.workers:
            worker.dead = worker.dead or self.rng.random() < 0.5
        reference.promise.set_exception(WorkerCrashed(f"task {reference.number} was cancelled"))

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = sys.modules.get("ray")
        sys.modules["ray"] = self  # type: ignore[assignment]
        try:
            yield
        finally:
            del sys.modules["ray"]
            if before is not None:
                sys.modules["ray"] = before
