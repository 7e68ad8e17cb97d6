"""Formats numbers for sentences, and makes text storable in databases."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ValidationError


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """Return e.g. `1 row`, `1,234 rows`, `0.5 GPUs`; `plural` is for irregular nouns."""
    figure = f"{number:,.0f}" if number == int(number) else f"{number:,g}"
    return f"{figure} {noun if number == 1 else plural or noun + 's'}"


def money(value: float, currency: str = "") -> str:
    """Return a sum as text, e.g. `1,234.50 EUR`.

    A sum below 1 has three significant digits, e.g. `0.00123`.
    """
    figure = f"{value:,.2f}" if value == 0 or abs(value) >= 1 else f"{value:.3g}"
    return f"{figure} {currency}" if currency else figure


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return `; did you mean 'X'?` with the most similar known name, "" if none is similar."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def are(number: float) -> str:
    """Return "is" for the number 1, else "are"."""
    return "is" if number == 1 else "are"


def some_are(number: float, whole: float, noun: str) -> str:
    """Return e.g. `0 of 1 shard is`, `1 of 3 shards is`, `1,234 of 2,000 rows are`."""
    return f"{number:,} of {counted(whole, noun)} {are(1 if 1 in (number, whole) else 2)}"


def sentence(text: str) -> str:
    """Return the text with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"


def storable(text: str) -> str:
    """Return text that UTF-8 and PostgreSQL can store: `␀` for NUL, `?` for half a surrogate pair.

    Errors quote rows, which may contain anything.
    """
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode()


def storable_in(value: Any) -> Any:
    """Return the value with `storable` applied to all its texts, at any depth."""
    return change_texts(value, storable)


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with `change` applied to its strings, also in lists, tuples and mappings."""
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


def finite_in(value: Any) -> Any:
    """Return `value` with null for NaN and infinity, which JSON cannot express, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_in(inner) for name, inner in value.items()}
    return [finite_in(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def error_text(error: BaseException) -> str:
    """Return an error's message.

    For a Pydantic error, the text names the model, each wrong field and its fault.
    """
    if not isinstance(error, ValidationError):
        return str(error)
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        place = ".".join(map(str, item["loc"]))
        lines.append(": ".join(filter(None, (place, item["msg"].removeprefix("Value error, ")))))
    return f"{error.title}: {'; '.join(lines)}"
