"""Reads the intact shards of a damaged run from its pieces or its result.

A shard is lost if its commit, one of its pieces, or one of the result files with its rows is
missing or changed. Nothing is repaired or written here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.family import Member
from prefect_raybatch.ledger.layout import KINDS, POSITION_COLUMN, piece_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.record_texts import PieceKind
from prefect_raybatch.ledger.records import Commit
from prefect_raybatch.result.pieces import check_commit, checked_piece
from prefect_raybatch.result.rows import numbered_rows
from prefect_raybatch.storage import read_ahead

SHARDS_AT_ONCE = 4  # whose pieces are read concurrently

FaultHandler = Callable[[str], None]


@dataclass(frozen=True)
class EncodedRows:
    """Rows of a shard of one kind (data or quarantine) as a Parquet file, and their positions."""

    kind: PieceKind
    positions: Positions
    data: bytes


@dataclass(frozen=True)
class IntactShard:
    """A shard of which nothing is missing or changed: its commit and its rows.

    If the rows were read from pieces, `encoded_rows` has an item for each piece. If they were read
    from the result's files, it has an item for each kind of rows that the shard has.
    """

    commit: Commit
    encoded_rows: tuple[EncodedRows, ...]


def intact_shards(member: Member, fault: FaultHandler) -> Iterator[IntactShard]:
    """Yield the intact shards of a run, in order of their numbers.

    `fault` is called with a message for each damaged record, piece, file or shard. A shard without
    a commit is left out without a message.
    """
    ledger, plan = member.ledger, member.plan
    shards = ledger.shards(plan)
    listing = ledger.listing(plan)
    # Without checkpoints: a copy there may be intact although the record itself is damaged.
    commits = ledger.commits(plan, listing, on_fault=lambda e: fault(str(e)), copies=False)
    checked = _checked(commits, shards, fault)
    if member.summary is not None and member.summary.compact:
        yield from _intact_shards(member, shards, checked, fault)
        return

    def load(commit: Commit) -> IntactShard | CorruptRun:
        try:
            return _of_pieces(ledger, commit)
        except CorruptRun as error:
            return error

    for found in read_ahead(load, checked, SHARDS_AT_ONCE, SHARDS_AT_ONCE):
        if isinstance(found, CorruptRun):
            fault(str(found))
        else:
            yield found


def _checked(commits: Iterator[Commit], shards: Shards, fault: FaultHandler) -> Iterator[Commit]:
    for commit in commits:
        try:
            check_commit(commit, shards[commit.shard].rows)
        except CorruptRun as error:
            fault(str(error))
            continue
        yield commit


def _of_pieces(ledger: Ledger, commit: Commit) -> IntactShard:
    held = []
    for piece in commit.pieces:
        data, table = checked_piece(ledger.store, commit.shard, piece)
        if not _are_at(table[POSITION_COLUMN].to_numpy(), piece.positions):
            raise CorruptRun(f"{piece_path(piece.path)} and its commit have different positions")
        held.append(EncodedRows(piece.kind, piece.positions, data))
    return IntactShard(commit, tuple(held))


def _intact_shards(
    member: Member, shards: Shards, commits: Iterator[Commit], fault: FaultHandler
) -> Iterator[IntactShard]:
    """Yield the shards whose rows are all in intact result files.

    Only shards with one of the `commits` are considered. `fault` is called with a message for each
    damaged file, and for each shard that is left out because of it.
    """
    rows = {kind: _Rows(numbered_rows(member, kind, fault)) for kind in KINDS}
    for commit in commits:
        shard = shards[commit.shard]
        positions_by_kind = {"data": commit.good, "quarantine": commit.failed}
        found = {kind: rows[kind].take(shard.start, shard.start + shard.rows) for kind in KINDS}
        held, whole = [], True
        for kind, positions in positions_by_kind.items():
            numbers, table = found[kind]
            if not _are_at(numbers - shard.start, positions):
                whole = False
                break
            if table is not None and len(positions):
                held.append(_as_piece(kind, positions, numbers - shard.start, table))
        if whole:
            yield IntactShard(commit, tuple(held))
        else:
            fault(f"shard {commit.shard}: some of its rows are in damaged files")


def _as_piece(kind: str, positions: Positions, at: np.ndarray, table: pa.Table) -> EncodedRows:
    out = io.BytesIO()
    table = table.add_column(0, POSITION_COLUMN, pa.array(at, pa.int32()))
    pq.write_table(table, out, compression="zstd")
    named: PieceKind = "data" if kind == "data" else "quarantine"
    return EncodedRows(named, positions, out.getvalue())


def _are_at(numbers: np.ndarray, positions: Positions) -> bool:
    try:
        return Positions.of(numbers) == positions
    except ValueError:
        return False


class _Rows:
    """Takes ranges of rows, in ascending order, from batches of rows with ascending numbers."""

    def __init__(self, batches: Iterator[tuple[np.ndarray, pa.Table]]):
        self._batches = batches
        self._held: list[tuple[np.ndarray, pa.Table]] = []
        self._ended = False

    def take(self, start: int, stop: int) -> tuple[np.ndarray, pa.Table | None]:
        """Return (numbers, table of the other columns) of the rows numbered `start` to `stop` - 1.

        The table is None if no such row is left. Rows before `start` are dropped.
        """
        while not self._ended and not (self._held and self._held[-1][0][-1] >= stop - 1):
            batch = next(self._batches, None)
            if batch is None:
                self._ended = True
            elif len(batch[0]):
                self._held.append(batch)
        taken, rest = [], []
        for numbers, table in self._held:
            low, high = np.searchsorted(numbers, [start, stop]).tolist()
            if low < high:
                taken.append((numbers[low:high], table.slice(low, high - low)))
            if high < len(numbers):
                rest.append((numbers[high:], table.slice(high)))
        self._held = rest
        numbers = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in taken)])
        return numbers, pa.concat_tables([part[1] for part in taken]) if taken else None
