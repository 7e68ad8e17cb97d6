"""Numbers in sentences."""

from __future__ import annotations


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """`1 row`, `1,234 rows`; `plural` where it is not the noun with an s."""
    return f"{number:,.0f} {noun if number == 1 else plural or noun + 's'}"
