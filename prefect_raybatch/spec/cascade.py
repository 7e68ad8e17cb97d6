"""Which answers of the first model of a cascade go to the larger model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class CascadeSpec:
    """The rule by which rows are unsure, and the names of both models.

    `below` is the bound of the `measure` (probability or logprob), None if only `fails_schema`
    decides. In the first model's result, `column` holds the answers, `measure_column` what the rule
    compares, and `columns` what only the rule needs. At most `at_most` of the rows go to the larger
    model. `classifies`: the first model embeds, and rows that it cannot embed are unsure. `check`:
    rows with the first model's answer that the larger model is asked about too, to compare.
    """

    measure: str | None
    below: float | None
    fails_schema: bool
    at_most: float
    first_name: str
    larger_name: str
    column: str
    columns: tuple[str, ...]
    measure_column: str
    classifies: bool = False
    check: int = 0


def most_rows(at_most: float, rows: int) -> int:
    """Return how many of `rows` the larger model may be asked about: 29 of 100 for 0.29."""
    return math.floor(Fraction(str(at_most)) * rows)
