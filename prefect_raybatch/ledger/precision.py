"""What `_raybatch/precision.json` says: in which precision a run's rows are asked.

Written once, by put-if-absent, before the first shard is asked: whoever drives the run takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import PRECISION
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.records import dump, with_checksum, without_checksum
from prefect_raybatch.ledger.strict import STRICT, Count, Number, read_json
from prefect_raybatch.storage import Store


@dataclass(frozen=True)
class Disagreement:
    """A row (its number in the input) with both its answers, as texts cut to a length."""

    __pydantic_config__: ClassVar = STRICT

    row: Count
    stored: str
    tried: str


@dataclass(frozen=True)
class PrecisionTry:
    """What engine arguments `tried` came to: of `rows` rows asked both ways `agreed`, which shows,
    with `confidence`, that the share `bound` agrees at least; some of the rows that do not. `error`
    says why there was nothing to compare; `seconds` with the engine's start."""

    __pydantic_config__: ClassVar = STRICT

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
        """The share of the sampled rows that agreed."""
        return self.agreed / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class PrecisionNote:
    """The engine arguments that were `decided` ({}: the model as it is stored), by which `tries`
    against `min_agreement`. `itself`: the share of the sample in which the stored model gave the
    same answer when it was asked again, in another order. `seconds`: the whole trial. `by`: the
    attempt that decided, or the run whose decision this one takes over."""

    __pydantic_config__: ClassVar = STRICT

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
    """The run's decision; None where there is none. Raises `CorruptRun` for one that is no such."""
    try:
        data = read_record(store, PRECISION)
    except FileNotFoundError:
        return None
    return read_json(_NOTE, without_checksum(data, f"{store.uri}/{PRECISION}"), PRECISION)


def note_precision(store: Store, note: PrecisionNote) -> PrecisionNote:
    """Writes the decision, once; returns the one that holds."""
    if put_record_if_absent(store, PRECISION, note.to_bytes()):
        return note
    found = read_precision(store)
    if found is None:
        raise CorruptRun(f"{store.uri}/{PRECISION} exists and cannot be read")
    return found
