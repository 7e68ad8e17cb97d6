"""Every size of a run with its reason, for people. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.precision import TRY_FP8, precision_tries
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import Model, gib
from prefect_raybatch.sizing.agreement import CONFIDENCE, confidence_of_each, sample_size
from prefect_raybatch.sizing.fit import Fit
from prefect_raybatch.sizing.sizes import BATCHED, Capacity, Sizing
from prefect_raybatch.words import counted


@dataclass(frozen=True)
class Figure:
    """A size and why it is so."""

    name: str
    value: str
    why: str


def figures(job: BatchJob, have: Capacity, size: Sizing, model: Model | None) -> list[Figure]:
    """All of them, in the order in which they follow from each other."""
    rows = Figure("rows a shard", f"{size.rows_per_shard:,}", size.rows_why)
    engine, cluster = job.engine, job.cluster
    stages = _stage_figures(engine, cluster, have, size)
    return [*_engine_figures(engine, have, size, model), *_precision(job), rows, *stages]


def _precision(job: BatchJob) -> list[Figure]:
    """What a trial will decide; nothing where the job leaves nothing to it."""
    tries = precision_tries(job.engine)
    if not tries:
        return []
    limits, confidence = job.limits, confidence_of_each(len(tries))
    rows = sample_size(limits.min_agreement, confidence)
    why = (
        f"{TRY_FP8}: before the first commit up to {rows:,} sampled rows are asked as the model is "
        f"stored and in fp8, which is taken if {limits.min_agreement:.4g} of the answers are the "
        f"same, with {CONFIDENCE:.0%} confidence (limits.min_agreement). Sizes are without fp8"
    )
    return [Figure("precision", f"fp8 {' and '.join(tries[0])}, or as stored", why)]


def _engine_figures(
    engine: Engine, have: Capacity, size: Sizing, model: Model | None
) -> list[Figure]:
    pool, arguments = size.pool, size.arguments
    gpu = pool.device == "gpu"
    where = f"the cluster has {counted(have.gpus, 'GPU')}"
    found = [
        Figure("device", pool.device, "engine.device" if engine.device != "auto" else where),
        Figure("replicas", _span(pool.replicas), pool.replicas_why),
    ]
    if gpu:
        tensor, pipeline = engine.tensor_parallel_size, engine.pipeline_parallel_size
        parallel = f"tensor {tensor} * pipeline {pipeline}"
        found += [
            Figure("GPUs", _span(pool.gpus), f"replicas * {parallel}"),
            Figure("engines a GPU", str(pool.engines_per_gpu), pool.packing_why),
        ]
    batched, seqs = arguments.max_num_batched_tokens, arguments.max_num_seqs
    step = f"{BATCHED[pool.device][0]} on a {pool.device.upper()}"
    if batched != BATCHED[pool.device][0]:
        step += ", fewer where that would take too much of the KV cache"
    if engine.max_num_batched_tokens:
        step = "engine.max_num_batched_tokens"
    found += [
        Figure("engines", _span((pool.fewest, pool.engines)), "replicas * engines a GPU"),
        Figure("max_num_seqs", str(seqs), size.sequences_why),
        Figure("max_num_batched_tokens", str(batched), step),
        Figure(
            "max_model_len",
            str(size.length or "the model's"),
            "engine.max_model_len" if engine.max_model_len else "the model's config.json",
        ),
        _kv_figure(engine, size, model),
    ]
    return found


def _kv_figure(engine: Engine, size: Sizing, model: Model | None) -> Figure:
    pool, name = size.pool, "KV cache an engine"
    if pool.device == "cpu":
        space = engine.env.get("VLLM_CPU_KVCACHE_SPACE", "1")
        return Figure(name, f"{space} GiB", "VLLM_CPU_KVCACHE_SPACE, 1 unless set")
    given = EngineArguments.of({**size.arguments.vllm(), **size.share})
    if model is None or not pool.gpu_bytes:
        if given.kv_cache_bytes:
            return Figure(name, gib(given.kv_cache_bytes), "engine.kv_cache_memory_bytes")
        why = "the engine measures what is free; the size of the model or of the GPU is not known"
        return Figure(name, "not known yet", why)
    fit = Fit(model, given, pool.gpu_bytes)
    adapters = f"{gib(fit.adapters)} for LoRA adapters - " if fit.adapters else ""
    why = (
        f"{gib(fit.room)} of {pool.kind} - weights {gib(fit.weights)} - {adapters}"
        f"{gib(fit.working)} to work: about {fit.tokens_held:,} tokens"
    )
    return Figure(name, gib(fit.cache), why if given.kv_cache_bytes else f"{why}; vLLM measures it")


def _stage_figures(engine: Engine, cluster: Cluster, have: Capacity, size: Sizing) -> list[Figure]:
    calls = size.concurrent
    rule = size.concurrent_why
    taken = size.pool.fewest * engine.num_cpus
    engines = counted(size.pool.engines, "engine")
    free = max(0.0, have.cpus - taken)
    found = [
        Figure("batch_size", str(engine.batch_size), "engine.batch_size: least rows a shard"),
        Figure(
            "max_concurrent_batches",
            str(calls),
            "engine.max_concurrent_batches" if engine.max_concurrent_batches else rule,
        ),
        Figure("tasks in flight an engine", str(calls + 1), "one more waits at its door"),
        Figure(
            "uncommitted shards",
            str(size.uncommitted),
            f"2 * {engines} * {calls + 1}, at most: what a crash costs",
        ),
    ]
    for name in ("prepare", "finish"):
        stage = getattr(cluster, name)
        width = max(1, int(free // stage.num_cpus))
        why = (
            f"({have.cpus:g} CPUs - {taken:g} of engines) / cluster.{name}.num_cpus "
            f"{stage.num_cpus:g}, shared with the other stage; Ray takes what it needs"
        )
        if stage.concurrency and stage.concurrency <= width:
            width, why = stage.concurrency, f"cluster.{name}.concurrency"
        found.append(Figure(f"{name} tasks", f"up to {width}", why))
    return found


def _span(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
