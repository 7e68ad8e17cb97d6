"""Records out of untrusted JSON: pydantic checks them, strictly, and what does not fit is a
`CorruptRun` that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from prefect_raybatch.errors import CorruptRun

Checked = TypeVar("Checked")

STRICT = ConfigDict(strict=True, extra="forbid")
LARGEST_FIGURE = 10**300  # beyond it a figure is damage, and some sums of such are infinite

Count = Annotated[int, Field(ge=0, strict=True)]
# An int stays an int and a float a float, so that a record that is read has the bytes it had.
Number = (
    Annotated[int, Field(gt=-LARGEST_FIGURE, lt=LARGEST_FIGURE, strict=True)]
    | Annotated[
        float,
        Field(
            gt=-float(LARGEST_FIGURE), lt=float(LARGEST_FIGURE), allow_inf_nan=False, strict=True
        ),
    ]
)
_BRANCHES = {"int", "float", "constrained-int", "constrained-float"}  # of Number, in a location


def read_json(adapter: TypeAdapter[Checked], data: bytes | str, what: str) -> Checked:
    """The record in `data`; `CorruptRun` names `what` and the field that is wrong."""
    try:
        _refuse_constants(data, what)
        return adapter.validate_json(data)
    except ValidationError as error:
        raise CorruptRun(_said(error, what)) from None


def _refuse_constants(data: bytes | str, what: str) -> None:
    """NaN and Infinity are no JSON, but pydantic takes them in a field of free JSON."""
    text = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    if b"NaN" not in text and b"Infinity" not in text:
        return
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise CorruptRun(f"{what} is not readable JSON: {error}") from None


def _said(error: ValidationError, what: str) -> str:
    found = error.errors(include_url=False, include_context=False)
    unknown = [_place(e["loc"]) for e in found if e["type"] == "unexpected_keyword_argument"]
    if unknown:
        return f"{what} has unknown fields {', '.join(sorted(unknown)[:20])}"
    first = found[0]
    place, value = _place(first["loc"]), first["input"]
    if first["type"] == "json_invalid":
        return f"{what} is not readable JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    if not place:
        return f"{what} holds {type(value).__name__}, not an object"
    if first["type"] == "missing":
        return f"{what} is malformed: {place} is missing"
    return f"{what} is malformed: {place} is {str(value)[:80]!r}: {first['msg']}"


def _place(location: Sequence[Any]) -> str:
    """`pieces.0.path`; without the name of the type that a number was tried as."""
    parts = location[:-1] if location and location[-1] in _BRANCHES else location
    return ".".join(str(part)[:40] for part in parts)
