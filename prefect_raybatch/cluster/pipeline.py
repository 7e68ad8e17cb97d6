"""Chains the stages of a run on Ray Data: work units go in, receipts come out.

One call of a `Pipeline` is one pass.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import re
import threading
import uuid
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pyarrow as pa
from ray.data import ActorPoolStrategy, DataContext, Dataset, ExecutionResources
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError

from prefect_raybatch.bounded import ANSWER, BoundedCalls
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster.cascade import escalated
from prefect_raybatch.cluster.endpoint import endpoint_launch, limiter_of
from prefect_raybatch.cluster.lookups import look_up
from prefect_raybatch.cluster.spanning import SpanningGroups
from prefect_raybatch.cluster.warm import ActorOptions, WarmKind, WarmLease
from prefect_raybatch.cluster.warm_actors import Deaths, EngineHost, Forwarder, warm_kind
from prefect_raybatch.distill.classifier import Classifier
from prefect_raybatch.errors import CorruptRun, EngineFailure, SourceError
from prefect_raybatch.job.cluster import Stage
from prefect_raybatch.ledger.drains import Draining
from prefect_raybatch.ledger.failures import (
    ENGINES_DIED,
    FEW_ALONE,
    NODE_LOST,
    STARTED_AND_DIED,
    Loss,
)
from prefect_raybatch.ledger.increments import (
    OF_ASKS,
    OF_FIRST,
    OF_LARGER,
    increment_of,
    input_store,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards, decode_schema
from prefect_raybatch.ledger.records import Plan, Receipt, Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.sizing.sizes import Sizing
from prefect_raybatch.source.find import check_planned
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.stages.block import Failure, is_lost
from prefect_raybatch.stages.calls.calling import Calls
from prefect_raybatch.stages.cascade import EscalatePrepare, failed_at_larger
from prefect_raybatch.stages.classified import FinishClassified
from prefect_raybatch.stages.endpoint.client import SharedLimiter
from prefect_raybatch.stages.endpoint.limiter import Usage
from prefect_raybatch.stages.endpoint.stage import EndpointStage
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage, engine_launch
from prefect_raybatch.stages.finish import RECEIPT, Finish, RawFinish
from prefect_raybatch.stages.hosted_batches.stage import BatchStage
from prefect_raybatch.stages.images.rows import TOO_MANY_AWAY, row_images
from prefect_raybatch.stages.lookup import LookUp
from prefect_raybatch.stages.pooling import Pooling
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.ray_internals import (
    EXECUTOR_LOG,
    EnginesDied,
    forget_starts,
    limit_deaths,
    limit_in_flight,
    map_actors,
    node_is_leaving,
    report_start,
    reported_starts,
    restarts_of,
    stop_pass,
)
from prefect_raybatch.stages.read import ShardDatasource, ShardReader, Task
from prefect_raybatch.stages.request_key import Keying
from prefect_raybatch.stages.texts import prepare_of
from prefect_raybatch.stages.vectors import finish_of
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)
# By default, Ray Data would retry forever a row that ends its worker each time. Instead, the driver
# runs what is missing in isolation, as with engines.
ONCE = {"max_retries": 0}
_BUILDING = threading.Lock()
ENGINE_RESTARTS = 3  # of an engine's process by Ray, before another engine replaces it
# An isolated pass continues until at least this many engines in a row, each with its restarts, died
# without an answer. The driver's isolated units and probe rows cannot kill as many.
DEATHS_ALONE = FEW_ALONE // (1 + ENGINE_RESTARTS) + 1
IN_CONSTRUCTOR = "raised in its creation task"  # in Ray's message
NODES_UNHEARD = replace(
    NODE_LOST, message="Ray's head does not answer, so a node may have been lost"
)
DETAIL = 300  # characters of Ray's message about the end of a process


@dataclass
class Pipeline:
    """The stages of one attempt at a run with a plan. `store` is the run directory.

    `size` has the sizes for the cluster. `shuffle` (any text) seeds a random order of the shards;
    if it is None, the longest shards come first. `on_pass` is called before the engines of a pass
    start. `warm` is the lease of engines that outlast the run; if it is None, each pass starts its
    own engines. `early` is the name under which prewarmed engines report their start, "" if there
    are none. For the next `others` seconds, requests of earlier attempts may still count against a
    hosted model's limits.
    """

    spec: RunSpec
    plan: Plan
    shards: Shards
    store: Store
    attempt: str
    size: Sizing
    shuffle: str | None = None
    engine: type = EngineStage
    on_pass: Callable[[], None] = lambda: None
    warm: WarmLease | None = None
    early: str = ""
    others: float = 0.0

    def __post_init__(self) -> None:
        ledger = Ledger(self.store)
        self._draining = Draining(self.store, self.attempt)
        self._running: Dataset | None = None
        self._limiter: SharedLimiter | None = None
        self._used, self._usage_lock = Usage(), threading.Lock()
        self._spanning: SpanningGroups | None = None
        self._passes = 0
        self._questions = {name: BoundedCalls(ANSWER) for name in ("nodes", "forget", "usage")}
        files = ledger.files(self.plan)
        check_planned(files, self.spec.read, self.plan.snapshot)
        self.reader = ShardReader(
            files,
            decode_schema(self.plan.input_schema),
            input_store(self.store, self.plan) if self.plan.snapshot else None,
            {} if self.plan.snapshot else dict(self.spec.read.options),
        )
        self.model = models.with_arguments(self.plan.model, self.spec.engine.model)
        self.task = Pooling.of(self.spec, self.model)
        self.increment = increment_of(self.plan)
        asks = self.increment is not None and self.increment.ledger == OF_ASKS
        finish_stage: Callable[..., Finish]
        finish_stage = RawFinish if asks else partial(finish_of, self.task)
        if self.spec.finish.classifier is not None:
            finish_stage = partial(FinishClassified, classifier=_classifier(ledger, self.plan))
        self.finish: Finish = finish_stage(
            self.spec.finish, self.spec.sampling, self.model, self.store, self.attempt
        )

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
        """Send units through the stages; yield their receipts as they arrive, in no order.

        `isolated` keeps one unit in flight per engine, so that a death can be attributed to that
        unit. At the end, each unfinished unit gets a receipt with a `Loss` in these cases:

        - A node was lost, or may have been lost.
        - An engine died while starting.
        - Several engines died in a row without an answer in between.

        In other cases, a unit whose process died gets no receipt: its rows may be the cause. Raises
        `EngineFailure` if an engine died while starting and the pass has no receipts yet. Ray has
        already retried the start by then.
        """
        missing, nodes = Missing(units), self._nodes()
        self.on_pass()
        self._passes += 1
        self.forget(early=self._passes > 1)
        try:
            node_errors: list[str] = []
            with _short_errors(node_errors):
                self._running = self.dataset_of(units, isolated)
                loss = yield from self._take_receipts(self._running, missing)
            if loss is None and node_errors:
                loss = NODE_LOST
            left_over = missing.units()
            if loss is None and left_over:
                loss = self._node_lost_since(nodes)
            if loss is not None:
                for unit in left_over:
                    yield Receipt.of_lost(unit, self.attempt, loss)
        finally:
            self._running = None
            # Ray Data only drops its references to actors, and Ray's error about a dead actor is
            # in a reference cycle with it. Until that is collected, the actor keeps its GPU, and
            # the next pass waits for it.
            gc.collect()
            if self._spanning is not None:
                self._spanning.remove()

    def _take_receipts(
        self, dataset: Dataset, missing: Missing
    ) -> Generator[Receipt, None, Loss | None]:
        """Yield the receipts of a pass, and remove their units from `missing`.

        Returns why the pass ended early; None if it did not. Raises `EngineFailure` if an engine's
        process died while starting and there is no receipt yet.
        """
        has_receipts = False
        try:
            for receipt in receipts_in(dataset):
                missing.take(receipt.unit)
                has_receipts = True
                yield receipt
        except ObjectLostError as error:
            log.warning("a receipt was lost with its node: %s", _first_line(error))
            return NODE_LOST
        except EnginesDied as error:
            loss = _died_in_a_row(error)
            log.warning("%s; the pass ends", loss.message)
            return loss
        except ActorDiedError as error:
            if IN_CONSTRUCTOR in str(error):
                raise  # no process died: an error of this package
            if is_node_loss(error):
                return NODE_LOST
            loss = self._died_starting(error)
            if not has_receipts:
                left = counted(len(missing.units()), "unit")
                raise EngineFailure(f"{loss.message}. {left} not done") from None
            return loss
        return None

    def _nodes(self) -> set[str] | None:
        """Return the ids of the live nodes; None if Ray does not answer in time."""
        try:
            return cluster.nodes(self._questions["nodes"])
        except TimeoutError as error:
            log.warning("could not list Ray's nodes; continuing: %s", error)
            return None

    def _node_lost_since(self, before: set[str] | None) -> Loss | None:
        """Return a loss if a node of `before` is gone or Ray cannot list its nodes, else None.

        `before` is the result of `_nodes` at the start of the pass.
        """
        now = self._nodes()
        if before is None or now is None:
            return NODES_UNHEARD
        return NODE_LOST if before - now else None

    def _died_starting(self, error: ActorDiedError) -> Loss:
        tries = 1 + self.engine_resources()["max_restarts"]
        return Loss(
            STARTED_AND_DIED,
            f"an engine's process died while starting, {tries} times in a row: {_why_died(error)}",
        )

    def _deaths_in_a_row(self, isolated: bool) -> int:
        """Return the number of dead engines in a row at which a pass ends.

        An answer in between starts the count again. An engine counts as dead once Ray no longer
        restarts it.
        """
        engines = self.size.pool.engines
        return max(engines, DEATHS_ALONE) if isolated else engines

    def dataset_of(self, units: Sequence[Unit], isolated: bool) -> Dataset:
        """Return the Ray dataset of a pass; later changes of Ray Data's settings do not affect it.

        `isolated` keeps one unit in flight per engine.
        """
        with _context() as context:
            limit_in_flight(context, self.size.uncommitted)
            limit_deaths(context, self._deaths_in_a_row(isolated))
            context.autoscaling_config = replace(
                context.autoscaling_config,
                actor_pool_util_upscaling_threshold=_threshold(self.size, isolated),
            )
            forwarded: list[object] = []
            if self.warm is not None:
                hosts = self.warm.engines(self._pool(len(units), isolated).min_size)
                forwarded = [hosts, uuid.uuid4().hex, self.warm.kind, self.warm.access.make]
                # Ray Data does not know of warm engines: it would give their resources to tasks.
                held = self.warm.holds
                context.execution_options.exclude_resources = ExecutionResources(
                    cpu=held.get("CPU", 0.0), gpu=held.get("GPU", 0.0)
                )
            return self._dataset(units, isolated, forwarded)

    def stages(
        self, isolated: bool
    ) -> tuple[Prepare | LookUp | EscalatePrepare, EngineLaunch | None, Finish]:
        """Return (prepare stage, settings with which engines start, finish stage) of a pass.

        The settings are None if the pass needs no engine. This is so in a rows phase that looks up
        its answers, and if the first model of a cascade was sure of all rows.

        With `isolated`, the user's functions are called in a separate process, and each row with an
        unavailable image fails. Without it, a block is lost as a whole if images of too many of its
        rows are unavailable (TOO_MANY_AWAY).
        """
        spec, limits, increment = self.spec, self.spec.limits, self.increment
        launch, hosted = self._launch(isolated), spec.engine.model.endpoint is not None
        calls = Calls(limits.function_seconds or None, isolated, limits.engine_deaths)
        prepare = prepare_of(
            self.task,
            spec.prompt,
            spec.sampling,
            self.model,
            spec.engine.model.context,
            calls=calls,
            images=row_images(
                *(spec.prompt, launch.arguments, dict(spec.read.options)),
                hosted=hosted,
                too_many=1.0 if isolated else TOO_MANY_AWAY,
            ),
            parsing=spec.finish.parsing,
            hosted=hosted,
        )
        finish = replace(self.finish, calls=calls)
        if increment is None or increment.ledger == OF_FIRST:
            return prepare, launch, finish
        if increment.ledger == OF_LARGER:
            stages = (prepare, finish, hosted)
            first, last = escalated(spec.cascade, self.plan, increment, self.store, *stages)
            return first, launch if first.first.asked else None, last
        pinned = self.plan.model.get("adapters") or {}
        keying = Keying.under(increment.context, pinned, spec.prompt.adapter_column)
        if increment.ledger == OF_ASKS:
            if prepare.images is not None:  # their digests are part of the keys
                prepare = replace(prepare, images=replace(prepare.images, digests=True))
            return replace(prepare, keying=keying), launch, finish
        pools = spec.engine.model.pools
        return look_up(pools, self.plan, increment, self.store, prepare, keying), None, finish

    def skips(self, isolated: bool) -> Callable[[int], bool]:
        """Return a function that tells the stages of a pass whether to skip a shard, by its number.

        An isolated pass skips no committed shard: the driver sends rows of such shards to see
        whether engines work at all.
        """
        if isolated:
            return partial(_is_draining, self._draining)
        return partial(_is_unwanted, self.store, self._draining)

    def _launch(self, isolated: bool) -> EngineLaunch:
        """Return all settings with which an engine, or the client of a hosted model, is started."""
        model, tell = dict(self.plan.model), partial(report_start, self.attempt)
        skips = self.skips(isolated)
        launch = engine_launch(self.spec, model, self.size, skips, self.attempt, self.task, tell)
        if self.warm is None:  # else the engine's actor checks, for all its runs
            launch = replace(launch, leaving=node_is_leaving)
        endpoint = self.spec.engine.model.endpoint
        if endpoint is None or (self.increment is not None and self.increment.looks_up):
            return launch
        self._limiter = self._limiter or limiter_of(endpoint, self.store, self.others)
        run = f"{self.plan.fingerprint} {self.plan.run_key}"
        return endpoint_launch(launch, endpoint, self.store, run, self._limiter)

    def _dataset(
        self, units: Sequence[Unit], isolated: bool, forwarded: Sequence[object] = ()
    ) -> Dataset:
        first, launch, finish = self.stages(isolated)
        takes = self.spec.cluster
        prepared = (
            ShardDatasource(self.reader, self.read_tasks(units, isolated), self.skips(isolated))
            .dataset(**_resources(takes.prepare), ray_remote_args=ONCE)
            .map_batches(first, **_batches(), **_stage(takes.prepare))
        )
        if launch is None:
            return prepared.map_batches(finish, **_batches(), **_stage(takes.finish))
        if not forwarded:
            stage: type = self.engine
            arguments: list[object] = [launch]
            placed = self._placed(resources_of(self.spec.sizes, self.size))
        else:
            deaths = Deaths(
                1 + ENGINE_RESTARTS, (1 + ENGINE_RESTARTS) * (DEATHS_ALONE if isolated else 1)
            )
            stage = Forwarder
            arguments = [launch, *forwarded, node_is_leaving, deaths, restarts_of]
            placed = {"num_cpus": 0, "max_restarts": ENGINE_RESTARTS, "max_task_retries": 0}
        pool = self._pool(len(units), isolated)
        options = {"fn_constructor_args": arguments, "compute": pool}
        answered = map_actors(prepared, stage, **options, **_batches(), **placed)
        return answered.map_batches(finish, **_batches(), **_stage(takes.finish))

    def _placed(self, resources: ActorOptions) -> ActorOptions:
        """Return Ray's options for an engine's actor.

        An engine that may span nodes gets a placement group.
        """
        sizes = self.spec.sizes
        if not (sizes.spans_nodes and self.size.pool.device == "gpu"):
            return {**resources, **cluster.forked_options(self.spec.cluster)}
        kind = sizes.accelerator
        self._spanning = SpanningGroups(sizes.gpus_per_replica, sizes.cpus, kind)
        kept = {k: v for k, v in resources.items() if k not in ("num_gpus", "accelerator_type")}
        return {**kept, "ray_remote_args_fn": self._spanning}

    def tokens_cost(self) -> float:
        """Return the price of a hosted model's tokens in this attempt so far; 0 for a local model.

        It is in the currency of `price_in` and `price_out`, which are per million tokens.
        """
        endpoint = self.spec.engine.model.endpoint
        if endpoint is None:
            return 0.0
        usage = self._usage()
        prompt = usage.prompt_tokens * (endpoint.price_in or 0.0)
        return (prompt + usage.output_tokens * (endpoint.price_out or 0.0)) / 1e6

    def server_wait(self) -> str:
        """Return why the run waits for a hosted model's server; "" if it does not wait.

        The reasons are open batches and an outage of the server.
        """
        if self.spec.engine.model.endpoint is None:
            return ""
        usage = self._usage()
        return usage.batches or usage.outage

    def limited(self) -> str:
        """Return why the rate limiter held back requests; "" if it did not.

        The text is from the limiter's last answer.
        """
        return self._used.waits

    def _usage(self, last: bool = False) -> Usage:
        """Return the usage of a hosted model; the last known one if the limiter does not answer.

        Pass `last` before leaving the cluster: later calls do not query the limiter, since that
        would start Ray again.
        """
        with self._usage_lock:
            if self._limiter is not None:
                with contextlib.suppress(Exception):  # the cluster is gone, or does not answer
                    self._used = self._questions["usage"](self._limiter.usage)
            if last:
                self._limiter = None
            return self._used

    def engines(self) -> dict[str, int]:
        """Return {Ray's actor state: number of engines of this pass in that state}."""
        return cluster.actor_states(self._actors())

    def deaths(self) -> dict[str, tuple[int, str]]:
        """Return {actor id: (number of deaths, text with process id and node)} of the engines.

        For warm engines, the actors are their hosts. {} if this process is not in a cluster.
        """
        kind = self._actors() if self.warm is None else EngineHost.__name__
        return cluster.actor_deaths(kind) if cluster.is_joined() else {}

    def _actors(self) -> str:
        """Return a text that the names of the engines' actors contain, by which they are found."""
        stage = Forwarder if self.warm is not None else self.engine
        return f"({stage.__name__})"

    def starts(self) -> list[dict[str, float]]:
        """Return for each engine, prewarmed ones included, when each phase of its start began.

        Each dict is {phase: seconds since 1970}.
        """
        if not cluster.is_joined():
            return []
        early = reported_starts(self.early) if self.early else []
        return early + reported_starts(self.attempt)

    def forget(self, early: bool = True) -> None:
        """Remove from the cluster the reports of when this attempt's engines started.

        With `early`, the reports of prewarmed engines are removed, too.
        """
        names = [self.attempt]
        if early and self.early:
            names.append(self.early)
            self.early = ""

        def ask() -> None:
            for name in names:
                forget_starts(name)

        with contextlib.suppress(Exception):  # the cluster is gone, or does not answer
            self._questions["forget"](ask)

    def leave(self) -> None:
        """Prepare to leave the cluster: read a hosted model's usage, and remove start reports."""
        self._usage(last=True)
        self.forget()

    def stop(self) -> None:
        """End the current pass, if any; call it in another thread than the one that iterates."""
        running = self._running
        if running is not None:
            stop_pass(running)

    def quarantine(self, unit: Unit, why: Loss) -> Receipt:
        """Write a single row that keeps killing its engine to quarantine; return its receipt.

        `unit` is that row, and `why` becomes its error. The receipt is empty if another driver has
        committed the shard meanwhile.
        """
        (task,) = self.reader.tasks(self._starts([unit]))
        table = next(self.reader.bind(task, self.skips(isolated=False))(), None)
        if table is None:  # another driver committed the shard meanwhile
            return Receipt(unit.shard, self.attempt)
        if is_lost(table):
            raise SourceError(f"shard {unit.shard}: cannot read the row that kills its engine")
        failure = Failure("engine", why.kind, why.message[:500])
        receipt = self.finish.failed(unit, table, failure, self.spec.limits.engine_deaths)
        is_larger = self.increment is not None and self.increment.ledger == OF_LARGER
        return failed_at_larger(receipt) if is_larger else receipt

    def read_tasks(self, units: Sequence[Unit], isolated: bool) -> list[Task]:
        """Return the read tasks for the units, in the order in which Ray starts them."""
        # The first driver starts with the longest shards, so that no engine ends the run with one.
        # A later driver uses a random order, because another driver may still be active.
        starts, seed = self._starts(units), self.shuffle
        if isolated:  # a separate task for each unit, so that no stage holds two
            return self.reader.tasks(starts, len(units), units_per_task=1, shuffle_seed=seed)
        return self.reader.tasks(starts, shuffle_seed=seed, work=self.shards.work)

    def _starts(self, units: Sequence[Unit]) -> list[tuple[Unit, int]]:
        return [(unit, self.shards[unit.shard].start + unit.offset) for unit in units]

    def _pool(self, units: int, isolated: bool) -> ActorPoolStrategy:
        calls = 1 if isolated else self.size.concurrent
        fewest, most = self.size.pool.engines_for(units)
        return ActorPoolStrategy(
            # If both are equal, Ray starts all engines at once.
            min_size=fewest,
            max_size=most,
            max_concurrent_calls_per_actor=calls,
            # One more block waits at the actor, to fill a free slot without a round trip.
            max_tasks_in_flight_per_actor=calls + (0 if isolated else 1),
            enable_true_multi_threading=True,
        )

    def engine_resources(self) -> ActorOptions:
        """Return Ray's options for an engine's actor: its resources, and how often it restarts."""
        return resources_of(self.spec.sizes, self.size)


class Missing:
    """The parts of a pass's units that no receipt has covered yet; the units do not overlap."""

    def __init__(self, units: Iterable[Unit]):
        self._of: dict[int, list[Unit]] = {}  # by offset
        for unit in sorted(units, key=lambda unit: unit.offset):
            self._of.setdefault(unit.shard, []).append(unit)

    def take(self, received: Unit) -> None:
        """Remove the positions of the unit `received`, for which a receipt came."""
        # By bisection, because an isolated pass may have one unit per row of a shard.
        units = self._of.get(received.shard, [])
        first = bisect_right(units, received.offset, key=lambda unit: unit.end)
        last = bisect_left(units, received.end, lo=first, key=lambda unit: unit.offset)
        units[first:last] = [part for unit in units[first:last] for part in unit.without(received)]

    def units(self) -> list[Unit]:
        return [unit for units in self._of.values() for unit in units]


def resources_of(spec: SizeSpec, size: Sizing) -> ActorOptions:
    """Return Ray's options for an engine's actor: its resources, and how often Ray restarts it."""
    resources: dict[str, object] = {
        "num_cpus": spec.cpus,
        # Ray does not retry a task that died; the driver runs what is missing in isolation. By
        # default Ray would retry forever (measured: 15 engine deaths in 80 s on one poison row).
        "max_restarts": ENGINE_RESTARTS,
        "max_task_retries": 0,
    }
    if size.pool.device == "gpu":
        # Rounded down to Ray's precision, so that all engines of a GPU fit.
        whole = spec.gpus_per_replica / size.pool.engines_per_gpu
        resources["num_gpus"] = math.floor(whole * 1000) / 1000
        if spec.accelerator:
            resources["accelerator_type"] = spec.accelerator
    return resources


def stage_of(endpoint: EndpointSpec | None, batch: bool = True) -> type[EngineStage]:
    """Return the class of the engine stage: for the hosted model `endpoint`, or for vLLM if None.

    Without `batch`, the batch API of a hosted model is not used even if the job sets it.
    """
    if endpoint is None:
        return EngineStage
    return BatchStage if batch and endpoint.batch else EndpointStage


def warm_kind_of(
    spec: RunSpec, model: models.PinnedModel, size: Sizing, engine: type = EngineStage
) -> WarmKind | None:
    """Return the kind of a run's engines; None if later runs cannot reuse the engines.

    Later runs find engines by their kind. `model` is the pinned model. Engines cannot be reused if
    they may span nodes, if their number is elastic, if the model is hosted, or if an argument is an
    object or a logits processor.
    """
    fewest, most = size.pool.replicas
    if spec.sizes.spans_nodes or fewest != most or spec.engine.model.endpoint is not None:
        return None
    launch = launch_of(spec, model, size)
    calls = min(size.concurrent, size.shards)  # so that small runs of several sizes share engines
    kind = warm_kind(engine, launch, resources_of(spec.sizes, size), calls)
    if kind is None:
        return None
    return replace(kind, options={**kind.options, **cluster.forked_options(spec.cluster)})


def launch_of(spec: RunSpec, model: models.PinnedModel, size: Sizing, **more: Any) -> EngineLaunch:
    """Return the settings for starting a run's engines; `more` replaces some of them."""
    task = Pooling.of(spec, models.with_arguments(model, spec.engine.model))
    return replace(engine_launch(spec, dict(model), size, task=task), **more)


def _classifier(ledger: Ledger, plan: Plan) -> Classifier:
    """Return the classifier stored with the plan; raise `CorruptRun` if there is none."""
    data = ledger.classifier(plan)
    if data is None:
        raise CorruptRun(
            f"{ledger.store.uri}: the job sets engine.classifier, and its plan keeps none. Use "
            "another --run-key"
        )
    return Classifier.from_bytes(data, f"{ledger.store.uri}: {plan.classifier_table}")


def _threshold(size: Sizing, isolated: bool) -> float:
    """Return the utilization of the running engines above which Ray Data starts another one.

    Utilization is (queued and running tasks) / (tasks that may run at once). Ray's default is 1.75.
    An elastic pool never reaches that if an engine may run two or more tasks and one waits: such a
    pool stayed at its minimum (measured). `isolated` says that an engine gets one unit at a time.
    """
    return 1.0 if isolated else 1 + 0.5 / size.concurrent


def _is_draining(draining: Draining, _shard: int) -> bool:
    return draining()


def _is_unwanted(store: Store, draining: Draining, shard: int) -> bool:
    """Return whether to skip a shard, because the attempt is draining or the shard is committed."""
    return draining() or Ledger(store).is_committed(shard)


def receipts_in(dataset: Dataset) -> Iterator[Receipt]:
    """Run the dataset of a pass; yield the receipts of its finish stage as they arrive."""
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        for text in cast(pa.Table, batch)[RECEIPT].to_pylist():
            yield Receipt.from_json(text)


@contextlib.contextmanager
def _context() -> Iterator[DataContext]:
    """Set Ray Data's settings for the block; restore the caller's settings after it.

    The settings are global to the process, so only one run may build a dataset at a time: two runs
    at once could use each other's settings, and the caller's would be lost.
    """
    with _BUILDING:
        yield from _settings()


def _settings() -> Iterator[DataContext]:
    context = DataContext.get_current().copy()
    context.target_max_block_size = None  # a shard stays one block, so a receipt is a shard
    context.max_errored_blocks = -1  # a lost task costs its shard a second pass, not the run
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    context.execution_options.verbose_progress = False
    with DataContext.current(context), warnings.catch_warnings():
        # Ray wants named arguments, but has no name for max_restarts and max_task_retries.
        warnings.filterwarnings("ignore", message=".*ray_remote_args.*")
        warnings.filterwarnings("ignore", message=".*exclude_resources.*")
        yield context


@contextlib.contextmanager
def _short_errors(node_errors: list[str]) -> Iterator[None]:
    """Within the block, shorten Ray Data's log of lost tasks to the first line of the error.

    Tracebacks reference the actors of the pass, so a log handler that keeps records would keep the
    actors' GPUs. `node_errors` gets the first line of each error about a lost node. Several runs of
    one process filter the same log. The first filter removes the traceback and marks the record, so
    that the filters of the other runs see the lost node as well.
    """

    def short(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            text = _first_line(record.exc_info[1])
            record.lost_with_node = text if is_node_loss(record.exc_info[1]) else ""
            record.msg = f"{record.msg} {text}"
            record.exc_info = None
        if text := getattr(record, "lost_with_node", ""):
            node_errors.append(text)
        return True

    EXECUTOR_LOG.addFilter(short)
    try:
        yield
    finally:
        EXECUTOR_LOG.removeFilter(short)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:300]}"


def _why_died(error: ActorDiedError) -> str:
    """Return in one line on which node an actor was, and how its process ended."""
    text = " ".join(str(error).split())
    place = re.search(r"\bip: (\S+)", text)
    detail = text.rpartition("Worker exit detail: ")[2].partition(" If the process was killed")[0]
    return (f"on node {place[1]}: " if place else "") + detail[:DETAIL].rstrip(".")


def _died_in_a_row(error: EnginesDied) -> Loss:
    return Loss(
        ENGINES_DIED,
        f"{counted(error.engines, 'engine')} died in a row, each {1 + ENGINE_RESTARTS} times, "
        "without an answer in between",
    )


def is_node_loss(error: BaseException) -> bool:
    """Return whether a task or its input was lost because a node died, not only a process."""
    by_class = isinstance(error, (NodeDiedError, ObjectLostError))
    return by_class or (isinstance(error, ActorDiedError) and "node has died" in str(error))


def _batches() -> ActorOptions:
    return {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}


def _stage(stage: Stage) -> ActorOptions:
    return {**_resources(stage), **_given(concurrency=stage.concurrency), **ONCE}


def _resources(stage: Stage) -> ActorOptions:
    return _given(num_cpus=stage.num_cpus, memory=stage.memory)


def _given(**options: object) -> ActorOptions:
    return {name: value for name, value in options.items() if value is not None}
