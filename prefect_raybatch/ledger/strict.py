"""Read records from untrusted JSON: strict checks, and a `CorruptRun` that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from prefect_raybatch.errors import CorruptRun

Checked = TypeVar("Checked")

STRICT = ConfigDict(strict=True, extra="forbid")
LARGEST_FIGURE = 10**300  # a larger figure is taken as damage: sums of such could be infinite

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
AS_RANGES, AS_BITMAP = "ranges", "bitmap"  # the two ways in which positions are written
_BRANCHES = {"int", "float", "constrained-int", "constrained-float"}  # Number in pydantic's errors
MOST_KEYS = 20_000  # unknown keys in a record; pydantic holds an error in memory for each
_KEY = re.compile(rb'"([^"]*)"\s*:')


@dataclass(frozen=True)
class StrictRecord:
    """Base class of records: reading one rejects unknown fields and wrong types."""

    __pydantic_config__: ClassVar = STRICT


def read_json(adapter: TypeAdapter[Checked], data: bytes | str, what: str) -> Checked:
    """Decode the record in `data`. Raises `CorruptRun`, which names `what` and the wrong field."""
    text = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    _refuse_strangers(adapter, text, what)
    try:
        _refuse_constants(text, what)
        return adapter.validate_json(data)
    except ValidationError as error:
        raise CorruptRun(_said(error, what)) from None


def _refuse_strangers(adapter: TypeAdapter[Any], text: bytes, what: str) -> None:
    """Raise `CorruptRun` for a record with over MOST_KEYS keys that are not names of fields.

    pydantic would hold an error in memory for each: several GB for millions of keys.
    """
    if text.count(b":") <= MOST_KEYS:
        return
    ours = _fields(adapter)
    strange = sum(found[1] not in ours for found in _KEY.finditer(text))
    if strange > MOST_KEYS:
        raise CorruptRun(f"{what} is malformed: it has {strange:,} unknown keys")


@cache
def _fields(adapter: TypeAdapter[Any]) -> frozenset[bytes]:
    """Return the names of all fields in records that `adapter` reads."""
    found: set[bytes] = set()
    _note_fields(adapter.core_schema, found)
    return frozenset(found)


def _note_fields(schema: Any, found: set[bytes]) -> None:
    if isinstance(schema, Mapping):
        if schema.get("type") == "dataclass-field":
            found.add(schema["name"].encode())
        for inner in schema.values():
            _note_fields(inner, found)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _note_fields(inner, found)


def _refuse_constants(text: bytes, what: str) -> None:
    """Raise `CorruptRun` for NaN and Infinity, which pydantic accepts in fields for any JSON."""
    if b"NaN" not in text and b"Infinity" not in text:
        return
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise CorruptRun(f"{what} is not valid JSON: {error}") from None


def _said(error: ValidationError, what: str) -> str:
    errors = error.errors(include_url=False, include_context=False)
    unknown = [_place(e["loc"]) for e in errors if e["type"] == "unexpected_keyword_argument"]
    if unknown:
        return f"{what} has unknown fields {', '.join(sorted(unknown)[:20])}"
    first = errors[0]
    place, value = _place(first["loc"]), first["input"]
    if first["type"] == "json_invalid":
        return f"{what} is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    if not place:
        return f"{what} holds {type(value).__name__}, not an object"
    if first["type"] == "missing":
        return f"{what} is malformed: {place} is missing"
    return f"{what} is malformed: {place} is {str(value)[:80]!r}: {first['msg']}"


def _place(location: Sequence[Any]) -> str:
    """Return pydantic's location of an error as text, e.g. `pieces.0.path`, without union types."""
    parts = location[:-1] if location and location[-1] in _BRANCHES else location
    parts = [part for part in parts if part not in (AS_RANGES, AS_BITMAP)]
    return ".".join(str(part)[:40] for part in parts)
