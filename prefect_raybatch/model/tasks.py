"""Determines by config.json what a model can do: generate, embed, classify, or score a pair.

An engine would report a mismatch only after a minute, and less clearly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.model.context import ModelConfig, with_overrides
from prefect_raybatch.spec.engine import ModelRequest

# Endings of class names by which vLLM recognizes models that pool (`_SUFFIX_TO_DEFAULTS`).
CLASSIFIES = ("ForSequenceClassification", "ClassificationModel")
NOT_A_TEXT = (  # models with a value for each token, or for inputs other than text
    *("ForTokenClassification", "ForAudioClassification", "ForImageClassification"),
    *("ForVideoClassification", "ForRewardModeling", "ForRewardModel", "RewardModel"),
)
EMBEDS = ("ForTextEncoding", "EmbeddingModel", "ForMaskedLM")
PoolingTask = Literal["embed", "classify"]


def overridden(request: ModelRequest, config: ModelConfig) -> ModelConfig:
    """Return config.json as vLLM sees it, with engine.hf_overrides."""
    return with_overrides(config, request.vllm_arguments)


def architectures(config: ModelConfig) -> list[str]:
    """Return the names of the model's architectures (classes) in config.json, or []."""
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def vllm_task(request: ModelRequest, config: ModelConfig) -> PoolingTask:
    """Return vLLM's task for a pooling job.

    For a score it is `classify` if the model classifies pairs, else `embed`: the score is then the
    cosine of two vectors.
    """
    if request.task != "score":
        return "classify" if request.task == "classify" else "embed"
    return "classify" if _classifies(request, overridden(request, config)) else "embed"


def labels(request: ModelRequest, config: ModelConfig) -> list[str]:
    """Return the names of the model's labels in the order of their ids.

    As in transformers, unnamed labels are LABEL_0 and so on, two by default. The setting
    `classifier_from_token` (in config.json or engine.hf_overrides) turns a generating model into a
    classifier. Its labels are then the tokens in the setting. If vLLM makes one score of two
    tokens, the only label is LABEL_0.
    """
    config = overridden(request, config)
    tokens, method = config.get("classifier_from_token"), config.get("method")
    if isinstance(tokens, list) and (config.get("is_original_qwen3_reranker") or method):
        two_way = method in (None, "from_2_way_softmax")
        return ["LABEL_0"] if two_way else [str(token) for token in tokens]
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        try:
            order = sorted(named, key=int)
        except (TypeError, ValueError):
            order = list(named)
        return [str(named[number]) for number in order]
    count = config.get("num_labels", 2)
    return [f"LABEL_{number}" for number in range(count if isinstance(count, int) else 2)]


def check_can(request: ModelRequest, source: str, config: ModelConfig, paired: bool = True) -> None:
    """Raise `ConfigError` for a model that cannot do the job's task.

    `paired`: each row has two texts, which a score compares. `source` names the model in errors.
    """
    config = overridden(request, config)
    if request.task == "generate":
        _check_generates(request, source, config)
        return
    names = architectures(config)
    shown = f"engine.model: {source} is {', '.join(names)}, which"
    if any(name in (vllm_fields.late_models() or ()) for name in names):
        raise ConfigError(f"{shown} returns a vector for each token, not one per row")
    if any(name.endswith(NOT_A_TEXT) for name in names):
        raise ConfigError(
            f"{shown} returns a value for each token or does not take text. Name a model that "
            f"can {request.task}"
        )
    classifies = _classifies(request, config)
    if request.task == "embed" and classifies:
        raise ConfigError(
            f"{shown} classifies. Set engine.task to classify, or to score for pairs, or name a "
            "model that embeds"
        )
    if request.task == "classify":
        _check_labels(request, shown, source, config, classifies)
    if request.task == "score" and classifies and len(labels(request, config)) != 1:
        raise ConfigError(
            f"{shown} has {len(labels(request, config))} labels, but a score needs exactly one. "
            "Set engine.task to classify"
        )
    if request.task == "score" and not classifies and not paired:
        raise ConfigError(
            f"{shown} embeds, so a score is the cosine of two texts. Write the second text into "
            "prompt.second"
        )


def _check_generates(request: ModelRequest, source: str, config: ModelConfig) -> None:
    extra = request.vllm_arguments
    if extra.get("runner") not in (None, "auto", "generate"):
        raise ConfigError(
            f"engine.runner: {extra['runner']!r} generates no text. Remove it, and set engine.task "
            "to embed, classify or score"
        )
    names = architectures(config)
    generating = vllm_fields.generating_models()
    if not names or any(name in (generating or ()) for name in names):
        return
    if any(name.endswith((*CLASSIFIES, *NOT_A_TEXT, *EMBEDS)) for name in names) or (
        generating is not None and all(name.endswith("Model") for name in names)
    ):
        raise ConfigError(
            f"engine.model: {source} is {', '.join(names)}, which embeds or classifies and "
            "generates no text. Set engine.task to what it does, or name a model that generates, "
            "such as one ending in ForCausalLM"
        )


def _classifies(request: ModelRequest, config: ModelConfig) -> bool:
    if request.vllm_arguments.get("convert") == "classify":
        return True
    known = vllm_fields.classifying_models() or ()
    names = architectures(config)
    return any(name in known or name.endswith(CLASSIFIES) for name in names)


def _check_labels(
    request: ModelRequest, shown: str, source: str, config: ModelConfig, classifies: bool
) -> None:
    if not classifies:
        raise ConfigError(
            f"{shown} does not classify. Name a model whose architecture ends in "
            "ForSequenceClassification, or set engine.task to embed"
        )
    names = labels(request, config)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"engine.model: id2label in config.json of {source} has {twice[0]!r} for several "
            "labels. Give each its own name there, or in engine.hf_overrides"
        )
