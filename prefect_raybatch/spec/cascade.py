"""Which answers of the first model of a cascade go to the larger model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CascadeSpec:
    """The rule by which rows are unsure, and the names of both models.

    `column` holds the answers in the first model's result. `below` is the bound of the `measure` (probability or logprob), None if only `fails_schema`
    decides. At most `at_most` of the rows go to the larger model. `columns` are those of the first
    model's result that only the rule needs.
    """

    measure: str | None
    below: float | None
    fails_schema: bool
    at_most: float
    first_name: str
    larger_name: str
    column: str
    columns: tuple[str, ...]
