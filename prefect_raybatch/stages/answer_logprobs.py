"""Log probabilities of the tokens of an answer (`sampling.logprobs`), from engine to column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from prefect_raybatch.stages.block import Tokenizer

Step = Mapping[int, float]  # the chosen token first, then the most probable ones

_TOKEN = [("token", pa.string()), ("id", pa.int32()), ("logprob", pa.float32())]


def logprobs_type(most: int, answers: int) -> pa.DataType:
    """Return the column's type: a list of tokens, or a list of such lists for several answers."""
    top = [("top", pa.list_(pa.struct(_TOKEN)))] if most else []
    one = pa.list_(pa.struct([*_TOKEN, *top]))
    return pa.list_(one) if answers > 1 else one


def steps_of(answers: Sequence[Sequence[Step]]) -> list[list[list[dict[str, Any]]]]:
    """Return a row of `STEPS_TYPE`."""
    return [[_ordered(step) for step in steps] for steps in answers]


def _ordered(step: Step) -> list[dict[str, Any]]:
    told = [{"id": token, "logprob": value} for token, value in step.items()]
    return [*told[:1], *sorted(told, key=lambda one: -one["logprob"])]


class TokenTexts:
    """The text of a single token; part of a character shows as the replacement character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def learn(self, ids: Iterable[int]) -> None:
        new = sorted(set(ids) - self._known.keys())
        texts = self._tokenizer.batch_decode([[one] for one in new], skip_special_tokens=False)
        self._known.update(zip(new, texts, strict=True))

    def __getitem__(self, token: int) -> str:
        return self._known[token]


def logprobs_told(rows: Sequence[Any], most: int, several: bool, tokenizer: Tokenizer) -> list[Any]:
    """Return the column for rows of `STEPS_TYPE`, with None for a row without an answer."""
    texts = TokenTexts(tokenizer)
    texts.learn(o["id"] for row in rows for steps in row or () for s in steps for o in s)

    def named(one: Mapping[str, Any]) -> dict[str, Any]:
        return {"token": texts[one["id"]], **one}

    def step(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        top = {"top": [named(one) for one in found[1 : most + 1]]} if most else {}
        return {**named(found[0]), **top}

    made = [row and [[step(found) for found in steps] for steps in row] for row in rows]
    return made if several else [row and row[0] for row in made]
