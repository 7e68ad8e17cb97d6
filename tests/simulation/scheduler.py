"""Tasks in one thread, of which a seed says whose turn it is; time and identifiers of their own.

A task is a greenlet. It runs until `Scheduler.point`, which every request of a store calls first.
Threads that the package starts become tasks of the same process.
"""

from __future__ import annotations

import asyncio
import datetime as real_datetime
import random
import sys
import time as real_time
import uuid as real_uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from greenlet import getcurrent, greenlet

PACKAGE = "prefect_raybatch"
START = 1_750_000_000.0  # seconds since 1970, when every schedule begins
STEP = 0.01  # seconds a request takes
MOST_STEPS = 60_000  # of a schedule; ours take hundreds


class Crashed(BaseException):
    """This process is dead: nothing that it still tries has an effect."""


class Stuck(Exception):
    """A schedule that does not end."""


class Process:
    """A driver, a reaper or whatever else may crash or stop as a whole."""

    def __init__(self, name: str, disturbed: bool = True) -> None:
        self.name, self.disturbed = name, disturbed
        self.dead = self.frozen = False
        self.error: BaseException | None = None
        self.ended = False
        self.leaves: str | None = None  # a run of which it must not change a file now

    def __repr__(self) -> str:
        return self.name


class Awaited(Protocol):
    """What a task may wait for."""

    def done(self) -> bool: ...


class Task(greenlet):
    """One line of execution of a process."""

    def __init__(self, scheduler: Scheduler, process: Process, run: Callable[[], Any]) -> None:
        super().__init__(run, scheduler.hub)
        self.process = process
        self.waits_for: Awaited | None = None


class Promise(Future):
    """A future whose result is waited for in the world's own time."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler

    def result(self, timeout: float | None = None) -> Any:
        self.scheduler.wait(self)
        return super().result(0)


class Pool:
    """In place of a ThreadPoolExecutor: what is submitted becomes a task of the same process."""

    scheduler: ClassVar[Scheduler]

    def __init__(self, max_workers: int | None = None, *_: Any, **__: Any) -> None:
        self.free, self.waiting = max_workers or 8, list[tuple[Promise, Callable[[], Any]]]()
        self.begun: list[Promise] = []

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Promise:
        promise = Promise(self.scheduler)
        self.waiting.append((promise, lambda: call(*args, **kwargs)))
        self._start()
        return promise

    def _start(self) -> None:
        while self.free and self.waiting:
            self.free -= 1
            promise, call = self.waiting.pop(0)
            self.begun.append(promise)
            self.scheduler.spawn(self.scheduler.process, lambda p=promise, c=call: self._work(p, c))

    def _work(self, promise: Promise, call: Callable[[], Any]) -> None:
        try:
            promise.set_result(call())
        except Crashed:
            promise.set_exception(CancelledError())
            raise
        except BaseException as error:
            promise.set_exception(error)
        self.free += 1
        self._start()

    def map(self, call: Callable[..., Any], *items: Any) -> Iterator[Any]:
        promises = [self.submit(call, *each) for each in zip(*items, strict=False)]
        return (promise.result() for promise in promises)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for promise, _ in self.waiting:
                promise.cancel()
            self.waiting.clear()
        if wait:
            for promise in [*self.begun, *(promise for promise, _ in self.waiting)]:
                self.scheduler.wait(promise)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class Scheduler:
    """Whose turn it is. `stay`: how probable it is that a process goes on after a point."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.names = random.Random(f"{seed} names")  # so that drawing one moves no decision
        self.stay = 0.0
        self.hub = getcurrent()
        self.clock, self.steps = 0.0, 0  # seconds of work and sleep, requests
        self.wall = START  # seconds since 1970 at clock 0: somebody may set it
        self.trace: list[str] = []
        self.tasks: list[Task] = []
        self.current: Task | None = None
        # Called at each point of a task; may raise Crashed, or freeze the process.
        self.disturb: Callable[[Process, str], None] = lambda process, what: None
        self.between: Callable[[], None] = lambda: None  # called before each turn
        self.fault: BaseException | None = None

    @property
    def process(self) -> Process:
        assert self.current is not None
        return self.current.process

    @property
    def inside(self) -> bool:
        return self.current is not None and getcurrent() is self.current

    def spawn(self, process: Process, call: Callable[[], Any]) -> Task:
        def run() -> None:
            try:
                call()
            except Crashed:
                pass
            except BaseException as error:
                self.fault = self.fault or error

        task = Task(self, process, run)
        self.tasks.append(task)
        return task

    def start(self, process: Process, call: Callable[[], Any]) -> None:
        """`call` as the main task of a process: what it raises is kept in `process.error`."""

        def run() -> None:
            try:
                call()
            except Exception as error:
                process.error = error
            self.note(f"{process} ends" + (f": {process.error!r}"[:160] if process.error else ""))
            process.ended = True

        self.spawn(process, run)

    def note(self, text: str) -> None:
        self.trace.append(text)

    def point(self, what: str) -> None:
        """Before each request `what` of the task that runs."""
        if not self.inside:  # set-up and checks, outside of the world
            return
        self._turn()
        self.steps += 1
        self.clock += STEP
        self.note(f"{self.process} {what}")
        self.disturb(self.process, what)
        if self.process.frozen:
            self._turn()

    def wait(self, promise: Awaited) -> None:
        task = self.current
        assert task is not None and self.inside, "waited for outside of the world"
        while not promise.done():
            task.waits_for = promise
            self._turn()

    def _turn(self) -> None:
        task = self.current
        assert task is not None
        self.hub.switch()
        if task.process.dead:
            raise Crashed

    def run(self, until: Callable[[], bool]) -> None:
        """Turns until `until` says so or nobody can go on."""
        while not until():
            self.between()
            self.tasks = [task for task in self.tasks if not task.dead]
            ready = [task for task in self.tasks if self._ready(task)]
            if not ready:
                return
            self._resume(self._chosen(ready))
            if self.fault is not None:
                raise self.fault
            if self.steps > MOST_STEPS:
                raise Stuck(f"no end after {MOST_STEPS} requests")

    def _ready(self, task: Task) -> bool:
        if task.process.dead:  # to unwind
            return True
        waits = task.waits_for
        return not task.process.frozen and (waits is None or waits.done())

    def _chosen(self, ready: list[Task]) -> Task:
        same = [task for task in ready if task.process is self.last]
        if same and self.rng.random() < self.stay:
            return same[0] if len(same) == 1 else self.rng.choice(same)
        processes = list(dict.fromkeys(task.process for task in ready))
        process = self.rng.choice(processes)
        return self.rng.choice([task for task in ready if task.process is process])

    last: Process | None = None

    def _resume(self, task: Task) -> None:
        task.waits_for = None
        self.current, self.last = task, task.process
        try:
            task.switch()
        finally:
            self.current = None

    def end(self, disturbed: bool = False) -> None:
        """Unwinds whoever is left, or only those that can be `disturbed`."""
        for _ in range(1000):
            self.tasks = [task for task in self.tasks if not task.dead]
            ending = [task for task in self.tasks if task.process.disturbed or not disturbed]
            if not ending:
                return
            for task in ending:
                task.process.dead = True
                self._resume(task)

    # --- what the package sees of it -----------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since 1970."""
        return self.wall + self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def uuid4(self) -> real_uuid.UUID:
        return real_uuid.UUID(int=self.names.getrandbits(128), version=4)


class Stand:
    """A module, with some names of a schedule's own in it."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


async def waited_for(sent: Awaitable[Any], limit: float) -> Any:
    """`asyncio.wait_for` where there is no loop: no request of this world takes long."""
    return await sent


@contextmanager
def installed(scheduler: Scheduler) -> Iterator[None]:
    """Puts the schedule's clock, names and tasks into every loaded module of the package."""

    class Moment(real_datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real_datetime.datetime.fromtimestamp(scheduler.now, tz)

    def clock() -> float:
        return scheduler.clock

    def now() -> float:
        return scheduler.now

    Pool.scheduler = scheduler
    stands = {
        id(real_time): Stand(
            real_time, time=now, monotonic=clock, perf_counter=clock, sleep=scheduler.sleep
        ),
        id(asyncio): Stand(asyncio, wait_for=waited_for),
        id(real_uuid): Stand(real_uuid, uuid4=scheduler.uuid4),
        id(random): Stand(random, uniform=scheduler.names.uniform, random=scheduler.names.random),
        id(real_datetime.datetime): Moment,
        id(ThreadPoolExecutor): Pool,
    }
    replace(PACKAGE, stands)
    try:
        yield
    finally:
        before = {id(s): s.module for s in stands.values() if isinstance(s, Stand)}
        before |= {id(Moment): real_datetime.datetime, id(Pool): ThreadPoolExecutor}
        replace(PACKAGE, before)


def replace(package: str, others: Mapping[int, Any]) -> None:
    """Other values, by the identity of what they take the place of, in all modules of a package."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for key, value in list(vars(module).items()):
                if (other := others.get(id(value))) is not None:
                    setattr(module, key, other)
