"""Turns rows into the texts of a pooling task (one or two per row), and texts into tokens.

No chat template surrounds the text, and the tokenizer adds its special tokens: this is what
embedding and classifying models are trained on, and what vLLM's `LLM.embed` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import pyarrow as pa

from prefect_raybatch.model import pinned as models
from prefect_raybatch.stages.block import (
    Failure,
    Row,
    Tokenizer,
    input_columns,
    rows_of,
    timed,
    with_failures,
)
from prefect_raybatch.stages.calls.isolated import NoChild
from prefect_raybatch.stages.columns import (
    KEY,
    PARAMS,
    SECOND,
    TOKENS,
    TRUNCATED,
)
from prefect_raybatch.stages.endpoint.prepare import PrepareHosted
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.pooling import Pooling, Texts
from prefect_raybatch.stages.prepare import UNKNOWN_CONTEXT, Prepare
from prefect_raybatch.stages.row_text import Plain, RowText, refused
from prefect_raybatch.stages.tokens import (
    CHARACTERS_A_TOKEN,
    LongPrompt,
    TokenIds,
    batches_of,
    guard_of,
    long_tokens,
)

UNBOUNDED = 1 << 30  # a tokenizer without a maximum length returns an immense number


RowRequests = tuple[ChatRequest, ...]  # one for each text of a row


@dataclass(frozen=True)
class Input:
    """The texts of a row for the tokenizer.

    The tokenizer is the model's own if `plain` is None. Otherwise it is `plain`, a copy that
    encodes control tokens of the row as plain text. Texts for `plain` have a mark in front of each
    control token that comes from the job.
    """

    texts: tuple[str, ...]
    plain: Plain | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True)
class Encoded:
    """Token ids of each prompt of a row, which has one or two prompts.

    `cut`: the prompts were shortened. `types_from` is the index at which the second text begins, in
    a prompt with two texts. It is None for one text, or if the tokenizer returns no token types.
    """

    ids: tuple[TokenIds, ...]
    types_from: int | None = None
    cut: bool = False


class Truncation(TypedDict, total=False):
    """Arguments of a tokenizer that cut texts at `max_length` tokens; empty for whole texts."""

    truncation: bool
    max_length: int


@dataclass(frozen=True)
class PrepareTexts(Prepare):
    """The prepare stage for a pooling task, such as embed, classify or score.

    `texts` says whether a row has one text, two texts in one prompt, or two texts in two prompts.
    """

    texts: Texts = Texts.ONE

    def _prepare(self, table: pa.Table) -> pa.Table:
        began = time.time()
        given = self._given(table)
        if self.keying is not None:
            planned = table[KEY].to_pylist()
            checked = self.keying.checked(list(map(_as_request, given)), table, planned)
            pairs = zip(checked, given, strict=True)
            given = [one if isinstance(one, Failure) else asked for one, asked in pairs]
        limit = self._limit()
        made = self._encoded(given, limit, limit)
        if self.prompt.on_too_long != "quarantine":
            cut = [isinstance(m, Encoded) and m.cut for m in made]
            table = TRUNCATED.add_to(table, cut)
        names = (TOKENS, SECOND) if self.texts is Texts.SEPARATE else (TOKENS,)
        for at, name in enumerate(names):
            ids = [m.ids[at] if isinstance(m, Encoded) else [] for m in made]
            table = name.add_to(table, ids)
        params = [_params(m) if isinstance(m, Encoded) else None for m in made]
        table = PARAMS.add_to(table, params)
        table = with_failures(table, [m if isinstance(m, Failure) else None for m in made])
        return timed(table, "prepare", began)

    def requests(self, table: pa.Table) -> list[ChatRequest | Failure]:
        """Return each row's request, or its failure; a request has a message for each text."""
        return list(map(_as_request, self._given(table)))

    def prompts(
        self, table: pa.Table
    ) -> tuple[list[ChatRequest | Failure], list[TokenIds | Failure]]:
        """Return (an empty request for each row, each row's prompt tokens).

        No prompt is cut to the limit. A failed row has its failure in both lists. If a row has two
        prompts, the tokens are those of the longer one. Of a text that is far too long, only a part
        is tokenized. That part still has more tokens than the model takes.
        """
        made = self._encoded(self._given(table), None, self._limit())
        requests = [m if isinstance(m, Failure) else ChatRequest([]) for m in made]
        return requests, [m if isinstance(m, Failure) else max(m.ids, key=len) for m in made]

    def _limit(self) -> int | None:
        """Return the most tokens that a prompt may have, None if unknown.

        The prompt may fill the whole context, because no answer follows it.
        """
        if self.max_model_len:
            return self.max_model_len
        own = models.context_length(self.model)
        said = self._tokenizer().model_max_length
        lengths = [n for n in (own, said) if isinstance(n, int) and n < UNBOUNDED]
        return min(lengths, default=None)

    def _given(self, table: pa.Table) -> list[RowRequests | Failure]:
        """Return each row's requests: one for each of its texts, or the row's failure."""
        if self.prompt.function:
            count = 1 if self.texts is Texts.ONE else 2
            rows = rows_of(table, input_columns(table))
            with self.calls.function(self.prompt.function, "prompt.function") as function:
                return [_guarded(function, count, row) for row in rows]
        first = self._requests(table)
        if self.texts is Texts.ONE:
            return [r if isinstance(r, Failure) else (r,) for r in first]
        other = replace(self.prompt, template=self.prompt.second)
        second = replace(self, prompt=other)._requests(table)
        return [_both(a, b) for a, b in zip(first, second, strict=True)]

    def _encoded(
        self, given: Sequence[RowRequests | Failure], limit: int | None, most: int | None
    ) -> list[Encoded | Failure]:
        """Return the tokens of each row, or its failure.

        A row with more than `limit` tokens (None: no limit) is cut or fails, as the job says. If a
        text has far more than `most` tokens, only a part of it is tokenized.
        """
        tokenizer, most = self._tokenizer(), most or UNKNOWN_CONTEXT
        rows = self.prompt.special_tokens_in_rows
        guard = None if rows == "allow" else guard_of(tokenizer)
        inputs = [
            a if isinstance(a, Failure) else self._input(guard, rows, a, limit, most) for a in given
        ]
        made: list[Encoded | Failure] = []
        for batch in batches_of([0 if isinstance(a, Failure) else a.size for a in inputs]):
            made += self._batch(inputs[batch])
        return [
            self._fitting(one, whole, limit)
            if isinstance(one, Input) and isinstance(whole, Encoded)
            else whole
            for one, whole in zip(inputs, made, strict=True)
        ]

    def _input(
        self, guard: RowText | None, rows: str, requests: RowRequests, limit: int | None, most: int
    ) -> Input | Failure:
        given = _input(None, rows, requests)
        if guard is None or isinstance(given, Failure):
            return given if isinstance(given, Failure) else self._bounded(given, limit, most)
        bounded = self._bounded(given, limit, most)  # first: if it fails, no search is needed
        safe = bounded if isinstance(bounded, Failure) else _input(guard, rows, requests)
        if isinstance(safe, Failure) or safe == given:
            return bounded if safe == given else safe
        return self._bounded(safe, limit, most)

    def _batch(self, inputs: Sequence[Input | Failure]) -> list[Encoded | Failure]:
        """Return the tokens of each row, or its failure.

        Rows for the model's own tokenizer are tokenized in one call, rows for a `plain` copy one by
        one.
        """
        ordinary = [a for a in inputs if isinstance(a, Input) and a.plain is None]
        made: Iterator[Encoded | Failure]
        try:
            made = iter(self._whole([a.texts for a in ordinary]) if ordinary else ())
        except Exception:  # one text fails: find out which, row by row
            made = iter([self._alone(one) for one in ordinary])
        return [
            a if isinstance(a, Failure) else next(made) if a.plain is None else self._alone(a)
            for a in inputs
        ]

    def _bounded(self, given: Input, limit: int | None, most: int) -> Input | Failure:
        """Return the texts, shortened if they have far more than `most` tokens, or a failure.

        A shortened text still has more than `most` tokens. The row fails instead if there is a
        `limit` and the job cuts no prompts.
        """
        tokenizer = self._tokenizer() if given.plain is None else given.plain.tokenizer
        side, texts = self.prompt.on_too_long, list(given.texts)
        for i, text in enumerate(texts):
            if len(text) <= most * CHARACTERS_A_TOKEN:
                continue
            end = side == "truncate_left"
            try:
                ids = long_tokens(partial(_ids, tokenizer), text, most, end)
            except Exception as error:
                return Failure.of("prepare", error)
            if not isinstance(ids, LongPrompt):
                continue
            if limit is not None and side == "quarantine":
                return _too_long(f"about {ids.estimate:,}", limit)
            texts[i] = text[-ids.characters :] if end else text[: ids.characters]
        return given if tuple(texts) == given.texts else replace(given, texts=tuple(texts))

    def _alone(self, given: Input, **cut: Unpack[Truncation]) -> Encoded | Failure:
        try:
            return self._whole([given.texts], given.plain, **cut)[0]
        except Exception as error:
            return Failure.of("prepare", error)

    def _whole(
        self,
        texts: Sequence[tuple[str, ...]],
        plain: Plain | None = None,
        **cut: Unpack[Truncation],
    ) -> list[Encoded]:
        """Return the tokens of each row's `texts`, from the tokenizer `plain` or else the model's.

        `cut` are the arguments that truncate texts, none for whole texts.
        """
        tokenizer = self._tokenizer() if plain is None else plain.tokenizer
        if not cut:
            return self._tokens(tokenizer, texts, plain)
        before = tokenizer.truncation_side
        tokenizer.truncation_side = self.prompt.on_too_long.removeprefix("truncate_")
        try:  # special tokens stay; in a pair the longer text is cut first
            return self._tokens(tokenizer, texts, plain, **cut)
        finally:
            tokenizer.truncation_side = before

    def _tokens(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[tuple[str, ...]],
        plain: Plain | None,
        **cut: Unpack[Truncation],
    ) -> list[Encoded]:
        def of(ids: list[TokenIds]) -> list[TokenIds]:
            return ids if plain is None else list(map(plain.original, ids))

        firsts = [text[0] for text in texts]
        if self.texts is Texts.PAIR:
            made = tokenizer(firsts, [text[1] for text in texts], add_special_tokens=True, **cut)
            types = made.get("token_type_ids") or [None] * len(texts)
            return [
                Encoded((ids,), _first_one(kinds))
                for ids, kinds in zip(of(made["input_ids"]), types, strict=True)
            ]
        sides = [of(tokenizer(firsts, add_special_tokens=True, **cut)["input_ids"])]
        if self.texts is Texts.SEPARATE:
            seconds = [text[1] for text in texts]
            sides.append(of(tokenizer(seconds, add_special_tokens=True, **cut)["input_ids"]))
        return [Encoded(ids) for ids in zip(*sides, strict=True)]

    def _fitting(self, given: Input, whole: Encoded, limit: int | None) -> Encoded | Failure:
        longest = max(map(len, whole.ids))
        if not min(map(len, whole.ids)):
            return Failure("prepare", "EmptyPrompt", "the prompt has no tokens")
        if limit is None or longest <= limit:
            return whole
        if self.prompt.on_too_long == "quarantine":
            return _too_long(str(longest), limit)
        made = self._alone(given, truncation=True, max_length=limit)
        return replace(made, cut=True) if isinstance(made, Encoded) else made


def _input(guard: RowText | None, rows: str, requests: RowRequests) -> Input | Failure:
    """Return a row's texts for the tokenizer, with control tokens made harmless, or its failure.

    `rows` is the job's `prompt.special_tokens_in_rows`: "refuse" makes a control token a failure.
    Without a `guard` the texts are unchanged.
    """
    texts = tuple(map(_text, requests))
    controls = () if guard is None else tuple(filter(None, map(guard.control_in, requests)))
    if guard is None or not controls:
        return Input(texts)
    if rows == "refuse":
        return refused(controls[0])
    if guard.plain is None:
        return Input(tuple(_text(guard.spaced(one)) for one in requests))
    hidden = [guard.hidden(one) for one in requests]
    return Input(tuple(guard.marked(_text(h.request), h.texts) for h in hidden), guard.plain)


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[TokenIds]:
    return list(tokenizer(texts, add_special_tokens=True)["input_ids"])


def _too_long(count: str, limit: int) -> Failure:
    return Failure(
        "prepare",
        "PromptTooLong",
        f"the prompt has {count} tokens, more than engine.max_model_len {limit}. Shorten the row, "
        "or set prompt.on_too_long to truncate it",
    )


def prepare_of(task: Pooling | None, *args: Any, hosted: bool = False, **more: Any) -> Prepare:
    """Return the prepare stage for a pooling `task`, or for text generation (None).

    `hosted`: the model is behind an HTTP API; the stage is then the same for every task. The other
    arguments are the stage's fields.
    """
    if hosted:
        return PrepareHosted(*args, **more)
    if task is None:
        return Prepare(*args, **more)
    return PrepareTexts(*args, **{**more, "texts": task.texts})


def _params(made: Encoded) -> str | None:
    """Return the vLLM request fields for a pair's token types as JSON; None without token types.

    The fields hold the index at which the second text begins.
    """
    if made.types_from is None:
        return None
    return json.dumps({"extra_kwargs": {"compressed_token_type_ids": made.types_from}})


def _first_one(types: Sequence[int] | None) -> int | None:
    """Return the index at which a pair's token types change from 0 to 1; None if `types` is None.

    Raises ValueError for types other than 0 and 1, which vLLM does not support.
    """
    if types is None:
        return None
    at = next((i for i, kind in enumerate(types) if kind), len(types))
    if any(kind != 1 for kind in types[at:]):
        raise ValueError(
            "the tokenizer returns token types other than 0s followed by 1s, which vLLM does "
            "not support"
        )
    return at


def _as_request(asked: RowRequests | Failure) -> ChatRequest | Failure:
    if isinstance(asked, Failure):
        return asked
    return ChatRequest([{"role": "text", "content": _text(one)} for one in asked])


def _text(request: ChatRequest) -> str:
    return "\n\n".join(str(message["content"]) for message in request.messages)


def _both(first: ChatRequest | Failure, second: ChatRequest | Failure) -> RowRequests | Failure:
    if isinstance(first, Failure):
        return first
    return second if isinstance(second, Failure) else (first, second)


def _guarded(
    function: Callable[[Row], object], count: int, row: Row | Failure
) -> RowRequests | Failure:
    """Return the `count` requests that a user's function makes from a row, or the row's failure.

    Raises `NoChild` if the function's process did not start.
    """
    if isinstance(row, Failure):
        return row
    try:
        made = function(row)
        texts = (made,) if count == 1 else tuple(made) if isinstance(made, (list, tuple)) else ()
        if len(texts) == count and all(isinstance(text, str) for text in texts):
            return tuple(ChatRequest([{"role": "user", "content": text}]) for text in texts)
        wanted = "text" if count == 1 else "two texts"
        raise TypeError(
            f"prompt.function must return {wanted} with this engine.task; it returned "
            f"{type(made).__name__}"
        )
    except NoChild:  # the function's process did not start, which is no fault of the row
        raise
    except Exception as error:
        return Failure.of("prepare", error)
