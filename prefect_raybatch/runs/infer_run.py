"""Reads, infers and commits the pending shards of a run, in one attempt per phase of the run.

Most runs have one phase, the rows phase. A requests phase with its own plan and ledger comes first
in a run that reuses or keeps answers (`reuse`) or orders all its prompts (`engine.order: run`). It
sends the run's requests to the model; in the rows phase, the rows then look up their answers. In a
cascade, the first phase infers all rows with the small model, and the rows phase infers some of
them again with the larger model.
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

import numpy as np

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.driver.cost import Spent, check_cost, spent_on
from prefect_raybatch.errors import (
    ConfigError,
    EngineFailure,
    EngineStartError,
    InsufficientResources,
    RayBatchError,
    RunDrained,
    is_transient,
)
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.learning.coming_run import with_arrangement
from prefect_raybatch.learning.rules import in_trial
from prefect_raybatch.ledger.accepted import accepted_note
from prefect_raybatch.ledger.arrangement import Arrangement, ArrangementNote
from prefect_raybatch.ledger.drains import Draining
from prefect_raybatch.ledger.increments import (
    Increment,
    begin_requests_phase,
    increment_of,
    waiting_rows,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.runs.arrangement import (
    TRIAL_INTERRUPTED,
    LearningSpec,
    decided_arrangement,
    trial_fields,
    used_fields,
)
from prefect_raybatch.runs.attempts import AttemptLog, about_process, compare_code
from prefect_raybatch.runs.costs import meter_for
from prefect_raybatch.runs.precision import decided_precision
from prefect_raybatch.runs.run import Run, run_of
from prefect_raybatch.runs.starts import seconds_of_others
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.cluster.pipeline import Pipeline
    from prefect_raybatch.cluster.sharing import Tenant
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
    requests, rows = begin_phases(run, ledger, plan, shards)
    if requests is None:
        return infer_phase(spec, rows, observe, engine)
    return _infer_both(spec, requests, rows, observe, engine)


def _infer_both(
    spec: RunSpec,
    requests: Phase,
    rows: Phase,
    observe: Callable[[Progress], None],
    engine: type | None,
) -> Progress:
    """Infer and finalize the requests phase unless it is finished, then infer the rows phase.

    Both phases run on one connection to the cluster, so a cluster made for this run is started
    once.
    """
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.sharing import Tenant
    from prefect_raybatch.runs.finalize_run import finalize_spec
    from prefect_raybatch.runs.increment import requests_spec

    first, before = spec.first or requests_spec(spec), requests.extent
    if requests.finished:
        rows = _without_unneeded(rows, spec.cascade)
        return infer_phase(spec, rows, observe, engine, before=before)
    user = Tenant(spec.name)
    with _imports(first.cluster, engine), cluster.connected(spec.cluster, user) as capacity:
        if spec.cascade is not None:  # the larger model must fit, too
            size = sized.for_attempt(spec.sizes, rows.plan, capacity)
            cluster.check_fit(spec.sizes, capacity, size.pool)
            log.info("%s answers all rows first", spec.cascade.first_name)
        else:
            log.info("asking %d requests first, in %s", requests.plan.rows, requests.run.uri)
        joined = JoinedCluster(user, capacity)
        asked = infer_phase(first, requests, observe, engine, joined, later=rows.extent)
        finalize_spec(first, requests.ledger, requests.plan, requests.shards, asked)
        before = replace(before, failed=asked.failed)
        rows = _without_unneeded(rows, spec.cascade)
        return infer_phase(spec, rows, observe, engine, joined, before=before)


def _without_unneeded(rows: Phase, cascade: CascadeSpec | None) -> Phase:
    """Return `rows`, the second phase, with `keeps_all` set if it needs no engine.

    That is so in a cascade whose first model answered all rows: none is left for the larger one.
    """
    if cascade is None or rows.increment is None:
        return rows
    from prefect_raybatch.cluster.cascade import first_answers

    answers = first_answers(rows.ledger.store, rows.increment, cascade, rows.plan)
    return replace(rows, keeps_all=not answers.asked)


def infer_phase(
    spec: RunSpec,
    phase: Phase,
    observe: Callable[[Progress], None],
    engine: type | None = None,
    joined: JoinedCluster | None = None,
    before: PhaseProgress | None = None,
    later: PhaseProgress | None = None,
) -> Progress:
    """Make one attempt at the pending shards of a phase; return the progress at the end.

    Joins the cluster unless `joined` is given, and only if a shard is pending. In a run of two
    phases, `before` has the rows and shards of the finished phase, or `later` those of the phase to
    come; they become part of the returned progress.
    """
    attempt = Attempt(spec, phase, observe, engine)
    if not attempt.resume(before, later):  # before Ray is imported, which takes seconds
        return attempt.driver.progress
    attempt.check()
    with ExitStack() as stack:
        joined = attempt.join(stack, joined)
        attempt.decide(joined)
        attempt.try_challenger(joined)
        pipeline = attempt.pipeline(stack, joined)
        return attempt.run(pipeline, joined.user)


def _imports(spec: ClusterSpec, engine: type | None) -> AbstractContextManager[None]:
    """Return a context in which vLLM is imported for engines; a null context if `engine` is set."""
    from prefect_raybatch.cluster import connect as cluster

    return cluster.engines_imported(spec) if engine is None else nullcontext()


@dataclass(frozen=True)
class Phase:
    """One phase of a run as its directory records it: its ledger, its plan and the plan's shards.

    `increment` is `plan.increment`, parsed; None for an ordinary run with one phase. `keeps_all`:
    no row goes to a cascade's larger model, so the rows phase takes all answers from the small one.
    `passed_on` are the error classes with which failed rows of a cascade's first phase go on to the
    larger model.
    """

    run: Run
    ledger: Ledger
    plan: Plan
    shards: Shards
    increment: Increment | None
    keeps_all: bool = False
    passed_on: frozenset[str] = frozenset()

    @property
    def needs_no_engine(self) -> bool:
        """Return whether this phase sends no row to a model."""
        return self.looks_up or self.keeps_all

    @property
    def looks_up(self) -> bool:
        """Return whether the rows of this phase only look up stored answers."""
        return self.increment is not None and self.increment.looks_up

    @property
    def finished(self) -> bool:
        """Return whether the phase's result is written."""
        return self.ledger.finished(self.plan) is not None

    @property
    def extent(self) -> PhaseProgress:
        """Return the phase's number of rows and shards, for the progress of the other phase."""
        from prefect_raybatch.driver.driver import PhaseProgress

        return PhaseProgress(self.plan.rows, self.plan.shards)


def begin_phases(
    run: Run, ledger: Ledger, plan: Plan, shards: Shards
) -> tuple[Phase | None, Phase]:
    """Return (requests phase, rows phase) of a run; in a cascade, the first is the small model's.

    The requests phase is None if the plan has none, or if the run is finished. Writes the plan of
    the requests phase unless it exists.
    """
    increment = increment_of(plan)
    own = plan if run.model is None else plan.with_model(run.model)
    rows = Phase(run, ledger, own, shards, increment)
    if increment is None or rows.finished:
        return None, rows
    begun = begin_requests_phase(ledger.store, increment)
    if begun is None:
        return None, rows
    from prefect_raybatch.runs.cascade import passed_on

    asks, asked = begun
    part = replace(run_of(asks.store, asked, asks), probed=run.probed)
    requests = Phase(
        *(part, asks, asked, asks.shards(asked), increment_of(asked)), passed_on=passed_on(plan)
    )
    return requests, rows


@dataclass(frozen=True)
class JoinedCluster:
    """The cluster that a phase runs on, with its capacity.

    `user` registers this run with the cluster connection, which several runs of a process may
    share.
    """

    user: Tenant
    capacity: Capacity


class Attempt:
    """One attempt at a phase, with its log, monitor and driver.

    Call `resume`, then `check`, `join`, `decide`, `try_challenger`, `pipeline` and `run`, as
    `infer_phase` does.
    """

    def __init__(
        self,
        spec: RunSpec,
        phase: Phase,
        observe: Callable[[Progress], None],
        engine: type | None = None,
    ) -> None:
        """Create log, monitor and driver; `engine` replaces the engine stage in tests."""
        from prefect_raybatch.driver.driver import Driver
        from prefect_raybatch.driver.monitor import Monitor

        self.spec, self.phase, self.engine = spec, phase, engine
        plan, ledger, limits = phase.plan, phase.ledger, spec.limits
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
            spec.prompt.images is not None and not phase.needs_no_engine,
        )
        self.spent = Spent()
        self.arrangement: ArrangementNote | None = None  # if it is learned

    def resume(self, before: PhaseProgress | None, later: PhaseProgress | None) -> bool:
        """Count the committed shards and rows; return whether a shard is pending.

        `before` and `later` are explained in `infer_phase`.
        """
        progress = self.driver.progress
        progress.before = before or progress.before
        progress.later = later or progress.later
        progress.passed_on = self.phase.passed_on
        self.driver.resume()
        return not self.driver.done.all()

    @property
    def size_spec(self) -> SizeSpec:
        """Return the size spec of this attempt; one without engines if its phase needs none."""
        return self.spec.sizes.without_engine() if self.phase.needs_no_engine else self.spec.sizes

    @property
    def committed(self) -> int:
        return int(self.driver.done.sum())

    def _check_cost(self, cost: float | None) -> None:
        limits, prices = self.spec.limits, self.spec.cluster.prices
        check_cost(limits, cost, self.phase.plan.shards, self.committed, prices.currency)

    def check(self) -> None:
        """Check the cost limit and the store, then record the attempt; call before joining.

        Logs a warning if another version of this package made the plan. Raises `CostExceeded` or
        the store's errors.
        """
        phase = self.phase
        self.spent = spent_on(phase.ledger, phase.plan)
        self._check_cost(self.spent.cost_at(None))
        self.monitor(self.driver.progress)
        if not phase.run.probed:  # an earlier command made the plan, and the store may differ now
            phase.ledger.store.probe()
        self.log.note()
        compare_code(phase.ledger.store)

    def join(self, stack: ExitStack, joined: JoinedCluster | None) -> JoinedCluster:
        """Return `joined`, or join the cluster until `stack` closes.

        Also starts the monitor, which writes the attempt's heartbeats until `stack` closes.
        """
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.raylet import raylet_watch
        from prefect_raybatch.cluster.sharing import Tenant

        user = joined.user if joined is not None else Tenant(self.spec.name)
        user.waits = self.monitor.set_waiting
        stack.enter_context(self.monitor)
        if joined is None:
            if not self.phase.needs_no_engine:
                stack.enter_context(_imports(self.spec.cluster, self.engine))
            capacity = stack.enter_context(cluster.connected(self.spec.cluster, user))
            joined = JoinedCluster(user, capacity)
        self.monitor.set_cluster(cluster.dashboard_url(), cluster.leaving, raylet_watch())
        return joined

    def decide(self, joined: JoinedCluster) -> None:
        """Make the choices that need a cluster, before the engines start.

        If the phase looks up stored answers, copy these into the order of its rows where that saves
        reads. Otherwise choose the precision, if the job tries fp8. Then choose the arrangement of
        the engines, if the run learns it from earlier runs.
        """
        if self.phase.looks_up:
            self._place_answers(joined.user)
        elif self.spec.engine.tries:
            self.spec = self.spec.decide(precision=self._precision(joined))
        self._arrange(joined)

    def _arrange(self, joined: JoinedCluster) -> None:
        """Use the engines per GPU and the `max_num_seqs` that were learned from earlier runs.

        Sets `arrangement`, to None if this run does not learn from earlier ones; then the sizes
        stay as they are. The first attempt of a run decides, later ones use its decision.
        """
        phase, spec = self.phase, self.spec
        learning = LearningSpec(spec.sizes, spec.engine, spec.output, phase.plan.job_name)
        parts = (phase.plan, phase.shards, phase.ledger)
        note = decided_arrangement(learning, *parts, joined.capacity, self.name)
        self.arrangement = note
        # Sizes are also fixed for a trial, or its engines might be reused after it.
        if note is not None and (note.challenger is not None or note.incumbent != note.model):
            self._use(note.incumbent)

    def _use(self, arrangement: Arrangement) -> None:
        """Use `arrangement` for the engines that this attempt starts from now on."""
        sizes = with_arrangement(self.spec.sizes, arrangement)
        self.spec = self.spec.decide(sizes=sizes)

    def try_challenger(self, joined: JoinedCluster) -> None:
        """Infer a fifth of the shards with another arrangement, if earlier runs suggest one.

        Shards that these engines do not commit stay pending. Only the attempt that decided on the
        trial makes it, since a later attempt would learn nothing from it.
        """
        note, spec = self.arrangement, self.spec
        if note is None or note.challenger is None or note.by != self.name:
            return
        shards = list(filter(in_trial, np.flatnonzero(~self.driver.done).tolist()))
        self._use(note.challenger)
        why = TRIAL_INTERRUPTED
        try:
            with ExitStack() as stack:
                pipeline = self.pipeline(stack, joined)
                self.driver.run_once(self._pass_of(pipeline, joined.user), shards)
            why = ""
        except (ConfigError, InsufficientResources, EngineStartError, EngineFailure) as error:
            why = type(error).__name__  # its text may quote what a user set
            log.warning("engines arranged as %s do not work: %s", note.challenger, error)
            self.monitor.failure = None  # of a stall: the next engines may do better
        finally:
            died = self.driver.progress.engine_deaths
            why = why or (f"{counted(died, 'engine')} died" if died else "")
            self.log.note(**trial_fields(why, died))
        self.spec = spec

    def _place_answers(self, user: Tenant) -> None:
        """Copy the answers that rows look up into the order of the rows, if that saves reads."""
        from prefect_raybatch.cluster.lookups import look_up_files
        from prefect_raybatch.runs.answers_by_row import sort_answers

        phase, store = self.phase, self.phase.ledger.store
        if phase.increment is not None:
            known = look_up_files(self.spec.engine.model.pools, phase.increment, store)
            sort_answers(store, phase.plan, phase.increment, known, user.waits)

    def _precision(self, joined: JoinedCluster) -> Mapping[str, str]:
        """Return the engine arguments of the precision that the run uses.

        If that is undecided (`try-fp8`), engines of each precision first answer a sample of rows.
        """
        phase, spec = self.phase, self.spec
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
        """Wait until the cluster has room for this attempt's engines; return its pipeline.

        The room is reserved until `stack` closes. Raises `InsufficientResources` if the engines do
        not fit the cluster, `CostExceeded` if the cost limit is reached, and `ConfigError` if
        limits.max_cost is set but the price of these GPUs is not known.
        """
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.pipeline import Pipeline, stage_of
        from prefect_raybatch.cluster.prewarm import hand_over_prewarmed

        phase, spec, capacity = self.phase, self.spec, joined.capacity
        engine = self.engine or stage_of(spec.engine.model.endpoint)
        size, kind = self._sizes(capacity, engine)
        cluster.check_fit(self.size_spec, capacity, size.pool)
        early = hand_over_prewarmed(
            kind, size.pool.engines_for(phase.plan.shards - self.committed)[0]
        )
        meter = meter_for(spec.cluster, spec.limits, capacity, size.pool, self.spent)
        self.monitor.meter = meter.continue_from(self.monitor.meter, early.gpu_seconds)
        self._check_cost(self.monitor.meter.total_cost)
        lease = cluster.admitted(self.size_spec, capacity, size.pool, joined.user, kind)
        warm = stack.enter_context(lease)
        if phase.increment is not None and not phase.looks_up:  # the report derives savings from it
            self.log.note(gpus=size.pool.gpus[1])
        if self.arrangement is not None:
            self.log.note(**used_fields(size))
        pipeline = Pipeline(
            spec,
            phase.plan,
            phase.shards,
            phase.ledger.store,
            self.name,
            size,
            # Another attempt may be alive. Ours is recorded before this check, so if two start at
            # the same moment, at least one sees the other.
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
        """Return for how many more seconds rate limits must count other attempts' requests.

        Returns 0 if the job sets no rate limits for a hosted model.
        """
        endpoint = self.spec.engine.model.endpoint
        if endpoint is None or not endpoint.limited:
            return 0.0
        return seconds_of_others(self.phase.ledger, self.name, time.time())

    def run(self, pipeline: Pipeline, user: Tenant) -> Progress:
        """Send the pending shards through the pipeline; return the progress at the end."""
        run_pass = self._pass_of(pipeline, user)
        suspects = pipeline.size.pool.engines * (1 + pipeline.size.concurrent)
        try:
            return self.driver.run(run_pass, pipeline.quarantine, suspects)
        except BaseException as error:
            self._cancel_batches(error)
            raise

    def _pass_of(self, pipeline: Pipeline, user: Tenant) -> RunPass:
        return _interruptible(pipeline, self.monitor, user, self.spec.limits)

    def _cancel_batches(self, error: BaseException) -> None:
        """Cancel this attempt's batches at a hosted model, unless a retry may fetch them.

        A retry may fetch them after a transient `error` or a drain.
        """
        from prefect_raybatch.stages.hosted_batches.stage import cancel_batches

        endpoint = self.spec.engine.model.endpoint
        ends = not isinstance(error, Exception) or not (
            is_transient(error) or isinstance(error, RunDrained)
        )
        if endpoint is not None and endpoint.batch and ends:
            cancel_batches(endpoint, self.phase.ledger.store, self.name)

    def _sizes(self, capacity: Capacity, engine: type) -> tuple[Sizing, WarmKind | None]:
        """Return (sizes of this attempt, kind of its engines); log warnings about the sizes.

        Idle engines of an earlier run can be reused if they have the same kind. If idle engines of
        another kind have sizes that are nearly as good as the best ones, returns their sizes and
        kind. The kind is None if the phase needs no engine, or if other runs cannot reuse its
        engines. `engine` is the class of the engine stage.
        """
        from prefect_raybatch.cluster import connect as cluster
        from prefect_raybatch.cluster.engine_reuse import closest_running
        from prefect_raybatch.cluster.pipeline import warm_kind_of

        sizes, plan = self.size_spec, self.phase.plan

        def size_of(spec: SizeSpec) -> Sizing:
            return sized.for_attempt(spec, plan, capacity)

        def kind_of(size: Sizing) -> WarmKind | None:
            return warm_kind_of(self.spec, plan.model, size, engine)

        if self.phase.needs_no_engine:
            return size_of(sizes), None
        up = cluster.CLUSTER_SESSION.warm.kinds
        size, kind = closest_running(sizes, size_of, size_of(sizes), kind_of, up)
        for warning in size.warnings:
            log.warning(warning)
        return size, kind


def _interruptible(pipeline: Pipeline, monitor: Monitor, user: Tenant, limits: Limits) -> RunPass:
    """Return the pipeline, wrapped so that a pass can be interrupted if that may be needed.

    It may be needed if a stall or a cost limit can end the run, and outside the main thread, where
    a signal to the process raises nothing.
    """
    from prefect_raybatch.driver.stall import interruptible

    # A nightly run that nobody watches needs `fail_on_stall`: Ray waits for ever for room in a
    # cluster, which neither `hang_seconds` (engines) nor `function_seconds` (functions) sees.
    may_end = limits.fail_on_stall or limits.max_cost is not None
    if may_end or threading.current_thread() is not threading.main_thread():
        halted = partial(_halted, user, monitor)
        return interruptible(pipeline, lambda: monitor.failure, pipeline.stop, halted)
    return pipeline


def _halted(user: Tenant, monitor: Monitor) -> RayBatchError | None:
    """Return why the run must stop now; None to continue."""
    return user.halted() or monitor.spent
