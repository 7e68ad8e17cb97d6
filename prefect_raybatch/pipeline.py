"""Chains the stages on Ray Data: work units in, receipts out. One call is one pass."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pyarrow as pa
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.data._internal.execution.streaming_executor import StreamingExecutor

from prefect_raybatch import cluster
from prefect_raybatch import model as models
from prefect_raybatch.errors import SourceError
from prefect_raybatch.job import BatchJob, Stage
from prefect_raybatch.ledger import Ledger
from prefect_raybatch.plan import Shards, decode_schema
from prefect_raybatch.records import Plan, Receipt, Unit
from prefect_raybatch.sizing import Sizing
from prefect_raybatch.stages.blocks import Failure, is_lost
from prefect_raybatch.stages.engine import EngineSpec, EngineStage, engine_spec
from prefect_raybatch.stages.finish import RECEIPT, Finish
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.read import ShardDatasource, ShardReader, Task
from prefect_raybatch.stages.window import limit_in_flight
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)
RAY_LLM_ACTOR = "vLLMEngineStageUDF"  # the class of ray.data.llm's engine actors
EXECUTOR_LOG = logging.getLogger("ray.data._internal.execution.streaming_executor_state")


@dataclass
class Pipeline:
    """The stages of one attempt, bound to a plan. `store` is rooted at the run directory.

    `size` is what was resolved for the cluster; `input_options` are the s3fs options of an input
    read in place; `shuffle` (any text) decides the order of the shards.
    """

    job: BatchJob
    plan: Plan
    shards: Shards
    store: Store
    attempt: str
    size: Sizing
    input_options: dict[str, Any]
    shuffle: str | None = None
    engine: type = EngineStage

    def __post_init__(self) -> None:
        ledger = Ledger(self.store)
        self._done = partial(_is_committed, self.store)
        self._running: Dataset | None = None
        self.reader = ShardReader(
            ledger.files(self.plan),
            decode_schema(self.plan.input_schema),
            self.store if self.plan.snapshot else None,
            self.input_options,
            done=self._done,
        )
        self.model = models.with_tokenizer(self.plan.model, self.job.engine)
        sampling = self.job.sampling
        self.finish = Finish(
            self.job.output,
            self.model,
            self.store,
            self.attempt,
            bool((sampling.model_extra or {}).get("skip_special_tokens", True)),
            int((sampling.model_extra or {}).get("n") or 1),
        )

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
        """Sends units through the stages; yields their receipts as they come, in no order.

        `isolated` keeps one unit in flight in an engine, so that a death can be blamed on it.
        Units whose task died with its process have no receipt: the caller sees what is missing.
        """
        try:
            with _context() as context:
                limit_in_flight(context, self.size.uncommitted)
                self._running = self._dataset(units, isolated)
                for batch in self._running.iter_batches(
                    batch_size=None, batch_format="pyarrow", prefetch_batches=0
                ):
                    for text in cast(pa.Table, batch)[RECEIPT].to_pylist():
                        yield Receipt.from_json(text)
        finally:
            self._running = None
            # Ray Data lets go of its actors and ends none; what Ray raised about one that died
            # refers to it in a circle. Until that is collected the actor keeps its GPU, and the
            # next pass waits for it.
            gc.collect()

    def _dataset(self, units: Sequence[Unit], isolated: bool) -> Dataset:
        prepare = Prepare(
            self.job.prompt,
            self.model,
            self.job.engine.context,
            self.job.sampling.max_tokens,
            self.job.sampling.given(),
        )
        spec = engine_spec(self.job, dict(self.plan.model), self.size, self._done)
        prepared = (
            ShardDatasource(self.reader, self._tasks(units))
            .dataset(**_resources(self.job.cluster.prepare))
            .map_batches(prepare, **_batches(), **_stage(self.job.cluster.prepare))
        )
        if self.job.engine.stage == "ray.data.llm":
            return self._ray_llm(prepared, spec, isolated, max(unit.rows for unit in units))
        return (
            prepared
            # Not map_batches: with num_gpus it refuses to leave blocks as they are, and with a
            # batch size it would wait until blocks of that many rows are there.
            .map_batches_internal(
                self.engine,
                fn_constructor_args=[spec],
                compute=self._pool(isolated),
                **_batches(),
                **self._engine_resources(),
            ).map_batches(self.finish, **_batches(), **_stage(self.job.cluster.finish))
        )

    def _ray_llm(self, prepared: Dataset, spec: EngineSpec, isolated: bool, rows: int) -> Dataset:
        # Imported here: ray.data.llm takes seconds, and few jobs want it.
        from prefect_raybatch.stages.ray_llm import Gather, Spread, through

        asked = prepared.map_batches(
            Spread(spec.sampling), **_batches(), **_stage(self.job.cluster.prepare)
        )
        calls = 1 if isolated else self.size.concurrent
        answers = through(asked, spec, self.size.pool, self._engine_resources(), calls, rows)
        gather = Gather(self.finish, spec.sampling, self.size.length)
        return answers.map_batches(gather, **_batches(), **_stage(self.job.cluster.finish))

    def engines(self) -> dict[str, int]:
        """How many engine actors are in which of Ray's states."""
        ray_llm = self.job.engine.stage == "ray.data.llm"
        return cluster.actor_states(f"({RAY_LLM_ACTOR if ray_llm else self.engine.__name__})")

    def stop(self) -> None:
        """Ends a pass from another thread than the one that iterates over it.

        Until its first block is there, Ray's executor is known to nobody but by its thread.
        """
        name = f"StreamingExecutor-{self._running.get_dataset_id()}" if self._running else None
        for thread in threading.enumerate():
            if thread.name == name and isinstance(thread, StreamingExecutor):
                thread.shutdown(force=True)

    def quarantine(self, unit: Unit, reason: str) -> Receipt:
        """The receipt of a single row that keeps killing its engine, with its piece written."""
        (task,) = self.reader.tasks(self._starts([unit]))
        table = next(self.reader.read(task), None)
        if table is None:  # another driver committed the shard meanwhile
            return Receipt(unit.shard, self.attempt)
        if is_lost(table):
            raise SourceError(f"shard {unit.shard}: the row that kills its engine cannot be read")
        kind, _, message = reason.partition(": ")
        failure = Failure("engine", kind or "EngineDied", message[:500])
        return self.finish.failed(unit, table, failure, self.job.limits.engine_deaths)

    def _tasks(self, units: Sequence[Unit]) -> list[Task]:
        # The first driver goes in order; a later one, which may meet a live one, does not.
        return self.reader.tasks(self._starts(units), shuffle_seed=self.shuffle)

    def _starts(self, units: Sequence[Unit]) -> list[tuple[Unit, int]]:
        return [(unit, self.shards[unit.shard].start + unit.offset) for unit in units]

    def _pool(self, isolated: bool) -> ActorPoolStrategy:
        calls, pool = 1 if isolated else self.size.concurrent, self.size.pool
        return ActorPoolStrategy(
            # Equal when the number is fixed: then Ray starts them all at once.
            min_size=pool.fewest,
            max_size=pool.engines,
            max_concurrent_calls_per_actor=calls,
            # One more waits at the actor, so that a freed slot is filled without a round trip.
            max_tasks_in_flight_per_actor=calls + (0 if isolated else 1),
            enable_true_multi_threading=True,
        )

    def _engine_resources(self) -> dict[str, Any]:
        engine = self.job.engine
        resources: dict[str, Any] = {
            "num_cpus": engine.num_cpus,
            # Ray would retry for ever (15 engine deaths in 80 s on one poison row): a task that
            # died is not retried by Ray, and the driver runs what is missing alone.
            "max_restarts": 3,
            "max_task_retries": 0,
        }
        if self.size.pool.device == "gpu":
            # Rounded down to what Ray counts in, so that all of them fit.
            whole = engine.gpus_per_replica / self.size.pool.engines_per_gpu
            resources["num_gpus"] = math.floor(whole * 1000) / 1000
            if engine.accelerator_type:
                resources["accelerator_type"] = engine.accelerator_type
        return resources


def _is_committed(store: Store, shard: int) -> bool:
    return Ledger(store).is_committed(shard)


@contextlib.contextmanager
def _context() -> Iterator[DataContext]:
    """Ray Data's settings for the block; the caller's own are put back."""
    context = DataContext.get_current().copy()
    context.target_max_block_size = None  # a shard stays one block, so a receipt is a shard
    context.max_errored_blocks = -1  # a lost task costs its shard a second pass, not the run
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    context.execution_options.verbose_progress = False
    with DataContext.current(context), _short_errors(), warnings.catch_warnings():
        # Ray wants named arguments, but has no name for max_restarts and max_task_retries.
        warnings.filterwarnings("ignore", message=".*ray_remote_args.*")
        yield context


@contextlib.contextmanager
def _short_errors() -> Iterator[None]:
    """Ray Data logs each lost task with its traceback, whose frames hold the actors of the pass: a
    handler that keeps records would keep their GPUs as well. Its first line says enough."""

    def short(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            text = str(record.exc_info[1]).strip().partition("\n")[0]
            record.msg = f"{record.msg} {type(record.exc_info[1]).__name__}: {text[:300]}"
            record.exc_info = None
        return True

    EXECUTOR_LOG.addFilter(short)
    try:
        yield
    finally:
        EXECUTOR_LOG.removeFilter(short)


def _batches() -> dict[str, Any]:
    return {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}


def _stage(stage: Stage) -> dict[str, Any]:
    given = {"num_cpus": stage.num_cpus, "memory": stage.memory, "concurrency": stage.concurrency}
    return {name: value for name, value in given.items() if value is not None}


def _resources(stage: Stage) -> dict[str, Any]:
    given = {"num_cpus": stage.num_cpus, "memory": stage.memory}
    return {name: value for name, value in given.items() if value is not None}
