"""`_raybatch/precision.json`: the precision in which the rows of a run are asked.

Written once by put-if-absent before the first shard is asked; every driver of the run follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import PRECISION
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.records import dump, with_checksum, without_checksum
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json
from prefect_raybatch.storage import Store


@dataclass(frozen=True)
class Disagreement(StrictRecord):
    """A row (its number in the input) with both answers, as texts cut to a length."""

    row: Count
    stored: str
    tried: str


@dataclass(frozen=True)
class PrecisionTry(StrictRecord):
    """The outcome of trying the engine arguments `tried`.

    `agreed` of the `rows` rows asked both ways got the same answer, which shows with `confidence`
    that at least the share `bound` agrees. `disagreeing` are some of the others. `error` says why
    nothing could be compared. `seconds` includes the engine's start.
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
    """The engine arguments that a run `decided` on; {} for the model as stored.

    `tries` were measured against `min_agreement`. `itself` is the share of the sample in which the
    stored model gave the same answer when asked again in another order. `seconds` is the time of
    the whole trial. `by` is the attempt that decided, or the run whose decision was reused.
    """

    decided: Mapping[str, str]
    min_agreement: Number
    tries: tuple[PrecisionTry, ...]
    by: str
    itself: Number | None = None
    seconds: Number = 0.0

    def to_bytes(self) -> bytes:
        return with_checksum(dump(asdict(self)))


_NOTE = TypeAdapter(PrecisionNote)


def read_precision(store: Store) -> PrecisionNote | None:
    """Return the decision of a run; None without one.

    Raises `CorruptRun` for a malformed record.
    """
    try:
        data = read_record(store, PRECISION)
    except FileNotFoundError:
        return None
    return read_json(_NOTE, without_checksum(data, f"{store.uri}/{PRECISION}"), PRECISION)


def note_precision(store: Store, note: PrecisionNote) -> PrecisionNote:
    """Write the decision once. Return the one that counts."""
    if put_record_if_absent(store, PRECISION, note.to_bytes()):
        return note
    decision = read_precision(store)
    if decision is None:
        raise CorruptRun(f"{store.uri}/{PRECISION} exists, but cannot be read")
    return decision
