"""Row to request: template or user function, chat template, tokens. CPU, one block at a time.

A row that fails here is marked and passes by the engine; it never takes its block with it.
"""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from prefect_raybatch.job.batch_job import Prompt
from prefect_raybatch.job.checks import template_fields
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.model import pinned as models
from prefect_raybatch.stages.block import (
    ERROR,
    ERROR_TYPE,
    FORMED,
    PARAMS,
    TOKENS,
    TRUNCATED,
    Failure,
    Messages,
    Tokenizer,
    copied,
    input_columns,
    load_tokenizer,
    lost_all,
    passes_by,
    rows_of,
    timed,
)
from prefect_raybatch.stages.calls.apart import NoChild
from prefect_raybatch.stages.calls.calling import HERE, Calls
from prefect_raybatch.stages.row_sampling import check_own, has_form

TokenIds = list[int]
Given = TypeVar("Given")
Made = TypeVar("Made")
CUTS = 4  # tries to cut a message: what is left may take other tokens than it did in the whole


@dataclass(frozen=True)
class Prepare:
    """The stage as a function of one block; made on the driver, run on any worker.

    `model` is the plan's pinned model, `max_model_len` in tokens (None: the model's own).
    `max_tokens` is the room that a prompt which is cut leaves for its answer. `calls`: how the
    user's function is called. `sampling`: the job's fields that are set, which a row's own are
    checked against; with `fixed_form`, a field that needs one form for all, it may set none.
    """

    prompt: Prompt
    model: dict[str, Any]
    max_model_len: int | None
    max_tokens: int = 1
    calls: Calls = HERE
    sampling: dict[str, Any] = field(default_factory=dict)
    fixed_form: str | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """Adds columns of tokens, parameters, errors and seconds to a block of input rows."""
        if passes_by(table):
            return table
        try:
            return self._prepare(table)
        except Exception as error:  # not of a row: a model or function that is not on this node
            return lost_all(table, Loss.of(error))

    def _prepare(self, table: pa.Table) -> pa.Table:
        began = time.time()
        limit = self.max_model_len or models.context_length(models.local_path(self.model))
        requests, whole = self.prompts(table)
        tokens = [self._fitted(r, t, limit) for r, t in zip(requests, whole, strict=True)]
        if self.prompt.on_too_long != "quarantine":
            cut = [
                t is not w and not isinstance(t, Failure)
                for t, w in zip(tokens, whole, strict=True)
            ]
            table = table.append_column(TRUNCATED, pa.array(cut, pa.bool_()))
        errors = [t.to_dict() if isinstance(t, Failure) else None for t in tokens]
        params = [
            json.dumps(r.sampling) if isinstance(r, ChatRequest) and r.sampling else None
            for r in requests
        ]
        table = table.append_column(
            TOKENS,
            pa.array([[] if isinstance(t, Failure) else t for t in tokens], pa.list_(pa.int32())),
        )
        table = table.append_column(PARAMS, pa.array(params, pa.string()))
        if self.prompt.function or has_form(self.sampling):
            own = [r.sampling if isinstance(r, ChatRequest) else None for r in requests]
            form = [has_form(self.sampling, given) for given in own]
            table = table.append_column(FORMED, pa.array(form, pa.bool_()))
        table = table.append_column(ERROR, pa.array(errors, ERROR_TYPE))
        return timed(table, "prepare", began)

    def prompts(
        self, table: pa.Table
    ) -> tuple[list[ChatRequest | Failure], list[TokenIds | Failure]]:
        """Request and prompt tokens of each row of a block of input rows, of any length; a
        `Failure` in either place for a row that has none."""
        tokenizer = self._tokenizer()
        requests = self._requests(table)
        return requests, tokenize(tokenizer, render(tokenizer, requests))

    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(*models.tokenizer_place(self.model))

    def _fitted(
        self, request: ChatRequest | Failure, tokens: TokenIds | Failure, limit: int | None
    ) -> TokenIds | Failure:
        """Tokens that leave room in `limit`, cut where the job says so, or the row's failure."""
        if isinstance(tokens, Failure) or isinstance(request, Failure):
            return tokens
        if not limit or self.prompt.on_too_long == "quarantine":
            return _fitting(tokens, limit)
        room = limit - request.answer(self.max_tokens)
        room = room if room > 0 else limit - 1
        if len(tokens) <= room:
            return _fitting(tokens, limit)
        left = self.prompt.on_too_long == "truncate_left"
        try:
            cut = shortened(self._tokenizer(), request, len(tokens), room, left)
        except Exception as error:
            return Failure.of("prepare", error)
        return _fitting(tokens, limit) if cut is None else cut

    def _own(self, fields: dict[str, Any]) -> None:
        check_own(fields, self.sampling, self.fixed_form)

    def _requests(self, table: pa.Table) -> list[ChatRequest | Failure]:
        if self.prompt.function:
            rows = rows_of(table, input_columns(table))
            with self.calls.function(self.prompt.function, "prompt.function") as function:
                made = [_guarded(_from_function, function, self._own, row) for row in rows]
            system = self.prompt.system
            return [r if isinstance(r, Failure) or not system else r.under(system) for r in made]
        template = self.prompt.template or ""
        fields = template_fields(template)
        fill = _Filler(template, self.prompt)
        return [_guarded(fill, row) for row in rows_of(table, list(fields))]


@dataclass(frozen=True)
class ChatRequest:
    """Chat messages of one row and the sampling fields it overrides."""

    messages: Messages
    sampling: dict[str, Any] | None = None

    def under(self, system: str) -> ChatRequest:
        """The same with a system message in front, unless it brings its own."""
        if self.messages[0]["role"] == "system":
            return self
        return ChatRequest([{"role": "system", "content": system}, *self.messages], self.sampling)

    def answer(self, most: int) -> int:
        """Most tokens out: its own max_tokens, or the job's."""
        own = (self.sampling or {}).get("max_tokens")
        return own if isinstance(own, int) else most


class _Filler:
    """Fills the template from a row. Only values are put in: no attribute of them is reachable."""

    def __init__(self, template: str, prompt: Prompt):
        self.parts = [(text, name) for text, name, _, _ in string.Formatter().parse(template)]
        self.system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        self.empty = prompt.on_null == "empty"

    def __call__(self, row: dict[str, Any]) -> ChatRequest:
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
        return ChatRequest([*self.system, {"role": "user", "content": "".join(text)}])


def _from_function(
    function: Callable[[dict[str, Any]], Any], check: Callable[[Any], None], row: dict[str, Any]
) -> ChatRequest:
    made = function(row)
    if isinstance(made, str):
        return ChatRequest([{"role": "user", "content": made}])
    if isinstance(made, dict) and "messages" in made:
        unknown = sorted(set(made) - {"messages", "sampling"})
        if unknown:
            raise TypeError(f"prompt.function returned unknown keys {', '.join(unknown)}")
        return ChatRequest(_messages(made["messages"]), _sampling(made.get("sampling"), check))
    return ChatRequest(_messages(made))


def _sampling(value: Any, check: Callable[[Any], None]) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise TypeError(
            f"prompt.function must return sampling as a dict, not {type(value).__name__}"
        )
    # It travels as JSON: what cannot fails its row here, and the function may change it later.
    made: dict[str, Any] | None = json.loads(json.dumps(value))
    if made:
        check(made)
    return made


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
    return [copied(m) for m in value]


def _guarded(make: Callable[..., ChatRequest], *args: Any) -> ChatRequest | Failure:
    if isinstance(args[-1], Failure):
        return args[-1]
    try:
        return make(*args)
    except NoChild:  # not of the row
        raise
    except Exception as error:
        return Failure.of("prepare", error)


def render(tokenizer: Tokenizer, requests: Sequence[ChatRequest | Failure]) -> list[str | Failure]:
    """Requests to prompt texts through the chat template; failures stay where they are."""
    if not getattr(tokenizer, "chat_template", None):
        return [
            r if isinstance(r, Failure) else "\n\n".join(str(m["content"]) for m in r.messages)
            for r in requests
        ]

    def texts_of(conversations: list[Messages]) -> list[str]:
        return tokenizer.apply_chat_template(
            conversations, tokenize=False, add_generation_prompt=True
        )

    good = [r.messages for r in requests if isinstance(r, ChatRequest)]
    texts: Iterator[str | Failure]
    try:
        texts = iter(texts_of(good) if good else ())
    except Exception:  # one of them: find out which, row by row
        texts = iter([_try(lambda one: texts_of([one])[0], messages) for messages in good])
    return [r if isinstance(r, Failure) else next(texts) for r in requests]


def tokenize(tokenizer: Tokenizer, texts: Sequence[str | Failure]) -> list[TokenIds | Failure]:
    """Prompt texts to token lists; failures stay where they are."""
    good = [t for t in texts if not isinstance(t, Failure)]

    def tokens(batch: list[str]) -> list[TokenIds]:
        special = not tokenizer.chat_template
        batch_ids: list[TokenIds] = tokenizer(batch, add_special_tokens=special)["input_ids"]
        return batch_ids

    ids: Iterator[TokenIds | Failure]
    try:
        ids = iter(tokens(good) if good else ())
    except Exception:
        ids = iter([_try(lambda text: tokens([text])[0], text) for text in good])
    return [t if isinstance(t, Failure) else next(ids) for t in texts]


def shortened(
    tokenizer: Tokenizer, request: ChatRequest, size: int, room: int, left: bool
) -> list[int] | None:
    """Prompt tokens of a request of `size` tokens, at most `room`, with the beginning (`left`) or
    the end of its last user message cut off; None where that message is not long enough.

    The text is cut and not the tokens: the chat template around it must stay whole.
    """
    users = [i for i, m in enumerate(request.messages) if m["role"] == "user"]
    if not users or not isinstance(request.messages[users[-1]]["content"], str):
        return None
    before, message = request.messages[: users[-1]], request.messages[users[-1]]
    after = request.messages[users[-1] + 1 :]
    content = message["content"]
    spans = _spans(tokenizer, content)
    over = size - room
    for _ in range(CUTS):
        keep = len(spans) - over
        if keep < 1:
            return None
        text = content[spans[-keep][0] :] if left else content[: spans[keep - 1][1]]
        asked = ChatRequest([*before, {**message, "content": text}, *after], request.sampling)
        (tokens,) = tokenize(tokenizer, render(tokenizer, [asked]))
        if isinstance(tokens, Failure):
            return None
        if len(tokens) <= room:
            return list(tokens)
        over += len(tokens) - room
    return None


def _spans(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Where each token of a text begins and ends in it, in characters."""
    if tokenizer.is_fast:
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(made["offset_mapping"])
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])  # taken as of one length
    return [(i * len(text) // count, (i + 1) * len(text) // count) for i in range(count)]


def _fitting(tokens: TokenIds, limit: int | None) -> TokenIds | Failure:
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


def _try(make: Callable[[Given], Made], value: Given) -> Made | Failure:
    try:
        return make(value)
    except Exception as error:
        return Failure.of("prepare", error)
