"""Numbers in sentences; text that databases can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """`1 row`, `1,234 rows`, `0.5 GPUs`; `plural` where it is not the noun with an s."""
    figure = f"{number:,.0f}" if number == int(number) else f"{number:,g}"
    return f"{figure} {noun if number == 1 else plural or noun + 's'}"


def money(value: float) -> str:
    """`1,234.50`, and small sums with the digits that tell them from nothing: `0.00123`."""
    return f"{value:,.2f}" if value == 0 or abs(value) >= 1 else f"{value:.3g}"


def are(number: float) -> str:
    """The verb behind so many."""
    return "is" if number == 1 else "are"


def storable(text: str) -> str:
    """Text that UTF-8 and PostgreSQL can hold: `\N{SYMBOL FOR NULL}` for NUL, `?` for half a
    surrogate pair. Errors quote what rows hold, and rows hold anything."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()


def storable_in(value: Any) -> Any:
    """The same value, with the texts in it made storable."""
    return change_texts(value, storable)


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the same value with each text in it changed, also in mappings, their keys, lists and
    tuples."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change_texts(key, change): change_texts(inner, change) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [change_texts(inner, change) for inner in value]
    if isinstance(value, tuple):
        return tuple(change_texts(inner, change) for inner in value)
    return value


def error_text(error: BaseException) -> str:
    """An error's message; of Pydantic's, which vLLM raises, what is wrong with which field, without
    its links and what else was given."""
    if not isinstance(error, ValidationError):
        return str(error)
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        place = ".".join(map(str, item["loc"]))
        lines.append(": ".join(filter(None, (place, item["msg"].removeprefix("Value error, ")))))
    return f"{error.title}: {'; '.join(lines)}"
