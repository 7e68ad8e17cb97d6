"""Log probabilities of the tokens of an answer (`sampling.logprobs`), from engine to column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

import pyarrow as pa

from prefect_raybatch.stages.block import Tokenizer

Step = Mapping[int, float]  # the chosen token first, then the most probable ones

_TOKEN = [("token", pa.string()), ("id", pa.int32()), ("logprob", pa.float32())]


class TokenLogprob(TypedDict):
    """A token with its log probability, as `STEPS_TYPE` holds it.

    One of the two names it: an engine tells its `id`, a hosted model its text in `token`.
    """

    id: int | None
    logprob: float
    token: str | None


TokenLogprobs = list[TokenLogprob]  # of one step: the chosen token first


def logprobs_type(most: int, answers: int) -> pa.DataType:
    """Return the column's type: a list of tokens, or a list of such lists for several answers."""
    top = [("top", pa.list_(pa.struct(_TOKEN)))] if most else []
    one = pa.list_(pa.struct([*_TOKEN, *top]))
    return pa.list_(one) if answers > 1 else one


def steps_of(answers: Sequence[Sequence[Step]]) -> list[list[TokenLogprobs]]:
    """Return, for each answer, its tokens with their log probabilities, as `STEPS_TYPE` holds them.

    The tokens of a step: the chosen one, then all from the most to the least probable.
    """
    return [[_ordered(step) for step in steps] for steps in answers]


def _ordered(step: Step) -> TokenLogprobs:
    told: TokenLogprobs = [
        {"id": token, "logprob": value, "token": None} for token, value in step.items()
    ]
    return [*told[:1], *sorted(told, key=lambda one: -one["logprob"])]


class TokenTexts:
    """The text of a single token; part of a character shows as the replacement character."""

    def __init__(self, tokenizer: Callable[[], Tokenizer]):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def learn(self, ids: Iterable[int]) -> None:
        new = sorted(set(ids) - self._known.keys())
        if not new:  # a hosted model has no tokenizer here
            return
        texts = self._tokenizer().batch_decode([[one] for one in new], skip_special_tokens=False)
        self._known.update(zip(new, texts, strict=True))

    def __getitem__(self, token: int) -> str:
        return self._known[token]


def logprobs_told(
    rows: Sequence[Sequence[Sequence[TokenLogprobs]] | None],
    most: int,
    several: bool,
    tokenizer: Callable[[], Tokenizer],
) -> list[object]:
    """Return the column for rows of `STEPS_TYPE`, with None for a row without an answer.

    The `tokenizer` is loaded where tokens have no text.
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
