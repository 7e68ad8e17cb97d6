"""JSON forms of pieces, receipts and commits, in which positions are still encoded.

A commit holds the failed and the skipped positions, as ranges or a bitmap; all others are good. A
piece that is the only one of its kind holds no positions, since the commit has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import PydanticCustomError, core_schema

from prefect_raybatch.ledger.failures import Failures
from prefect_raybatch.ledger.positions import MOST_POSITIONS, PositionsText
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.ledger.strict import AS_BITMAP, AS_RANGES, Count, Number, StrictRecord

PieceKind = Literal["data", "quarantine"]


def _piece_name(name: str) -> str:
    if "/" in name:
        raise PydanticCustomError("piece_name", "not a file name")
    return name


PieceName = Annotated[str, AfterValidator(_piece_name)]


class _RangesOrBitmap:
    """Validator of `PositionsText` that stops at the first malformed range: there may be many."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        number = core_schema.int_schema(strict=True)
        pair = core_schema.tuple_positional_schema([number, number])
        ranges = core_schema.tuple_schema([pair], variadic_item_index=0, fail_fast=True)
        bitmap = core_schema.str_schema(strict=True)
        choices: list[Any] = [(ranges, AS_RANGES), (bitmap, AS_BITMAP)]
        return core_schema.union_schema(choices, mode="left_to_right")


ShardRows = Annotated[Count, Field(le=MOST_POSITIONS)]
SomePositions = Annotated[PositionsText, _RangesOrBitmap()]


@dataclass(frozen=True)
class PieceText(StrictRecord):
    """The JSON form of a `Piece`, with encoded positions.

    With `positions` None, the piece has all good positions of its receipt or commit (kind data), or
    all failed ones (kind quarantine).
    """

    path: PieceName
    kind: PieceKind
    rows: Count
    bytes: Count
    sha256: str
    positions: SomePositions | None = None


PieceTexts = Annotated[tuple[PieceText, ...], FailFast()]


@dataclass(frozen=True)
class ReceiptText(StrictRecord):
    """The JSON form of a `Receipt`; `lost`, `fatal` and `counted` are the parts of its `Loss`."""

    shard: Count
    attempt: str
    good: SomePositions
    failed: SomePositions
    skipped: SomePositions
    pieces: PieceTexts
    stats: ShardStats = field(default_factory=ShardStats)
    failures: Failures = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    lost: str | None = None
    fatal: bool = False
    counted: bool = False
    part: tuple[Count, Count] | None = None


@dataclass(frozen=True)
class CommitText(StrictRecord):
    """The JSON form of a `Commit`; positions that are neither failed nor skipped are good."""

    shard: Count
    attempt: str
    token: str
    plan_hash: str
    failed: SomePositions
    skipped: SomePositions
    pieces: PieceTexts
    stats: ShardStats
    failures: Failures
    where: Mapping[str, str]
    committed: Number
    format: Count
    rows: ShardRows


RECEIPT_TEXT, COMMIT_TEXT = TypeAdapter(ReceiptText), TypeAdapter(CommitText)
