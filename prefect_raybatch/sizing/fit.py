"""Whether a model fits on its GPUs, told before one starts, and what would make it fit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_raybatch.errors import InsufficientResources
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.model.memory import LEAST_FIXED, USABLE, Model, gib
from prefect_raybatch.sizing.cards import CARDS, GB, without_nvlink

LITTLE = 0.05
SHARES = (2, 4, 8)  # GPUs of one node that may share a model


def usable(arguments: Mapping[str, Any], gpu_bytes: int) -> float:
    """Bytes of a GPU that engines may take."""
    return float(arguments.get("gpu_memory_utilization") or USABLE) * gpu_bytes


def least(
    model: Model, arguments: Mapping[str, Any], length: int, tensor: int, pipeline: int
) -> int:
    """Bytes of a GPU without which an engine cannot start: its part of the weights, a step's
    activations, and KV cache for one sequence of `length` tokens. Less than it will really take."""
    offloaded = float(arguments.get("cpu_offload_gb") or 0) * 2**30
    weights = max(0.0, model.weights / tensor / pipeline - offloaded)
    working = model.working(
        min(int(arguments["max_num_batched_tokens"]), 2048), 1, LEAST_FIXED, tensor
    )
    return int(weights + working + model.kv_bytes(length, tensor, pipeline))


def check_memory(
    job: BatchJob,
    model: Model,
    arguments: Mapping[str, Any],
    gpu_bytes: int,
    kind: str,
    length: int | None,
) -> None:
    """Raises `InsufficientResources` with the figures and what would make the model fit, when one
    engine cannot start on GPUs of that memory. `length` is the context length in tokens."""
    tensor, pipeline = (
        int(arguments["tensor_parallel_size"]),
        int(arguments["pipeline_parallel_size"]),
    )
    tokens = length or 0
    room = usable(arguments, gpu_bytes)
    need = least(model, arguments, tokens, tensor, pipeline)
    if need <= room:
        return
    parts = tensor * pipeline
    share = f"a share of 1/{parts} of {job.engine.model}" if parts > 1 else job.engine.model
    cache = model.kv_bytes(tokens, tensor, pipeline)
    remedies = _remedies(model, arguments, room, tokens, tensor, pipeline)
    raise InsufficientResources(
        f"engine.model: {share} does not fit on {kind} of {gib(gpu_bytes)}: weights "
        f"{gib(model.weights / parts)}, {gib(cache)} of KV cache for one sequence of {tokens:,} "
        f"tokens, {gib(need - model.weights / parts - cache)} to work; {gib(room)} may be taken. "
        f"It would fit with {' or with '.join(remedies)}"
    )


def _remedies(
    model: Model,
    arguments: Mapping[str, Any],
    room: float,
    tokens: int,
    tensor: int,
    pipeline: int,
) -> list[str]:
    found = []
    for wider in SHARES:
        if wider <= tensor or model.heads % wider:
            continue
        if least(model, arguments, tokens, wider, pipeline) <= room:
            found.append(f"engine.tensor_parallel_size {wider}")
            break
    short = _length(model, arguments, room, tensor, pipeline)
    if short and short < tokens:
        found.append(f"engine.max_model_len {short}")
    stored = model.weights / tensor / pipeline
    others = least(model, arguments, tokens, tensor, pipeline) - stored
    loaded = model.weights / model.params  # bytes a parameter
    for bits, text in ((8, "fp8"), (4.2, "4-bit")):
        part = bits / 8 / loaded
        if part < 1 and others + part * stored <= room:
            found.append(f"a model quantized to {text}")
            break
    need = least(model, arguments, tokens, tensor, pipeline)
    share = room and need / (float(arguments.get("gpu_memory_utilization") or USABLE))
    larger = [card for card in CARDS.values() if card.memory >= share]
    if larger:
        smallest = min(larger, key=lambda card: card.memory)
        found.append(f"GPUs of {smallest.memory // GB} GB, such as {smallest.name}")
    return found or ["more GPUs: raise engine.tensor_parallel_size and pipeline_parallel_size"]


def cache_left(model: Model, arguments: Mapping[str, Any], room: float) -> float:
    """Bytes that are likely to be left for the KV cache of an engine alone on its GPUs."""
    tensor, pipeline = arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]
    batched, seqs = arguments["max_num_batched_tokens"], arguments["max_num_seqs"]
    offloaded = float(arguments.get("cpu_offload_gb") or 0) * 2**30
    weights = max(0.0, float(model.weights / tensor / pipeline) - offloaded)
    return max(0.0, room - weights - model.working(batched, seqs, tensor=tensor))


def rows_held(model: Model, arguments: Mapping[str, Any], gpu_bytes: int, tokens: int) -> int:
    """Rows of so many tokens that the KV cache of an engine alone on its GPUs is likely to hold."""
    tensor, pipeline = arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]
    left = cache_left(model, arguments, usable(arguments, gpu_bytes))
    cache = float(arguments.get("kv_cache_memory_bytes") or left)
    return int(cache // max(1, model.kv_bytes(tokens, tensor, pipeline)))


def step_tokens(
    model: Model, arguments: Mapping[str, Any], gpu_bytes: int, row: int, steps: tuple[int, ...]
) -> int:
    """The most of `steps`, tokens in one engine step (descending), that leaves room in the KV cache
    for `max_num_seqs` rows of so many tokens, or whose activations are too small a part of the GPU
    to matter; the least where none does."""
    tensor, little = arguments["tensor_parallel_size"], LITTLE * usable(arguments, gpu_bytes)
    for tokens in steps:
        asked = {**arguments, "max_num_batched_tokens": tokens}
        if rows_held(model, asked, gpu_bytes, row) >= arguments["max_num_seqs"]:
            return tokens
        if model.working(tokens, 0, 0, tensor) <= little:
            return tokens
    return steps[-1]


def cramped(model: Model, arguments: Mapping[str, Any], gpu_bytes: int, row: int) -> list[str]:
    """A warning where the KV cache is likely to be too small for the rows at once."""
    seqs, held = arguments["max_num_seqs"], rows_held(model, arguments, gpu_bytes, row)
    if held >= seqs:
        return []
    return [
        f"the KV cache is likely to have room for {held} rows of about {row} tokens, not for "
        f"max_num_seqs {seqs}: rows will wait or be computed twice; lower engine.max_num_seqs or "
        "engine.max_num_batched_tokens, or give the model more memory"
    ]


def over_pcie(tensor: int, kind: str) -> list[str]:
    """A warning where GPUs that share each layer have no NVLink between them."""
    if tensor == 1 or not kind or not without_nvlink(kind):
        return []
    return [
        f"tensor_parallel_size {tensor} on {kind}: these cards talk over PCIe alone, which costs "
        "far more in each layer than the cards bring; set engine.pipeline_parallel_size instead, "
        "or take a quantized model that fits on one"
    ]


def _length(
    model: Model, arguments: Mapping[str, Any], room: float, tensor: int, pipeline: int
) -> int:
    """The longest sequence, in steps of 256 tokens, for which the cache is likely to have room."""
    far = 1 << 20  # where layers that keep a window alone no longer count
    one = model.kv_bytes(far, tensor, pipeline) / far
    return int(cache_left(model, arguments, room) / one) // 256 * 256 if one else 0
