"""The engine stage: prompts in tokens to answers in tokens. The only stage that names vLLM.

One actor an engine. Several blocks are in flight in it at once, so that the tail of one shard
overlaps the head of the next; `stepper` holds the one thread that drives vLLM.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prefect_raybatch import model as models
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job import BatchJob
from prefect_raybatch.memory import describe, packed
from prefect_raybatch.sizing import Sizing
from prefect_raybatch.stages.blocks import (
    ANSWERS,
    CACHED_TOKENS,
    ERROR,
    ERROR_TYPE,
    FINISH,
    MERGED,
    PARAMS,
    PROMPT_TOKENS,
    TEXTS,
    TIMES,
    TOKENS,
    Failure,
    lost_all,
    passes_by,
    timed,
    units_of,
)
from prefect_raybatch.stages.figures import Sampler
from prefect_raybatch.stages.order import arrange, token_keys

if TYPE_CHECKING:
    from prefect_raybatch.stages.stepper import Completion

log = logging.getLogger(__name__)
STARTS, PAUSE = 2, 10.0  # tries to start an engine, and seconds between them
SAME = 0.95  # of the memory in a card's data sheet is what the card then shows


CPU_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,  # compiling takes half a minute and pays back little on a CPU
    "enable_prefix_caching": True,
}
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # The core in the actor's own process and on one thread: 2.6 ms of CPU a row against 4.9, a
    # start of 15 s against 45 s (two more processes would import vLLM), and a core left for the
    # other stages. More speed comes from more engines, one a core. Figures: docs/tuning.md.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
GPU_DEFAULTS: dict[str, Any] = {
    "enable_prefix_caching": True,
}


@dataclass(frozen=True)
class EngineSpec:
    """All an engine actor needs. `arguments` are vLLM's EngineArgs without the model;
    `engines_per_gpu` above 1 means that this one may take only its share of the GPU: the arguments
    in `share`, chosen for a GPU of `gpu_bytes` (0: not known, so the engine looks itself); `done`
    says whether a shard (by id) is committed, and travels to the actor; `sort` puts a block's rows
    in the order that suits the engine, `merge` asks once about equal requests of a block;
    `hang_seconds` is the time a step may take, None any."""

    model: dict[str, Any]
    sampling: dict[str, Any]
    arguments: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    engines_per_gpu: int = 1
    gpu_bytes: int = 0
    share: dict[str, Any] = field(default_factory=dict)
    done: Callable[[int], bool] | None = None
    sort: bool = True
    merge: bool = True
    hang_seconds: float | None = None


def engine_spec(
    job: BatchJob,
    model: dict[str, Any],
    size: Sizing,
    done: Callable[[int], bool] | None = None,
) -> EngineSpec:
    """Every sizing argument set on purpose: through Ray, vLLM's own defaults starve a GPU."""
    cpu = size.pool.device == "cpu"
    arguments = {**(CPU_DEFAULTS if cpu else GPU_DEFAULTS), **size.arguments}
    sampling = job.sampling.given()
    ours = {k: os.environ.get(k, v) for k, v in CPU_ENV.items()} if cpu else {}
    env = {**ours, **job.engine.env}
    pool = size.pool
    share = (pool.engines_per_gpu, pool.gpu_bytes, size.share)
    sort = job.engine.order == "auto"
    # A logits processor of the user's may keep a state, or count.
    merge = job.engine.deduplicate and not arguments.get("logits_processors")
    hang_seconds = job.limits.hang_seconds or None
    return EngineSpec(model, sampling, arguments, env, *share, done, sort, merge, hang_seconds)


class EngineStage:
    """A callable class for a Ray actor pool: block in, block out; never raises for a row.

    An engine that cannot start, or that died with the block in it, gives a `lost` block with the
    reason: an exception would be retried by Ray without end and its text lost.
    """

    sampler: Sampler | None = None

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self._lock = threading.Lock()
        self._engine: Any = None
        self._refused: str | None = None
        os.environ.update(spec.env)
        self.sampler = Sampler(self._load).start()
        # Started now and not at the first block: all engines load side by side while rows are
        # still being read.
        self._ready()

    def _ready(self) -> Any:
        """The live engine, started anew after a death; None with `_refused` set when it cannot."""
        with self._lock:
            if self._engine is None and self._refused is None:
                self._start()
            return self._engine

    def _start(self) -> None:
        from prefect_raybatch.stages.stepper import SteppedEngine

        for attempt in range(STARTS):
            try:
                self._engine = SteppedEngine(self._arguments(), self.spec.hang_seconds)
                self._refused = None  # of an earlier try: a death later must start another one
                return
            except Exception as error:
                log.exception("the engine did not start (attempt %d)", attempt + 1)
                self._refused = f"{type(error).__name__}: {error}"
                # Wrong arguments stay wrong; a RuntimeError may be memory that a dying engine
                # has not given back yet.
                if not isinstance(error, RuntimeError) or attempt + 1 == STARTS:
                    return
                time.sleep(PAUSE)

    def _arguments(self) -> dict[str, Any]:
        path = models.local_path(self.spec.model)
        arguments = self.spec.arguments
        if self.spec.engines_per_gpu > 1:
            arguments = {**arguments, **self._share()}
        return {**arguments, "model": path, "revision": self.spec.model.get("revision")}

    def _share(self) -> dict[str, Any]:
        """Of the GPU that is here: as it was resolved, unless the GPU is smaller than was thought
        or nobody knew it."""
        from vllm.platforms import current_platform

        there = current_platform.get_device_total_memory()
        if self.spec.share and there >= SAME * self.spec.gpu_bytes:
            return self.spec.share
        config, stored = models.read_config(self.spec.model)
        model = describe(config, self.spec.arguments, stored)
        return packed(model, self.spec.arguments, there, self.spec.engines_per_gpu)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Answers the well rows of a block; adds answers, finish reasons and token counts."""
        from prefect_raybatch.stages.stepper import EngineDied, Request

        table = self.pending(table)
        if passes_by(table):
            return table
        began = time.time()
        engine = self._ready()
        if engine is None:
            return lost_all(table, self._refused or "the engine did not start", fatal=True)
        prompts = table[TOKENS].to_pylist()
        errors = table[ERROR].to_pylist()
        params = [fields_of(self.spec.sampling, own) for own in table[PARAMS].to_pylist()]
        well = [i for i, error in enumerate(errors) if error is None]
        keys = token_keys(table[TOKENS])
        asked = arrange(keys, params, well, self.spec.sort, self.spec.merge)
        try:
            done = engine.run([Request(prompts[i], params[i]) for i in asked.rows])
        except EngineDied as death:
            with self._lock:
                if self._engine is engine:
                    self._engine = None
            return lost_all(table, f"EngineDied: {death}")
        answers = zip(asked.rows, map(asked.served, asked.rows), done, strict=True)
        table = answered(table, answers, began)
        if self.sampler is not None:
            table = self.sampler.tell(table, began)
        return timed(table, "engine", began)

    def _load(self) -> dict[str, float]:
        return getattr(self._engine, "load", dict)()  # {} while there is no engine

    def pending(self, table: pa.Table) -> pa.Table:
        """The block, or none of its rows when another driver committed its shard meanwhile.

        Reading looks as well, but runs ahead: blocks can wait here for long.
        """
        if self.spec.done is None or passes_by(table):
            return table
        try:
            if all(self.spec.done(unit.shard) for unit in units_of(table)):
                return table.slice(0, 0)
        except RayBatchError as error:  # only saves work: the commit itself decides in the end
            log.info("whether the shard is committed cannot be told: %s", error)
        return table


_TYPES = {
    ANSWERS: pa.list_(pa.list_(pa.int32())),
    TEXTS: pa.list_(pa.string()),
    FINISH: pa.string(),
    PROMPT_TOKENS: pa.int32(),
    CACHED_TOKENS: pa.int32(),
    MERGED: pa.bool_(),
}


def fields_of(sampling: dict[str, Any], own: str | None) -> dict[str, Any]:
    """A row's sampling fields: the job's, and those that a prompt function set for it (JSON)."""
    return {**sampling, **json.loads(own)} if own else sampling


def answered(
    table: pa.Table, answers: Iterable[tuple[int, Sequence[int], Completion]], began: float
) -> pa.Table:
    """A prepared block with the columns of its answers, and when it came to the engine.

    `answers` are (the row that was asked about, the rows that get its answer, the answer).
    """
    errors = table[ERROR].to_pylist()
    columns: dict[str, list[Any]] = {name: [None] * table.num_rows for name in _TYPES}
    for row, served, completion in answers:
        for i in served:
            if completion.error:
                errors[i] = Failure("engine", *completion.error).to_dict()
                continue
            columns[ANSWERS][i] = completion.token_ids
            columns[TEXTS][i] = completion.texts
            columns[FINISH][i] = completion.finish_reason
            columns[MERGED][i] = i != row
            if i == row:  # tokens count where they were computed
                columns[PROMPT_TOKENS][i] = completion.prompt_tokens
                columns[CACHED_TOKENS][i] = completion.cached_tokens
    table = table.drop_columns([TOKENS, PARAMS, ERROR])
    table = table.append_column(ERROR, pa.array(errors, ERROR_TYPE))
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values, _TYPES[name]))
    when = pa.array([began] * table.num_rows, pa.float64())
    return table.append_column(f"{TIMES}_began", when)
