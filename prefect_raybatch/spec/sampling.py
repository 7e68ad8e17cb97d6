"""How answers are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """How the answers to a row are sampled.

    `fields` go to vLLM with each request; `pooling` are those of a pooling task, except the task
    itself, which its model decides. `max_tokens` is the most tokens of an answer, 1 if the task
    pools. `answers` is the number of answers to a row (n). `logprobs` is the number of most
    probable tokens written for each token, None for none. `choices` are the labels of which an
    answer is one, and `labels` those whose probabilities are written. `form` is
    sampling.structured_outputs, None if an answer schema is the form (it is in `fields`).
    `fixed_form` is the field that requires one form for all rows, so that no row may set another;
    None if rows may.
    """

    fields: Mapping[str, Any]
    pooling: Mapping[str, Any]
    temperature: float
    max_tokens: int
    answers: int
    logprobs: int | None
    choices: tuple[str, ...]
    labels: tuple[str, ...]
    form: Mapping[str, Any] | None
    fixed_form: str | None
    skip_special_tokens: bool

    @property
    def drawn_apart(self) -> bool:
        """Return whether two equal requests may get different answers."""
        return self.temperature > 0 and self.fields.get("seed") is None

    def greedy(self) -> SamplingSpec:
        """Return how a sample is asked for a comparison: one answer per row, without randomness."""
        fields = {name: value for name, value in self.fields.items() if name != "n"}
        return replace(self, fields={**fields, "temperature": 0.0}, temperature=0.0, answers=1)
