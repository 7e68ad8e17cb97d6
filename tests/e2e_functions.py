"""User functions of the end-to-end tests, importable on driver and workers."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prefect_raybatch.demo import SYSTEM, TEMPLATE

GATE = "RAYBATCH_GATE"  # a folder in which `most` says how many shards are let through
OPEN = "open"  # a file in it, once all are
ROWS_A_SHARD = 40

_through: set[int] = set()


def ask(row: dict) -> dict:
    """The demo's question; raises where the note says so, and appends a long note."""
    if row["note"] == "raise":
        raise ValueError(f"no question for {row['id']}")
    text = TEMPLATE.format(Company=row["Company"]) + (row["note"] or "")
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": text},
        ]
    }


def wait_at(gate: Path, shard: int) -> None:
    """Lets the first shards that come through, and holds the others, as long as a test needs."""
    if shard in _through:
        return
    (gate / f"shard-{shard}").touch()
    most = int((gate / "most").read_text())
    while len(list(gate.glob("shard-*"))) > most and not (gate / OPEN).exists():
        time.sleep(0.05)
    _through.add(shard)


def ask_at_gate(row: dict) -> dict:
    """Asks about the row's company, once its shard is through the gate."""
    wait_at(Path(os.environ[GATE]), row["id"] // ROWS_A_SHARD)
    return {"messages": [{"role": "user", "content": row["Company"]}]}


def shape(row: dict) -> dict | None:
    """Two columns; leaves two rows out, fails on one. At a gate it waits."""
    if GATE in os.environ:
        wait_at(Path(os.environ[GATE]), row["id"] // ROWS_A_SHARD)
    if row["id"] in (40, 41):
        return None
    if row["id"] == 100:
        raise RuntimeError("postprocess does not like row 100")
    return {"industry": row["industry"], "length": len(row["industry"])}
