"""What processes do: drive a run to its end, tidy up, retry its failed rows.

All of it through the package's own functions. Made up are the engine's answers, and how Ray cuts,
repeats and loses what finish gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from helpers.engines import with_answers
from helpers.small import MODEL, receipts
from helpers.specs import finish_stage

from prefect_raybatch.api import finalize_partial, finalize_run
from prefect_raybatch.api.retry import plan_retry
from prefect_raybatch.driver.driver import Driver, Progress
from prefect_raybatch.errors import (
    ConfigError,
    IncompleteRun,
    NoSuchRun,
    PlanMismatch,
    is_transient,
)
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan, Receipt, Unit
from prefect_raybatch.result.reap import reap
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.retry import NothingToRetry
from prefect_raybatch.runs.run import run_of
from prefect_raybatch.stages.block import Failure, tag
from prefect_raybatch.stages.columns import POSITION

from .scheduler import Pool
from .world import KEY, World

Made = TypeVar("Made")
TRIES = 3  # of a task, as Prefect repeats what is worth it
AT_ONCE = 2  # units in the stages of a driver


class Stages:
    """A pass: units through a made-up engine and the real finish, as Ray Data would run them."""

    def __init__(self, world: World, ledger: Ledger, plan: Plan, calm: bool) -> None:
        self.world, self.ledger, self.plan = world, ledger, plan
        self.rng, self.calm = world.scheduler.rng, calm
        self.attempt = world.scheduler.uuid4().hex
        self.rows = world.input_of(ledger, plan)
        self.shards = ledger.shards(plan)
        job = world.job_of(plan)
        self.finish = finish_stage(job.output, dict(MODEL), ledger.store, self.attempt)

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
        units = list(units)
        if not isolated:
            self.rng.shuffle(units)
        pool = Pool(1 if isolated else AT_ONCE)
        for promise in [pool.submit(self.unit, unit) for unit in units]:
            yield from promise.result()

    def happens(self, rate: float) -> bool:
        return not self.calm and self.rng.random() < rate

    def unit(self, unit: Unit) -> list[Receipt]:
        if self.happens(0.3) and self.ledger.is_committed(unit.shard):
            return []
        found = []
        for offset, rows in self.cuts(unit):
            if self.happens(0.05):  # a task that nobody hears of again
                continue
            found.append(self.receipt(Unit(unit.shard, offset, rows)))
        if self.happens(0.15):  # Ray runs the task again, with other cuts
            found += [self.receipt(Unit(unit.shard, o, n)) for o, n in self.cuts(unit)]
            self.rng.shuffle(found)
        return found

    def cuts(self, unit: Unit) -> list[tuple[int, int]]:
        """[(offset, rows)] that make up a unit: mostly it is one block."""
        if unit.rows == 1 or not self.happens(0.3):
            return [(unit.offset, unit.rows)]
        at = self.rng.randrange(1, unit.rows)
        return [(unit.offset, at), (unit.offset + at, unit.rows - at)]

    def block(self, unit: Unit) -> pa.Table:
        start = self.shards[unit.shard].start + unit.offset
        return tag(self.rows.slice(start, unit.rows), unit)

    def receipt(self, unit: Unit) -> Receipt:
        block = self.block(unit)
        ids = block["id"].to_pylist()
        if self.world.deadly & {*ids} and self.plan.parent is None:
            return Receipt.of_lost(unit, self.attempt, Loss(ENGINE_DIED, "segmentation fault"))
        errors = [
            Failure("engine", "ValueError", "refused").to_dict() if self.fails(i) else None
            for i in ids
        ]
        answers = [f"{self.attempt} answers {i}" for i in ids]
        (made,) = receipts(self.finish(with_answers(block, errors, answers)))
        return made

    def fails(self, row: int) -> bool:
        """Which rows fail is another matter in each attempt, as with any sampled answer."""
        if self.plan.parent is None and row in self.world.bad:
            return True
        return self.happens(0.15)

    def quarantine(self, unit: Unit, why: Loss) -> Receipt:
        rows = self.block(unit).select([POSITION, "id", "Company", "tags"])
        return self.finish.failed(unit, rows, Failure("engine", "EngineDied", str(why)), 2)


def infer(world: World, ledger: Ledger, plan: Plan, calm: bool) -> Progress:
    """What an attempt does between plan and finalize."""
    driver = Driver(plan, ledger.shards(plan), ledger, Limits(max_failed_fraction=1.0))
    progress = driver.resume()
    if driver.done.all():
        return progress
    stages = Stages(world, ledger, plan, calm)
    return driver.run(stages, stages.quarantine)


def drive(world: World, calm: bool = False) -> None:
    """A driver of the first run: plan, infer, finalize."""

    def attempt() -> None:
        store = world.open(f"{world.root}/{KEY}")
        ledger = Ledger(store)
        plan = world.planned(ledger)
        progress = infer(world, ledger, plan, calm)
        finalize_run(world.job, run_of(store, plan, ledger), progress)

    _repeated(attempt)


def retry(world: World, key: str = KEY, calm: bool = False) -> None:
    """Retries what failed in a run, or goes on with a retry that is not finished."""

    def attempt() -> None:
        try:
            made = plan_retry(f"{world.root}/{key}")
        except ConfigError as error:
            if calm and "failed again. Retry those" not in str(error):
                raise
            return  # others have taken these rows, or the run is not finished
        except PlanMismatch:
            return  # another one began at the same moment
        if isinstance(made, NothingToRetry):
            return
        store = world.open(made.run.uri)
        ledger = Ledger(store)
        plan = ledger.load_plan()
        assert plan is not None
        finalize_run(made.job, made.run, infer(world, ledger, plan, calm))

    _repeated(attempt)


def take_partial(world: World, wait: int) -> None:
    """What a person does who needs the rows that are there, while drivers work or not: looks until
    there are some, each time after `wait` turns."""
    for _ in range(10):
        for _ in range(wait):
            world.scheduler.point("waits")
        try:
            _repeated(lambda: finalize_partial(f"{world.root}/{KEY}"))
            return
        except (IncompleteRun, NoSuchRun):  # too early
            continue
        except ConfigError:  # too late
            return


def mend(world: World, wait: int = 0, calm: bool = False) -> None:
    """What a person does who believes that a run has lost files: repairs it, and goes on with the
    fork, if it came to one. `wait`: turns between looks."""
    for _ in range(1 if calm else 5):
        for _ in range(wait):
            world.scheduler.point("waits")
        if _repeated(lambda: _forked(world)):
            return finish_fork(world, calm)


def _forked(world: World) -> bool:
    process = world.scheduler.process
    process.leaves = KEY
    try:
        return repair_run(f"{world.root}/{KEY}").run_key is not None
    except NoSuchRun:
        return False
    finally:
        process.leaves = None


def finish_fork(world: World, calm: bool = False) -> None:
    """Goes on with the fork as with any run."""

    def attempt() -> None:
        store = world.open(f"{world.root}/{KEY}.m1")
        ledger = Ledger(store)
        if (plan := ledger.load_plan()) is not None:
            progress = infer(world, ledger, plan, calm)
            finalize_run(world.job, run_of(store, plan, ledger), progress)

    _repeated(attempt)


def tidy(world: World, key: str = KEY, times: int = 1, calm: bool = False) -> None:
    """Reaps as a person might who believes that nobody works on a run; `calm`: all that is left."""
    rng = world.scheduler.rng
    for _ in range(times):
        for _ in range(0 if calm else rng.randrange(30)):
            world.scheduler.point("waits")
        older = -1e6 if calm else rng.choice([-60.0, 0.0, 1.0, 3600.0])
        store = world.open(f"{world.root}/{key}")

        def attempt(older: float = older, store: Any = store) -> None:
            try:
                reap(store, older, dry_run=not calm and rng.random() < 0.1)
            except NoSuchRun:
                return

        _repeated(attempt)


def _repeated(attempt: Callable[[], Made]) -> Made:
    for left in reversed(range(TRIES)):
        try:
            return attempt()
        except Exception as error:
            if not left or not is_transient(error):
                raise
    raise AssertionError
