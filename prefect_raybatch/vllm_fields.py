"""Which engine and sampling fields the installed vLLM knows, read from its source.

Importing vLLM takes over ten seconds; parsing two of its files takes a tenth of one. So a
misspelt field is refused at once, also on a laptop that holds vLLM without a GPU. Where vLLM is
not installed nothing is known here, and the engine itself refuses the field later.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path


@cache
def engine_fields() -> frozenset[str] | None:
    """Field names of vLLM's `EngineArgs`; None when vLLM is not installed."""
    return _class_fields("engine/arg_utils.py", "EngineArgs")


@cache
def sampling_fields() -> frozenset[str] | None:
    """Public field names of vLLM's `SamplingParams`; None when vLLM is not installed."""
    return _class_fields("sampling_params.py", "SamplingParams")


def _class_fields(file: str, name: str) -> frozenset[str] | None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / file
    if not path.exists():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return frozenset(
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and not item.target.id.startswith("_")
            )
    return None
