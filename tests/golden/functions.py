"""User functions and an answer class that jobs of the corpus name.

The source of this module is part of their fingerprints: a change here changes the corpus.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Company(BaseModel):
    industry: str
    employees: int | None


def ask(row: dict[str, Any]) -> str:
    return f"What does {row['Company']} sell?"


def show(row: dict[str, Any]) -> list[dict[str, Any]]:
    image = {"type": "image", "image": row["picture"]}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]


def split(row: dict[str, Any]) -> dict[str, Any]:
    return {"industry": row["response"].strip(), "length": len(row["response"])}
