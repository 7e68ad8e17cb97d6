"""Prompt functions for OpenAI batch files: make the request to a model from a row of such a file.

A row is one line of the file: `line` (its number), `url`, `body` (JSON), and `fault`, which says
why the line is invalid, or is None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prefect_raybatch.source.openai_batch import CHAT_URL, COMPLETION_URL, EMBEDDING_URL

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
# Fields that change no answer, and fields with values that change no answer.
IGNORED = frozenset(["model", "user", "metadata", "store", "service_tier", "parallel_tool_calls"])
EMPTY: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "encoding_format": ("float",),
    "echo": (False,),
    "best_of": (1,),
}
_ROLES = ("system", "user", "assistant")


def chat_request(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return {messages, sampling} for a row with a chat; raise ValueError if the row is invalid.

    This is the prompt function of a run over a batch file with a hosted model.
    """
    body, line = _opened(row, CHAT_URL)
    sampling = _sampling(body, line, "messages")
    return {"messages": _messages(body.get("messages"), line), "sampling": sampling}


def text_request(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's request for a local model: {messages, sampling} or {prompt, sampling}.

    It has `prompt` if the row's `url` is for completions. Raises ValueError if the row is invalid.
    """
    if row["fault"] is None and row["url"] == COMPLETION_URL:
        made = completion_request(row)
        return {"prompt": made["messages"][0]["content"], "sampling": made["sampling"]}
    return chat_request(row)


def completion_request(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return {messages, sampling} for a row of a completions request (`/v1/completions`).

    The request's `prompt` becomes the only message, from the user. This is the prompt function of a
    run over a batch file with `engine.endpoint.api: completions`. Raises ValueError if the row is
    invalid, is for another URL, or has a field that is not supported.
    """
    body, line = _opened(row, COMPLETION_URL)
    sampling = _sampling(body, line, "prompt")
    message = {"role": "user", "content": _one_text(body, "prompt", line)}
    return {"messages": [message], "sampling": sampling}


def _sampling(body: Mapping[str, Any], line: str, asked: str) -> dict[str, Any]:
    """Return the sampling fields of a body; raise ValueError for an unsupported field.

    `asked` is the name of the body's field that holds the prompt ("messages" or "prompt"). `line`
    is text such as `line 7`, with which the error begins.
    """
    sampling = {
        name: value for name, value in body.items() if name in SAMPLED and value is not None
    }
    for name, value in body.items():
        if name == "max_completion_tokens" and value is not None:
            sampling["max_tokens"] = value
        elif name == "response_format" and value is not None:
            sampling.update(_form(value, line))
        elif name not in SAMPLED and name != asked:
            _refuse(name, value, line)
    return sampling


def embedding_request(row: Mapping[str, Any]) -> str:
    """Return the text that is to be embedded for a row; raise ValueError if the row is invalid.

    This is the prompt function of a run over a batch file with `engine.task: embed`.
    """
    body, line = _opened(row, EMBEDDING_URL)
    for name, value in body.items():
        if name != "input":
            _refuse(name, value, line)
    return _one_text(body, "input", line)


def _one_text(body: Mapping[str, Any], name: str, line: str) -> str:
    text = body.get(name)
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if not isinstance(text, str) or not text:
        raise ValueError(f"{line}: body.{name} is not supported; write one text that is not empty")
    return text


def _opened(row: Mapping[str, Any], url: str) -> tuple[dict[str, Any], str]:
    """Return (body, `line N` for errors); raise ValueError if a row is invalid or not for `url`."""
    if row["fault"] is not None:
        raise ValueError(row["fault"])
    line = f"line {row['line']}"
    if row["url"] != url:
        raise ValueError(
            f"{line}: url {row['url']} is not answered by this run, only {url}; put the requests "
            "of each url into a file of their own, and set engine.task: embed for embeddings, or "
            "engine.endpoint.api: completions for completions of a hosted model"
        )
    return json.loads(row["body"]), line


def _refuse(name: str, value: object, line: str) -> None:
    """Raise ValueError for the body's field `name`, unless its value cannot change the answer."""
    if name not in IGNORED and value is not None and not _is_empty(name, value):
        raise ValueError(f"{line}: body.{_ascii(name)} is not supported; remove it")


def _ascii(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode()


def _is_empty(name: str, value: object) -> bool:
    return any(type(value) is type(empty) and value == empty for empty in EMPTY.get(name, ()))


def _form(value: object, line: str) -> dict[str, Any]:
    """Return the sampling fields for `value`, the `response_format` of a body.

    Raises ValueError if it is not supported.
    """
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
