"""Reads JSON answers strictly: an answer that does not fit `output.schema_model` fails its row.

Each answer is parsed and validated here, even if the engine generated it with a grammar: a grammar
does not enforce all of a schema, and an answer can end before its JSON object is complete.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from typing import Never

import pyarrow as pa

from prefect_raybatch.job.answer_types import AnswerShape, columns_of
from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.row_outcomes import ColumnValues
from prefect_raybatch.stages.schema_check import AnswerMisfit, SchemaCheck

AnswerObject = dict[str, object]
NOT_VALID = "AnswerNotValid"
MAX_ANSWER = 32_000  # characters of a failed answer that are kept in the row's message
MAX_REASON = 500
INT64 = range(-(1 << 63), 1 << 63)


class AnswerReader:
    """Parses answers and converts them to column values; `schema` is a JSON Schema as text."""

    def __init__(self, schema: str):
        self.columns = columns_of(schema)
        self._check = SchemaCheck(schema)

    @property
    def schema(self) -> pa.Schema:
        """Return the Arrow schema with one column for each property of the JSON Schema."""
        return pa.schema([shape.field(name) for name, shape in self.columns.items()])

    def read(self, text: str) -> tuple[AnswerObject, ColumnValues] | Failure:
        """Return (the answer's JSON object, its column values for Arrow), or the row's failure."""
        try:
            found = _parsed(text)
            self._check(found)
            row = {n: _value(s, found.get(n), f".{n}") for n, s in self.columns.items()}
            _known(found, self.columns, "")
        except AnswerMisfit as misfit:
            return _failure(misfit, text)
        except RecursionError:
            return _failure(AnswerMisfit("", "depth", "it is nested too deeply"), text)
        return found, row


@lru_cache(maxsize=4)
def reader_of(schema: str) -> AnswerReader:
    """Return the reader for a JSON Schema (as text), created once per worker process."""
    return AnswerReader(schema)


def _parsed(text: str) -> AnswerObject:
    """Parse an answer as strict JSON; raise `AnswerMisfit` if it is not valid.

    `SchemaCheck` checks later whether the value is an object.
    """
    try:
        found: AnswerObject = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except AnswerMisfit:
        raise
    except ValueError as error:
        raise AnswerMisfit("", "JSON", f"it is not JSON: {error}") from None
    try:  # "\ud800" is JSON, but no text
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise AnswerMisfit("", "JSON", "a text in it contains a lone surrogate") from None
    return found


def _object(pairs: Sequence[tuple[str, object]]) -> AnswerObject:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise AnswerMisfit("", "JSON", f"duplicate property {twice!r}")
    return made


def _constant(name: str) -> Never:
    raise AnswerMisfit("", "JSON", f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise AnswerMisfit("", "JSON", f"the number {text[:40]} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > 400:  # no float64 is as large, and Python refuses some thousand digits
        raise AnswerMisfit("", "JSON", f"a whole number of {len(text)} digits is too large")
    return int(text)


def _known(found: Iterable[str], names: Container[str], place: str) -> None:
    odd = [name for name in found if name not in names]
    if odd:
        raise AnswerMisfit(place, "properties", f"property {odd[0]!r} is not in the schema")


def _value(shape: AnswerShape, found: object, place: str) -> object:
    """Convert a validated JSON value to a Python value that Arrow takes for the type `shape`.

    `place` is the value's path in the answer, for errors.
    """
    if found is None and shape.nullable:
        return None
    if shape.kind == "json":
        return json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    if shape.kind == "struct" and isinstance(found, dict):
        names = dict(shape.names)
        _known(found, names, place)
        return {n: _value(inner, found.get(n), f"{place}.{n}") for n, inner in names.items()}
    item = shape.item
    if item is not None and shape.kind == "list" and isinstance(found, list):
        return [_value(item, one, f"{place}[{i}]") for i, one in enumerate(found)]
    if item is not None and shape.kind == "map" and isinstance(found, dict):
        return [(name, _value(item, one, f"{place}.{name}")) for name, one in found.items()]
    return _scalar(shape, found, place)


def _scalar(shape: AnswerShape, found: object, place: str) -> str | bool | int | float:
    if shape.kind == "text" and isinstance(found, str):
        return found
    if shape.kind == "boolean" and isinstance(found, bool):
        return found
    if not isinstance(found, (int, float)) or isinstance(found, bool):
        raise _other_type(shape, found, place)
    if shape.kind == "integer" and found == int(found):  # 1.0 is an integer
        if int(found) not in INT64:
            raise AnswerMisfit(place, "int64", "the whole number does not fit in 64 bits")
        return int(found)
    if shape.kind == "number":
        try:
            return float(found)
        except OverflowError:
            raise AnswerMisfit(place, "float64", "the number is too large") from None
    raise _other_type(shape, found, place)


def _other_type(shape: AnswerShape, found: object, place: str) -> AnswerMisfit:
    return AnswerMisfit(place, "type", f"{type(found).__name__} is not {shape.kind}")


def _failure(misfit: AnswerMisfit, text: str) -> Failure:
    # The answer comes last: only the first COUNTED_CHARACTERS tell reasons apart in failure counts.
    reason = str(misfit)[:MAX_REASON].encode("utf-8", "replace").decode()
    return Failure(
        "engine",
        NOT_VALID,
        f"the answer does not fit output.schema_model at {misfit.place} ({misfit.rule}). Retry "
        f"the row, perhaps with another prompt, model or schema. Reason: {reason}. Answer: "
        f"{text[:MAX_ANSWER]}",
    )
