"""Row to the plain text of a task that pools, or to a pair of texts; text to tokens.

No chat template is put around the text, and the tokenizer adds its special tokens: what a model
that embeds or classifies was trained on, and what vLLM's `LLM.embed` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from prefect_raybatch.model import pinned as models
from prefect_raybatch.stages.block import (
    ERROR,
    ERROR_TYPE,
    PARAMS,
    SECOND,
    TOKENS,
    TRUNCATED,
    Failure,
    Tokenizer,
    input_columns,
    rows_of,
    timed,
)
from prefect_raybatch.stages.calls.apart import NoChild
from prefect_raybatch.stages.messages import ChatRequest
from prefect_raybatch.stages.pooling import Pooling, Texts
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.request_key import KEY
from prefect_raybatch.stages.tokens import TokenIds

UNBOUNDED = 1 << 30  # a tokenizer that knows no length says an immense one


@dataclass(frozen=True)
class Encoded:
    """Token ids of a row's prompt, or of its two; `types_from` is the first of a pair's second
    text, where the tokenizer gives types; `cut`: they were shortened."""

    ids: tuple[TokenIds, ...]
    types_from: int | None = None
    cut: bool = False


@dataclass(frozen=True)
class PrepareTexts(Prepare):
    """The stage for a task that pools; `texts` says what a row's prompt is made of."""

    texts: Texts = Texts.ONE

    def _prepare(self, table: pa.Table) -> pa.Table:
        began = time.time()
        given = self._given(table)
        if self.keying is not None:
            planned = table[KEY].to_pylist()
            checked = self.keying.checked(list(map(_as_request, given)), table, planned)
            pairs = zip(checked, given, strict=True)
            given = [one if isinstance(one, Failure) else texts for one, texts in pairs]
        made = self._encoded(given, self._limit())
        if self.prompt.on_too_long != "quarantine":
            cut = [isinstance(m, Encoded) and m.cut for m in made]
            table = table.append_column(TRUNCATED, pa.array(cut, pa.bool_()))
        names = (TOKENS, SECOND) if self.texts is Texts.TWO else (TOKENS,)
        for at, name in enumerate(names):
            ids = [m.ids[at] if isinstance(m, Encoded) else [] for m in made]
            table = table.append_column(name, pa.array(ids, pa.list_(pa.int32())))
        params = [_params(m) if isinstance(m, Encoded) else None for m in made]
        table = table.append_column(PARAMS, pa.array(params, pa.string()))
        errors = [m.to_dict() if isinstance(m, Failure) else None for m in made]
        table = table.append_column(ERROR, pa.array(errors, ERROR_TYPE))
        return timed(table, "prepare", began)

    def requests(self, table: pa.Table) -> list[ChatRequest | Failure]:
        """The texts of each row, each as a message."""
        return list(map(_as_request, self._given(table)))

    def prompts(
        self, table: pa.Table
    ) -> tuple[list[ChatRequest | Failure], list[TokenIds | Failure]]:
        """Request and prompt tokens of each row, of any length; of two texts the longer one's."""
        made = self._encoded(self._given(table), None)
        requests = [m if isinstance(m, Failure) else ChatRequest([]) for m in made]
        return requests, [m if isinstance(m, Failure) else max(m.ids, key=len) for m in made]

    def _limit(self) -> int | None:
        """The most tokens of a prompt; there is no answer that would need room."""
        if self.max_model_len:
            return self.max_model_len
        own = models.context_length(models.local_path(self.model))
        said = self._tokenizer().model_max_length
        lengths = [n for n in (own, said) if isinstance(n, int) and n < UNBOUNDED]
        return min(lengths, default=None)

    def _given(self, table: pa.Table) -> list[tuple[str, ...] | Failure]:
        """The text of each row, or its two."""
        if self.prompt.function:
            count = 1 if self.texts is Texts.ONE else 2
            rows = rows_of(table, input_columns(table))
            with self.calls.function(self.prompt.function, "prompt.function") as function:
                return [_guarded(function, count, row) for row in rows]
        first = self._requests(table)
        if self.texts is Texts.ONE:
            return [r if isinstance(r, Failure) else (_text(r),) for r in first]
        other = self.prompt.model_copy(update={"template": self.prompt.second})
        second = replace(self, prompt=other)._requests(table)
        return [_both(a, b) for a, b in zip(first, second, strict=True)]

    def _encoded(
        self, texts: Sequence[tuple[str, ...] | Failure], limit: int | None
    ) -> list[Encoded | Failure]:
        tokenizer = self._tokenizer()
        good = [t for t in texts if not isinstance(t, Failure)]
        made: Iterator[Encoded | Failure]
        try:
            made = iter(self._whole(tokenizer, good) if good else ())
        except Exception:  # one text fails: find out which, row by row
            made = iter([self._alone(tokenizer, one) for one in good])
        found: list[Encoded | Failure] = []
        for text in texts:
            encoded = text if isinstance(text, Failure) else next(made)
            if isinstance(encoded, Encoded) and not isinstance(text, Failure):
                encoded = self._fitting(tokenizer, text, encoded, limit)
            found.append(encoded)
        return found

    def _alone(self, tokenizer: Tokenizer, text: tuple[str, ...]) -> Encoded | Failure:
        try:
            return self._whole(tokenizer, [text])[0]
        except Exception as error:
            return Failure.of("prepare", error)

    def _whole(
        self, tokenizer: Tokenizer, texts: Sequence[tuple[str, ...]], **cut: Any
    ) -> list[Encoded]:
        firsts = [text[0] for text in texts]
        if self.texts is Texts.PAIR:
            made = tokenizer(firsts, [text[1] for text in texts], add_special_tokens=True, **cut)
            types = made.get("token_type_ids") or [None] * len(texts)
            return [
                Encoded((ids,), _first_one(kinds))
                for ids, kinds in zip(made["input_ids"], types, strict=True)
            ]
        sides = [tokenizer(firsts, add_special_tokens=True, **cut)["input_ids"]]
        if self.texts is Texts.TWO:
            seconds = [text[1] for text in texts]
            sides.append(tokenizer(seconds, add_special_tokens=True, **cut)["input_ids"])
        return [Encoded(ids) for ids in zip(*sides, strict=True)]

    def _fitting(
        self, tokenizer: Tokenizer, text: tuple[str, ...], whole: Encoded, limit: int | None
    ) -> Encoded | Failure:
        longest = max(map(len, whole.ids))
        if not min(map(len, whole.ids)):
            return Failure("prepare", "EmptyPrompt", "the prompt has no tokens")
        if limit is None or longest <= limit:
            return whole
        if self.prompt.on_too_long == "quarantine":
            return Failure(
                "prepare",
                "PromptTooLong",
                f"the prompt has {longest} tokens, and the context {limit} (engine.max_model_len)",
            )
        before = tokenizer.truncation_side
        tokenizer.truncation_side = self.prompt.on_too_long.removeprefix("truncate_")
        try:  # special tokens stay; of a pair the longer text is cut first
            (made,) = self._whole(tokenizer, [text], truncation=True, max_length=limit)
        except Exception as error:
            return Failure.of("prepare", error)
        finally:
            tokenizer.truncation_side = before
        return replace(made, cut=True)


def prepare_of(task: Pooling | None, *args: Any, **more: Any) -> Prepare:
    """The prepare stage of a job, by how it asks its model (None: for text)."""
    if task is None:
        return Prepare(*args, **more)
    return PrepareTexts(*args, **{**more, "texts": task.texts})


def _params(made: Encoded) -> str | None:
    """What vLLM is told of one row, as JSON: where the types of its tokens change."""
    if made.types_from is None:
        return None
    return json.dumps({"extra_kwargs": {"compressed_token_type_ids": made.types_from}})


def _first_one(types: Sequence[int] | None) -> int | None:
    """Where the token types of a pair become 1; vLLM takes 0s followed by 1s."""
    if types is None:
        return None
    at = next((i for i, kind in enumerate(types) if kind), len(types))
    if any(kind != 1 for kind in types[at:]):
        raise ValueError("the tokenizer gives token types other than 0s followed by 1s")
    return at


def _as_request(texts: tuple[str, ...] | Failure) -> ChatRequest | Failure:
    if isinstance(texts, Failure):
        return texts
    return ChatRequest([{"role": "text", "content": text} for text in texts])


def _text(request: ChatRequest) -> str:
    return "\n\n".join(str(message["content"]) for message in request.messages)


def _both(first: ChatRequest | Failure, second: ChatRequest | Failure) -> Any:
    for one in (first, second):
        if isinstance(one, Failure):
            return one
    return _text(first), _text(second)  # type: ignore[arg-type]


def _guarded(function: Callable[[dict[str, Any]], Any], count: int, row: Any) -> Any:
    """What a user's function made of a row, as `count` texts, or why it failed."""
    if isinstance(row, Failure):
        return row
    try:
        made = function(row)
        texts = (made,) if count == 1 else tuple(made) if isinstance(made, (list, tuple)) else ()
        if len(texts) == count and all(isinstance(text, str) for text in texts):
            return texts
        wanted = "text" if count == 1 else "two texts"
        raise TypeError(
            f"prompt.function must return {wanted} with this engine.task; it returned "
            f"{type(made).__name__}"
        )
    except NoChild:  # the function's process did not start, which is no fault of the row
        raise
    except Exception as error:
        return Failure.of("prepare", error)
