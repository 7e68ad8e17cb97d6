"""`_raybatch/precision.json`: the model's precision with which a run infers its rows.

Written by put-if-absent before the first shard is inferred; every driver of the run follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefect_raybatch.ledger.json_record import JsonRecord
from prefect_raybatch.ledger.layout import PRECISION
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord


@dataclass(frozen=True)
class Disagreement(StrictRecord):
    """A sampled row whose answer changed with the engine arguments that were tried.

    `row` is its number in the input. `stored` is the answer without these arguments, `tried` the
    answer with them; both may be cut.
    """

    row: Count
    stored: str
    tried: str


@dataclass(frozen=True)
class PrecisionTry(StrictRecord):
    """The outcome of trying the engine arguments `tried` on a sample of rows.

    `rows` rows were inferred with and without these arguments. `agreed` of them got the same answer
    both times. From this follows, with the confidence `confidence`, that at least the share `bound`
    of all rows of the input agrees. `disagreeing` are some of the sampled rows that got different
    answers. `error` says why nothing could be compared, or is "". `seconds` is the duration of the
    trial, the start of the engine included.
    """

    tried: Mapping[str, str]
    rows: Count
    agreed: Count
    bound: Number
    confidence: Number
    disagreeing: tuple[Disagreement, ...] = ()
    error: str = ""
    seconds: Number = 0.0

    @property
    def agreement(self) -> float:
        """Return the share of sampled rows that agreed."""
        return self.agreed / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class PrecisionNote(StrictRecord):
    """The engine arguments that a run `decided` on for its precision; {} for the model as stored.

    `tries` are the trials, which had to reach the share `min_agreement` of equal answers. `itself`
    is the share of sampled rows for which the stored model gave the same answer in a second
    inference, in another row order; None if it was not measured. `seconds` is the time of the whole
    trial. `by` is the attempt that decided, or the run whose decision was reused.
    """

    decided: Mapping[str, str]
    min_agreement: Number
    tries: tuple[PrecisionTry, ...]
    by: str
    itself: Number | None = None
    seconds: Number = 0.0


_FILE = JsonRecord(PRECISION, PrecisionNote)
read_precision, record_precision = _FILE.read, _FILE.put_if_absent
