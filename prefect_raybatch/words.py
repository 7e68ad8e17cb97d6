"""Numbers in sentences."""

from __future__ import annotations


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """`1 row`, `1,234 rows`, `0.5 GPUs`; `plural` where it is not the noun with an s."""
    figure = f"{number:,.0f}" if number == int(number) else f"{number:,g}"
    return f"{figure} {noun if number == 1 else plural or noun + 's'}"


def are(number: float) -> str:
    """The verb behind so many."""
    return "is" if number == 1 else "are"
