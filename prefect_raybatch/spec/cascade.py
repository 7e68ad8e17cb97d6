"""Which answers of the first model of a cascade go to the larger model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class CascadeSpec:
    """The rule by which rows are unsure, and the names of both models.

    A row is unsure if the `measure` of its answer (probability or logprob) is under `below`, both
    None without such a bound, or if `fails_schema` and its answer does not fit the schema. In the
    first model's result, `column` holds the answers and `measure_column` the values of the measure;
    `columns` are columns of that result that only this rule needs; the run's result drops them. At
    most the share `at_most` (0 to 1) of the rows goes to the larger model. `classifies`: the first
    model embeds, and rows that it cannot embed are unsure. `check`: the number of rows besides the
    unsure ones that the larger model answers too, to compare both models' answers.
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
    """Return how many of `rows` may go to the larger model: 29 of 100 if `at_most` is 0.29."""
    return math.floor(Fraction(str(at_most)) * rows)
