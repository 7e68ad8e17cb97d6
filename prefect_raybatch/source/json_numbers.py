"""Converts the values of a JSON key to text if neither int64 nor float64 represents all exactly.

pyarrow reads an integer above 2^63 as a float. If a key has both integers and fractions, it reads
all of them as floats. Rounded to floats, two identifiers may become equal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Set
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.source.arrow_types import map_type

LONG_DIGITS = 16  # floats hold numbers of fewer digits, unless the exponent is too small
_SMALL = re.compile(rb"[0-9.]+[eE]-[0-9]{3,}")
_DIGITS = np.zeros(256, bool)
_DIGITS[[*b"0123456789."]] = True
_LONG = re.compile(rb"[0-9.]+(?:[eE][-+]?[0-9]+)?")
EXACT_INTEGERS = 1 << 53  # floats hold all whole numbers up to here
Path = tuple[str | None, ...]  # keys from the top; None for the items of a list


def is_exact_float(number: str) -> bool:
    """Return whether a number survives being read as a float64: 0.1 does, 2^53 + 1 does not."""
    value = float(number)
    if number.lstrip("-").isdigit():
        return abs(value) <= EXACT_INTEGERS and int(number) == value
    if repr(value) == number:
        return True
    return math.isfinite(value) and Decimal(number) == Decimal(repr(value))


def exact_as_floats(column: pa.ChunkedArray) -> bool:
    """Return whether floats represent all integers of a column exactly."""
    import pyarrow.compute as pc

    most = pc.max(pc.abs(column)).as_py()
    return most is None or 0 <= most <= EXACT_INTEGERS


def has_floats(schema: pa.Schema) -> bool:
    """Return whether a schema contains floats, at any depth."""
    kinds: list[pa.DataType] = []

    def note(kind: pa.DataType) -> pa.DataType:
        kinds.append(kind)
        return kind

    for field in schema:
        map_type(field.type, note)
    return any(map(pa.types.is_floating, kinds))


def inexact_paths(block: bytes, schema: pa.Schema) -> set[Path]:
    """Return the paths in a JSON Lines block whose numbers pyarrow read as inexact floats.

    A path is the keys from the top to a value, None for an item of a list. `schema` is the one that
    pyarrow inferred for the block.
    """
    if not has_floats(schema):
        return set()
    starts = [start for start, number in _long_numbers(block) if not _holds(number)]
    if not starts:
        return set()
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    lines = block.split(b"\n")
    paths: set[Path] = set()
    for at in np.unique(np.searchsorted(ends, starts)).tolist():
        row = json.loads(lines[at], parse_int=_Number, parse_float=_Number)
        paths.update(path for path, number in _numbers(row, ()) if not is_exact_float(number))
    return {path for path in paths if _is_float(path, schema)}


def _long_numbers(block: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, text) of each number in a block that a float may not represent exactly.

    These numbers have many digits, or an exponent of -100 or below; pyarrow itself rejects numbers
    that are too large for a float. The text has no sign. Digits within a JSON string are yielded
    too, so the text may not be a valid number.
    """
    edges = np.diff(_DIGITS[np.frombuffer(block, np.uint8)].view(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    for start in starts[ends - starts >= LONG_DIGITS].tolist():
        if (match := _LONG.match(block, start)) is not None:
            yield start, match[0]
    if b"e-" in block or b"E-" in block:
        for match in _SMALL.finditer(block):
            yield match.start(), match[0]


def with_texts(block: bytes, paths: Set[Path], as_written: Set[Path] = frozenset()) -> bytes:
    """Return a JSON Lines block in which the numbers at `paths` are strings.

    Most strings are the numbers exactly as in the block. Only fractions that a float represents
    exactly are written as Python prints them, unless their path is in `as_written`.
    """
    made = []
    for line in block.split(b"\n"):
        if line.strip():
            row = json.loads(line, parse_int=_Number, parse_float=_Number)
            line = json.dumps(_changed(row, (), paths, as_written)).encode()
        made.append(line)
    return b"\n".join(made)


class _Number(str):
    """A number as written in the file."""

    __slots__ = ()


def _holds(number: bytes) -> bool:
    try:
        return is_exact_float(number.decode())
    except ValueError:  # digits inside a string, such as 1.2.3
        return True


def _numbers(value: Any, path: Path) -> Iterator[tuple[Path, _Number]]:
    if isinstance(value, _Number):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, (*path, None))


def _changed(value: Any, path: Path, paths: Set[Path], as_written: Set[Path]) -> Any:
    if isinstance(value, _Number):
        whole = value.lstrip("-").isdigit()
        if path not in paths:
            return int(value) if whole else float(value)
        if path in as_written:
            return str(value)
        return repr(float(value)) if not whole and is_exact_float(value) else str(value)
    if isinstance(value, dict):
        return {
            key: _changed(inner, (*path, key), paths, as_written) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_changed(inner, (*path, None), paths, as_written) for inner in value]
    return value


def _is_float(path: Path, schema: pa.Schema) -> bool:
    kind: pa.DataType = pa.struct(schema)
    for key in path:
        kind = kind.value_type if key is None else kind.field(key).type
    return bool(pa.types.is_floating(kind))
