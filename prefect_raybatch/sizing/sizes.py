"""Job, cluster and model to every size of a run, each with its reason. Pure.

What `raybatch plan` prints and what the pipeline and the engines are given is this one `Sizing`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.model.memory import Model, packed
from prefect_raybatch.sizing import engines as packing
from prefect_raybatch.sizing import sequences
from prefect_raybatch.sizing.cards import Card, card
from prefect_raybatch.sizing.fit import check_memory, cramped, over_pcie, step_tokens
from prefect_raybatch.sizing.shards import (
    SEQUENCES,
    choose_rows_per_shard,
    concurrent_batches,
    problems,
)

BATCHED = {"cpu": (4096,), "gpu": (16384, 8192, 4096, 2048)}  # tokens a step, the first that fits
ASSUMED_GPUS = 8  # of a cluster that cannot be asked yet: a large node
ASSUMED_CPUS = 16  # for each GPU
ASSUMED_PACKED = 3  # engines a GPU there, where answers are short


@dataclass(frozen=True)
class Capacity:
    """What the cluster has in all (logical CPUs, GPUs, nodes) and where it is.

    `gpus_by_node` are those of each node that has any; `cpus_a_gpu` the fewest CPUs that such a
    node has for each GPU; `gpu_bytes` the measured memory of the smallest GPU, 0 where it was not
    measured; `assumed` says that nobody was asked.
    """

    cpus: float
    gpus: float
    nodes: int
    address: str
    gpus_by_node: tuple[float, ...] = ()
    accelerators: tuple[str, ...] = ()  # Ray's names
    cpus_a_gpu: float = 0.0
    gpu_bytes: int = 0
    assumed: bool = False


@dataclass(frozen=True)
class Pool:
    """The engines of a run. `replicas` are the fewest and the most copies of the model by GPUs
    (equal when the number is fixed), each of `gpus_a_replica` GPUs and `engines_per_gpu` engines;
    `kind` is the GPU's name, `gpu_bytes` its memory, where they are known."""

    device: str
    replicas: tuple[int, int]
    gpus_a_replica: int
    engines_per_gpu: int
    kind: str
    gpu_bytes: int
    replicas_why: str
    packing_why: str

    @property
    def fewest(self) -> int:
        """Engines at the start."""
        return self.replicas[0] * self.engines_per_gpu

    @property
    def engines(self) -> int:
        """Engines at most."""
        return self.replicas[1] * self.engines_per_gpu

    @property
    def gpus(self) -> tuple[int, int]:
        return self.replicas[0] * self.gpus_a_replica, self.replicas[1] * self.gpus_a_replica


@dataclass(frozen=True)
class Sizing:
    """What was resolved. `arguments` are the engine's, and `share` those that keep it to its share
    of a GPU; `length` is the context length in tokens, where it is known; `problems` cost speed,
    with the change that mends them; `warnings` may be as meant."""

    pool: Pool
    rows_per_shard: int
    rows_why: str
    shards: int
    shards_a_worker: float
    concurrent: int
    max_num_seqs: int
    sequences_why: str
    saturated: bool
    arguments: dict[str, Any]
    share: dict[str, Any]
    length: int | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def uncommitted(self) -> int:
        """Shards that may be in engines, or answered and not yet committed: what a crash costs.

        Twice what engines hold and what waits at their doors, so that they need not wait for the
        stage behind them.
        """
        return 2 * self.pool.engines * (self.concurrent + 1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        value = asdict(self)
        value["uncommitted"] = self.uncommitted
        value["pool"] |= {"engines": self.pool.engines, "gpus": self.pool.gpus}
        return value


def expected_engines(job: BatchJob, have: Capacity | None) -> int:
    """Engines to cut the shards for, before a cluster is there to say; None: nothing is known."""
    engine = job.engine
    gpus = have.gpus if have else ASSUMED_GPUS
    gpu = device(job, gpus) == "gpu"
    each = 1
    if gpu and engine.gpus_per_replica == 1:
        row = packing.tokens(job, 0)
        short = row.out is not None and row.out <= packing.SHORT
        each = ASSUMED_PACKED if short else 1
        if engine.engines_per_gpu != "auto":
            each = engine.engines_per_gpu
    if engine.replicas == "auto":
        return each * (max(1, int(gpus // engine.gpus_per_replica)) if gpu else 1)
    return each * (engine.replicas if isinstance(engine.replicas, int) else engine.replicas[1])


def certain_engines(job: BatchJob) -> int:
    """The engines of which the job itself is certain."""
    asked, each = job.engine.replicas, job.engine.engines_per_gpu
    replicas = asked if isinstance(asked, int) else 1 if asked == "auto" else asked[0]
    return int(replicas * (each if isinstance(each, int) and job.engine.device == "gpu" else 1))


def imagined(kind: str | None, gpus: int | None, cpus: int | None) -> Capacity:
    """A cluster of `gpus` GPUs of that kind (1 where only the kind is given), up to 8 on a node."""
    count = gpus if gpus is not None else 1 if kind else 0
    cpus = cpus or ASSUMED_CPUS * max(1, count)
    full, rest = divmod(count, ASSUMED_GPUS)
    nodes = [float(ASSUMED_GPUS)] * full + ([float(rest)] if rest else [])
    kinds = (kind,) if kind and count else ()
    each = cpus / count if count else 0.0
    return Capacity(cpus, count, len(nodes) or 1, "nowhere: what if", tuple(nodes), kinds, each)


def assumed(job: BatchJob) -> Capacity:
    """A cluster that cannot be asked from here: what the job itself says of it."""
    kinds = (job.engine.accelerator_type,) if job.engine.accelerator_type else ()
    gpus = 0.0 if job.engine.device == "cpu" else float(ASSUMED_GPUS)
    nodes = (gpus,) if gpus else ()
    return Capacity(
        ASSUMED_CPUS * (gpus or 1), gpus, 1, "not asked", nodes, kinds, ASSUMED_CPUS, assumed=True
    )


# --- engines ------------------------------------------------------------------------------------


def device(job: BatchJob, gpus: float) -> str:
    """cpu or gpu, as the job says or as the cluster has."""
    if job.engine.device != "auto":
        return job.engine.device
    return "gpu" if gpus >= 1 else "cpu"


def card_of(job: BatchJob, have: Capacity) -> tuple[Card | None, str, int]:
    """(the card, its name, its bytes of memory): the one that the job asks for or the cluster's
    only kind; None and 0 where it is not known."""
    kinds = [job.engine.accelerator_type] if job.engine.accelerator_type else have.accelerators
    if len(kinds) != 1 or kinds[0] is None:
        return None, " and ".join(str(kind) for kind in kinds) or "unknown", have.gpu_bytes
    found = card(kinds[0])
    return found, kinds[0], have.gpu_bytes or (found.memory if found else 0)


def choose_pool(
    job: BatchJob,
    have: Capacity,
    model: Model | None,
    row_bytes: float,
    arguments: dict[str, Any],
    unknown: str = "",
) -> Pool:
    """The engines of the run on that cluster; `unknown` says why the model's size is not known."""
    engine = job.engine
    kind = device(job, have.gpus)
    found, name, size = card_of(job, have)
    replicas, why = _replicas(job, have, kind)
    if kind == "cpu":
        return Pool(kind, replicas, 0, 1, "", 0, why, "on a CPU replicas count engines")
    if engine.engines_per_gpu == "auto":
        row = packing.tokens(job, row_bytes)
        length = _length(job, model)
        each, packed_why = packing.choose(
            job, model, found, size, have.cpus_a_gpu, arguments, row, length
        )
        if model is None and unknown:
            packed_why = f"{packed_why} ({unknown})"
    else:
        each, packed_why = engine.engines_per_gpu, "engine.engines_per_gpu"
    return Pool(kind, replicas, engine.gpus_per_replica, each, name, size, why, packed_why)


def _replicas(job: BatchJob, have: Capacity, kind: str) -> tuple[tuple[int, int], str]:
    asked = job.engine.replicas
    if isinstance(asked, int):
        return (asked, asked), "engine.replicas"
    if isinstance(asked, list):
        return (asked[0], asked[1]), "engine.replicas: as many as the cluster gives room for"
    if kind == "cpu":
        return (1, 1), "one engine on a CPU, unless engine.replicas says more"
    each = job.engine.gpus_per_replica
    # An engine is one actor, so that all its GPUs are on one node.
    found = sum(int(gpus // each) for gpus in have.gpus_by_node or (have.gpus,))
    count = max(1, found)
    return (count, count), f"all {have.gpus:g} GPUs / {each} GPUs a replica"


def _length(job: BatchJob, model: Model | None) -> int | None:
    """Context length in tokens, where it is known."""
    return job.engine.context or (model.context if model else None)


# --- all of it ----------------------------------------------------------------------------------


def resolve(
    job: BatchJob,
    rows: int,
    row_bytes: float,
    have: Capacity,
    model: Model | None = None,
    unknown: str = "",
    planned: int | None = None,
    expected: int | None = None,
) -> Sizing:
    """Every size of a run on that cluster.

    `planned` is the rows a shard of an existing plan, which stay as they are; without a plan they
    follow from `expected` engines. Raises `InsufficientResources` or `ConfigError` when the model
    does not fit on its GPUs, or not so often.
    """
    engine = job.engine
    kind = device(job, have.gpus)
    arguments: dict[str, Any] = {
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "max_num_seqs": SEQUENCES if engine.max_num_seqs == "auto" else engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens or BATCHED[kind][0],
        **(engine.model_extra or {}),
    }
    if engine.context:
        arguments["max_model_len"] = engine.context
    pool = choose_pool(job, have, model, row_bytes, arguments, unknown)
    length = _length(job, model)
    row = packing.tokens(job, row_bytes)
    seqs, seqs_why = sequences.choose(
        job, model, card_of(job, have)[0], pool.gpu_bytes, arguments, row, pool.engines_per_gpu
    )
    arguments["max_num_seqs"] = seqs
    share: dict[str, Any] = {}
    warnings = over_pcie(engine.tensor_parallel_size, pool.kind)
    if pool.device == "gpu" and model and pool.gpu_bytes:
        most = _largest(job, have)
        check_memory(job, model, arguments, max(most, pool.gpu_bytes), pool.kind, length)
        if pool.engines_per_gpu > 1:
            share = packed(model, arguments, pool.gpu_bytes, pool.engines_per_gpu)
        else:
            if not engine.max_num_batched_tokens:
                arguments["max_num_batched_tokens"] = step_tokens(
                    model, arguments, pool.gpu_bytes, row.typical, BATCHED["gpu"]
                )
            warnings += cramped(model, arguments, pool.gpu_bytes, row.typical)
    chosen, why = choose_rows_per_shard(rows, row_bytes, job, expected or pool.engines)
    if planned:
        chosen, why = planned, "the run's plan"
    concurrent = concurrent_batches(job, chosen, seqs)
    shards = math.ceil(rows / chosen)
    # A run with fewer rows than that has all of them in flight.
    known = certain_engines(job) if have.assumed else pool.engines
    saturated = min(chosen, max(rows, 1)) * concurrent >= min(seqs, rows)
    return Sizing(
        pool,
        chosen,
        why,
        shards,
        round(shards / pool.engines, 2),
        concurrent,
        seqs,
        seqs_why,
        saturated,
        arguments,
        share,
        length,
        tuple(problems(job, rows, chosen, known, seqs)),
        tuple(warnings),
    )


def _largest(job: BatchJob, have: Capacity) -> int:
    """Bytes of the largest card of that name, as the one that is there may be; 0: measured."""
    found = card_of(job, have)[0]
    return found.most if found and not have.gpu_bytes else 0
