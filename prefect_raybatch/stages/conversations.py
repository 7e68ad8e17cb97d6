"""Converts a cell with a conversation, or with documents, to the form that chat templates take.

A cell is a list of structs, or JSON text. A fault in it fails the row; the error names its place,
such as `messages[2].tool_calls[0].function`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from prefect_raybatch.spec.request import PromptSpec
from prefect_raybatch.stages.block import Message, Messages, Row
from prefect_raybatch.stages.images.rows import is_image
from prefect_raybatch.stages.messages import ChatRequest, Document


class Conversation:
    """Makes a chat request from a row's messages, which are in the job's column `prompt.messages`.

    `prompt.system` comes first, unless the row has a system or developer message of its own. Image
    parts are kept if the job has `prompt.images`.
    """

    def __init__(self, prompt: PromptSpec):
        self.column = prompt.messages or ""
        self.system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        self.continued = prompt.continue_final_message
        self.images = prompt.images is not None

    def __call__(self, row: Row) -> ChatRequest:
        messages = messages_of(row[self.column], self.column, self.images)
        last = messages[-1]["role"] == "assistant"
        if last and not self.continued:
            raise ValueError(
                f"{self.column}: the last message is the assistant's, so there is nothing to "
                "answer. Remove it, or set prompt.continue_final_message: true"
            )
        own = any(message["role"] in ("system", "developer") for message in messages)
        if own or not self.system:
            return ChatRequest(messages)
        return ChatRequest([*self.system, *messages], job_messages=len(self.system))


def messages_of(cell: object, name: str, images: bool = False) -> Messages:
    """Return the messages of a cell of column `name`; with `images`, they may have image parts.

    Raises ValueError or TypeError that names the place of the fault.
    """
    found = _list(cell, name, "messages {role, content}")
    if not found:
        raise ValueError(f"{name} is an empty conversation; it needs at least one message")
    return [_message(message, f"{name}[{i}]", images) for i, message in enumerate(found)]


def documents_of(cell: object, name: str) -> list[Document] | None:
    """Return the documents of a cell of column `name`; None for a null.

    A document that is only a text becomes {"text": ...}. Raises ValueError or TypeError that names
    the place of the fault.
    """
    if cell is None:
        return None
    made = []
    for i, document in enumerate(_list(cell, name, "documents {title, text} or texts")):
        if not isinstance(document, (str, dict)):
            raise TypeError(f"{name}[{i}] is {_kind(document)}, not a text or {{title, text}}")
        made.append({"text": document} if isinstance(document, str) else _filled(document))
    return made


def _list(cell: object, name: str, what: str) -> list[object]:
    if cell is None:
        raise ValueError(f"column {name} is null; it must hold a list of {what}")
    if isinstance(cell, (str, bytes)):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is text that is not JSON: {error}") from None
    if not isinstance(cell, list):
        raise TypeError(f"{name} is {_kind(cell)}, not a list of {what}")
    return cell


def _message(value: object, where: str, images: bool) -> Message:
    message = _plain(value)
    if not isinstance(message, dict):
        raise TypeError(f"{where} is {_kind(value)}, not a message {{role, content}}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role is missing; set it to system, user, assistant or tool")
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise TypeError(f"{where}.tool_calls is {_kind(calls)}, not a list")
        if role != "assistant" and calls:
            raise ValueError(f"{where}.tool_calls: only the assistant can call tools, not {role}")
        del message["tool_calls"]  # instead of an empty list, templates expect no such key
        if calls:
            message["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
    content = message.get("content")
    if content is None and "tool_calls" not in message:
        raise ValueError(f"{where}.content is missing")
    message["content"] = "" if content is None else _content(content, f"{where}.content", images)
    return message


def _content(value: object, where: str, images: bool) -> str | list[object]:
    """Return a message's content as one text; text parts are joined by newlines, as in vLLM.

    If the content has image parts, it is returned as a list of parts instead. Image parts raise an
    error unless `images` is true. `where` names the content in errors.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError(f"{where} is {_kind(value)}, not text")
    texts: list[str] = []
    parts: list[object] = []
    for i, part in enumerate(value):
        if images and is_image(part):
            parts.append(part)
            continue
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise ValueError(
                f"{where}[{i}] has type {kind!r}; only text parts are supported, and image parts "
                "if prompt.images.per_row is set"
            )
        if not isinstance(text, str):
            raise TypeError(f"{where}[{i}] has no text")
        texts.append(text)
        parts.append({"type": "text", "text": text})
    return parts if len(parts) > len(texts) else "\n".join(texts)


def _call(value: object, where: str) -> Message:
    """Return a tool call with its arguments as a mapping, as chat templates expect them.

    `where` names the call in errors.
    """
    if not isinstance(value, dict) or not isinstance(function := value.get("function"), dict):
        raise TypeError(f"{where} is not of the form {{id, type, function: {{name, arguments}}}}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{where}.function.name is missing")
    given = function.get("arguments")
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}.function.arguments is not JSON: {error}") from None
    given = given or {}
    if not isinstance(given, dict):
        raise TypeError(f"{where}.function.arguments is {_kind(given)}, not a mapping")
    return {"type": "function", **value, "function": {**function, "arguments": given}}


def _plain(value: object) -> object:
    """Return the value with Arrow's maps as dicts, and without struct fields that are null."""
    if isinstance(value, Mapping):
        return _filled(value)
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):
            return {name: _plain(inner) for name, inner in value if inner is not None}
        return [_plain(inner) for inner in value]
    return value


def _filled(value: Mapping[str, object]) -> Row:
    return {name: _plain(inner) for name, inner in value.items() if inner is not None}


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
