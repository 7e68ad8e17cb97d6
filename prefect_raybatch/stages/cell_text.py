"""Converts the values of a column to the text that a prompt template inserts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.source.arrow_types import map_type
from prefect_raybatch.stages.block import NOT_IN_PYTHON, Failure, unreadable

_FLOATS = {16: np.float16, 32: np.float32}


def cell_texts(column: pa.ChunkedArray, name: str) -> list[str | Failure | None]:
    """Return the text of each value of column `name`; None for a null or NaN.

    A value without a text, such as bytes that are not UTF-8, gives a `Failure`.
    """
    kind, held = column.type, map_type(column.type, _written_out)
    if held != map_type(kind, lambda inner: inner):
        column = column.cast(held)
    try:
        values = column.to_pylist()
    except NOT_IN_PYTHON:
        return [_alone(column.slice(i, 1), kind, name) for i in range(len(column))]
    return [_checked(value, kind, name) for value in values]


def _written_out(kind: pa.DataType) -> pa.DataType:
    """Return Arrow's string type for a time type in nanoseconds; return any other type unchanged.

    Python has no such time, but Arrow can write it as text.
    """
    return pa.string() if kind == pa.time64("ns") else kind


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _alone(cell: pa.ChunkedArray, kind: pa.DataType, name: str) -> str | Failure | None:
    """Return the text of the only value in `cell`.

    The result is a `Failure` or None in the cases in which `cell_texts` returns one. A time that
    Python cannot represent gets its text from Arrow, if Arrow can write it.
    """
    try:
        return _checked(cell.to_pylist()[0], kind, name)
    except NOT_IN_PYTHON as error:
        if pa.types.is_temporal(cell.type) and not isinstance(error, KeyError):
            text = str(cell.cast(pa.string()).to_pylist()[0])
            if not text.startswith("<"):  # Arrow's sign for a year that it cannot write either
                return text
        failure = unreadable(error)
        return replace(failure, message=f"column {name}: {failure.message}")


def _checked(value: Any, kind: pa.DataType, name: str) -> str | Failure | None:
    try:
        return cell_text(value, kind)
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        return Failure(
            "prepare",
            "ValueError",
            f"column {name} holds bytes that are not UTF-8 text ({wrong}). Store the column as "
            "text, or read it with a prompt.function",
        )


def cell_text(value: Any, kind: pa.DataType) -> str | None:
    """Return the text of a value of type `kind`; None for a null or NaN.

    Raises UnicodeDecodeError for bytes that are not UTF-8.
    """
    types = pa.types
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, str):
        return _without_zeros(value) if types.is_time(kind) else value
    if isinstance(value, Decimal):
        return format(value, "f")  # str would write a zero of scale 18 as 0E-18
    if types.is_floating(kind) and kind.bit_width in _FLOATS:
        # The shortest text that means this value in its own width: 19.99 and not 19.98999977...
        return str(float(str(_FLOATS[kind.bit_width](value))))
    if types.is_nested(kind):
        return _json_text(value, kind)
    return str(value)


def _json_text(value: Any, kind: pa.DataType) -> str:
    types = pa.types
    if value is None:
        return "null"
    if types.is_struct(kind):
        pairs = [(field.name, value[field.name], field.type) for field in kind]
        return _object(pairs)
    if types.is_map(kind):
        texts = [(cell_text(key, kind.key_type), inner) for key, inner in value]
        return _object([(key or "", inner, kind.item_type) for key, inner in texts])
    if types.is_nested(kind) and not types.is_union(kind):
        return f"[{', '.join(_json_text(inner, kind.value_type) for inner in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = cell_text(value, kind)
    if text is None:
        return "null"
    number = isinstance(value, int | float | Decimal) and not math.isinf(value)
    return text if number else json.dumps(text, ensure_ascii=False)


def _object(pairs: list[tuple[str, Any, pa.DataType]]) -> str:
    members = (
        f"{json.dumps(name, ensure_ascii=False)}: {_json_text(value, kind)}"
        for name, value, kind in pairs
    )
    return f"{{{', '.join(members)}}}"
