"""Checks of chat settings that need only the job: tools, template arguments, parser names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prefect_raybatch.job.checks import nearest

# Arguments that the stages themselves pass to a chat template, or to its renderer.
RESERVED_ARGUMENTS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    )
)
FIELDS_FIRST = ("type", "function", "name", "description", "parameters", "properties", "required")


def is_template_text(value: str) -> bool:
    """Return whether `value` is the text of a chat template, rather than the name of its file.

    Text contains {{, {% or {#.
    """
    return any(mark in value for mark in ("{{", "{%", "{#"))


def check_template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    """Return `prompt.chat_template_kwargs` with keys in a fixed order (see `_ordered`).

    Raises ValueError for values that are not JSON, and for arguments that the run sets itself.
    """
    for name in value:
        if name in RESERVED_ARGUMENTS:
            raise ValueError(f"{name!r} is set by the run itself; remove it")
    made: dict[str, Any] = _json(value)
    return made


def check_tools(value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return `prompt.tools` with keys in a fixed order (see `_ordered`); None stays None.

    Raises ValueError for an empty list and for an invalid or duplicate tool.
    """
    if value is None:
        return None
    if not value:
        raise ValueError("is an empty list; name the tools, or remove it")
    names: list[str] = []
    for number, tool in enumerate(value, 1):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ValueError(
                f"tool {number} of {len(value)} is not a tool definition; write {{type: function, "
                "function: {name, description, parameters}}"
            )
        name, parameters = function.get("name"), function.get("parameters", {})
        if not isinstance(name, str) or not name:
            raise ValueError(f"tool {number} of {len(value)} has no function.name; set it")
        if not isinstance(parameters, dict):
            raise ValueError(
                f"tool {name!r}: function.parameters is not a mapping; write a JSON Schema"
            )
        if name in names:
            raise ValueError(f"duplicate tool {name!r}; remove one")
        names.append(name)
    made: list[dict[str, Any]] = _json(value)
    return made


def check_parser(name: str | None, known: frozenset[str] | None) -> str | None:
    """Return a parser's name; raise ValueError if it is not in `known`, vLLM's parsers.

    If `known` is None, nothing is checked.
    """
    if name is not None and known is not None and name not in known:
        raise ValueError(f"vLLM has no parser {name!r}{nearest(name, known)}")
    return name


def _json(value: object) -> Any:
    try:
        return _ordered(json.loads(json.dumps(value, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"is not valid JSON ({error}); use only text, numbers, lists and mappings"
        ) from None


def _ordered(value: object) -> object:
    """Return a JSON value with the keys of its mappings sorted, those in FIELDS_FIRST first.

    Chat templates write tools in the order of their keys. The records of a run and Prefect's
    database lose this order. A retry must write the same prompts as its run, so the order has to be
    fixed.
    """
    if isinstance(value, list):
        return [_ordered(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    places = {name: place for place, name in enumerate(FIELDS_FIRST)}
    names = sorted(value, key=lambda name: (places.get(name, len(FIELDS_FIRST)), name))
    return {name: _ordered(value[name]) for name in names}
