"""Reads from the source of the installed vLLM which fields, models and parsers it has.

Importing vLLM takes over ten seconds; parsing two of its files takes a tenth of one. So a misspelt
field is rejected at once, even on a laptop that has vLLM without a GPU. Without vLLM nothing is
known here, and the engine itself rejects the field later.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PARSES = 5  # tries to parse a source
LIMITS = "get_supported_mm_limits"
REGISTRY = "model_executor/models/registry.py"


@cache
def engine_fields() -> frozenset[str] | None:
    """Return the field names of vLLM's `EngineArgs`; None if vLLM is not installed."""
    return _class_fields("engine/arg_utils.py", "EngineArgs")


@cache
def sampling_fields() -> frozenset[str] | None:
    """Return the public field names of vLLM's `SamplingParams`; None if vLLM is not installed."""
    return _class_fields("sampling_params.py", "SamplingParams")


@cache
def form_fields() -> frozenset[str] | None:
    """Return the public fields of vLLM's `StructuredOutputsParams`; None without vLLM."""
    return _class_fields("sampling_params.py", "StructuredOutputsParams")


@cache
def generating_models() -> frozenset[str] | None:
    """Return architectures that vLLM lists as generating text; None if vLLM is not installed."""
    lists = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
    return _listed(REGISTRY, *lists)


@cache
def text_models() -> frozenset[str] | None:
    """Return architectures that vLLM lists as generating text and not as multimodal.

    Returns None if vLLM is not installed.
    """
    text = _listed(REGISTRY, "_TEXT_GENERATION_MODELS")
    return None if text is None else text - (_listed(REGISTRY, "_MULTIMODAL_MODELS") or frozenset())


@cache
def media_limits(architecture: str) -> Mapping[str, int | None] | None:
    """Return {medium: maximum number of items in a request} for a model architecture.

    The value None means no limit, as in {"image": None}. The result is None if vLLM is not
    installed or its source does not show the limits.
    """
    for table in _tables(REGISTRY, "_MULTIMODAL_MODELS"):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == architecture:
                module, name = ast.literal_eval(value)
                file = f"model_executor/models/{module}.py"
                return _limits(file, _asked_about(file, name))
    return None


@cache
def classifying_models() -> frozenset[str] | None:
    """Return architectures that vLLM lists as classifying text; None if vLLM is not installed."""
    return _listed(REGISTRY, "_SEQUENCE_CLASSIFICATION_MODELS")


@cache
def late_models() -> frozenset[str] | None:
    """Return architectures that give a vector per token (late interaction); None without vLLM."""
    return _listed(REGISTRY, "_LATE_INTERACTION_MODELS")


@cache
def reasoning_parsers() -> frozenset[str] | None:
    """Return the names of vLLM's reasoning parsers; None if vLLM is not installed."""
    return _listed("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER")


@cache
def tool_parsers() -> frozenset[str] | None:
    """Return the names of vLLM's tool parsers; None if vLLM is not installed."""
    return _listed("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER")


def _listed(file: str, *tables: str) -> frozenset[str] | None:
    """Return the keys of the dicts named `tables` at the top level of one of vLLM's files.

    Returns None if there are no keys, or vLLM is not installed.
    """
    found = _tables(file, *tables)
    keys = (key for table in found for key in table.keys)
    return frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant)) or None


def _tables(file: str, *names: str) -> list[ast.Dict]:
    return [
        node.value
        for node in _statements(file)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in names
    ]


def _asked_about(file: str, name: str) -> str | None:
    """Return the name of the class that a decorator of a model class gets as argument `info`.

    `name` is the model class in vLLM's `file`. Returns None without such a decorator.
    """
    for node in _statements(file):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for call in node.decorator_list:
                for given in call.keywords if isinstance(call, ast.Call) else ():
                    if given.arg == "info" and isinstance(given.value, ast.Name):
                        return given.value.id
    return None


def _limits(file: str, name: str | None) -> Mapping[str, int | None] | None:
    """Return the dict that `get_supported_mm_limits` of class `name` in vLLM's `file` returns.

    Follows base classes, and imports of the class from files beside it. Returns None if the method
    is not found, or returns anything but one literal dict.
    """
    body = _statements(file) if name else []
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == LIMITS:
                    return _returned(method)
            for base in node.bases:
                if isinstance(base, ast.Name) and (found := _limits(file, base.id)) is not None:
                    return found
            return None
    for node in body:
        if not isinstance(node, ast.ImportFrom) or node.level != 1 or not node.module:
            continue
        if name in [alias.name for alias in node.names if alias.asname is None]:
            return _limits(f"model_executor/models/{node.module}.py", name)
    return None


def _returned(method: ast.FunctionDef) -> Mapping[str, int | None] | None:
    ends = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)]
    try:
        found = ast.literal_eval(ends[0]) if len(ends) == 1 and ends[0] else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@cache
def definition(folder: str, name: str) -> ast.stmt | None:
    """Return the class or assignment `name` at the top level of a file in vLLM's `folder`.

    Returns None if there is none, or vLLM is not installed.
    """
    root = _root()
    begins = re.compile(rf"^(class )?{name}\b[^.(\n]*[=:(]", re.MULTILINE)
    for path in sorted((root / folder).glob("*.py")) if root else ():
        text = path.read_text(encoding="utf-8")
        for node in parsed(text).body if begins.search(text) else ():
            if getattr(node, "name", None) == name or name in map(ast.unparse, _targets(node)):
                return node
    return None


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


def class_body(file: str, name: str) -> list[ast.stmt]:
    """Return the statements of a class in one of vLLM's files; empty if vLLM is not installed."""
    for node in _statements(file):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    return []


def annotated(body: list[ast.stmt]) -> Iterator[Any]:
    """Yield the fields among the statements of a class: `name: type = default`."""
    for item in body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item


def _root() -> Path | None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def _statements(file: str) -> list[ast.stmt]:
    """Return the top-level statements of a file of vLLM; empty if file or vLLM is missing."""
    root = _root()
    path = None if root is None else root / file
    return parsed(path.read_text(encoding="utf-8")).body if path and path.exists() else []


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of Python source; retry if parsing in other threads disturbs it.

    Up to 3.11.7 and 3.12.1, Python's parser adds up the nesting depths in all threads, so parsing
    in several at once may fail (CPython's issue 106905).
    """
    for _ in range(PARSES):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)


def _class_fields(file: str, name: str) -> frozenset[str] | None:
    names = (item.target.id for item in annotated(class_body(file, name)))
    return frozenset(name for name in names if not name.startswith("_")) or None
