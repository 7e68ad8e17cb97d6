"""Checks before engines start whether a model fits on its GPUs, and suggests changes. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from prefect_raybatch.errors import InsufficientResources
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.memory import LEAST_FIXED, Model, gib
from prefect_raybatch.sizing.cards import CARDS, GB, without_nvlink
from prefect_raybatch.sizing.cost import Tokens

LITTLE = 0.05
SHARES = (2, 4, 8)  # GPUs of one node that may share a model


@dataclass(frozen=True)
class Fit:
    """Memory that a model takes on each GPU of one engine that shares its GPUs with no other.

    `gpu_bytes` is the memory of one GPU; `length` is the context length in tokens, 0 if unknown.
    """

    model: Model
    arguments: EngineArguments
    gpu_bytes: int
    length: int = 0

    @property
    def parts(self) -> int:
        """Return the number of GPUs over which the model is split."""
        return self.arguments.tensor_parallel_size * self.arguments.pipeline_parallel_size

    @property
    def room(self) -> float:
        """Return how many bytes of each GPU the engine may take."""
        return self.arguments.usable * self.gpu_bytes

    @property
    def weights(self) -> float:
        """Return the bytes of weights on each GPU, without those offloaded to host memory."""
        return max(0.0, self.model.weights / self.parts - self.arguments.offloaded)

    @property
    def working(self) -> int:
        arguments = self.arguments
        return self.model.working(
            arguments.max_num_batched_tokens,
            arguments.max_num_seqs,
            tensor=arguments.tensor_parallel_size,
        )

    @property
    def adapters(self) -> int:
        """Return the bytes on each GPU that vLLM reserves for LoRA adapters."""
        arguments = self.arguments
        return self.model.adapters(arguments.tensor_parallel_size, arguments.pipeline_parallel_size)

    @property
    def cache(self) -> float:
        """Return the bytes of KV cache on each GPU: the job's value, else the free bytes."""
        return self.arguments.kv_cache_bytes or self.left

    @property
    def left(self) -> float:
        """Estimate the bytes on each GPU that are left for the KV cache."""
        return max(0.0, self.room - self.weights - self.adapters - self.working)

    @property
    def least(self) -> int:
        """Return the fewest bytes of each GPU with which the engine might start.

        Counts weights, adapters, the activations of a step, and KV cache for one sequence of
        `length`.
        """
        arguments = self.arguments
        working = self.model.working(
            min(arguments.max_num_batched_tokens, 2048),
            1,
            LEAST_FIXED,
            arguments.tensor_parallel_size,
        )
        return int(self.weights + self.adapters + working + self.kv_bytes(self.length))

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of KV cache that a sequence of `tokens` tokens takes on each GPU."""
        arguments = self.arguments
        return self.model.kv_bytes(
            tokens, arguments.tensor_parallel_size, arguments.pipeline_parallel_size
        )

    def rows_held(self, row: Tokens) -> int:
        """Estimate how many rows with the tokens of `row` the KV cache holds."""
        left = self.cache - self.kv_bytes(row.cached_once)
        return max(0, int(left // max(1, self.kv_bytes(row.cached_per_row()))))

    @property
    def tokens_held(self) -> int:
        """Estimate how many tokens the KV cache holds."""
        return int(self.cache // max(1, self.kv_bytes(1)))

    def with_arguments(self, **arguments: Any) -> Fit:
        """Return this fit with some engine arguments (name=value) changed."""
        return replace(self, arguments=replace(self.arguments, **arguments))


def check_memory(fit: Fit, name: str, kind: str) -> None:
    """Raise `InsufficientResources` if an engine cannot start on GPUs of this `kind` (GPU name).

    The message gives the figures and the changes with which the model `name` would fit.
    """
    if fit.least <= fit.room:
        return
    tokens = fit.length
    share = f"1/{fit.parts} of {name}" if fit.parts > 1 else name
    weights, cache = fit.model.weights / fit.parts, fit.kv_bytes(tokens)
    adapters = f"{gib(fit.adapters)} for adapters, " if fit.adapters else ""
    raise InsufficientResources(
        f"engine.model: {share} does not fit on {kind} of {gib(fit.gpu_bytes)}: "
        f"{gib(weights)} for weights, {adapters}{gib(cache)} of KV cache for one sequence of "
        f"{tokens:,} tokens and {gib(fit.least - weights - fit.adapters - cache)} of working "
        f"memory exceed the usable {gib(fit.room)}. It would fit with "
        f"{' or with '.join(_remedies(fit))}"
    )


def _remedies(fit: Fit) -> list[str]:
    model, tensor = fit.model, fit.arguments.tensor_parallel_size
    remedies = []
    for wider in SHARES:
        if wider <= tensor or model.heads % wider:
            continue
        if fit.with_arguments(tensor_parallel_size=wider).least <= fit.room:
            remedies.append(f"engine.tensor_parallel_size {wider}")
            break
    short = _length(fit)
    if short and short < fit.length:
        remedies.append(f"engine.max_model_len {short}")
    stored = model.weights / fit.parts
    others = fit.least - stored
    loaded = model.weights / model.params  # bytes a parameter
    for bits, text in ((8, "fp8"), (4.2, "4-bit")):
        part = bits / 8 / loaded
        if part < 1 and others + part * stored <= fit.room:
            remedies.append(f"a model quantized to {text}")
            break
    share = fit.room and fit.least / fit.arguments.usable
    larger = [card for card in CARDS.values() if card.memory >= share]
    if larger:
        smallest = min(larger, key=lambda card: card.memory)
        remedies.append(f"GPUs of {smallest.memory // GB} GB, such as {smallest.name}")
    return remedies or ["more GPUs: raise engine.tensor_parallel_size and pipeline_parallel_size"]


def _length(fit: Fit) -> int:
    """Return the longest sequence, in tokens, that the KV cache probably holds.

    The number is a multiple of 256. Returns 0 if a sequence takes no KV cache.
    """
    far = 1 << 20  # context from which layers with a sliding window no longer count
    one = fit.kv_bytes(far) / far
    return int(fit.left / one) // 256 * 256 if one else 0


def step_tokens(fit: Fit, row: Tokens, steps: tuple[int, ...]) -> int:
    """Return the largest of `steps` (tokens per engine step, in descending order) that fits.

    A value fits if the KV cache then still holds `max_num_seqs` rows like `row`, each with its own
    copy of the shared prefix, or if the activations of a step take at most 5 % of the usable
    memory. Returns the smallest value if none fits.
    """
    for tokens in steps:
        asked = fit.with_arguments(max_num_batched_tokens=tokens)
        if asked.cache >= fit.arguments.max_num_seqs * asked.kv_bytes(row.typical):
            return tokens
        activations = fit.model.working(tokens, 0, 0, fit.arguments.tensor_parallel_size)
        if activations <= LITTLE * fit.room:
            return tokens
    return steps[-1]


def cramped(fit: Fit, row: Tokens) -> list[str]:
    """Return [warning] if the KV cache probably holds fewer than `max_num_seqs` rows, else []."""
    seqs, held = fit.arguments.max_num_seqs, fit.rows_held(row)
    if held >= seqs:
        return []
    return [
        f"the KV cache probably holds {held} rows of about {row.typical} tokens, fewer than "
        f"max_num_seqs {seqs}, so rows wait or are computed twice. Lower engine.max_num_seqs or "
        "engine.max_num_batched_tokens, or give the model more memory"
    ]


def over_pcie(tensor: int, kind: str) -> list[str]:
    """Return [warning] if the `tensor` GPUs that compute each layer together lack NVLink.

    Else returns []. `kind` is the GPU's name.
    """
    if tensor == 1 or not kind or not without_nvlink(kind):
        return []
    return [
        f"tensor_parallel_size {tensor} on {kind}: these cards only communicate over PCIe, which "
        "costs more time than the cards save. Set engine.pipeline_parallel_size instead, or use "
        "a quantized model that fits on one card"
    ]


def over_network(tensor: int, on_a_node: float) -> list[str]:
    """Return [warning] if the `tensor` GPUs that compute each layer together need several nodes.

    Else returns []. `on_a_node` is the most GPUs that a node has, 0 if unknown.
    """
    if not on_a_node or tensor <= on_a_node:
        return []
    return [
        f"tensor_parallel_size {tensor} over nodes of {on_a_node:g} GPUs: each layer waits for the "
        f"network. Set tensor_parallel_size {on_a_node:g} and pipeline_parallel_size "
        f"{tensor / on_a_node:g} or more"
    ]
