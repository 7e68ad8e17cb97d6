"""Checks commits; reads the pieces that commits name, and checks these too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.ledger.layout import KINDS, POSITION_COLUMN, piece_path
from prefect_raybatch.ledger.positions import Positions, disjoint
from prefect_raybatch.ledger.records import Commit, Piece, digest
from prefect_raybatch.storage import Store
from prefect_raybatch.storage.parquet import parquet_table


def check_commit(commit: Commit, rows: int) -> None:
    """Raise `CorruptRun` unless the commit has each position from 0 to `rows` - 1 exactly once.

    Raise it also unless the data pieces have exactly the positions of good rows, and the quarantine
    pieces those of failed rows. The message names the shard.
    """
    held = disjoint((commit.good, commit.failed, commit.skipped))
    if held != Positions.spans((0, rows)):
        raise CorruptRun(
            f"the commit of shard {commit.shard} does not have each of {rows} rows once"
        )
    for kind, positions in (("data", commit.good), ("quarantine", commit.failed)):
        pieces = [piece for piece in commit.pieces if piece.kind == kind]
        named = disjoint(piece.positions for piece in pieces)
        if named != positions or sum(piece.rows for piece in pieces) != len(positions):
            raise CorruptRun(
                f"the commit of shard {commit.shard} names {kind} pieces with other rows"
            )


def read_pieces(store: Store, commit: Commit) -> Iterator[tuple[str, pa.Table, bytes | None]]:
    """Yield (kind, table, Parquet file or None) for each kind of pieces that a commit names.

    The table has the rows of all pieces of the kind, sorted by position. The Parquet file is the
    bytes of the piece, if there is only one and its rows are sorted already; else it is None.
    Raises `CorruptRun`, which names the piece or shard, if a piece is missing or differs from the
    commit in size, checksum or positions.
    """
    for kind in KINDS:
        pieces = [p for p in commit.pieces if p.kind == kind]
        if not pieces:
            continue
        files = [checked_piece(store, commit.shard, piece) for piece in pieces]
        data, table = files[0] if len(files) == 1 else (None, pa.concat_tables(t for _, t in files))
        if (np.diff(table[POSITION_COLUMN].to_numpy()) < 0).any():
            data, table = None, table.sort_by(POSITION_COLUMN)
        expected = commit.good if kind == "data" else commit.failed
        if (actual := _other_positions(table, expected)) is not None:
            raise CorruptRun(
                f"shard {commit.shard}: its {kind} pieces hold positions {actual}, the commit says "
                f"{expected.ranges_text()}"
            )
        yield kind, table, data


def read_piece(store: Store, shard: int, piece: Piece) -> pa.Table:
    """Return the table of one piece of shard number `shard`.

    Raises `CorruptRun` if the piece is missing, or its size, checksum or row count is wrong.
    """
    return checked_piece(store, shard, piece)[1]


def checked_piece(store: Store, shard: int, piece: Piece) -> tuple[bytes, pa.Table]:
    """Read and check one piece as `read_piece` does; return (its bytes, its table)."""
    path = piece_path(piece.path)
    try:
        data = store.read(path)
    except FileNotFoundError:
        raise CorruptRun(f"{path}, a piece of committed shard {shard}, is missing") from None
    if len(data) != piece.bytes or digest(data) != piece.sha256:
        raise CorruptRun(
            f"{path} (shard {shard}) is not what was committed: {len(data)} bytes, committed "
            f"{piece.bytes}, or other contents; it held positions {piece.positions.ranges_text()}"
        )
    # Several pieces are read at once: more threads for each would cost a third more CPU time.
    table = parquet_table(data)
    check_types(table.schema, path)
    if table.num_rows != piece.rows or POSITION_COLUMN not in table.column_names:
        raise CorruptRun(f"{path} (shard {shard}) holds {table.num_rows} rows, not {piece.rows}")
    return data, table


def _other_positions(table: pa.Table, expected: Positions) -> str | None:
    """Return the positions in a table as text; None if they are the expected ones."""
    try:
        actual = Positions.of(table[POSITION_COLUMN].to_numpy())
    except ValueError as error:
        return f"that are invalid ({error})"
    return None if actual == expected else actual.ranges_text()
