"""Estimates the GPU memory of a model from its config.json, without a GPU or the weights.

Engines that share a GPU each need a fixed KV cache: otherwise vLLM measures free memory while the
others are allocating, and dies with "No available memory for the cache blocks".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model.arguments import EngineArguments
from prefect_raybatch.model.context import ModelConfig, own_context, text_part
from prefect_raybatch.spec.engine import EngineFields

FIXED = int(2.5 * 2**30)  # bytes an engine: CUDA context, graphs, NCCL and workspaces
LEAST_FIXED = 1 << 30  # bytes that every engine needs beside weights, activations and cache
LEAST_KV = 1 << 29  # bytes of KV cache, below which an engine does not fit
CACHE_BLOCK = 16  # tokens per block of vLLM's KV cache by default: only whole blocks are shared
KV_CACHE_BYTES = "kv_cache_memory_bytes"
_BYTES = {"float32": 4, "float": 4, "float8_e4m3fn": 1, "fp8": 1}
# Bits per weight, including the scales and zeros of groups of 128 weights.
_METHODS = {"fp8": 8, "modelopt": 8, "mxfp4": 4.25, "awq": 4.2, "gptq": 4.2, "bitsandbytes": 4.2}


@dataclass(frozen=True)
class Model:
    """Sizes of a model.

    `params` counts all parameters, `active` those used for one token. `weights` are bytes as
    loaded. `context` is the default context length in tokens, or None.

    Some layers attend to all tokens, others only to the last `window`. `kv_full` and `kv_window`
    are the bytes of KV cache per token, summed over all layers of the first kind and of the second.
    `attention` and `attention_window` are the FLOPs for each pair of a token and a token that it
    attends to, summed in the same way.

    vLLM reserves memory for LoRA adapters. `adapters_whole` bytes of it are needed in full on each
    GPU of a tensor parallel group; `adapters_split` bytes are divided among these GPUs. Both are
    sums over all layers.

    `looked_up` is the bytes of the embeddings of which a step reads only one row per token. `fp8`:
    weights and activations are multiplied as fp8.
    """

    params: float
    active: float
    weights: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    kv_full: int
    kv_window: int
    window: int
    context: int | None
    adapters_whole: int = 0
    adapters_split: int = 0
    attention: float = 0.0
    attention_window: float = 0.0
    looked_up: int = 0
    fp8: bool = False

    @property
    def sparse(self) -> bool:
        """Return whether the model is a mixture of experts."""
        embeddings = self.vocab * self.hidden
        return self.params - self.active > 1.01 * embeddings  # a dense model looks up at most these

    def adapters(self, tensor: int = 1, pipeline: int = 1) -> int:
        """Return the bytes reserved for LoRA adapters on one of tensor * pipeline GPUs.

        `tensor` and `pipeline` are the parallel sizes.
        """
        return math.ceil((self.adapters_whole + self.adapters_split / tensor) / pipeline)

    def kv_bytes(self, tokens: int, tensor: int = 1, pipeline: int = 1) -> int:
        """Return the KV cache bytes of a sequence of `tokens` on one of tensor * pipeline GPUs.

        `tensor` and `pipeline` are the parallel sizes.
        """
        whole = self.kv_full * tokens + self.kv_window * min(tokens, self.window)
        return math.ceil(whole / min(tensor, self.kv_heads) / pipeline)

    def working(self, batched: int, seqs: int, fixed: int = FIXED, tensor: int = 1) -> int:
        """Return the bytes of working memory of a step on one of `tensor` GPUs.

        These are the activations of `batched` tokens, the logits of `seqs` sequences in float32
        (three copies while sampling), and `fixed` bytes for the CUDA context, graphs and
        workspaces.
        """
        width = 4 * self.hidden + 3 * self.intermediate / tensor
        return int(batched * width * 2 + 3 * 4 * seqs * self.vocab / tensor + fixed)


@dataclass(frozen=True)
class Estimate:
    """The memory that one engine takes of its GPU, in bytes.

    `working` are activations, logits and a fixed part.
    """

    weights: int
    working: int
    kv_cache: int


@dataclass(frozen=True)
class Precision:
    """Data types of weights and KV cache, as far as an engine's arguments set them."""

    dtype: str
    quantization: str
    kv_cache_dtype: str

    @classmethod
    def of(cls, arguments: EngineFields) -> Precision:
        """Return the data types that engine arguments set.

        A dtype that the arguments do not set is "auto"; an unset quantization is the text "None".
        """
        return cls(
            dtype=str(arguments.get("dtype") or "auto"),
            quantization=str(arguments.get("quantization")),
            kv_cache_dtype=str(arguments.get("kv_cache_dtype") or "auto"),
        )


def describe(config: ModelConfig, arguments: EngineFields, stored: int | None = None) -> Model:
    """Return the sizes of a model from its config.json.

    `arguments` are the engine's (`Precision` and LoRA settings matter), `stored` the bytes of the
    weight files, None if unknown. Raises `ConfigError` for a config without the needed sizes.
    """
    text = text_part(config)
    _check_sizes(text)
    heads = text["num_attention_heads"]
    layers, embeddings, active = _parameters(text)
    precision = Precision.of(arguments)
    kept = _kept_bytes(text, precision)
    full, windowed = _layers(text)
    latent = text.get("kv_lora_rank")
    whole, split = _adapters(text, arguments)
    values = _attended(text)
    stored_as = str((text.get("quantization_config") or {}).get("quant_method"))
    tied = text.get("tie_word_embeddings")
    return Model(
        params=layers + embeddings,
        active=active,
        weights=_weights(text, precision, layers, embeddings, stored),
        hidden=text["hidden_size"],
        intermediate=text.get("intermediate_size") or text["moe_intermediate_size"],
        vocab=text["vocab_size"],
        heads=heads,
        # A latent cache is the same for all heads, so that each GPU holds it whole.
        kv_heads=1 if latent else text.get("num_key_value_heads") or heads,
        kv_full=int(full * kept),
        kv_window=int(windowed * kept),
        window=text.get("sliding_window") or 0,
        context=own_context(config, arguments),
        adapters_whole=whole,
        adapters_split=split,
        attention=2.0 * values[0],
        attention_window=2.0 * values[1],
        looked_up=0 if tied else int(embeddings / 2 * _loaded_bytes(text, precision)),
        fp8="fp8" in (precision.quantization.split("_")[0], stored_as),
    )


def _check_sizes(text: ModelConfig) -> None:
    """Raise `ConfigError` for a config from which no memory can be estimated."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in names if not text.get(name)]
    if not (text.get("intermediate_size") or text.get("moe_intermediate_size")):
        missing.append("intermediate_size")
    if any(name.startswith(("mamba_", "ssm_")) for name in text):
        missing.append("plain attention layers")
    if missing:
        raise ConfigError(
            f"engine.model: config.json has no {', '.join(missing)}, so its memory cannot be "
            "estimated. Set engine.kv_cache_memory_bytes"
        )


def share(model: Model, arguments: EngineArguments, gpu_bytes: int, engines: int) -> Estimate:
    """Return the memory that each of `engines` on one GPU takes.

    Together the engines take the share `gpu_memory_utilization` of the GPU; what weights, adapters
    and working memory leave of that share is KV cache. Raises `ConfigError` if the engines do not
    fit.
    """
    own = arguments.usable * gpu_bytes / engines
    working = model.working(arguments.max_num_batched_tokens, arguments.max_num_seqs)
    adapters = model.adapters()
    left = math.floor(own - model.weights - adapters - working)
    if left < LEAST_KV:
        room = f", {gib(adapters)} for adapters" if adapters else ""
        raise ConfigError(
            f"engine.engines_per_gpu: {engines} engines do not fit on a GPU of {gib(gpu_bytes)}: "
            f"each needs {gib(model.weights)} for weights{room} and {gib(working)} of working "
            f"memory, but its share is {gib(own)}. Lower engine.engines_per_gpu or "
            "engine.max_num_batched_tokens"
        )
    return Estimate(model.weights, working, left)


def packed(
    model: Model, arguments: EngineArguments, gpu_bytes: int, engines: int
) -> dict[str, Any]:
    """Return the engine arguments that limit each of `engines` on a GPU to an equal share of it.

    They set the bytes of the KV cache. If the job sets `kv_cache_memory_bytes`, this is used for
    each engine instead of the computed number.
    """
    cache = arguments.kv_cache_bytes or share(model, arguments, gpu_bytes, engines).kv_cache
    return {
        # vLLM refuses to start if less than this is free, even if the other engines hold the rest.
        "gpu_memory_utilization": math.floor(1000 * arguments.usable / engines) / 1000,
        KV_CACHE_BYTES: cache,
    }


def gib(size: float) -> str:
    """Return a size in GiB for display."""
    return f"{size / 2**30:.1f} GiB"


def experts_of(config: ModelConfig) -> int:
    """Return the number of experts per layer by config.json; 0 for a dense model."""
    text = text_part(config)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return int(next((text[name] for name in names if text.get(name)), 0))


def _parameters(text: ModelConfig) -> tuple[float, float, float]:
    """Return three numbers of parameters: in all layers, in the embeddings, and used for one token.

    The embeddings include the output head. For one token, a model of experts uses only some of
    them. Of the embeddings, the output head is counted as used, but not the lookup of one row.
    """
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    dense = text.get("intermediate_size") or 0
    experts = experts_of(text)
    sparse = 0
    if experts:
        sparse = layers // (text.get("interleave_moe_layer_step") or 1)
        sparse -= text.get("first_k_dense_replace") or len(text.get("mlp_only_layers") or ())
        dense = text.get("intermediate_size_mlp") or dense
    expert = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
    common = text.get("shared_expert_intermediate_size") or (
        (text.get("n_shared_experts") or 0) * expert
    )
    chosen = text.get("num_experts_per_tok") or 1
    attention = layers * _attention(text) + 3 * hidden * dense * (layers - sparse)
    common_part = sparse * hidden * (3 * common + experts)
    one = sparse * 3 * hidden * expert
    head = text["vocab_size"] * hidden
    return (
        attention + common_part + one * experts,
        head * (1 if text.get("tie_word_embeddings") else 2),
        attention + common_part + one * min(chosen, experts) + head,
    )


def _adapters(text: ModelConfig, arguments: EngineFields) -> tuple[int, int]:
    """Return (`adapters_whole`, `adapters_split`) of `Model`: bytes for LoRA adapters.

    vLLM reserves the memory when it starts, for the largest adapters possible: `max_loras` adapters
    of rank `max_lora_rank`, each with both matrices for every linear layer and for the embeddings.
    The adapters' real sizes do not matter.
    """
    if not arguments.get("enable_lora"):
        return 0, 0
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    size = text.get("head_dim") or hidden // heads
    queries, keys = heads * size, (text.get("num_key_value_heads") or heads) * size
    inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    experts = next((text[n] for n in ("num_local_experts", "num_experts") if text.get(n)), 1)
    # Splitting a layer by its outputs splits the second matrix; by its inputs, the first.
    whole = 3 * hidden + hidden + experts * (2 * hidden + hidden)
    split = queries + 2 * keys + queries + experts * 3 * inner
    layers, ends = text["num_hidden_layers"], 2 * (hidden + text["vocab_size"])
    kept = _loaded_bytes(text, Precision.of(arguments))
    one = kept * int(arguments.get("max_loras") or 1) * int(arguments.get("max_lora_rank") or 16)
    return one * (layers * whole + ends), one * layers * split


def _attention(text: ModelConfig) -> float:
    """Return the number of parameters in the attention of one layer."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    latent = text.get("kv_lora_rank")
    if latent:
        nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
        query, value = heads * (nope + rope), text["v_head_dim"]
        rank = text.get("q_lora_rank")
        asked = rank * (hidden + query) if rank else hidden * query
        kept = hidden * (latent + rope) + latent * heads * (nope + value)
        return float(asked + kept + heads * value * hidden)
    size = text.get("head_dim") or hidden // heads
    return float(hidden * size * 2 * (heads + (text.get("num_key_value_heads") or heads)))


def _layers(text: ModelConfig) -> tuple[int, int]:
    """Return the number of values per token in the KV cache, for two groups of layers.

    The groups are all layers that keep all tokens, and all layers with a sliding window.
    """
    heads = text["num_attention_heads"]
    size = text.get("head_dim") or text["hidden_size"] // heads
    one = 2 * (text.get("num_key_value_heads") or heads) * size
    if text.get("kv_lora_rank"):
        one = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    full, windowed = _kinds(text)
    return one * full, one * windowed


def _kinds(text: ModelConfig) -> tuple[int, int]:
    """Return the number of layers that keep all tokens, and of layers with a sliding window."""
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    windowed = kinds.count("sliding_attention") if text.get("sliding_window") else 0
    return len(kinds) - windowed - kinds.count("linear_attention"), windowed


def _attended(text: ModelConfig) -> tuple[int, int]:
    """Return how many multiplications attention takes for a token and one token that it attends to.

    Returns two numbers: the sum over layers that keep all tokens, and over layers with a sliding
    window. Counts products of queries with keys and of attention weights with values, over all
    heads.
    """
    heads = text["num_attention_heads"]
    size = text.get("head_dim") or text["hidden_size"] // heads
    one = 2 * heads * size
    if text.get("kv_lora_rank"):
        one = heads * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"])
    full, windowed = _kinds(text)
    return one * full, one * windowed


def _weights(
    text: ModelConfig,
    precision: Precision,
    layers: float,
    embeddings: float,
    stored: int | None,
) -> int:
    loaded = _loaded_bytes(text, precision)
    bits = _quantized_bits(text.get("quantization_config") or {})
    if stored and bits:
        return stored
    wanted = _METHODS.get(precision.quantization.split("_")[0])
    if stored and not wanted:
        return int(stored * loaded / _BYTES.get(_dtype(text), 2))
    return int(layers * (bits or wanted or 8 * loaded) / 8 + embeddings * loaded)


def _quantized_bits(quantization: ModelConfig) -> float | None:
    """Return the bits per weight by `quantization_config` of config.json.

    Returns None if the model is not quantized, or by an unknown method.
    """
    method = str(quantization.get("quant_method") or "")
    if not method:
        return None
    groups = quantization.get("config_groups") or {}
    for group in groups.values():
        bits = (group.get("weights") or {}).get("num_bits")
        if bits:
            return float(bits) if bits >= 8 else bits + 0.2
    if method == "bitsandbytes" and not quantization.get("load_in_4bit"):
        return 8.0
    bits = quantization.get("bits") or quantization.get("w_bit")
    if bits:
        return float(bits) if bits >= 8 else bits + 0.2
    return _METHODS.get(method)


def _dtype(text: ModelConfig) -> str:
    return str(text.get("dtype") or text.get("torch_dtype"))


def _loaded_bytes(text: ModelConfig, precision: Precision) -> int:
    """Return the bytes per loaded weight.

    Weights that are stored in float32 are loaded in 16 bits, unless the job sets the dtype.
    """
    if precision.dtype != "auto":
        return _BYTES.get(precision.dtype, 2)
    return min(_BYTES.get(_dtype(text), 2), 2)


def _kept_bytes(text: ModelConfig, precision: Precision) -> int:
    """Return the bytes per value in the KV cache."""
    fp8 = precision.kv_cache_dtype.startswith("fp8")
    return 1 if fp8 else max(2, _loaded_bytes(text, precision))
