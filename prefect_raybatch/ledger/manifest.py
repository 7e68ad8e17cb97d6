"""The manifest: a table of the pieces that are the result of a run with `output.compact: false`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import SUCCESS
from prefect_raybatch.ledger.plan_tables import from_parquet, to_parquet
from prefect_raybatch.ledger.record_files import put_table, read_table
from prefect_raybatch.ledger.records import Piece, digest
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.storage import Store


@dataclass(frozen=True)
class PieceRow:
    """A piece of the result, and the input row at which its shard begins."""

    shard: int
    start: int
    piece: Piece


def put_manifest(store: Store, pieces: Sequence[PieceRow]) -> str:
    """Write the manifest, a table that lists these pieces, and return the table's name."""
    data = _table(pieces)
    name = f"manifest-{digest(data)[:16]}.parquet"
    put_table(store, name, data)
    return name


def _table(pieces: Sequence[PieceRow]) -> bytes:
    """Return the manifest as Parquet bytes, one row for each piece."""
    import pyarrow as pa

    columns = {
        "shard": pa.array([p.shard for p in pieces], pa.int32()),
        "start": pa.array([p.start for p in pieces], pa.int64()),
        "kind": pa.array([p.piece.kind for p in pieces], pa.string()),
        "piece": pa.array([p.piece.path for p in pieces], pa.string()),
        "rows": pa.array([p.piece.rows for p in pieces], pa.int64()),
        "bytes": pa.array([p.piece.bytes for p in pieces], pa.int64()),
        "sha256": pa.array([p.piece.sha256 for p in pieces], pa.string()),
    }
    return to_parquet(pa.table(columns))


def pieces_named(store: Store, success: Success) -> set[str]:
    """Return the names of the pieces that are the result of a finished run without compaction.

    Raises `CorruptRun` if `_SUCCESS` names no manifest, or if the manifest's pieces do not hold all
    rows: only a complete manifest can tell which other pieces are orphans.
    """
    name = success.manifest
    if name is None:
        raise CorruptRun(f"{store.uri}/{SUCCESS} has no manifest. Nothing was deleted")
    table = from_parquet(read_table(store, name, SUCCESS), name, ["kind", "piece", "rows"])
    held = {"data": 0, "quarantine": 0}
    for kind, rows in zip(table["kind"].to_pylist(), table["rows"].to_pylist(), strict=True):
        held[kind] = held.get(kind, 0) + rows
    if held != {"data": success.data, "quarantine": success.quarantine}:
        raise CorruptRun(
            f"{store.uri}: the pieces in {name} hold {held['data']:,} rows and "
            f"{held['quarantine']:,} failed rows, but _SUCCESS says {success.data:,} and "
            f"{success.quarantine:,}. Nothing was deleted"
        )
    return set(table["piece"].to_pylist())
