"""Row to request: template or user function, chat template, tokens. CPU, one block at a time.

A row that fails here is marked and passes by the engine; it never takes its block with it.
"""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from prefect_raybatch import model as models
from prefect_raybatch.errors import is_transient
from prefect_raybatch.functions import load_function
from prefect_raybatch.job import Prompt, template_fields
from prefect_raybatch.stages.blocks import (
    ERROR,
    ERROR_TYPE,
    PARAMS,
    TOKENS,
    Failure,
    input_columns,
    load_tokenizer,
    lost_all,
    passes_by,
    rows_of,
    timed,
)


@dataclass(frozen=True)
class Prepare:
    """The stage as a function of one block; made on the driver, run on any worker.

    `model` is the plan's pinned model, `max_model_len` in tokens (None: the model's own).
    """

    prompt: Prompt
    model: dict[str, Any]
    max_model_len: int | None

    def __call__(self, table: pa.Table) -> pa.Table:
        """Adds columns of tokens, parameters, errors and seconds to a block of input rows."""
        if passes_by(table):
            return table
        try:
            return self._prepare(table)
        except Exception as error:  # not of a row: a model or function that is not on this node
            return lost_all(table, f"{type(error).__name__}: {error}", not is_transient(error))

    def _prepare(self, table: pa.Table) -> pa.Table:
        began = time.time()
        tokenizer = load_tokenizer(*models.tokenizer_place(self.model))
        limit = self.max_model_len or models.context_length(models.local_path(self.model))
        requests = self._requests(table)
        texts = render(tokenizer, requests)
        tokens = encode(tokenizer, texts, limit)
        errors = [t.to_dict() if isinstance(t, Failure) else None for t in tokens]
        params = [
            json.dumps(r.sampling) if isinstance(r, Request) and r.sampling else None
            for r in requests
        ]
        table = table.append_column(
            TOKENS,
            pa.array([[] if isinstance(t, Failure) else t for t in tokens], pa.list_(pa.int32())),
        )
        table = table.append_column(PARAMS, pa.array(params, pa.string()))
        table = table.append_column(ERROR, pa.array(errors, ERROR_TYPE))
        return timed(table, "prepare", began)

    def _requests(self, table: pa.Table) -> list[Request | Failure]:
        if self.prompt.function:
            function = load_function(self.prompt.function, "prompt.function")
            rows = rows_of(table, input_columns(table))
            made = [_guarded(_from_function, function, row) for row in rows]
            system = self.prompt.system
            return [r if isinstance(r, Failure) or not system else r.under(system) for r in made]
        template = self.prompt.template or ""
        fields = template_fields(template)
        fill = _Filler(template, self.prompt)
        return [_guarded(fill, row) for row in rows_of(table, list(fields))]


@dataclass(frozen=True)
class Request:
    """Chat messages of one row and the sampling fields it overrides."""

    messages: list[dict[str, Any]]
    sampling: dict[str, Any] | None = None

    def under(self, system: str) -> Request:
        """The same with a system message in front, unless it brings its own."""
        if self.messages[0]["role"] == "system":
            return self
        return Request([{"role": "system", "content": system}, *self.messages], self.sampling)


class _Filler:
    """Fills the template from a row. Only values are put in: no attribute of them is reachable."""

    def __init__(self, template: str, prompt: Prompt):
        self.parts = [(text, name) for text, name, _, _ in string.Formatter().parse(template)]
        self.system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        self.empty = prompt.on_null == "empty"

    def __call__(self, row: dict[str, Any]) -> Request:
        text = []
        for literal, name in self.parts:
            text.append(literal)
            if name is not None:
                value = row[name]
                if value is None and not self.empty:
                    raise ValueError(
                        f"column {name} is null; clean the input or set prompt.on_null: empty"
                    )
                text.append("" if value is None else str(value))
        return Request([*self.system, {"role": "user", "content": "".join(text)}])


def _from_function(function: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> Request:
    made = function(row)
    if isinstance(made, str):
        return Request([{"role": "user", "content": made}])
    if isinstance(made, dict) and "messages" in made:
        unknown = sorted(set(made) - {"messages", "sampling"})
        if unknown:
            raise TypeError(f"prompt.function returned unknown keys {', '.join(unknown)}")
        return Request(_messages(made["messages"]), _sampling(made.get("sampling")))
    return Request(_messages(made))


def _sampling(value: Any) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise TypeError(
            f"prompt.function must return sampling as a dict, not {type(value).__name__}"
        )
    json.dumps(value)  # it travels as JSON: what cannot fails its row here
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    good = isinstance(value, Sequence) and value and not isinstance(value, str)
    if not good or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        raise TypeError(
            "prompt.function must return text, a list of {'role', 'content'} messages, or "
            f"{{'messages': ..., 'sampling': ...}}; it returned {type(value).__name__}"
        )
    for message in value:
        if not isinstance(message["content"], (str, list)):  # a template would print anything
            kind = type(message["content"]).__name__
            raise TypeError(f"prompt.function returned a message whose content is {kind}, not text")
    return [dict(m) for m in value]


def _guarded(make: Callable[..., Request], *args: Any) -> Request | Failure:
    if isinstance(args[-1], Failure):
        return args[-1]
    try:
        return make(*args)
    except Exception as error:
        return Failure.of("prepare", error)


def render(tokenizer: Any, requests: list[Any]) -> list[Any]:
    """Requests to prompt texts through the chat template; failures stay where they are."""
    if not getattr(tokenizer, "chat_template", None):
        return [
            r if isinstance(r, Failure) else "\n\n".join(str(m["content"]) for m in r.messages)
            for r in requests
        ]

    def apply(conversations: Any) -> Any:
        return tokenizer.apply_chat_template(
            conversations, tokenize=False, add_generation_prompt=True
        )

    good = [r.messages for r in requests if isinstance(r, Request)]
    try:
        texts = iter(apply(good) if good else ())
    except Exception:  # one of them: find out which, row by row
        texts = iter([_try(apply, messages) for messages in good])
    return [r if isinstance(r, Failure) else next(texts) for r in requests]


def encode(tokenizer: Any, texts: list[Any], limit: int | None) -> list[Any]:
    """Prompt texts to token lists; texts over the context length become failures."""
    good = [t for t in texts if not isinstance(t, Failure)]

    def tokens(batch: list[str]) -> list[list[int]]:
        return tokenizer(batch, add_special_tokens=not tokenizer.chat_template)["input_ids"]

    try:
        ids = iter(tokens(good) if good else ())
    except Exception:
        ids = iter([_try(lambda text: tokens([text])[0], text) for text in good])
    made = [t if isinstance(t, Failure) else next(ids) for t in texts]
    return [_fitting(t, limit) for t in made]


def _fitting(tokens: Any, limit: int | None) -> Any:
    if isinstance(tokens, Failure):
        return tokens
    if not tokens:
        return Failure("prepare", "EmptyPrompt", "the prompt has no tokens")
    if limit and len(tokens) >= limit:
        return Failure(
            "prepare",
            "PromptTooLong",
            f"the prompt has {len(tokens)} tokens and leaves no room in engine.max_model_len "
            f"{limit}",
        )
    return tokens


def _try(make: Callable[[Any], Any], value: Any) -> Any:
    try:
        return make(value)
    except Exception as error:
        return Failure.of("prepare", error)
