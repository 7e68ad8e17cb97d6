"""Answers of a hosted model: read from the server's JSON, stored as JSON in a run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefect_raybatch.spec.endpoint import EndpointPath
from prefect_raybatch.stages.answer_logprobs import TokenLogprob, TokenLogprobs

# Errors that reading JSON of an unexpected shape or depth may raise.
NOT_AS_AGREED = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(OverflowError, RecursionError),
)

# Values of finish_reason, in lower case: of complete answers, and of those at the token limit.
COMPLETE = (
    *("", "none", "stop", "stop_sequence", "eos", "eos_token", "end_turn", "complete"),
    *("tool_calls", "tool_use", "function_call"),
)
AT_LIMIT = ("length", "max_tokens", "model_length")


@dataclass(frozen=True)
class HostedChoice:
    """One of the answers to a request.

    For an embedding, `text` is the vector as a JSON list. `finish` is "stop" or "length". `steps`
    has the log probabilities of each token and its alternatives, None if the server sent none.
    """

    text: str
    finish: str = "stop"
    steps: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class HostedAnswer:
    """The server's answers to a row's request, or the row's error as (class, message).

    `output_tokens` is the sum over all choices: servers do not report it by choice.
    """

    choices: tuple[HostedChoice, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: tuple[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values from which `from_json` makes an equal answer."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HostedAnswer | None:
        """Return the answer that `to_json` encoded; None if the values are damaged."""
        try:
            choices = tuple(_kept_choice(one) for one in value["choices"])
            prompt, output, error = (
                value[name] for name in ("prompt_tokens", "output_tokens", "error")
            )
            if error is not None:
                kind, message = error
                error = (_checked(kind, str), _checked(message, str))
            return cls(choices, _checked(prompt, int), _checked(output, int), error)
        except NOT_AS_AGREED:
            return None


def row_error(kind: str, message: str, prompt: int = 0, output: int = 0) -> HostedAnswer:
    """Return an answer that holds a row's error and the prompt and output tokens billed for it."""
    return HostedAnswer((), prompt, output, (kind, message))


def answer_of(value: Any, path: EndpointPath) -> HostedAnswer:
    """Parse a response's JSON from API `path`.

    If the model refuses, returns no text, or is stopped by the server, the answer holds a row's
    error. Raises one of the exceptions in NOT_AS_AGREED if the JSON is malformed.
    """
    usage = value.get("usage") or {}
    prompt = max(0, int(usage.get("prompt_tokens") or 0))
    output = max(0, int(usage.get("completion_tokens") or 0))
    if path == "embeddings":
        numbers = [float(number) for number in value["data"][0]["embedding"]]
        return HostedAnswer((HostedChoice(json.dumps(numbers)),), prompt)
    choices = []
    for choice in _in_order(value["choices"]):
        message = choice["message"] if path == "chat/completions" else {"content": choice["text"]}
        content, finish = message["content"], choice.get("finish_reason")
        if content is None and (refusal := message.get("refusal")):
            said = f"the model refuses to answer: {str(refusal)[:300]}"
            return row_error("AnswerRefused", said, prompt, output)
        if not isinstance(content, str):
            said = f"the answer has no text (finish_reason {finish!r})"
            return row_error("NoAnswer", said, prompt, output)
        name = str(finish).lower()
        if name not in COMPLETE + AT_LIMIT:
            said = f"the server cut the answer off (finish_reason {finish!r})"[:300]
            return row_error("AnswerCut", f"{said}. Retry the row", prompt, output)
        reason = "length" if name in AT_LIMIT else "stop"
        choices.append(HostedChoice(content, reason, _steps_in(choice.get("logprobs"), path)))
    if not choices:
        if prompt:
            return row_error("NoAnswer", "the answer has no choices", prompt, output)
        raise ValueError("no choices")
    return HostedAnswer(tuple(choices), prompt, output)


def as_utf8(text: str) -> str:
    """Return the text with U+FFFD for each half of a surrogate pair, which UTF-8 cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _in_order(choices: Sequence[Any]) -> list[Any]:
    """Return choices in the order of their index, which servers need not keep."""
    return sorted(choices, key=lambda choice: int(choice.get("index") or 0))


def _steps_in(logprobs: Any, path: EndpointPath) -> list[TokenLogprobs] | None:
    """Return the tokens of a choice with their log probabilities; None if absent or malformed."""
    if logprobs is None:
        return None
    try:
        if path == "completions":
            return _completion_steps(logprobs)
        return [
            _step(_chat_token(one), [_chat_token(other) for other in one.get("top_logprobs") or ()])
            for one in logprobs["content"]
        ]
    except NOT_AS_AGREED:
        return None


def _chat_token(value: Any) -> TokenLogprob:
    text, spelled = value["token"], value.get("bytes")
    if spelled:  # the exact bytes: as text, servers write a part of a character in various ways
        text = bytes(spelled).decode("utf-8", "replace")
    return _token(text, value["logprob"])


def _completion_steps(logprobs: Any) -> list[TokenLogprobs]:
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    most = logprobs.get("top_logprobs") or [None] * len(tokens)
    return [
        _step(_token(token, value), [_token(*other) for other in (top or {}).items()])
        for token, value, top in zip(tokens, values, most, strict=True)
    ]


def _step(chosen: TokenLogprob, others: list[TokenLogprob]) -> TokenLogprobs:
    return [chosen, *sorted(others, key=lambda one: -one["logprob"])]


def _token(text: Any, value: Any) -> TokenLogprob:
    return {"id": None, "token": as_utf8(_checked(text, str)), "logprob": float(value)}


def _kept_choice(value: Mapping[str, Any]) -> HostedChoice:
    steps = value["steps"]
    if steps is not None:
        steps = [[_token(one["token"], one["logprob"]) for one in step] for step in steps]
    return HostedChoice(_checked(value["text"], str), _checked(value["finish"], str), steps)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of {kind}")
    return value
