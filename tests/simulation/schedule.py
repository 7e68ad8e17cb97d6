"""One schedule from its seed to a verdict."""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.result.verify_chain import verify_chain

from . import actors, checker
from .disasters import FORK, PowerLoss, Rot
from .scheduler import Process, Scheduler
from .tasks import WorkerCrashed
from .wire import Weather
from .world import KEY, World

KINDS = ("s3", "disk")
MEMORY = Path("/dev/shm")  # a folder of a disk is removed in milliseconds, hundreds of times
TAIL = 60  # lines of a trace that a report shows


@dataclass
class Outcome:
    """What became of a schedule; `faults` is empty where all held."""

    seed: str
    faults: list[str]
    trace: list[str]
    title: str
    seconds: float
    befell: dict[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]

    def text(self, whole: bool = False) -> str:
        """For people: the seed, what is wrong, the trace, and how to see it again."""
        shown = self.trace if whole else self.trace[-TAIL:]
        left = len(self.trace) - len(shown)
        lines = [f"seed {self.seed} ({self.title}): {'; '.join(self.faults) or 'all held'}"]
        lines += [f"  ... {left} lines before these"] if left else []
        lines += [f"  {line}" for line in shown]
        again = f"PYTHONPATH=tests python -m simulation --one {self.seed}"
        lines.append(f"again, with all lines: {again}")
        return "\n".join(lines)


def weather_of(scheduler: Scheduler) -> Weather:
    """Each schedule has some faults, and none has all: else little work would get through."""
    rng = scheduler.rng
    rates = {
        "crash": 0.006,
        "stop": 0.012,
        "unsent": 0.02,
        "unheard": 0.03,
        "replayed": 0.05,
        "stale": 0.25,
        "spoiled": 0.05,
        "clock": 0.01,
    }
    scheduler.stay = rng.choice([0.0, 0.5, 0.9, 0.97])
    likely = {"stale": 0.3, "spoiled": 0.25, "clock": 0.1}
    drawn = {n: rate for n, rate in rates.items() if rng.random() < likely.get(n, 0.5)}
    return Weather(wake=rng.choice([0.0, 0.003, 0.03]), **drawn)


def run_schedule(seed: str) -> Outcome:
    """The schedule of `seed`. It has a kind of store, some processes, and some faults."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        scheduler = Scheduler(seed)
        weather = weather_of(scheduler)
        world = World(scheduler, scheduler.rng.choice(KINDS), folder, weather)
        schedule = Schedule(world)
        with _quiet(), world.installed():
            try:
                schedule.play()
            except Exception as error:
                schedule.faults.append(f"the schedule broke: {error!r}")
            finally:
                scheduler.end()
        if not schedule.faults:
            schedule.verify()
        faults = list(dict.fromkeys(schedule.faults))
        rates = ", ".join(n for n in vars(weather) if getattr(weather, n) and n != "wake")
        title = f"{world.kind}, {world.rows} rows by {world.per_shard}, {rates or 'no fault'}"
        seconds = time.monotonic() - began
        trace = [line.replace(str(folder), "") for line in scheduler.trace]
        return Outcome(seed, faults, trace, title, seconds, schedule.befell)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Schedule:
    """The acts of a schedule: disturbed processes, then one that nothing disturbs, then those that
    wake after it and what arrives late, and then one more."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler = world, world.scheduler
        self.faults: list[str] = []
        self.befell: dict[str, int] = {}
        self.processes: list[Process] = []
        self.retriers = 0
        self.first_act = True
        self.power, self.rot = PowerLoss(world), Rot(world)
        world.cluster.begin = self.add
        self.scheduler.disturb, self.scheduler.between = self.disturb, self.between

    def play(self) -> None:
        rng, world = self.scheduler.rng, self.world
        drivers = rng.choice([1, 2, 2, 3])
        for number in range(drivers):
            self.start(f"driver {number + 1}", lambda: actors.drive(world))
        for number in range(rng.choice([0, 0, 1, 2])):
            times = rng.randrange(1, 4)
            self.start(f"reaper {number + 1}", lambda t=times: actors.tidy(world, times=t))
        self.retriers = rng.choice([0, 0, 1, 2])
        self.start_taker()
        self.start_menders()
        self.scheduler.run(self.still)
        self.first_act = False
        self.rot.strike()
        self.operate("operator")
        for process in self.processes:  # zombies: what stood still goes on in a finished run
            self.wake(process)
        self.world.wire.weather.stop = 0.0
        self.scheduler.run(lambda: self.broken() or not self.alive())
        while self.world.wire.late and not self.broken():
            self.world.wire.deliver()
        self.operate("last operator")
        rotten, tasks = self.rot.happened, self.world.cluster.begun
        self.befell |= {"file rot": rotten, "repair": self.forked, "task": tasks}
        if not self.broken():
            for base, files in self.families().items():
                self.faults += checker.check(files, base, world.rows)
                left = [key for key in files if "/pieces/" in key and world.compact]
                self.faults += [f"{key} is left" for key in left]

    def start_taker(self) -> None:
        """In some schedules somebody takes what is there; drawn apart, so that the seeds of the
        others mean what they meant."""
        rng = random.Random(f"{self.scheduler.seed} takes what is there")
        if rng.random() < 0.3:
            wait = rng.choice([1, 5, 20])
            self.start("taker", lambda: actors.take_partial(self.world, wait))

    def start_menders(self) -> None:
        """Where files are to rot, some repair before anybody says that they should; and nobody
        retries rows of a run that may lose its quarantine."""
        if self.rot.planned:
            self.retriers = 0
            for number in range(self.rot.rng.choice([0, 1, 2])):
                wait = self.rot.rng.choice([5, 20, 50])
                mend = partial(actors.mend, self.world, wait)
                self.start(f"mender {number + 1}", mend)

    def start(self, name: str, call: Callable[[], object], disturbed: bool = True) -> Process:
        process = self.world.process(name, disturbed)
        self.add(process, call)
        return process

    def add(self, process: Process, call: Callable[[], object]) -> None:
        self.processes.append(process)
        self.scheduler.start(process, call)

    def operate(self, name: str) -> None:
        """A person runs the same commands again, and nothing happens to them."""
        if self.broken():
            return

        def commands() -> None:
            if self.rot.happened:
                self.mend()
            else:
                actors.drive(self.world, calm=True)
            done = 0
            while done < len(runs := self.runs()):  # a retry may make another, at the end of them
                actors.retry(self.world, runs[done], calm=True)
                actors.tidy(self.world, runs[done], calm=True)
                done += 1

        process = self.start(name, commands, disturbed=False)
        self.scheduler.run(lambda: self.broken() or process.ended)
        if process.error is not None and not self.broken():
            self.faults.append(f"the run cannot be finished: {process.error!r}")

    def mend(self) -> None:
        """A person drives the run, and repairs it whatever came of that."""
        with suppress(CorruptRun):
            actors.drive(self.world, calm=True)
        actors.mend(self.world, calm=True)
        if f"{FORK}/_raybatch/plan.json" in self.world.files():
            actors.finish_fork(self.world, calm=True)
            self.forked = True

    forked = False  # then only the fork is asked for

    def runs(self) -> list[str]:
        """Keys of all runs that are to be whole in the end."""
        return sorted(
            key.partition("/")[0]
            for files in self.families().values()
            for key in files
            if key.endswith("/_raybatch/plan.json")
        )

    def families(self) -> dict[str, dict[str, bytes]]:
        """{first run: its files and those of the runs that retry its rows}."""
        files = self.world.files()
        base = FORK if self.forked else KEY
        if self.forked or self.rot.planned:
            files = {k: v for k, v in files.items() if (k.startswith(FORK)) == self.forked}
        return {base: files}

    # --- what happens meanwhile -----------------------------------------------------------------

    def broken(self) -> bool:
        """Whether a fault was found; looks at what ended since."""
        self.faults += self.world.watch.faults
        self.world.watch.faults.clear()
        for process in self.processes:
            error = process.error
            if error is None or not process.disturbed:
                continue
            if not isinstance(error, (RayBatchError, FileNotFoundError, WorkerCrashed)):
                self.faults.append(f"{process} ended with {error!r}")
            elif (
                isinstance(error, CorruptRun)
                and self.world.wire.weather.clear
                and (not self.rot.happened)
            ):
                self.faults.append(f"{process} says of a sound run: {error}")
        return bool(self.faults)

    def alive(self) -> bool:
        return any(not (p.ended or p.dead) for p in self.processes)

    def still(self) -> bool:
        """Whether the first act is over: nobody is left but those that stand still."""
        return self.broken() or all(p.ended or p.dead or p.frozen for p in self.processes)

    def between(self) -> None:
        """Before each turn: late arrivals, wakings, and retries of a run that has just ended."""
        rng, wire = self.scheduler.rng, self.world.wire
        if self.first_act and self.power.due:
            self.power_off()
        if self.first_act and self.rot.left and self.rot.rng.random() < self.rot.soon:
            self.rot.strike()
        if wire.late and rng.random() < 0.02:
            wire.deliver()
        for process in self.processes:
            if process.frozen and wire.weather.wake and rng.random() < wire.weather.wake:
                self.wake(process)
        if self.retriers and KEY in self.world.watch.ended:
            self.retriers -= 1
            number = self.retriers
            self.start(f"retrier {number + 1}", lambda: actors.retry(self.world))

    def power_off(self) -> None:
        """All that works dies at once, and somebody starts it again."""
        self.befell["power loss"] = 1
        self.scheduler.note("... the power fails")
        for process in self.processes:
            process.dead = True
        self.scheduler.end(disturbed=True)
        self.power.strike()
        for number in range(self.power.rng.choice([1, 2])):
            self.start(f"driver {number + 1} again", lambda: actors.drive(self.world))

    def disturb(self, process: Process, what: str) -> None:
        if not process.disturbed:
            return
        rng, weather = self.scheduler.rng, self.world.wire.weather
        draw = rng.random()
        if draw < weather.crash:
            self.note("crash", process)
            process.dead = True
            self.world.cluster.lost(process)
            if rng.random() < 0.5:  # somebody starts it again
                name = f"{process.name}'"
                if process.name.startswith("driver"):
                    self.start(name, lambda: actors.drive(self.world))
        elif draw < weather.crash + weather.stop:
            self.note("stop", process)
            process.frozen = True
            self.world.cluster.lost(process)
        elif draw < weather.crash + weather.stop + weather.clock:
            self.note("clock set back", process)
            self.scheduler.wall -= rng.choice([1.0, 3600.0])

    def wake(self, process: Process) -> None:
        if process.frozen and not process.dead:
            self.note("wake", process)
            process.frozen = False
            if self.scheduler.rng.random() < 0.5:
                self.scheduler.clock += 7200.0  # long enough for any time limit

    def note(self, what: str, process: Process) -> None:
        self.befell[what] = self.befell.get(what, 0) + 1
        self.scheduler.note(f"{process}   ... {what}")

    # --- the end --------------------------------------------------------------------------------

    def verify(self) -> None:
        """The package's own proof must agree with the checker's."""
        for base in self.families():
            found = verify_chain(self.world.open(self.world.root), base)
            self.faults += [f"raybatch verify: {fault}" for fault in found.faults]


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of what is injected help nobody."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
