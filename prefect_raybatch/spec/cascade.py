"""The rule that sends answers of a cascade's first model to the larger model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class CascadeSpec:
    """The rule by which rows of a cascade go to the larger model, and the names of both models.

    Rows go to the larger model if the first model's answer is unsure. It is unsure if its `measure`
    (probability or logprob) is under `below`; if the job sets no such bound, `measure` and `below`
    are None. With `fails_schema`, an answer that does not fit the schema is unsure as well.
    `at_most` is the largest share (0 to 1) of the rows that may go to the larger model. `check` is
    the number of further rows that the larger model answers, to compare both models. `classifies`:
    the first model embeds, and rows that it cannot embed are unsure.

    In the first model's result, `column` holds the answers and `measure_column` ("" without a
    measure) the values of the measure. `columns` are columns of that result that only this rule
    needs, so the run's result drops them.
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
    """Return how many of `rows` rows may go to the larger model: 29 of 100 if `at_most` is 0.29."""
    return math.floor(Fraction(str(at_most)) * rows)
