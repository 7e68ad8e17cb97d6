"""Checks before an engine starts, by the model's files, whether it can load and use the model.

An engine reports the same faults after a minute, on the GPU, once for each of its restarts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.model import adapters, tasks
from prefect_raybatch.model import pinned as models
from prefect_raybatch.model.context import ModelConfig, longest_context, own_context, text_part
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.request import ImageSpec, PromptSpec, SamplingSpec
from prefect_raybatch.storage import Store, is_remote

LONGER_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # vLLM accepts a longer context if it is set
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 100 << 20  # the most that safetensors itself accepts
# Values of engine.load_format with which vLLM reads weight files in the model's folder.
FROM_FILES = {None, "auto", "hf", "safetensors", "pt", "npcache", "mistral"}
# Begins of the names of architectures that vLLM runs as encoders.
ENCODERS = ("Bert", "ModernBert", "NomicBert", "Roberta", "XLMRoberta", "Gte", "BgeM3")
TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model"),
)


def check(
    request: ModelRequest,
    prompt: PromptSpec,
    sampling: SamplingSpec,
    model: models.PinnedModel,
    files: bool = True,
    step: int | None = None,
) -> None:
    """Raise `ConfigError` for a model that cannot do what the run asks of it.

    Checks that

    - the model can do the task, and accepts the images;
    - its context has room for the answer;
    - the token ids in sampling fields are in its vocabulary;
    - the adapters fit, and weights and tokenizer are there and complete.

    `model` is the result of `pinned.pin`. Weights and tokenizer of a
    model on Hugging Face are not checked. With `files` False, weights, tokenizer and adapters are
    not checked at all, e.g. to compute sizes for a cluster that the user only describes. `step` is
    the tokens per engine step that the job sets, None if it sets none.
    """
    source = str(model["source"])
    config, _ = models.read_config(model)
    tasks.check_can(request, source, config, prompt.paired)
    if prompt.images is not None:
        check_images(request, prompt.images, source, config)
    _check_length(request, config)
    if request.pools:
        _check_encoder_step(request, step, config)
    else:
        _check_room(request, 1 if sampling.fills_context else sampling.max_tokens, config)
        _check_vocabulary(request, sampling, config)
    if found := adapters.pin_adapters(request) if files else {}:
        adapters.check_adapters_fit(request, found, config)
    if not files:
        return
    if source == models.DEMO or is_remote(source) or Path(source).is_dir():
        _check_files(request, source, models.store_of(model))


def check_images(
    request: ModelRequest, images: ImageSpec, source: str, config: ModelConfig
) -> None:
    """Raise `ConfigError` for a model that accepts no images, or fewer than a row may have.

    If no vLLM is installed that knows the model's limits, nothing is raised. `source` names the
    model in errors.
    """
    names = tasks.architectures(tasks.overridden(request, config))
    shown = f"engine.model: {source} is {', '.join(names)}, which accepts"
    if any(name in (vllm_fields.text_models() or ()) for name in names):
        raise ConfigError(
            f"{shown} only text, but prompt.images sends images. Name a model that accepts them, "
            "such as Qwen2.5-VL, or remove prompt.images"
        )
    limits = vllm_fields.media_limits(names[0]) if names else None
    if limits is None:
        return
    if "image" not in limits:
        raise ConfigError(
            f"{shown} {' and '.join(sorted(limits)) or 'no media'}, but no images. Name another"
        )
    most = limits["image"]
    if most is not None and images.most > most:
        raise ConfigError(
            f"{shown} {most} image{'s' if most > 1 else ''} a request, but prompt.images.per_row "
            f"is {images.most}. Lower it, or name a model that accepts more"
        )


def _check_room(request: ModelRequest, max_tokens: int, config: ModelConfig) -> None:
    if request.context_auto:  # follows from the rows and leaves room for the answer
        return
    context, said = request.context, "engine.max_model_len"
    if context is None:
        context, said = own_context(config, request.vllm_arguments), "by the model's config.json"
    if context is None:
        return
    if max_tokens >= context:
        raise ConfigError(
            f"sampling.max_tokens: {max_tokens:,} leaves no room for a prompt, since prompt "
            f"and answer together have {context:,} tokens ({said}). Lower it"
        )


def _check_vocabulary(request: ModelRequest, sampling: SamplingSpec, config: ModelConfig) -> None:
    """Raise `ConfigError` for token ids outside the vocabulary: vLLM would reject every row."""
    tokens = text_part(config).get("vocab_size")
    if not isinstance(tokens, int) or "hf_overrides" in request.vllm_arguments:
        return
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        ids = map(int, sampling.fields.get(name) or ())
        outside = [token for token in ids if not 0 <= token < tokens]
        if outside:
            raise ConfigError(
                f"sampling.{name}: the model has no token {outside[0]:,}. Its ids go from 0 to "
                f"{tokens - 1:,} (vocab_size in config.json)"
            )


def _check_length(request: ModelRequest, config: ModelConfig) -> None:
    """Raise `ConfigError` for a context length that vLLM rejects, judged by config.json."""
    if "hf_overrides" in request.vllm_arguments or request.context is None:
        return
    allowed = {**os.environ, **request.env}.get(LONGER_ALLOWED, "0")
    longest = longest_context(config)
    if longest is not None and request.context > longest and allowed in ("", "0"):
        raise ConfigError(
            f"engine.max_model_len: {request.context:,} is more than the {longest:,} tokens that "
            "the model supports (config.json). Lower it, or remove it to use the model's maximum"
        )


def _check_encoder_step(request: ModelRequest, step: int | None, config: ModelConfig) -> None:
    """Raise `ConfigError` for a step without room for an encoder's whole prompt: vLLM rejects it.

    Judges only by engine.max_model_len: without it, other files of the model count, too.
    """
    names = tasks.architectures(tasks.overridden(request, config))
    is_encoder = any(name.startswith(ENCODERS) for name in names)
    is_chunked = request.vllm_arguments.get("enable_chunked_prefill")
    if step is None or request.context is None or is_chunked or not is_encoder:
        return
    if step < request.context:
        raise ConfigError(
            f"engine.max_num_batched_tokens ({step:,}) must be at least engine.max_model_len "
            f"({request.context:,}), since {names[0]} is an encoder, which takes a prompt in one "
            "step. Raise the one, or lower the other"
        )


def _check_files(request: ModelRequest, source: str, store: Store) -> None:
    extra = request.vllm_arguments
    sizes = {file.path: file.size for file in store.list(recursive=False)}
    weights = {name for name in sizes if name.endswith(models.WEIGHTS)}
    if extra.get("load_format") in FROM_FILES:
        if not weights:
            raise ConfigError(
                f"engine.model: {source} has no weights (no file ends in "
                f"{', '.join(models.WEIGHTS)}). Copy them there, or name another model"
            )
        _check_index(source, store, sizes)
        for name in sorted(weights):
            if name.endswith(".safetensors"):
                _check_safetensors(f"{source}/{name}", store, name, sizes[name])
    own = not extra.get("tokenizer") and not extra.get("trust_remote_code")
    gguf = any(name.endswith(".gguf") for name in weights)  # holds its tokenizer itself
    if own and not gguf and not any(_is_tokenizer(name) for name in sizes):
        raise ConfigError(
            f"engine.model: {source} has no tokenizer ({', '.join(TOKENIZER)}). Copy it there, "
            "or name one in engine.tokenizer"
        )


def _is_tokenizer(name: str) -> bool:
    return name in TOKENIZER or name.startswith("tokenizer.model.") or name.endswith(".tiktoken")


def _check_index(source: str, store: Store, sizes: Mapping[str, int]) -> None:
    if INDEX not in sizes:
        return
    try:
        index = json.loads(store.read(INDEX, MAX_INDEX_BYTES))
        files = sorted({str(file) for file in index["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"engine.model: {source}/{INDEX} cannot be read. Copy it again") from None
    missing = [file for file in files if file not in sizes]
    if missing:
        raise ConfigError(
            f"engine.model: {source} lacks {len(missing)} of the {len(files)} weight files that "
            f"{INDEX} names, such as {missing[0]}. Copy the model again"
        )


def _check_safetensors(where: str, store: Store, name: str, size: int) -> None:
    """Raise `ConfigError` for a truncated file: its header says where its last tensor ends."""
    with store.open(name) as stream:
        said = _safetensors_bytes(stream)
    if said is None:
        raise ConfigError(
            f"engine.model: {where} is not a safetensors file (it may be a Git LFS pointer, or "
            "truncated). Copy it again"
        )
    if said != size:
        raise ConfigError(
            f"engine.model: {where} has {size:,} bytes, but its header says {said:,}: it was "
            "truncated or changed. Copy it again"
        )


def _safetensors_bytes(stream: BinaryIO) -> int | None:
    """Return the file size that a safetensors header implies; None if there is no such header."""
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        return None
    head = stream.read(length)
    try:
        tensors = json.loads(head)
        ends = [t["data_offsets"][1] for key, t in tensors.items() if key != "__metadata__"]
        return 8 + length + max(map(int, ends), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
