"""Which engine and sampling fields and which models the installed vLLM knows, by its source.

Importing vLLM takes over ten seconds; parsing two of its files takes a tenth of one. So a
misspelt field is refused at once, also on a laptop that holds vLLM without a GPU. Where vLLM is
not installed nothing is known here, and the engine itself refuses the field later.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

PARSES = 5  # tries to parse a source


@cache
def engine_fields() -> frozenset[str] | None:
    """Field names of vLLM's `EngineArgs`; None when vLLM is not installed."""
    return _class_fields("engine/arg_utils.py", "EngineArgs")


@cache
def sampling_fields() -> frozenset[str] | None:
    """Public field names of vLLM's `SamplingParams`; None when vLLM is not installed."""
    return _class_fields("sampling_params.py", "SamplingParams")


@cache
def generating_models() -> frozenset[str] | None:
    """Architectures that vLLM lists as generating text; None when vLLM is not installed."""
    lists = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
    return _listed("model_executor/models/registry.py", *lists)


@cache
def classifying_models() -> frozenset[str] | None:
    """Architectures that vLLM lists as classifying text; None when vLLM is not installed."""
    return _listed("model_executor/models/registry.py", "_SEQUENCE_CLASSIFICATION_MODELS")


@cache
def late_models() -> frozenset[str] | None:
    """Those that vLLM lists as giving a vector a token; None when vLLM is not installed."""
    return _listed("model_executor/models/registry.py", "_LATE_INTERACTION_MODELS")


@cache
def reasoning_parsers() -> frozenset[str] | None:
    """Names of vLLM's reasoning parsers; None when vLLM is not installed."""
    return _listed("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER")


@cache
def tool_parsers() -> frozenset[str] | None:
    """Names of vLLM's tool parsers; None when vLLM is not installed."""
    return _listed("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER")


def _listed(file: str, *tables: str) -> frozenset[str] | None:
    """The keys of the tables of these names in one of vLLM's files."""
    names: set[str] = set()
    for node in _statements(file):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in tables
        ):
            names |= {str(k.value) for k in node.value.keys if isinstance(k, ast.Constant)}
    return frozenset(names) or None


def _statements(file: str) -> list[ast.stmt]:
    """What stands at the top of one of vLLM's files; nothing where it is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return []
    path = Path(next(iter(found.submodule_search_locations))) / file
    return parsed(path.read_text(encoding="utf-8")).body if path.exists() else []


def parsed(source: str) -> ast.Module:
    """The syntax tree of Python source, whatever other threads parse meanwhile: up to 3.11.7 and
    3.12.1 Python counts the depth of all of them together (CPython's issue 106905)."""
    for _ in range(PARSES):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)


def _class_fields(file: str, name: str) -> frozenset[str] | None:
    for node in _statements(file):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return frozenset(
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and not item.target.id.startswith("_")
            )
    return None
