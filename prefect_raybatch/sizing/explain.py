"""Describes every size of a run and the reason for it, for people. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_raybatch.job.engine import TRY_FP8
from prefect_raybatch.job.secrets import recorded_endpoint
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import Model, gib
from prefect_raybatch.sizing.agreement import CONFIDENCE, bonferroni_confidence, sample_size
from prefect_raybatch.sizing.fit import Fit
from prefect_raybatch.sizing.sizes import BATCHED, Capacity, Sizing
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.engine import EngineSpec, ModelRequest
from prefect_raybatch.spec.sizes import SizeSpec
from prefect_raybatch.words import counted, money

_ALL = "all shards of the run"


@dataclass(frozen=True)
class Figure:
    """A size of a run as text, and the reason for its value."""

    name: str
    value: str
    why: str


def figures(
    spec: SizeSpec,
    engine: EngineSpec,
    cluster: ClusterSpec,
    capacity: Capacity,
    size: Sizing,
    model: Model | None,
    least: float,
) -> list[Figure]:
    """Return all sizes of a run, each after the sizes that it depends on.

    `least` is limits.min_agreement: the share of answers that must agree if a trial decides on the
    precision.
    """
    return [
        *_engine_figures(spec, engine.model, capacity, size, model, cluster.prices.currency),
        *_precision(engine.tries, least),
        Figure("rows a shard", f"{size.rows_per_shard:,}", size.rows_why),
        *_stage_figures(spec, engine.model, cluster, capacity, size),
    ]


def _precision(tries: Sequence[Mapping[str, str]], least: float) -> list[Figure]:
    """Return [figure on the precision that a trial (`try-fp8`) will choose]; [] without a trial."""
    if not tries:
        return []
    rows = sample_size(least, bonferroni_confidence(len(tries)))
    why = (
        f"{TRY_FP8}: before the first commit, up to {rows:,} sampled rows are answered as stored "
        f"and in fp8, which is used if {least:.4g} of the answers agree, with "
        f"{CONFIDENCE:.0%} confidence (limits.min_agreement). Sizes are without fp8"
    )
    return [Figure("precision", f"fp8 {' and '.join(tries[0])}, or as stored", why)]


def _step_why(spec: SizeSpec, device: str, arguments: EngineArguments) -> str:
    """Return the reason for the number of tokens per engine step."""
    step, usual = arguments.max_num_batched_tokens, BATCHED[device][0]
    if spec.max_num_batched_tokens:
        return "engine.max_num_batched_tokens"
    if step > usual and step == arguments.max_num_seqs:
        return "engine.max_num_seqs, since each takes a token of a step"
    if step > usual:
        return "the context length, since engine.enable_chunked_prefill is false"
    fewer = ", fewer if they would leave too little KV cache" if step < usual else ""
    return f"{usual} on a {device.upper()}{fewer}"


def _engine_figures(
    spec: SizeSpec,
    request: ModelRequest,
    capacity: Capacity,
    size: Sizing,
    model: Model | None,
    currency: str,
) -> list[Figure]:
    pool, arguments = size.pool, size.arguments
    if (hosted := request.endpoint) is not None:
        return [
            Figure("hosted model", hosted.model, f"at {recorded_endpoint(hosted.url)}"),
            Figure("workers", _span(pool.replicas), pool.replicas_why),
            _in_flight(hosted, size),
            *_limits_and_prices(hosted, currency),
        ]
    gpu = pool.device == "gpu"
    where = f"the cluster has {counted(capacity.gpus, 'GPU')}"
    shown = [
        Figure("device", pool.device, "engine.device" if spec.device != "auto" else where),
        Figure("replicas", _span(pool.replicas), pool.replicas_why),
    ]
    if gpu:
        parallel = f"tensor {spec.tensor} * pipeline {spec.pipeline}"
        shown += [
            Figure("GPUs", _span(pool.gpus), f"replicas * {parallel}"),
            Figure("engines a GPU", str(pool.engines_per_gpu), pool.packing_why),
        ]
    batched, seqs = arguments.max_num_batched_tokens, arguments.max_num_seqs
    shown += [
        Figure("engines", _span((pool.fewest, pool.engines)), "replicas * engines a GPU"),
        Figure("max_num_seqs", str(seqs), size.sequences_why),
        Figure("max_num_batched_tokens", str(batched), _step_why(spec, pool.device, arguments)),
        Figure(
            "max_model_len",
            str(size.length or "the model's"),
            "engine.max_model_len"
            if spec.context or request.context_auto
            else "the model's config.json",
        ),
        _kv_figure(request.env, size, model),
    ]
    return shown


def _in_flight(hosted: EndpointSpec, size: Sizing) -> Figure:
    if not hosted.batch:
        return Figure("requests in flight", f"up to {hosted.max_in_flight:,}", "of all workers")
    batches = min(size.shards, size.concurrent * size.pool.engines)
    why = "a shard each, answered within 24 hours (engine.endpoint.batch)"
    return Figure("batches at once", f"{batches:,} of {size.shards:,}", why)


def _limits_and_prices(hosted: EndpointSpec, currency: str) -> list[Figure]:
    limits = {"requests": hosted.requests_per_minute, "tokens": hosted.tokens_per_minute}
    if hosted.batch:
        del limits["tokens"]  # of the calls about batches, which have no tokens
    shown = [
        Figure(
            f"{name} per minute",
            "no limit" if limit is None else f"{limit:,}",
            f"engine.endpoint.{name}_per_minute",
        )
        for name, limit in limits.items()
    ]
    if hosted.price_in is None and hosted.price_out is None:
        return [*shown, Figure("prices", "unknown", "engine.endpoint.price_in and price_out")]
    prices = (hosted.price_in or 0.0, hosted.price_out or 0.0)
    value = " and ".join(money(price, currency) for price in prices)
    why = "per million prompt tokens and answer tokens (engine.endpoint.price_in, price_out)"
    return [*shown, Figure("prices", value, why)]


def _kv_figure(env: Mapping[str, str], size: Sizing, model: Model | None) -> Figure:
    pool, name = size.pool, "KV cache an engine"
    if pool.device == "cpu":
        space = env.get("VLLM_CPU_KVCACHE_SPACE", "1")
        return Figure(name, f"{space} GiB", "VLLM_CPU_KVCACHE_SPACE, 1 unless set")
    given = EngineArguments.of({**size.arguments.vllm(), **size.share})
    if model is None or not pool.gpu_bytes:
        if given.kv_cache_bytes:
            return Figure(name, gib(given.kv_cache_bytes), "engine.kv_cache_memory_bytes")
        why = "vLLM measures free memory; the size of the model or of the GPU is unknown"
        return Figure(name, "unknown", why)
    fit = Fit(model, given, pool.gpu_bytes)
    adapters = f"{gib(fit.adapters)} for LoRA adapters - " if fit.adapters else ""
    why = (
        f"{gib(fit.room)} of {pool.kind} - weights {gib(fit.weights)} - {adapters}"
        f"{gib(fit.working)} working memory: about {fit.tokens_held:,} tokens"
    )
    return Figure(name, gib(fit.cache), why if given.kv_cache_bytes else f"{why}; vLLM measures it")


def _stage_figures(
    spec: SizeSpec, request: ModelRequest, cluster: ClusterSpec, capacity: Capacity, size: Sizing
) -> list[Figure]:
    calls, engines = size.concurrent, counted(size.pool.engines, "engine")
    taken = size.pool.fewest * spec.cpus
    free = max(0.0, capacity.cpus - taken)
    rule = "engine.max_concurrent_batches" if spec.max_concurrent_batches else size.concurrent_why

    def capped(name: str, number: int, why: str) -> Figure:
        """Return a figure that counts shards: `number`, or all shards if the run has fewer."""
        return Figure(name, str(min(number, size.shards)), why if number <= size.shards else _ALL)

    found = [
        Figure("batch_size", str(spec.batch_size), "engine.batch_size: minimum rows per shard"),
        capped("max_concurrent_batches", calls, rule),
        capped("tasks in flight an engine", calls + 1, "one more waits in its queue"),
        capped(
            "uncommitted shards",
            size.uncommitted,
            f"2 * {engines} * {calls + 1}, at most: {_after_crash(request.endpoint)}",
        ),
    ]
    for name in ("prepare", "finish"):
        stage = getattr(cluster, name)
        width = max(1, int(free // stage.num_cpus))
        why = (
            f"({capacity.cpus:g} CPUs - {taken:g} for engines) / cluster.{name}.num_cpus "
            f"{stage.num_cpus:g}, shared with the other stage; Ray uses what it needs"
        )
        if stage.concurrency and stage.concurrency <= width:
            width, why = stage.concurrency, f"cluster.{name}.concurrency"
        found.append(Figure(f"{name} tasks", f"up to {width}", why))
    return found


def _after_crash(hosted: EndpointSpec | None) -> str:
    """Return a text on what happens to uncommitted shards after a crash."""
    if hosted is None:
        return "lost if the run crashes"
    if hosted.batch:
        return "after a crash, the continued run takes their batches over"
    return "after a crash, their answers are in the journal, except for the last second"


def _span(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"
