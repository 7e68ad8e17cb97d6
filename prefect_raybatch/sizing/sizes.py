"""Computes every size of a run and the reason for it, from job, cluster and model. No I/O.

`raybatch plan` prints the resulting `Sizing`, which the pipeline and the engines use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.ray_cluster import PodGroup
from prefect_raybatch.job.secrets import hide_argument
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import Model, packed
from prefect_raybatch.sizing import cost
from prefect_raybatch.sizing import engines as packing
from prefect_raybatch.sizing.cards import Card, EngineGpu, card
from prefect_raybatch.sizing.cost import Tokens
from prefect_raybatch.sizing.fit import (
    Fit,
    check_memory,
    cramped,
    over_network,
    over_pcie,
    step_tokens,
)
from prefect_raybatch.sizing.roofline import Work, work_of
from prefect_raybatch.sizing.shards import (
    SEQUENCES,
    choose_rows_per_shard,
    concurrent_batches,
    problems,
)
from prefect_raybatch.spec.sizes import SizeSpec

BATCHED = {"cpu": (4096,), "gpu": (16384, 8192, 4096, 2048)}  # tokens per step; the first that fits
ASSUMED_GPUS = 8  # of a cluster that cannot be queried yet: a large node
ASSUMED_CPUS = 16  # for each GPU
ASSUMED_PACKED = 3  # engines per GPU of such a cluster, for short answers


@dataclass(frozen=True)
class Capacity:
    """Total capacity of a cluster (logical CPUs, GPUs, nodes) and its address.

    `gpus_by_node` lists the GPUs of each node that has any; `cpus_a_gpu` is the fewest CPUs per GPU
    on these nodes. `accelerators` are Ray's names of the GPU models. `gpu_bytes` is the measured
    memory of the smallest GPU, 0 if not measured. `assumed`: no cluster was queried.
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
    """The engines of a run: their number, their GPUs, and the reasons for both.

    `replicas` is the fewest and the most copies of the model (equal if the number is fixed). Each
    copy takes `gpus_a_replica` GPUs, on which there are `engines_per_gpu` engines. `kind` is the
    GPU's name, `gpu_bytes` its memory, 0 if unknown. `replicas_why` and `packing_why` are the
    reasons for `replicas` and `engines_per_gpu`.
    """

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
        """Return the fewest engines that the pool may have: those that it starts with."""
        return self.replicas[0] * self.engines_per_gpu

    @property
    def engines(self) -> int:
        """Return the most engines that the pool may have."""
        return self.replicas[1] * self.engines_per_gpu

    def engines_for(self, shards: int) -> tuple[int, int]:
        """Return (fewest, most) engines for a pass over `shards` shards, at most one per shard.

        After an engine died, few shards may be left, and starting an engine takes a minute.
        """
        return min(self.fewest, shards), min(self.engines, shards)

    @property
    def gpus(self) -> tuple[int, int]:
        return self.replicas[0] * self.gpus_a_replica, self.replicas[1] * self.gpus_a_replica


@dataclass(frozen=True)
class Sizing:
    """The sizes of a run; fields ending in `_why` are reasons.

    `shards_a_worker` is the mean number of shards per engine, `concurrent` the number of shards in
    flight in an engine. `saturated` says that the shards in flight have enough rows to keep an
    engine busy: `max_num_seqs` rows, or all rows of the run. `arguments` are the engine arguments,
    `share` further ones that keep an engine to its share of a GPU. `length` is the context length
    in tokens, if known. `problems` are texts on what makes the run slow, with the change to make;
    `warnings` are about settings that may be intended. `work` is the engine's work per token, None
    if the model or the GPU is unknown. `rate` is the rows per second on one GPU, as the cost model
    predicts. It is 0 if it is unknown, or if the KV cache is probably too small for `max_num_seqs`
    rows.
    """

    pool: Pool
    rows_per_shard: int
    rows_why: str
    shards: int
    shards_a_worker: float
    concurrent: int
    concurrent_why: str
    max_num_seqs: int
    sequences_why: str
    saturated: bool
    arguments: EngineArguments
    share: dict[str, Any]
    length: int | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    work: Work | None = None
    rate: float = 0.0

    @property
    def uncommitted(self) -> int:
        """Return the most shards that may be started but not committed.

        A crash may lose their answers. The number is twice as many shards as the engines and their
        queues hold, so that engines need not wait for the finish stage.
        """
        return 2 * self.pool.engines * (self.concurrent + 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON-compatible values, with credentials masked."""
        arguments = self.arguments.vllm()
        shown = {name: hide_argument(value, name) for name, value in arguments.items()}
        value = {**asdict(self), "arguments": shown}
        value["uncommitted"] = self.uncommitted
        del value["work"], value["rate"]  # a run's report has them, beside measured values
        value["pool"] |= {"engines": self.pool.engines, "gpus": self.pool.gpus}
        return value


def expected_engines(
    spec: SizeSpec, capacity: Capacity | None, model: Model | None = None, row_bytes: float = 0.0
) -> int:
    """Estimate the number of engines before the cluster is started, to choose the rows per shard.

    `capacity` is None if nothing is known of the cluster. `model` is None if the model's size is
    unknown. If the cluster, the model's size and the kind of GPU are known, the number is the cost
    model's choice for rows of `row_bytes` bytes on average. Otherwise it is a rough guess.
    """
    if capacity and model and gpu_of(spec.accelerator, capacity).card:
        row, length = Tokens.of(spec.row, row_bytes), spec.context or model.context
        return choose_pool(spec, capacity, model=model, unknown="", row=row, length=length).engines
    gpus = capacity.gpus if capacity else ASSUMED_GPUS
    gpu = spec.device_for(gpus) == "gpu"
    each = 1
    if gpu and spec.gpus_per_replica == 1:
        short = spec.row.out <= packing.SHORT
        packed_most = packing.MOST_ENGINES if spec.pools else ASSUMED_PACKED
        each = spec.engines_per_gpu or (packed_most if short else 1)
    if spec.replicas is None:
        return each * (max(1, int(gpus // spec.gpus_per_replica)) if gpu else 1)
    return each * spec.replicas[1]


def _asked_engines(spec: SizeSpec, pool: Pool) -> int:
    """Return the most engines that the job asks for: replicas * `engine.engines_per_gpu`.

    If the job does not set engines per GPU, counts one: further engines start only as needed.
    """
    return pool.replicas[1] * (spec.engines_per_gpu or 1)


def certain_engines(spec: SizeSpec) -> int:
    """Return the number of engines that a run has at least, by the settings of its job alone."""
    each = spec.engines_per_gpu if spec.device == "gpu" else None
    return (spec.replicas[0] if spec.replicas else 1) * (each or 1)


def imagined(kind: str | None, gpus: int | None, cpus: int | None) -> Capacity:
    """Return the capacity of an imagined cluster: `gpus` GPUs named `kind`, up to 8 on a node.

    `gpus` is by default 1 with a `kind`, else 0; `cpus` is by default 16 per GPU, or 16 without
    GPUs.
    """
    count = gpus if gpus is not None else 1 if kind else 0
    cpus = cpus or ASSUMED_CPUS * max(1, count)
    full, rest = divmod(count, ASSUMED_GPUS)
    nodes = [float(ASSUMED_GPUS)] * full + ([float(rest)] if rest else [])
    kinds = (kind,) if kind and count else ()
    each = cpus / count if count else 0.0
    return Capacity(cpus, count, len(nodes) or 1, "what if", tuple(nodes), kinds, each)


def assumed(spec: SizeSpec) -> Capacity:
    """Return an assumed capacity for a cluster that cannot be queried.

    It is one node with 8 GPUs, or without any if the job's device is the CPU.
    """
    kinds = (spec.accelerator,) if spec.accelerator else ()
    gpus = 0.0 if spec.device == "cpu" else float(ASSUMED_GPUS)
    nodes = (gpus,) if gpus else ()
    return Capacity(
        ASSUMED_CPUS * (gpus or 1), gpus, 1, "not queried", nodes, kinds, ASSUMED_CPUS, assumed=True
    )


def capacity_of_pods(groups: Sequence[PodGroup], accelerator: str | None) -> Capacity:
    """Return the capacity of the Kubernetes pods that will be created for a run.

    `accelerator` is the GPU name in the job, because pods do not say which GPUs they have.
    """
    kinds = (accelerator,) if accelerator else ()
    pods = [group for group in groups for _ in range(group.pods)]
    with_gpus = [pod for pod in pods if pod.gpus]
    return Capacity(
        sum(pod.cpus for pod in pods),
        float(sum(pod.gpus for pod in pods)),
        len(pods),
        "created by cluster.kubernetes",
        tuple(float(pod.gpus) for pod in with_gpus),
        kinds if with_gpus else (),
        min((pod.cpus / pod.gpus for pod in with_gpus), default=0.0),
    )


# --- engines ------------------------------------------------------------------------------------


def gpu_of(accelerator: str | None, capacity: Capacity) -> EngineGpu:
    """Return the GPU that the job names (`accelerator`), or else the only kind in the cluster.

    `card` is None if the cluster has several kinds or reports none, or if the kind is unknown.
    """
    kinds = [accelerator] if accelerator else list(capacity.accelerators)
    if len(kinds) != 1:
        return EngineGpu(" and ".join(kinds) or "unknown", None, capacity.gpu_bytes, 0)
    found = card(kinds[0])
    memory = capacity.gpu_bytes or (found.memory if found else 0)
    return EngineGpu(kinds[0], found, memory, found.most if found and not capacity.gpu_bytes else 0)


def _sequences_tried(spec: SizeSpec) -> tuple[int, ...]:
    """Return the values of max_num_seqs among which the cost model chooses.

    Leaves out values above the job's `max_num_batched_tokens`, which vLLM rejects.
    """
    if spec.max_num_seqs:
        return (spec.max_num_seqs,)
    most = spec.max_num_batched_tokens or packing.TRIED[-1]
    return tuple(n for n in packing.TRIED if n <= most) or (most,)


def choose_pool(
    spec: SizeSpec,
    capacity: Capacity,
    *,
    model: Model | None,
    unknown: str,
    row: Tokens,
    length: int | None,
) -> Pool:
    """Choose device, replicas and engines per GPU for a cluster with this `capacity`.

    `model` is None if the model's size is unknown; `unknown` is the reason, for the plan's text.
    `row` are the expected tokens of a row, `length` is the context length in tokens.
    """
    device, gpu = spec.device_for(capacity.gpus), gpu_of(spec.accelerator, capacity)
    replicas, why = _replicas(spec, capacity, device)
    if device == "cpu":
        return Pool(device, replicas, 0, 1, "", 0, why, "on a CPU, a replica is an engine")
    if spec.engines_per_gpu is None:
        each, packed_why = packing.choose_engines_per_gpu(
            model=model,
            gpu=gpu,
            cpus_a_gpu=capacity.cpus_a_gpu,
            cpus_an_engine=spec.cpus,
            arguments=_asked(spec, device, length),
            row=row,
            length=length,
            pools=spec.pools,
            sequences=_sequences_tried(spec),
        )
        if model is None and unknown:
            packed_why = f"{packed_why} ({unknown})"
    else:
        each, packed_why = spec.engines_per_gpu, "engine.engines_per_gpu"
    return Pool(
        device=device,
        replicas=replicas,
        gpus_a_replica=spec.gpus_per_replica,
        engines_per_gpu=each,
        kind=gpu.name,
        gpu_bytes=gpu.memory,
        replicas_why=why,
        packing_why=packed_why,
    )


def pool_for(spec: SizeSpec, capacity: Capacity) -> Pool:
    """Return the pool of engines of a run whose model and rows are not known yet."""
    row = Tokens.of(spec.row, 0)
    return choose_pool(spec, capacity, model=None, unknown="", row=row, length=None)


def _replicas(spec: SizeSpec, capacity: Capacity, device: str) -> tuple[tuple[int, int], str]:
    if spec.replicas is not None:
        fewest, most = spec.replicas
        why = "" if fewest == most else ": as many as fit on the cluster"
        return spec.replicas, f"engine.replicas{why}"
    if device == "cpu":
        return (1, 1), "one engine on a CPU; engine.replicas sets more"
    each = spec.gpus_per_replica
    count = max(1, max_model_copies(spec, capacity))
    return (count, count), f"all {capacity.gpus:g} GPUs / {each} GPUs per replica"


def max_model_copies(spec: SizeSpec, capacity: Capacity) -> int:
    """Return for how many copies of the model the cluster has GPUs; memory is not considered."""
    each, nodes = spec.gpus_per_replica, capacity.gpus_by_node or (capacity.gpus,)
    if spec.spans_nodes:
        return int(sum(map(int, nodes)) // each)
    # Such an engine is one actor, so that all its GPUs are on one node.
    return sum(int(gpus // each) for gpus in nodes)


def _asked(spec: SizeSpec, device: str, length: int | None) -> EngineArguments:
    """Return the job's engine arguments, with defaults that `_engine_sizes` may still change."""
    step = max(BATCHED[device][0], least_step(spec, length))
    return EngineArguments(
        tensor_parallel_size=spec.tensor,
        pipeline_parallel_size=spec.pipeline,
        max_num_seqs=spec.max_num_seqs or SEQUENCES,
        max_num_batched_tokens=spec.max_num_batched_tokens or step,
        max_model_len=spec.context,
        more=spec.vllm_arguments,
    )


def least_step(spec: SizeSpec, length: int | None) -> int:
    """Return the fewest tokens per engine step with which vLLM starts.

    Each sequence takes a token of a step. Without chunked prefill, a step must hold a prompt of the
    context length `length` (None if it is unknown).
    """
    whole = length if spec.takes_whole_prompts else None
    return max(spec.max_num_seqs or spec.least_sequences, whole or 1)


def check_step(spec: SizeSpec, length: int | None) -> None:
    """Raise `ConfigError` for sequences and tokens per step with which vLLM does not start.

    That is for fewer tokens than `least_step`, and for more active sequences than sequences.
    """
    step, active = spec.max_num_batched_tokens, spec.least_sequences
    sequences = spec.max_num_seqs or active
    if active > sequences:
        raise ConfigError(
            f"engine.max_num_active_seqs ({active:,}) must be at most engine.max_num_seqs "
            f"({sequences:,}). Lower the one, or raise the other"
        )
    if step is None:
        return
    if step < sequences:
        name = "max_num_seqs" if spec.max_num_seqs else "max_num_active_seqs"
        raise ConfigError(
            f"engine.max_num_batched_tokens ({step:,}) must be at least engine.{name} "
            f"({sequences:,}). Raise the one, or lower the other"
        )
    if step < least_step(spec, length):
        raise ConfigError(
            f"engine.max_num_batched_tokens ({step:,}) must be at least the context length "
            f"({length:,}), since engine.enable_chunked_prefill is false. Raise it, lower "
            "engine.max_model_len, or remove enable_chunked_prefill"
        )


# --- all sizes ----------------------------------------------------------------------------------


def sizes_of(
    spec: SizeSpec,
    rows: int,
    row_bytes: float,
    capacity: Capacity,
    model: Model | None = None,
    unknown: str = "",
    planned: int | None = None,
    expected: int | None = None,
) -> Sizing:
    """Return every size of a run on a cluster with this `capacity`.

    `unknown` says why `model` is None. `planned` is the rows per shard of an existing plan; without
    it, they are chosen for `expected` engines. Raises `InsufficientResources` or `ConfigError` if
    the model does not fit on its GPUs, or fewer engines fit on a GPU than the job sets.
    """
    gpu = gpu_of(spec.accelerator, capacity)
    row = Tokens.of(spec.row, row_bytes)
    length = spec.context or (model.context if model else None)
    pool = choose_pool(spec, capacity, model=model, unknown=unknown, row=row, length=length)
    engine = _engine_sizes(spec, model, gpu, row, length, pool)
    seqs = engine.arguments.max_num_seqs
    chosen, why = _rows_per_shard(spec, rows, row_bytes, expected or pool.engines, planned)
    uneven = row.out > packing.SHORT
    concurrent = concurrent_batches(spec.max_concurrent_batches, chosen, seqs, uneven)
    shards = math.ceil(rows / chosen)
    known = certain_engines(spec) if capacity.assumed else _asked_engines(spec, pool)
    idle = problems(
        rows=rows, rows_per_shard=chosen, concurrent=concurrent, engines=known, seqs=seqs
    )
    return Sizing(
        pool=pool,
        rows_per_shard=chosen,
        rows_why=why,
        shards=shards,
        shards_a_worker=round(shards / pool.engines, 2),
        concurrent=concurrent,
        concurrent_why=f"ceil({'2 * ' if uneven else ''}{seqs} / {chosen:,}) + 1, at least 2",
        max_num_seqs=seqs,
        sequences_why=engine.sequences_why,
        # A run with fewer rows than that has all of them in flight.
        saturated=min(chosen, max(rows, 1)) * concurrent >= min(seqs, rows),
        arguments=engine.arguments,
        share=engine.share,
        length=length,
        problems=tuple(idle),
        warnings=(*_slow_links(spec, capacity, pool), *engine.warnings),
        work=_work(model, gpu, pool),
        rate=engine.rate,
    )


def _rows_per_shard(
    spec: SizeSpec, rows: int, row_bytes: float, engines: int, planned: int | None
) -> tuple[int, str]:
    if planned:
        return planned, "the run's plan"
    return choose_rows_per_shard(spec, rows=rows, row_bytes=row_bytes, engines=engines)


@dataclass(frozen=True)
class _EngineSizes:
    """The sizes of one engine; `Sizing` explains the fields."""

    arguments: EngineArguments
    sequences_why: str
    share: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    rate: float = 0.0


def _slow_links(spec: SizeSpec, capacity: Capacity, pool: Pool) -> list[str]:
    """Return warnings if GPUs that compute a layer together are connected by PCIe or network."""
    warnings = over_pcie(spec.tensor, pool.kind)
    if pool.device == "gpu":
        warnings += over_network(spec.tensor, max(capacity.gpus_by_node, default=0))
    return warnings


def _engine_sizes(
    spec: SizeSpec,
    model: Model | None,
    gpu: EngineGpu,
    row: Tokens,
    length: int | None,
    pool: Pool,
) -> _EngineSizes:
    """Return the sizes of one engine; raise the errors of `sizes_of`."""
    arguments, fit = _asked(spec, pool.device, length), None
    if pool.device == "gpu" and model and pool.gpu_bytes:
        fit = Fit(model, arguments, pool.gpu_bytes, length or 0)
    seqs, why = packing.choose_max_num_seqs(
        asked=spec.max_num_seqs,
        fit=fit,
        card=gpu.card,
        row=row,
        engines_per_gpu=pool.engines_per_gpu,
        step=spec.max_num_batched_tokens,
    )
    if seqs < spec.least_sequences:
        seqs, why = spec.least_sequences, "engine.max_num_active_seqs"
    if fit is None:
        return _EngineSizes(replace(arguments, max_num_seqs=seqs), why)
    return _sizes_in_memory(spec, fit.with_arguments(max_num_seqs=seqs), why, gpu, row, pool)


def _sizes_in_memory(
    spec: SizeSpec, fit: Fit, sequences_why: str, gpu: EngineGpu, row: Tokens, pool: Pool
) -> _EngineSizes:
    """Return the sizes of an engine whose model and GPU are known.

    Raises the errors of `sizes_of`.
    """
    check_memory(replace(fit, gpu_bytes=max(gpu.most, gpu.memory)), spec.model, pool.kind)
    arguments, share, warnings = fit.arguments, {}, []
    if pool.engines_per_gpu > 1:
        share = packed(fit.model, arguments, pool.gpu_bytes, pool.engines_per_gpu)
    else:
        if not spec.max_num_batched_tokens:
            batched = max(step_tokens(fit, row, BATCHED["gpu"]), least_step(spec, fit.length))
            fit = fit.with_arguments(max_num_batched_tokens=batched)
        warnings = cramped(fit, row)
        arguments = fit.arguments
    rate = _rate(fit, gpu.card, row, pool.engines_per_gpu)
    return _EngineSizes(arguments, sequences_why, share, tuple(warnings), rate)


def _rate(fit: Fit, kind: Card | None, row: Tokens, engines: int) -> float:
    if kind is None or not packing.holds_rows(fit, engines, row):
        return 0.0
    return cost.rows_per_second(fit.model, kind, row, engines, fit.arguments.max_num_seqs)


def _work(model: Model | None, gpu: EngineGpu, pool: Pool) -> Work | None:
    if model is None or gpu.card is None or pool.device == "cpu":
        return None
    return work_of(model, gpu.card, pool.gpus_a_replica, pool.engines_per_gpu)
