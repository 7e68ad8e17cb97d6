"""Reads OpenAI batch files: one row per request; an invalid line becomes a row with its error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from prefect_raybatch.errors import SourceError
from prefect_raybatch.source.encodings import check_encoding
from prefect_raybatch.source.find import File
from prefect_raybatch.source.json_lines import line_blocks
from prefect_raybatch.source.streams import one_line

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
EMBEDDING_URL = "/v1/embeddings"
URLS = (CHAT_URL, COMPLETION_URL, EMBEDDING_URL)
REQUEST_SCHEMA = pa.schema(
    {
        "line": pa.int64(),
        "custom_id": pa.string(),
        "url": pa.string(),
        "body": pa.string(),
        "fault": pa.string(),
    }
)


def request_tables(
    file: File, columns: Sequence[str] | None, known: dict[str, None], models: Iterable[str] | None
) -> Iterator[pa.Table]:
    """Yield the rows of a batch file in tables of about streams.BLOCK_BYTES.

    `columns` are the columns of REQUEST_SCHEMA to yield (None: all). All names of REQUEST_SCHEMA
    are added to `known`. `models` are the model names that a request may have (None: any).

    A line is invalid if its model is not one of these, or if anything else is wrong. Such a line
    becomes a row without a body, and the row's `fault` says what is wrong. Raises SourceError only
    if the file cannot be read.
    """
    known.update(dict.fromkeys(REQUEST_SCHEMA.names))
    models, seen = None if models is None else list(models), set[str]()
    chosen = [name for name in REQUEST_SCHEMA.names if columns is None or name in columns]
    try:
        check_encoding(file)
        for first, block in line_blocks(file):
            lines = enumerate(block.split(b"\n"), first)
            rows = [
                dict(zip(REQUEST_SCHEMA.names, values, strict=True))
                for values in rows_of_requests(lines, models, seen)
            ]
            yield pa.Table.from_pylist(rows, REQUEST_SCHEMA).select(chosen)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{file.uri} cannot be read ({one_line(error)}). Write the file again"
        ) from None


def rows_of_requests(
    lines: Iterable[tuple[int, bytes]], models: Sequence[str] | None, seen: set[str]
) -> Iterator[list[object]]:
    """Yield the values of REQUEST_SCHEMA for each line that is not blank.

    The row of an invalid line has no body, and `fault` says what is wrong. `lines` are (number,
    content). `models` are the model names that a request may have, None for any. `seen` are the
    custom_ids of earlier valid lines, which must not occur again; new ones are added to it.
    """
    for number, line in lines:
        if line.strip():
            custom_id, url, body, fault = _read(line, models)
            if fault is None and custom_id in seen:
                fault = f"custom_id {custom_id!r} is that of an earlier line; make it unique"
            if fault is None:
                seen.add(custom_id)
            text = None if fault is not None else json.dumps(body)
            yield [number, custom_id, url, text, fault and f"line {number}: {fault}"]


def _read(line: bytes, models: Sequence[str] | None) -> tuple[str, str | None, object, str | None]:
    """Parse one line of a batch file to (custom_id, URL, body, fault).

    The custom_id is "" if the line has no valid one. URL and body may be None; the fault is None if
    the line is valid.
    """
    try:
        request = json.loads(line.decode("utf-8"), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        problem = f"it is not valid JSON ({str(error)[:100]}); write one object per line"
        return "", None, None, problem
    if not isinstance(request, dict):
        return "", None, None, "it is not an object; write {custom_id, method, url, body}"
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return "", None, None, "custom_id is missing or is no text; set a unique text"
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        return "", None, None, "custom_id has half of a surrogate pair; write the whole character"
    fault = _fault(request, models)
    return custom_id, None if fault else request["url"], request.get("body"), fault


def _fault(request: Mapping[str, Any], models: Sequence[str] | None) -> str | None:
    url, body = request.get("url"), request.get("body")
    if request.get("method") != "POST":
        return f"method is {request.get('method')!r}; set it to POST"
    if url not in URLS:
        return f"url {url!r} is not supported; use {' or '.join(URLS)}"
    if not isinstance(body, dict):
        return "body is missing or is no object; write the request into it"
    model = body.get("model")
    if models is not None and model is not None and model not in models:
        known = ", ".join(models)
        return f"model {model!r} is not served, only {known}; add it with source.served_as"
    return None


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
