"""Computes a model's context length (tokens of prompt and answer) from its config.json.

Follows the rule of vLLM (`vllm/config/model.py`, `_get_and_verify_max_len`). So a length that
engines would reject after half a minute is rejected in the plan, and a prompt that is too long for
the engines is quarantined. Where the supported versions of vLLM differ, the shortest length counts,
because a plan may be made where no vLLM is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from prefect_raybatch.spec.engine import EngineFields

ModelConfig = Mapping[str, Any]
"""A model's config.json, or an object in it; its fields depend on the architecture."""

OVERRIDES = "hf_overrides"
LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
ALONE_COUNTS = "model_max_length"  # overrides all fields of LENGTHS
YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
# RoPE types whose context length already includes the scaling factor; YaRN since vLLM 0.30.
UNSCALED = ("su", "longrope", "llama3", *YARN)
ROPES = ("rope_scaling", "rope_parameters")
ORIGINAL = "original_max_position_embeddings"
OF_LENGTH = (*LENGTHS, ALONE_COUNTS, *ROPES, ORIGINAL, "model_type")  # fields of config.json


def text_part(config: ModelConfig) -> ModelConfig:
    """Return the config with the fields of its `text_config`, if any, moved to the top level.

    Multimodal models have the fields of their text model there.
    """
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def with_overrides(config: ModelConfig, arguments: EngineFields) -> ModelConfig:
    """Return config.json as vLLM sees it: with `hf_overrides` of the engine's `arguments`."""
    changes = arguments.get(OVERRIDES)
    if not isinstance(changes, Mapping):
        return config
    text, new = config.get("text_config"), changes.get("text_config")
    if isinstance(text, Mapping) and isinstance(new, Mapping):  # vLLM merges nested configs
        changes = {**changes, "text_config": _updated(text, new)}
    return _updated(config, changes)


def _updated(config: ModelConfig, changes: ModelConfig) -> ModelConfig:
    """Return `config` with `changes`, which also replace fields that are synonyms in transformers.

    Its classes read max_position_embeddings from the field that the model has in its place (GPT-2:
    n_positions), and RoPE scaling from either of two fields.
    """
    replaced = set(ROPES) if not changes.keys().isdisjoint(ROPES) else set()
    if LENGTHS[0] in changes and LENGTHS[0] not in config:
        replaced |= set(LENGTHS)
    return {**{k: v for k, v in config.items() if k not in replaced}, **changes}


def length_overrides(arguments: EngineFields) -> ModelConfig:
    """Return those of `hf_overrides` that can change the context length; others may be secrets."""
    changes = arguments.get(OVERRIDES)
    if not isinstance(changes, Mapping):
        return {}
    text = length_overrides({OVERRIDES: changes.get("text_config")})
    found = {name: changes[name] for name in OF_LENGTH if name in changes}
    return {**found, "text_config": text} if text else found


def own_context(config: ModelConfig, arguments: EngineFields = MappingProxyType({})) -> int | None:
    """Return the context length (tokens) that an engine has by default, by config.json.

    The default is the length without `max_model_len`. `arguments` are the engine's. Returns None if
    config.json has no length. The length differs from `longest_context` only for LongRoPE: there it
    is the length before scaling.
    """
    config = with_overrides(config, arguments)
    text = text_part(config)
    longest = longest_context(config)
    if longest is not None and any(_kind(rope) in ("su", "longrope") for rope in _ropes(text)):
        short = text.get(ORIGINAL)
        return short if _is_length(short) else longest
    return longest


def longest_context(config: ModelConfig) -> int | None:
    """Return the longest context (tokens) an engine accepts; None if config.json has none."""
    text = text_part(config)
    whole = text.get(ALONE_COUNTS)
    known = [whole] if _is_length(whole) else [text.get(name) for name in LENGTHS]
    length = min((n for n in known if isinstance(n, int) and _is_length(n)), default=None)
    if length is None or "gemma3" in str(text.get("model_type")):
        return length
    factor = 1.0
    for rope in _ropes(text):
        if _kind(rope) not in UNSCALED:
            factor = rope.get("factor") or factor
        if _kind(rope) == "yarn" and _is_length(rope.get(ORIGINAL)):
            # vLLM before 0.30 takes this length and no other.
            length = min(length, int(rope[ORIGINAL] * (rope.get("factor") or 1.0)))
    return int(length * factor)


def _ropes(text: ModelConfig) -> Iterator[ModelConfig]:
    """Yield the rope scaling settings: one, or one for each kind of layer."""
    for name in ROPES:
        found = text.get(name)
        if isinstance(found, Mapping):
            nested = [inner for inner in found.values() if isinstance(inner, Mapping)]
            yield from nested or [found]


def _kind(rope: ModelConfig) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
