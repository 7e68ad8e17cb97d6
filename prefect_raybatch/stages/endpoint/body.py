"""Translates a row's request to the JSON of an OpenAI server, and its answer back."""

from __future__ import annotations

import json
from typing import Any

from prefect_raybatch.job.endpoint import HOSTED_SAMPLING
from prefect_raybatch.spec.request import SamplingFields

CAREFUL_CHARACTERS = 3  # a careful guess; the server's usage corrects it
MESSAGE_TOKENS = 8  # that a chat template puts around a message
LABEL_FIELD = "label"


def body_of(model: str, messages: list[dict[str, Any]], params: SamplingFields) -> dict[str, Any]:
    """Return the body of a chat completion.

    Raises ValueError for a sampling field that no hosted model takes.
    """
    given = {name: value for name, value in params.items() if value is not None}
    odd = sorted(set(given) - set(HOSTED_SAMPLING))
    if odd:
        raise ValueError(
            f"sampling.{odd[0]} does not apply to engine.endpoint; leave it out of what "
            "prompt.function returns"
        )
    form = given.pop("structured_outputs", None) or {}
    labels = given.pop("choice", None) or form.get("choice")
    body = {"model": model, "messages": messages, **given}
    if labels:
        body["response_format"] = _json_schema("label", _label_schema(labels))
    elif form.get("json") is not None:
        schema = form["json"]
        schema = json.loads(schema) if isinstance(schema, str) else schema
        body["response_format"] = _json_schema("answer", schema)
    return body


def answer_text(content: str, params: SamplingFields) -> str:
    """Return the answer's text: of a choice, the label in its JSON object."""
    form = params.get("structured_outputs") or {}
    if not (params.get("choice") or form.get("choice")):
        return content
    try:
        label = json.loads(content)[LABEL_FIELD]
    except (ValueError, TypeError, KeyError):
        return content
    return label if isinstance(label, str) else content


def prompt_estimate(messages: list[dict[str, Any]]) -> int:
    """Return about how many tokens the messages have, rather too many."""
    characters = sum(len(str(message.get("content", ""))) for message in messages)
    return characters // CAREFUL_CHARACTERS + MESSAGE_TOKENS * len(messages)


def _json_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def _label_schema(labels: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {LABEL_FIELD: {"type": "string", "enum": list(labels)}},
        "required": [LABEL_FIELD],
        "additionalProperties": False,
    }
