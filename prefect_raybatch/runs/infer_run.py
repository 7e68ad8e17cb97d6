"""Reads, infers and commits the pending shards of a run, in an attempt for each of its phases.

A run that reuses answers has two phases: the requests that it asks first, and its rows.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.driver.cost import Spent, check_cost, spent_on
from prefect_raybatch.errors import RayBatchError, RunDrained, is_transient
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.accepted import accepted_note
from prefect_raybatch.ledger.drains import Draining
from prefect_raybatch.ledger.increments import (
    Increment,
    begin_asks,
    increment_of,
    waiting_rows,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.runs.attempts import AttemptLog, about_process, compare_code
from prefect_raybatch.runs.costs import meter_for
from prefect_raybatch.runs.precision import decided_precision
from prefect_raybatch.runs.run import Run, run_of
from prefect_raybatch.runs.starts import seconds_of_others
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec

if TYPE_CHECKING:
    from prefect_raybatch.cluster.pipeline import Pipeline
    from prefect_raybatch.cluster.sharing import User
    from prefect_raybatch.cluster.warm import WarmKind
    from prefect_raybatch.driver.driver import PhaseProgress, Progress, RunPass
    from prefect_raybatch.driver.monitor import Monitor
    from prefect_raybatch.sizing.sizes import Capacity, Sizing

log = logging.getLogger(__name__)


def infer_spec(
    spec: RunSpec,
    run: Run,
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    observe: Callable[[Progress], None],
    engine: type | None = None,
) -> Progress:
    """Read, infer and commit every pending shard of a planned run; return the progress at the end.

    Starts no engine if nothing is pending. `engine` replaces the engine stage in tests.
    """
    requests, rows = begin_phases(spec, run, ledger, plan, shards)
    if requests is None:
        return infer_phase(rows, observe, engine)
    return _infer_both(requests, rows, observe, engine)


def _infer_both(
    requests: Phase, rows: Phase, observe: Callable[[Progress], None], engine: type | None
) -> Progress:
    """Infer and finalize the requests of a run, then give each row its answer.

    The cluster is held over both phases, so that one that starts for this run starts once.
    """
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.sharing import User
    from prefect_raybatch.runs.finalize_run import finalize_spec

    before = requests.extent
    if requests.finished:
        return infer_phase(_without_unneeded(rows), observe, engine, before=before)
    user = User(rows.spec.name)
    with _imports(requests.spec, engine), cluster.connected(rows.spec.cluster, user) as capacity:
        if rows.spec.cascade is not None:
            _check_larger_fits(rows, capacity)
            log.info("%s answers all rows first", rows.spec.cascade.first_name)
        else:
            log.info("asking %d requests first, in %s", requests.plan.rows, requests.run.uri)
        joined = JoinedCluster(user, capacity)
        asked = infer_phase(requests, observe, engine, joined, later=rows.extent)
        finalize_spec(requests.spec, requests.ledger, requests.plan, requests.shards, asked)
        before = replace(before, failed=asked.failed)
        return infer_phase(_without_unneeded(rows), observe, engine, joined, before=before)


def _without_unneeded(rows: Phase) -> Phase:
    """Return the rows phase, without an engine if a cascade leaves no row to its larger model."""
    cascade = rows.spec.cascade
    if cascade is None or rows.increment is None:
        return rows
    from prefect_raybatch.cluster.cascade import first_answers

    answers = first_answers(rows.ledger.store, rows.increment, cascade, rows.plan)
    return replace(rows, keeps_all=not answers.asked)


def _check_larger_fits(rows: Phase, capacity: Capacity) -> None:
    """Raise the error of a larger model that the cluster has no room for, before any row."""
    from prefect_raybatch.cluster import connect as cluster

    size = sized.for_attempt(rows.sizes, rows.plan, capacity)
    cluster.check_fit(rows.sizes, capacity, size.pool)


def infer_phase(
    phase: Phase,
    observe: Callable[[Progress], None],
    engine: type | None = None,
    joined: JoinedCluster | None = None,
    before: PhaseProgress | None = None,
    later: PhaseProgress | None = None,
) -> Progress:
    """Make one attempt at the pending shards of a phase; return the progress at the end.

    The cluster is joined here unless it is `joined` already. `before` and `later` are the run's
    other phase, which its progress counts.
    """
    attempt = Attempt(phase, observe, engine)
    if not attempt.resume(before, later):  # before Ray is imported, which takes seconds
        return attempt.driver.progress
    attempt.check()
    with ExitStack() as stack:
        joined = attempt.join(stack, joined)
        attempt.decide(joined)
        pipeline = attempt.pipeline(stack, joined)
        return attempt.run(pipeline, joined.user)


def _imports(spec: RunSpec, engine: type | None) -> AbstractContextManager[None]:
    """Import vLLM for the run's engines from now on, unless they are those of a test."""
    from prefect_raybatch.cluster import connect as cluster

    return cluster.engines_imported(spec.cluster) if engine is None else nullcontext()


@dataclass(frozen=True)
class Phase:
    """One phase of a run: what it does, and its ledger with the plan and its shards.

    `increment` is the plan's record of reuse, None for an ordinary run. `keeps_all`: the first
    model of a cascade was sure of every row.
    """

    spec: RunSpec
    run: Run
    ledger: Ledger
    plan: Plan
    shards: Shards
    increment: Increment | None
    keeps_all: bool = False

    @property
    def needs_no_engine(self) -> bool:
        """Return whether no row is asked about in this phase."""
        return self.looks_up or self.keeps_all

    @property
    def looks_up(self) -> bool:
        """Return whether every answer of this phase exists already, so that it needs no engine."""
        return self.increment is not None and self.increment.looks_up

    @property
    def sizes(self) -> SizeSpec:
        """Return the size spec of the phase: without engines if it asks no row."""
        return self.spec.sizes.without_engine() if self.needs_no_engine else self.spec.sizes

    @property
    def finished(self) -> bool:
        """Return whether the phase's result is written."""
        return self.ledger.finished(self.plan) is not None

    @property
    def extent(self) -> PhaseProgress:
        """Return the size of this phase, as the progress of the run's other phase shows it."""
        from prefect_raybatch.driver.driver import PhaseProgress

        return PhaseProgress(self.plan.rows, self.plan.shards)


def begin_phases(
    spec: RunSpec, run: Run, ledger: Ledger, plan: Plan, shards: Shards
) -> tuple[Phase | None, Phase]:
    """Return the requests phase of a run and its rows phase.

    The first is None if the run has no requests to ask or is finished. Writes the plan of the
    requests phase unless it exists.
    """
    increment = increment_of(plan)
    own = plan if run.model is None else plan.with_model(run.model)
    rows = Phase(spec, run, ledger, own, shards, increment)
    if increment is None or rows.finished:
        return None, rows
    begun = begin_asks(ledger.store, increment)
    if begun is None:
        return None, rows
    from prefect_raybatch.runs.increment import asks_of

    asks, asked = begun
    part = replace(run_of(asks.store, asked, asks), probed=run.probed)
    what = spec.first or asks_of(spec)
    return Phase(what, part, asks, asked, asks.shards(asked), increment_of(asked)), rows


@dataclass(frozen=True)
class JoinedCluster:
    """The cluster that a phase runs on: this run as a user of it, and its capacity."""

    user: User
    capacity: Capacity


class Attempt:
    """One attempt at a phase: its log, monitor and driver, and the steps to its pipeline."""

    def __init__(
        self, phase: Phase, observe: Callable[[Progress], None], engine: type | None = None
    ) -> None:
        """Store the arguments; `engine` replaces the engine stage in tests."""
        from prefect_raybatch.driver.driver import Driver
        from prefect_raybatch.driver.monitor import Monitor

        self.phase, self.engine = phase, engine
        plan, ledger, limits = phase.plan, phase.ledger, phase.spec.limits
        self.name = uuid.uuid4().hex
        self.log = AttemptLog(
            ledger, self.name, {**about_process(plan), **accepted_note(phase.run.accepted)}
        )
        self.monitor = Monitor(
            self.name, plan, ledger.store, limits, observe, on_started=self.log.note_start
        )
        waiting = None
        if phase.increment is not None:
            waiting = waiting_rows(ledger, phase.increment, phase.shards)
        self.driver = Driver(
            plan,
            phase.shards,
            ledger,
            limits,
            self.monitor,
            self.log.note_stop,
            waiting,
            Draining(ledger.store, self.name).look,
        )
        self.spent = Spent()

    def resume(self, before: PhaseProgress | None, later: PhaseProgress | None) -> bool:
        """Count what is committed; return whether anything is pending.

        `before` and `later` are the run's other phase, which the progress counts.
        """
        progress = self.driver.progress
        progress.before = before or progress.before
        progress.later = later or progress.later
        self.driver.resume()
        return not self.driver.done.all()

    @property
    def committed(self) -> int:
        return int(self.driver.done.sum())

    def _check_cost(self, cost: float | None) -> None:
        spec, shards = self.phase.spec, self.phase.plan.shards
        check_cost(spec.limits, cost, shards, self.committed, spec.cluster.prices.currency)

    def check(self) -> None:
        """Run preflight checks, then record the attempt."""
        phase = self.phase
        self.spent = spent_on(phase.ledger, phase.plan)
        self._check_cost(self.spent.at(None))
        self.monitor(self.driver.progress)
        if not phase.run.probed:  # an earlier command made the plan, and the store may differ now
            phase.ledger.store.probe()
        self.log.note()
        compare_code(phase.ledger.store)

    def join(self, stack: ExitStack, joined: JoinedCluster | None) -> JoinedCluster:
        """Return the cluster, joined until `stack` closes unless it is `joined` already.

        From then on heartbeats tell how the attempt stands.
        """
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.raylet import raylet_watch
        from prefect_raybatch.cluster.sharing import User

        user = joined.user if joined is not None else User(self.phase.spec.name)
        user.waits = self.monitor.held
        stack.enter_context(self.monitor)
        if joined is None:
            if not self.phase.needs_no_engine:
                stack.enter_context(_imports(self.phase.spec, self.engine))
            capacity = stack.enter_context(cluster.connected(self.phase.spec.cluster, user))
            joined = JoinedCluster(user, capacity)
        self.monitor.joined(cluster.dashboard_url(), cluster.leaving, raylet_watch())
        return joined

    def decide(self, joined: JoinedCluster) -> None:
        """Record where each row's answer is if the phase looks up, else decide on the precision."""
        if self.phase.looks_up:
            self._place_answers(joined.user)
        elif self.phase.spec.engine.tries:
            spec = self.phase.spec.decide(precision=self._precision(joined))
            self.phase = replace(self.phase, spec=spec)

    def _place_answers(self, user: User) -> None:
        """Record where the answer of each row is."""
        from prefect_raybatch.cluster.lookups import known_answers
        from prefect_raybatch.runs.answers_by_row import place_answers

        phase, store = self.phase, self.phase.ledger.store
        if phase.increment is not None:
            known = known_answers(phase.spec.engine.model.pools, phase.increment, store)
            place_answers(store, phase.plan, phase.increment, known, user.waits)

    def _precision(self, joined: JoinedCluster) -> Mapping[str, str]:
        """Return the engine arguments of the precision that the run uses.

        If it has not decided yet, engines of each precision answer a sample of the rows first.
        """
        phase, spec = self.phase, self.phase.spec
        stored = sized.for_attempt(spec.sizes, phase.plan, joined.capacity)
        self.monitor.meter = meter_for(
            spec.cluster, spec.limits, joined.capacity, stored.pool, self.spent
        )
        return decided_precision(
            spec,
            phase.plan,
            phase.shards,
            phase.ledger,
            joined.capacity,
            joined.user,
            self.name,
            self.engine,
            self.monitor.meter,
            partial(_halted, joined.user, self.monitor),
        )

    def pipeline(self, stack: ExitStack, joined: JoinedCluster) -> Pipeline:
        """Return the stages with their sizes, once the cluster has room for them.

        `stack` holds the room until it closes.
        """
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.early import engines_begun
        from prefect_raybatch.cluster.pipeline import Pipeline, stage_of

        phase, spec, capacity = self.phase, self.phase.spec, joined.capacity
        engine = self.engine or stage_of(spec)
        size, kind = self._sizes(capacity, engine)
        cluster.check_fit(phase.sizes, capacity, size.pool)
        early = engines_begun(kind, size.pool.engines_for(phase.plan.shards - self.committed)[0])
        meter = meter_for(spec.cluster, spec.limits, capacity, size.pool, self.spent)
        self.monitor.meter = meter.after(self.monitor.meter, early.gpu_seconds)
        self._check_cost(self.monitor.meter.whole)
        lease = cluster.admitted(phase.sizes, capacity, size.pool, joined.user, kind)
        warm = stack.enter_context(lease)
        if phase.increment is not None and not phase.looks_up:  # the report derives savings from it
            self.log.note(gpus=size.pool.gpus[1])
        pipeline = Pipeline(
            spec,
            phase.plan,
            phase.shards,
            phase.ledger.store,
            self.name,
            size,
            # Another attempt may be alive. Ours is noted before we look, so that of two that start
            # at the same moment one at least sees the other.
            shuffle=self.name if len(phase.ledger.attempts()) > 1 else None,
            engine=engine,
            on_pass=self.monitor.pass_began,
            warm=warm,
            early=early.name,
            others=self._seconds_of_others(),
        )
        self.monitor.meter.tokens_cost = pipeline.tokens_cost
        self.monitor.limited = pipeline.limited
        self.monitor.watch(pipeline)
        stack.callback(pipeline.leave)
        stack.callback(self.monitor.note_start)
        stack.callback(self.monitor.look_at_deaths)
        return pipeline

    def _seconds_of_others(self) -> float:
        """Return how long a hosted model's limits still count requests of earlier attempts."""
        endpoint = self.phase.spec.engine.model.endpoint
        if endpoint is None or not endpoint.limited:
            return 0.0
        return seconds_of_others(self.phase.ledger, self.name, time.time())

    def run(self, pipeline: Pipeline, user: User) -> Progress:
        """Send the pending shards through the pipeline; return the progress at the end."""
        run_pass = _interruptible(pipeline, self.monitor, user, self.phase.spec.limits)
        suspects = pipeline.size.pool.engines * (1 + pipeline.size.concurrent)
        try:
            return self.driver.run(run_pass, pipeline.quarantine, suspects)
        except BaseException as error:
            self._cancel_batches(error)
            raise

    def _cancel_batches(self, error: BaseException) -> None:
        """Cancel the batches at a hosted model, unless a retry is to go on with them."""
        from prefect_raybatch.stages.hosted_batches.stage import cancel_batches

        endpoint = self.phase.spec.engine.model.endpoint
        ends = not isinstance(error, Exception) or not (
            is_transient(error) or isinstance(error, RunDrained)
        )
        if endpoint is not None and endpoint.batch and ends:
            cancel_batches(endpoint, self.phase.ledger.store, self.name)

    def _sizes(self, capacity: Capacity, engine: type) -> tuple[Sizing, WarmKind | None]:
        """Return the sizes of this attempt, and the kind of engine by which running ones are found.

        The kind is None for a phase without engines. Prefers running engines that are similar
        enough.
        """
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.near import nearest_up
        from prefect_raybatch.cluster.pipeline import warm_kind_of

        phase, plan = self.phase, self.phase.plan

        def size_of(asked: SizeSpec) -> Sizing:
            return sized.for_attempt(asked, plan, capacity)

        def kind_of(size: Sizing) -> WarmKind | None:
            return warm_kind_of(phase.spec, plan.model, size, engine)

        if phase.needs_no_engine:
            return size_of(phase.sizes), None
        up = cluster.SHARED.warm.kinds
        size, kind = nearest_up(phase.sizes, size_of, size_of(phase.sizes), kind_of, up)
        for warning in size.warnings:
            log.warning(warning)
        return size, kind


def _interruptible(pipeline: Pipeline, monitor: Monitor, user: User, limits: Limits) -> RunPass:
    """Return the pass such that a stall or its costs can end it.

    A signal to the main thread also ends a run in another thread, in which it is not raised.
    """
    from prefect_raybatch.driver.stall import interruptible

    # A nightly run that nobody watches needs `fail_on_stall`: Ray waits for ever for room in a
    # cluster, which neither `hang_seconds` (engines) nor `function_seconds` (functions) sees.
    may_end = limits.fail_on_stall or limits.max_cost is not None
    if may_end or threading.current_thread() is not threading.main_thread():
        halted = partial(_halted, user, monitor)
        return interruptible(pipeline, lambda: monitor.failure, pipeline.stop, halted)
    return pipeline


def _halted(user: User, monitor: Monitor) -> RayBatchError | None:
    """Return why the run must stop now; None to continue."""
    return user.halted() or monitor.spent
