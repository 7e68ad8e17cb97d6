"""`_raybatch/precision.json`: the model's precision with which a run infers its rows.

Written by put-if-absent before the first shard is inferred; every driver of the run follows it.
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
    """A sampled row whose answer changed with the engine arguments that were tried.

    `row` is its number in the input. `stored` is the answer of the model as stored, `tried` that
    with these arguments; both may be cut.
    """

    row: Count
    stored: str
    tried: str


@dataclass(frozen=True)
class PrecisionTry(StrictRecord):
    """The outcome of trying the engine arguments `tried` on a sample of rows.

    `rows` rows were inferred with and without these arguments. `agreed` of them got the same answer
    both times, which shows with `confidence` that at least the share `bound` of all rows agrees.
    `disagreeing` are some rows with two answers. `error` says why nothing could be compared, or "".
    `seconds` includes the engine's start.
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

    `tries` were measured against `min_agreement`. `itself` is the share of sampled rows for which
    the stored model gave the same answer in a second inference, in another row order; None if it
    was not measured. `seconds` is the time of the whole trial. `by` is the attempt that decided, or
    the run whose decision was reused.
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
    """Return the decision of a run; None if there is none yet.

    Raises `CorruptRun` for a malformed record.
    """
    try:
        data = read_record(store, PRECISION)
    except FileNotFoundError:
        return None
    return read_json(_NOTE, without_checksum(data, f"{store.uri}/{PRECISION}"), PRECISION)


def record_precision(store: Store, note: PrecisionNote) -> PrecisionNote:
    """Write the decision unless one exists; return the stored one."""
    if put_record_if_absent(store, PRECISION, note.to_bytes()):
        return note
    decision = read_precision(store)
    if decision is None:
        raise CorruptRun(f"{store.uri}/{PRECISION} exists, but cannot be read")
    return decision
