"""User functions of the trials, good and bad; the rows say what shall go wrong."""

from __future__ import annotations

import os
from typing import Any

QUESTION = "What industry is this company in: {text}"  # for the bundled model


def end(note: str) -> None:
    """Ends or hangs this process where the note says so."""
    if note == "exit":
        os._exit(9)
    while note == "loop":
        pass


def ask(row: dict[str, Any]) -> str:
    end(row["note"])
    if row["note"] == "raise":
        raise LookupError("no such template")
    return str(row["text"])


def ask_company(row: dict[str, Any]) -> str:
    return QUESTION.format(text=ask(row))


def shape(row: dict[str, Any]) -> dict[str, Any] | None:
    end(row["note"])
    if row["note"] == "raise":
        raise RuntimeError("postprocess cannot")
    if row["note"] == "columns":
        return {"response": row["response"], "more": 1}
    if row["note"] == "type":
        return {"response": ["a", "list"]}
    if row["note"] == "skip":
        return None
    return {"response": row["response"]}
