"""Translates a row's request to the JSON of an OpenAI server, and its answer back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from prefect_raybatch.job.endpoint import HOSTED_SAMPLING
from prefect_raybatch.job.images import UNKNOWN
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.images.decode import BadImage, size_in_url
from prefect_raybatch.stages.images.rows import ImagePart, image_reference, is_image
from prefect_raybatch.stages.messages import plain_prompt

CAREFUL_CHARACTERS = 3  # per token: a careful guess, which the server's reported usage corrects
# For an image, GPT-4o takes 85 tokens and 170 for each 512 x 512 pixels, Claude one for 750 pixels,
# Qwen2.5-VL one for 784.
IMAGE_TOKENS, PIXELS_PER_TOKEN = 85, 512
MESSAGE_TOKENS = 8  # tokens that a chat template adds to a message
LABEL_FIELD = "label"
LABEL_JSON_TOKENS = 16  # more than the braces, quotes and field name around a label take


def body_of(
    endpoint: EndpointSpec, messages: list[dict[str, Any]], params: SamplingFields
) -> dict[str, Any]:
    """Return the JSON body of a request with these messages and sampling fields (`params`).

    Raises ValueError for a sampling field, or a kind of `structured_outputs`, that no hosted model
    takes, and for content that is not text where there is no chat.
    """
    if endpoint.path == "embeddings":
        text = plain_prompt(messages)
        return {"model": endpoint.model, "input": text, "encoding_format": "float"}
    given = {name: value for name, value in params.items() if value is not None}
    odd = sorted(set(given) - set(HOSTED_SAMPLING))
    if odd:
        raise ValueError(
            f"sampling.{odd[0]} does not apply to engine.endpoint; leave it out of what "
            "prompt.function returns"
        )
    form = given.pop("structured_outputs", None) or {}
    labels = given.pop("choice", None) or form.get("choice")
    if given.get("n") == 1:  # the default, which servers without n need not be told
        del given["n"]
    most = given.pop("logprobs", None)
    asked: dict[str, Any] = {"messages": messages}
    if endpoint.path == "completions":
        asked = {"prompt": plain_prompt(messages)}
    if most is not None and endpoint.path == "completions":
        asked["logprobs"] = most
    elif most is not None:
        asked |= {"logprobs": True, **({"top_logprobs": most} if most else {})}
    body = {"model": endpoint.model, **asked, **given}
    if labels:
        body["response_format"] = _json_schema("label", _label_schema(labels))
        if "max_tokens" in body:  # the job's limit is meant for the label alone
            body["max_tokens"] += LABEL_JSON_TOKENS
    elif form.get("json_object"):
        body["response_format"] = {"type": "json_object"}
    elif form.get("json") is not None:
        schema = form["json"]
        schema = json.loads(schema) if isinstance(schema, str) else schema
        body["response_format"] = _json_schema("answer", schema)
    elif form:
        raise ValueError(
            f"sampling.structured_outputs: a hosted model does not take {', '.join(sorted(form))}; "
            "use json, json_object or choice"
        )
    return body


def answer_text(content: str, params: SamplingFields) -> str:
    """Return the answer in a response's text `content`.

    If `params` restrict the answer to a choice, `content` is JSON and the answer is the label in
    it. Otherwise, and if the label cannot be read, the answer is `content` itself.
    """
    form = params.get("structured_outputs") or {}
    if not (params.get("choice") or form.get("choice")):
        return content
    try:
        label = json.loads(content)[LABEL_FIELD]
    except (ValueError, TypeError, KeyError, RecursionError):
        return content
    return label if isinstance(label, str) else content


def reserved_tokens(messages: list[dict[str, Any]], body: Mapping[str, Any]) -> tuple[int, int]:
    """Return upper estimates of a request's tokens: (prompt, all answers)."""
    answer = int(body.get("max_tokens") or 0)
    return prompt_estimate(messages), answer * int(body.get("n") or 1)


def prompt_estimate(messages: list[dict[str, Any]]) -> int:
    """Return an upper estimate of the number of tokens in the messages, images included."""
    contents = [message.get("content", "") for message in messages]
    parts = [part for one in contents for part in (one if isinstance(one, list) else [one])]
    images = [part for part in parts if is_image(part)]
    characters = sum(len(_text_of(part)) for part in parts if not is_image(part))
    own = characters // CAREFUL_CHARACTERS + MESSAGE_TOKENS * len(messages)
    return own + sum(map(_image_tokens, images))


def image_tokens(pixels: float) -> int:
    """Return an upper estimate of the tokens for an image of `pixels`; models differ widely."""
    return IMAGE_TOKENS + math.ceil(pixels / PIXELS_PER_TOKEN)


def _image_tokens(part: ImagePart) -> int:
    try:
        width, height = size_in_url(image_reference(part)) or UNKNOWN
    except BadImage:  # the server says what is wrong with it
        width, height = UNKNOWN
    return image_tokens(width * height)


def _text_of(part: object) -> str:
    return str(part.get("text", "")) if isinstance(part, dict) else str(part)


def _json_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def _label_schema(labels: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {LABEL_FIELD: {"type": "string", "enum": list(labels)}},
        "required": [LABEL_FIELD],
        "additionalProperties": False,
    }
