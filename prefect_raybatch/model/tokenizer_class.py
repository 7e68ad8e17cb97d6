"""Determines which class `AutoTokenizer` of transformers would choose, without importing it.

Importing `AutoTokenizer` imports torch. This takes 5 CPU-seconds on a small machine and over 20
beside a GPU, in each process that prepares rows, while the engines start. Importing only the class
of a tokenizer takes under one CPU-second.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PLAIN_CLASS = "TokenizersBackend"
"""The class that loads a tokenizer as its files define it; new in transformers 5."""

REGISTERED: dict[str, str | None] = {
    "llama": None,
    "gpt_oss": None,
    "smollm3": None,
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "qwen3_next": "Qwen2Tokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "phi3": PLAIN_CLASS,
    "granite": PLAIN_CLASS,
    "olmo2": PLAIN_CLASS,
    "glm4_moe": PLAIN_CLASS,
    "deepseek_v3": PLAIN_CLASS,
}
"""{model_type in config.json: tokenizer class that transformers registers for it, or None}.

A test compares each with `AutoTokenizer`, which decides for types that are missing here.
"""

REPLACES = {"qwen2"}
"""`model_type`s whose registered class is used, whatever class tokenizer_config.json names."""

_COMMIT = re.compile("[0-9a-f]{40}")


def class_of_tokenizer(path: str, revision: str | None) -> str | None:
    """Return the name of the class that `AutoTokenizer` chooses for a model; None if unknown.

    `path` is a folder or a Hugging Face name. For a name, only the files of commit `revision` in
    the local cache are read.
    """
    config = _read(path, revision, "config.json")
    named = _read(path, revision, "tokenizer_config.json")
    kind, own = config.get("model_type"), named.get("tokenizer_class")
    if kind not in REGISTERED or not isinstance(own, str) or "auto_map" in (*config, *named):
        return None
    own, registered = own.removesuffix("Fast"), REGISTERED[kind]
    if own == "PreTrainedTokenizer":  # what PLAIN_CLASS was called before
        own = PLAIN_CLASS
    if registered is None or registered == own:
        return own
    if kind in REPLACES:
        return registered
    return PLAIN_CLASS if PLAIN_CLASS in (own, registered) else None


def _read(path: str, revision: str | None, name: str) -> dict[str, Any]:
    """Return a JSON file of the model as a dict; empty if it is missing or not an object."""
    file = Path(path, name)
    if not Path(path).is_dir() and revision and _COMMIT.fullmatch(revision):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, name, revision=revision)
        file = Path(cached) if isinstance(cached, str) else file
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
