"""User functions of the end-to-end tests, importable on driver and workers."""

from __future__ import annotations

from prefect_raybatch.demo import SYSTEM, TEMPLATE


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


def shape(row: dict) -> dict | None:
    """Two columns; leaves two rows out, fails on one."""
    if row["id"] in (40, 41):
        return None
    if row["id"] == 100:
        raise RuntimeError("postprocess does not like row 100")
    return {"industry": row["industry"], "length": len(row["industry"])}
