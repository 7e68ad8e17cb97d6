"""Which pieces are the result of a run with `output.compact: false`, in input order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import MANIFEST, SUCCESS
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import from_parquet, to_parquet
from prefect_raybatch.ledger.record_files import put_table, read_table
from prefect_raybatch.ledger.records import Piece, Plan, digest, dump
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.storage import Store, put_proved


@dataclass(frozen=True)
class PieceRow:
    """A piece of the result, and where its shard begins in the input."""

    shard: int
    start: int
    piece: Piece


def put_manifest(store: Store, plan: Plan, pieces: Sequence[PieceRow]) -> str | None:
    """Writes the manifest; the name of the table, None in runs of format 1, which have JSON."""
    if plan.format == 1:
        rows = [{"shard": p.shard, "start": p.start, "piece": p.piece.path} for p in pieces]
        named = {"numbers": plan.numbers_table} if plan.numbers_table else {}
        put_proved(store, MANIFEST, dump({"pieces": rows, **named}))
        return None
    data = _table(pieces)
    name = f"manifest-{digest(data)[:16]}.parquet"
    put_table(store, name, data)
    return name


def _table(pieces: Sequence[PieceRow]) -> bytes:
    """Parquet bytes, one row a piece."""
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


def pieces_named(ledger: Ledger, plan: Plan, success: Success) -> set[str]:
    """The pieces that are the result of a finished run without compaction: by its manifest, or in
    runs of format 1 by the commits of all shards.

    Raises `CorruptRun` where they are not those of all rows: an orphan is only what is missing
    from a whole manifest.
    """
    if success.manifest is None:
        return {piece.path for commit in ledger.every_commit(plan) for piece in commit.pieces}
    wanted = ["kind", "piece", "rows"]
    table = from_parquet(
        read_table(ledger.store, success.manifest, SUCCESS), success.manifest, wanted
    )
    held = {"data": 0, "quarantine": 0}
    for kind, rows in zip(table["kind"].to_pylist(), table["rows"].to_pylist(), strict=True):
        held[kind] = held.get(kind, 0) + rows
    if held != {"data": success.data, "quarantine": success.quarantine}:
        raise CorruptRun(
            f"{ledger.store.uri}: {success.manifest} names pieces of {held['data']:,} rows and "
            f"{held['quarantine']:,} failed ones, _SUCCESS {success.data:,} and "
            f"{success.quarantine:,}. Nothing was deleted"
        )
    return set(table["piece"].to_pylist())
