"""Converts the log probabilities of answer tokens (`sampling.logprobs`) to the result's column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

import pyarrow as pa

from prefect_raybatch.stages.block import Tokenizer

Step = Mapping[int, float]  # the chosen token first, then the most probable ones

_TOKEN = [("token", pa.string()), ("id", pa.int32()), ("logprob", pa.float32())]


class TokenLogprob(TypedDict):
    """A token with its log probability, as the column type STEPS_TYPE holds it.

    An engine sets `id`, and `token` is None; a hosted model sets `token`, the text, and `id` is
    None.
    """

    id: int | None
    logprob: float
    token: str | None


TokenLogprobs = list[TokenLogprob]  # of one step: the chosen token first


def logprobs_type(most: int, answers: int) -> pa.DataType:
    """Return the type of the log probabilities column: per row, a list of tokens for each answer.

    If `answers` (per row) is 1, a row has only the list of tokens. `most` is the number of most
    probable tokens listed with each token in its field `top`; with 0 there is no such field.
    """
    top = [("top", pa.list_(pa.struct(_TOKEN)))] if most else []
    one = pa.list_(pa.struct([*_TOKEN, *top]))
    return pa.list_(one) if answers > 1 else one


def steps_of(answers: Sequence[Sequence[Step]]) -> list[list[TokenLogprobs]]:
    """Convert the log probabilities of a row's answers to STEPS_TYPE: a list [answer][step].

    A step stands for one generated token. It lists the chosen token, then all reported tokens from
    the most to the least probable, with the chosen token again among them.
    """
    return [[_ordered(step) for step in steps] for steps in answers]


def _ordered(step: Step) -> TokenLogprobs:
    told: TokenLogprobs = [
        {"id": token, "logprob": value, "token": None} for token, value in step.items()
    ]
    return [*told[:1], *sorted(told, key=lambda one: -one["logprob"])]


class TokenTexts:
    """A cache of the texts of single tokens by id; part of a character shows as U+FFFD."""

    def __init__(self, tokenizer: Callable[[], Tokenizer]):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def learn(self, ids: Iterable[int]) -> None:
        """Decode each token of `ids` whose text is not in the cache yet, and add its text."""
        new = sorted(set(ids) - self._known.keys())
        if not new:  # a hosted model has no tokenizer here
            return
        texts = self._tokenizer().batch_decode([[one] for one in new], skip_special_tokens=False)
        self._known.update(zip(new, texts, strict=True))

    def __getitem__(self, token: int) -> str:
        return self._known[token]


def logprobs_column(
    rows: Sequence[Sequence[Sequence[TokenLogprobs]] | None],
    most: int,
    several: bool,
    tokenizer: Callable[[], Tokenizer],
) -> list[object]:
    """Return the values of the log probabilities column; None for a row without an answer.

    `rows` are values of STEPS_TYPE, `most` is the number of alternatives listed with each token,
    `several`: rows have several answers. `tokenizer` is called only if tokens have no text yet.
    """
    texts = TokenTexts(tokenizer)
    every = (o for row in rows for steps in row or () for s in steps for o in s)
    texts.learn(o["id"] for o in every if o["id"] is not None)

    def named(one: TokenLogprob) -> dict[str, object]:
        text = one["token"] if one["id"] is None else texts[one["id"]]
        return {"token": text, "id": one["id"], "logprob": one["logprob"]}

    def step(found: TokenLogprobs) -> dict[str, object]:
        top = {"top": [named(one) for one in found[1 : most + 1]]} if most else {}
        return {**named(found[0]), **top}

    made = [
        None if row is None else [[step(found) for found in steps] for steps in row] for row in rows
    ]
    return list(made) if several else [row and row[0] for row in made]
