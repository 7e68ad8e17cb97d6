"""Reads the lines of an OpenAI batch file; a wrong line becomes a row with its fault."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

URL = "/v1/chat/completions"
REQUEST_COLUMNS = ("line", "custom_id", "body", "fault")
# Fields of a body that vLLM's SamplingParams have under the same name.
SAMPLED = frozenset(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "bad_words",
        "include_stop_str_in_output",
        "structured_outputs",
    ]
)
# Fields that change no answer, and values with which a field means nothing.
IGNORED = frozenset(
    ["model", "messages", "user", "metadata", "store", "service_tier", "parallel_tool_calls"]
)
EMPTY: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
}
_ROLES = ("system", "user", "assistant")


def rows_of_requests(
    lines: Iterable[tuple[int, bytes]], models: Iterable[str]
) -> Iterator[list[object]]:
    """Yield the REQUEST_COLUMNS of each line that is not blank.

    A wrong line has a fault and no body. `lines` are numbered; `models` are the names that a
    request may ask for.
    """
    names, seen = list(models), set[str]()
    for number, line in lines:
        if line.strip():
            custom_id, body, fault = _read(line, names)
            if fault is None and custom_id in seen:
                fault = f"custom_id {custom_id!r} is that of an earlier line; make it unique"
            if fault is None:
                seen.add(custom_id)
            text = None if fault is not None else json.dumps(body)
            yield [number, custom_id, text, fault and f"line {number}: {fault}"]


def _read(line: bytes, models: list[str]) -> tuple[str, object, str | None]:
    """Return the custom_id of a line ("" if it has none), its body and its fault, if any."""
    try:
        request = json.loads(line.decode("utf-8"), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        return "", None, f"it is not valid JSON ({str(error)[:100]}); write one object per line"
    if not isinstance(request, dict):
        return "", None, "it is not an object; write {custom_id, method, url, body}"
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return "", None, "custom_id is missing or is no text; set a unique text"
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        return "", None, "custom_id has half of a surrogate pair; write the whole character"
    return custom_id, request.get("body"), _fault(request, models)


def _fault(request: Mapping[str, Any], models: list[str]) -> str | None:
    url, body = request.get("url"), request.get("body")
    if request.get("method") != "POST":
        return f"method is {request.get('method')!r}; set it to POST"
    if url != URL:
        return f"url {url!r} is not supported; use {URL}"
    if not isinstance(body, dict):
        return "body is missing or is no object; write the request into it"
    if body.get("model") is not None and body["model"] not in models:
        known = ", ".join(models)
        return f"model {body['model']!r} is not served, only {known}; add it with --served-as"
    return None


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def chat_request(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages and sampling fields of a row; raise ValueError for what is wrong in it.

    This is the prompt function of a batch file's run.
    """
    if row["fault"] is not None:
        raise ValueError(row["fault"])
    body, line = json.loads(row["body"]), f"line {row['line']}"
    sampling = {
        name: value for name, value in body.items() if name in SAMPLED and value is not None
    }
    for name, value in body.items():
        if name == "max_completion_tokens" and value is not None:
            sampling["max_tokens"] = value
        elif name == "response_format" and value is not None:
            sampling.update(_form(value, line))
        elif name in (*SAMPLED, *IGNORED) or value is None:
            continue
        elif not _is_empty(name, value):
            raise ValueError(f"{line}: body.{_ascii(name)} is not supported; remove it")
    return {"messages": _messages(body.get("messages"), line), "sampling": sampling}


def _ascii(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode()


def _is_empty(name: str, value: object) -> bool:
    return any(type(value) is type(empty) and value == empty for empty in EMPTY.get(name, ()))


def _form(value: object, line: str) -> dict[str, Any]:
    """Return the sampling fields of a response_format."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    form = value.get("json_schema") if isinstance(value, dict) else None
    schema = form.get("schema") if isinstance(form, dict) else None
    if kind == "json_schema" and isinstance(schema, dict):
        return {"structured_outputs": {"json": schema}}
    raise ValueError(
        f"{line}: body.response_format is not supported; use type text, json_object, or "
        "json_schema with json_schema.schema"
    )


def _messages(value: object, line: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{line}: body.messages is missing or empty; write a list of messages")
    return [_message(message, f"{line}: body.messages[{i}]") for i, message in enumerate(value)]


def _message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ValueError(f"{where}.role is not supported; use {', '.join(_ROLES)}")
    others = [name for name, value in message.items() if value is not None]
    for name in others:
        if name not in ("role", "content"):
            raise ValueError(f"{where}.{_ascii(name)} is not supported; remove it")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "\n".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise ValueError(f"{where}.content is not supported; write text or text parts")
    return {"role": message["role"], "content": content}
