"""Reads, infers and commits pending shards."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.compile.job import compile_planned
from prefect_raybatch.driver.cost import CostMeter, Spent, check_cost, spent_on
from prefect_raybatch.driver.stops import Stop
from prefect_raybatch.errors import ConfigError, RayBatchError
from prefect_raybatch.installed import code_version
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.accepted import accepted_note
from prefect_raybatch.ledger.drains import Draining
from prefect_raybatch.ledger.increments import OF_ROWS, begin_asks, increment_of, waiting_rows
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.runs.attempts import INFERENCE, recorded_attempt
from prefect_raybatch.runs.planned_by import compare_code
from prefect_raybatch.runs.precision import decided_precision
from prefect_raybatch.runs.run import Run, load_run, run_of, who
from prefect_raybatch.sizing.prices import gpu_price
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.storage import open_store

if TYPE_CHECKING:
    from prefect_raybatch.cluster.pipeline import Pipeline
    from prefect_raybatch.cluster.sharing import User
    from prefect_raybatch.cluster.warm import WarmKind
    from prefect_raybatch.driver.driver import OtherLedger, Progress, RunPass
    from prefect_raybatch.driver.monitor import Monitor
    from prefect_raybatch.driver.starting import Starting
    from prefect_raybatch.sizing.sizes import Capacity, Pool, Sizing

log = logging.getLogger(__name__)


def infer_run(
    job: BatchJob,
    run: Run,
    observe: Callable[[Progress], None] = lambda progress: None,
    engine: type | None = None,
) -> Progress:
    """Read, infer and commit every pending shard; return the progress at the end.

    Starts no engine if nothing is pending. An observer that is a `heartbeat.Listener` also receives
    heartbeats. `engine` replaces the engine stage in tests.
    """
    check_trust(job)
    check_run_place(run.uri)
    store = open_store(run.uri, job.output.options or None)
    ledger = Ledger(store)
    plan, _ = load_run(ledger, run)
    begin = ledger.finished(plan) is None
    with recorded_attempt(store, job, run.run_key, INFERENCE, begin):
        return _infer(compile_planned(job, plan), run, ledger, plan, observe, engine)


def _infer(
    spec: RunSpec,
    run: Run,
    ledger: Ledger,
    plan: Plan,
    observe: Callable[[Progress], None],
    engine: type | None,
) -> Progress:
    """Infer and commit the pending shards. A run that reuses answers first asks its requests."""
    store, increment = ledger.store, increment_of(plan)
    if increment is None or ledger.finished(plan) is not None:
        return _attempt(spec, run, observe, engine)
    begun = begin_asks(store, increment)
    if begun is None:
        return _attempt(spec, run, observe, engine)
    from prefect_raybatch.driver.driver import OtherLedger

    first = OtherLedger(begun[1].rows, begun[1].shards)
    if begun[0].finished(begun[1]) is not None:
        return _attempt(spec, run, observe, engine, before=first)
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.sharing import User
    from prefect_raybatch.runs.finalize_run import finalize_spec
    from prefect_raybatch.runs.increment import asks_of

    # Asked first: a run of its own, of which only this one knows. The cluster is held over both,
    # so that one that is started here is started once.
    user, part = User(spec.name), asks_of(spec)
    with cluster.connected(spec.cluster, user) as capacity:
        asks = replace(run_of(begun[0].store, begun[1], begun[0]), probed=run.probed)
        log.info("asking %d requests first, in %s", asks.rows, asks.uri)
        held, later = (user, capacity), OtherLedger(run.rows, run.shards)
        asked = _attempt(part, asks, observe, engine, held, later=later)
        finalize_spec(part, begun[0], begun[1], begun[0].shards(begun[1]), asked)
        before = replace(first, failed=asked.failed)
        return _attempt(spec, run, observe, engine, held, before=before)


def _attempt(
    spec: RunSpec,
    run: Run,
    observe: Callable[[Progress], None],
    engine: type | None,
    held: tuple[User, Capacity] | None = None,
    before: OtherLedger | None = None,
    later: OtherLedger | None = None,
) -> Progress:
    """Make one attempt at the pending shards of one ledger. `held`: the cluster is held already, by
    this user of it; `before`, `later`: the progress in the run's other ledger."""
    attempt = _Attempt(spec, run, observe, engine)
    progress = attempt.driver.progress
    progress.before = before or progress.before
    progress.later = later or progress.later
    attempt.driver.resume()
    if attempt.driver.done.all():  # before Ray is imported, which takes seconds
        return progress
    attempt.check()
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.sharing import User

    user, capacity = held or (User(spec.name), None)
    user.waits = attempt.monitor.held
    with ExitStack() as stack:
        stack.enter_context(attempt.monitor)
        capacity = capacity or stack.enter_context(cluster.connected(spec.cluster, user))
        attempt.joined()
        attempt.decide(user, capacity)
        pipeline = attempt.pipeline(stack, user, capacity)
        monitor = attempt.monitor
        monitor.engines, monitor.starts = pipeline.engines, pipeline.starts
        monitor.deaths = pipeline.deaths
        pipeline.on_pass = monitor.pass_began
        stack.callback(pipeline.forget)
        stack.callback(monitor.note_start)
        stack.callback(monitor.look_at_deaths)
        run_pass = _interruptible(pipeline, monitor, user, spec.limits)
        suspects = pipeline.size.pool.engines * (1 + pipeline.size.concurrent)
        return attempt.driver.run(run_pass, pipeline.quarantine, suspects)


class _Attempt:
    """The objects of one attempt at a ledger, and the steps from there to its pipeline, in their
    order. `looks_up`: all its answers exist, and nothing is asked."""

    def __init__(
        self,
        spec: RunSpec,
        run: Run,
        observe: Callable[[Progress], None],
        engine: type | None,
    ):
        from prefect_raybatch.driver.driver import Driver
        from prefect_raybatch.driver.monitor import Monitor

        self.spec, self.run, self.engine = spec, run, engine
        self.store = open_store(run.uri, dict(spec.output.options) or None)
        self.ledger = Ledger(self.store)
        plan, self.shards = load_run(self.ledger, run)
        self.increment = increment_of(plan)
        self.looks_up = self.increment is not None and self.increment.ledger == OF_ROWS
        self.plan = plan if run.model is None else plan.with_model(run.model)
        self.name = uuid.uuid4().hex
        who_drives = {**_whoami(self.plan), **accepted_note(run.accepted)}
        self.whoami = Whoami(self.ledger, self.name, who_drives)
        limits = spec.limits
        self.monitor = Monitor(self.name, self.plan, self.store, limits, observe)
        self.monitor.on_started = partial(_note_start, self.whoami)
        waiting = None
        if self.increment is not None:
            waiting = waiting_rows(self.ledger, self.increment, self.shards)
        self.driver = Driver(
            self.plan,
            self.shards,
            self.ledger,
            limits,
            self.monitor,
            partial(_note_stop, self.whoami),
            waiting,
            Draining(self.store, self.name).look,
        )
        self.spent = Spent()

    @property
    def committed(self) -> int:
        return int(self.driver.done.sum())

    def check(self) -> None:
        """Run preflight checks, then record the attempt."""
        self.spent = spent_on(self.ledger, self.plan)
        check_cost(self.spec.limits, self.spent.at(None), self.plan.shards, self.committed)
        self.monitor(self.driver.progress)
        if not self.run.probed:  # the plan is an earlier attempt's: what that found may differ now
            self.store.probe()
        self.whoami.note()
        compare_code(self.store)

    def joined(self) -> None:
        from prefect_raybatch.cluster import connect as cluster

        self.monitor.dashboard, self.monitor.leaving = cluster.dashboard_url(), cluster.leaving
        if self.monitor.dashboard:
            log.info("Ray's dashboard: %s", self.monitor.dashboard)

    def decide(self, user: User, capacity: Capacity) -> None:
        """Settle what is open until the run is in the cluster: where the answers of rows are that
        it looks up, and the precision of its engines."""
        if self.increment is not None and self.looks_up:
            from prefect_raybatch.cluster.lookups import known_answers
            from prefect_raybatch.runs.answers_by_row import place_answers

            known = known_answers(self.spec.engine.model.pools, self.increment, self.store)
            place_answers(self.store, self.plan, self.increment, known, user.waits)
        elif self.spec.engine.tries:
            stored = sized.for_attempt(self.spec.sizes, self.plan, capacity)
            self.monitor.meter = meter_for(self.spec, capacity, stored.pool, self.spent)
            with_what = (self.plan, self.shards, self.ledger, capacity, user, self.name)
            halted = partial(_halted, user, self.monitor)
            meter = self.monitor.meter
            found = decided_precision(self.spec, *with_what, self.engine, meter, halted)
            self.spec = self.spec.decide(precision=found)

    def pipeline(self, stack: ExitStack, user: User, capacity: Capacity) -> Pipeline:
        """Return the stages with their sizes, once the cluster has room for them, which `stack`
        holds."""
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.early import engines_begun
        from prefect_raybatch.cluster.near import nearest_up
        from prefect_raybatch.cluster.pipeline import Pipeline, warm_kind_of

        more: dict[str, Any] = {"engine": self.engine} if self.engine else {}
        asked = self.spec.sizes.without_engine() if self.looks_up else self.spec.sizes

        def sizes(asked: SizeSpec) -> Sizing:
            return sized.for_attempt(asked, self.plan, capacity)

        def kind_of(size: Sizing) -> WarmKind | None:
            return warm_kind_of(self.spec, self.plan.model, size, **more)

        size, kind = sizes(asked), None
        if not self.looks_up:
            size, kind = nearest_up(asked, sizes, size, kind_of, cluster.SHARED.warm.kinds)
        cluster.check_fit(asked, capacity, size.pool)
        for warning in () if self.looks_up else size.warnings:
            log.warning(warning)
        early = engines_begun(kind, size.pool.engines_for(self.plan.shards - self.committed)[0])
        meter = meter_for(self.spec, capacity, size.pool, self.spent)
        self.monitor.meter = meter.after(self.monitor.meter, early.gpu_seconds)
        check_cost(self.spec.limits, self.monitor.meter.whole, self.plan.shards, self.committed)
        warm = stack.enter_context(cluster.admitted(asked, capacity, size.pool, user, kind))
        if self.increment is not None and not self.looks_up:  # what a report reckons savings by
            self.whoami.note(gpus=size.pool.gpus[1])
        return Pipeline(
            self.spec,
            self.plan,
            self.shards,
            self.store,
            self.name,
            size,
            # Another attempt may be alive. Ours is noted before we look, so that of two that start
            # at the same moment one at least sees the other.
            shuffle=self.name if len(self.ledger.attempts()) > 1 else None,
            warm=warm,
            early=early.name,
            **more,
        )


class Whoami:
    """The note of an attempt, to which several threads add."""

    def __init__(self, ledger: Ledger, attempt: str, known: dict[str, Any]):
        self.ledger, self.attempt, self.known = ledger, attempt, known
        self._lock = threading.Lock()

    def note(self, **more: Any) -> None:
        with self._lock:
            self.known |= more
            self.ledger.note_attempt(self.attempt, self.known)


def meter_for(spec: RunSpec, capacity: Capacity, pool: Pool, spent: Spent) -> CostMeter:
    """Return a meter for the costs of an attempt with that pool, in addition to earlier costs.
    Raises `ConfigError` if a limit on costs is set and no price is known."""
    price = gpu_price(spec.cluster, capacity)
    if price.hour is None and pool.gpus[1] and price.why:
        if spec.limits.max_cost is not None:
            raise ConfigError(
                f"limits.max_cost: {price.why}; name it there, or set cluster.price_per_gpu_hour "
                "for all others"
            )
        log.warning("no costs are counted: %s", price.why)
    return CostMeter(price.hour, pool.gpus_a_replica / pool.engines_per_gpu, pool.fewest, spent)


def _interruptible(pipeline: Pipeline, monitor: Monitor, user: User, limits: Limits) -> RunPass:
    """Return the pass such that a stall or its costs can end it, and a signal to the main thread
    also ends a run in another thread, in which it is not raised."""
    from prefect_raybatch.driver.stall import interruptible

    # A nightly run that nobody watches needs `fail_on_stall`: Ray waits for ever for room in a
    # cluster, which neither `hang_seconds` (engines) nor `function_seconds` (functions) sees.
    told = limits.fail_on_stall or limits.max_cost is not None
    if told or threading.current_thread() is not threading.main_thread():
        halted = partial(_halted, user, monitor)
        return interruptible(pipeline, lambda: monitor.failure, pipeline.stop, halted)
    return pipeline


def _halted(user: User, monitor: Monitor) -> RayBatchError | None:
    """Return why the run must stop now; None to continue."""
    return user.halted() or monitor.spent


def _note_stop(whoami: Whoami, stop: Stop) -> None:
    try:
        whoami.note(stopped=stop.to_dict())
    except RayBatchError as error:  # the run ends with its own error, not with this one
        log.warning("the failed rows are not noted in the run directory: %s", error)


def _note_start(whoami: Whoami, starting: Starting) -> None:
    if starting.engines:
        whoami.note(start={"engines": starting.engines, "seconds": starting.seconds()})


def _whoami(plan: Plan) -> dict[str, Any]:
    user, _, host = who().rpartition("@")
    return {
        "host": host,
        "pid": os.getpid(),
        "user": user,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": plan.hash,
        "code": code_version(),
    }
