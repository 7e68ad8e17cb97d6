"""The postprocess function of the kept runs. Its text stands in their fingerprints: never edit."""

from __future__ import annotations

from typing import Any


def shape(row: dict[str, Any]) -> dict[str, Any] | None:
    """Two columns; leaves row 5 out, fails on row 11."""
    if row["id"] == 5:
        return None
    if row["id"] == 11:
        raise RuntimeError("row 11 is not liked")
    return {"industry": row["industry"], "length": len(row["industry"])}
