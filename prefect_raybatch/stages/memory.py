"""What an engine takes of a GPU, estimated from the model's own files: no GPU is touched.

Engines that share a GPU each need a fixed KV cache: left to itself, vLLM measures what is free
while the others are allocating, and dies with "No available memory for the cache blocks".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_raybatch.errors import ConfigError

USABLE = 0.92  # of a GPU, shared by its engines; the rest is the driver's and fragmentation
FIXED = 2.5 * 2**30  # bytes an engine: CUDA context, graphs, NCCL and workspaces
LEAST_KV = 0.5 * 2**30
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "fp8": 1}


@dataclass(frozen=True)
class Estimate:
    """Bytes of one engine: weights, activations and fixed part (`working`), KV cache."""

    weights: int
    working: int
    kv_cache: int


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files; without any (dummy weights), of a dense Llama of those sizes."""
    for pattern in WEIGHTS:
        found = sum(file.stat().st_size for file in folder.glob(pattern))
        if found:
            return found
    config = _config(folder)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return (layers * (attention + mlp) + embeddings) * _dtype_bytes(config)


def kv_token_bytes(folder: Path) -> int:
    """Bytes of KV cache a token: 2 (key and value) * layers * KV heads * head size * dtype."""
    config = _config(folder)
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return int(2 * config["num_hidden_layers"] * kv_heads * head * _dtype_bytes(config))


def working_bytes(folder: Path, batched_tokens: int, max_num_seqs: int) -> int:
    """Activations of a step of `batched_tokens` tokens, the logits of `max_num_seqs` rows in
    float32 (three copies while sampling), and the fixed part."""
    config = _config(folder)
    width = 4 * config["hidden_size"] + 3 * config["intermediate_size"]
    logits = 3 * 4 * max_num_seqs * config["vocab_size"]
    return int(batched_tokens * width * 2 + logits + FIXED)


def share(folder: Path, arguments: Mapping[str, Any], gpu_bytes: int, engines: int) -> Estimate:
    """What each of `engines` on a GPU of `gpu_bytes` takes; `ConfigError` when it does not fit."""
    own = USABLE * gpu_bytes / engines
    weights = weight_bytes(folder)
    working = working_bytes(
        folder, int(arguments["max_num_batched_tokens"]), int(arguments["max_num_seqs"])
    )
    left = math.floor(own - weights - working)
    if left < LEAST_KV:
        raise ConfigError(
            f"engine.engines_per_gpu: {engines} engines do not fit on a GPU of {_gib(gpu_bytes)}: "
            f"each takes {_gib(weights)} of weights and {_gib(working)} to work with, of its share "
            f"of {_gib(own)}; lower engine.engines_per_gpu or engine.max_num_batched_tokens"
        )
    return Estimate(weights, working, left)


def packed(
    folder: Path, arguments: Mapping[str, Any], gpu_bytes: int, engines: int
) -> dict[str, Any]:
    """Engine arguments for one of `engines` on a GPU; what the job gives itself stays."""
    found = share(folder, arguments, gpu_bytes, engines)
    return {
        "kv_cache_memory_bytes": found.kv_cache,
        # vLLM refuses to start with less than this free, also when the others are there already.
        "gpu_memory_utilization": round(USABLE / engines, 3),
        **arguments,
    }


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.model: {folder}/config.json is not readable: {error}") from None
    config = config.get("text_config") or config
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in (*names, "intermediate_size") if not config.get(name)]
    if missing:
        raise ConfigError(
            f"engine.model: config.json has no {', '.join(missing)}, so its memory cannot be "
            "estimated; set engine.kv_cache_memory_bytes"
        )
    return dict(config)


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    return _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
