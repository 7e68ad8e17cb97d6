"""Writes requests as lines of a batch's input files, and parses its output and error files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect_raybatch.spec.endpoint import EndpointPath
from prefect_raybatch.stages.endpoint.answers import NOT_AS_AGREED, HostedAnswer, answer_of
from prefect_raybatch.stages.endpoint.client import (
    QUOTED_TEXT,
    HostedRequest,
    is_passing,
    remedy_of,
)

MOST_REQUESTS, MOST_FILE_BYTES = 50_000, 200_000_000  # limits of a batch's input file
# Error codes of requests that the server did not try.
UNTRIED = ("batch_expired", "batch_cancelled")
QUEUE_FULL = "token_limit_exceeded"
# Error codes of a batch or a request that end the run, and what to do.
REFUSING = {
    "insufficient_quota": "the account's quota is used up; raise it",
    "billing_hard_limit_reached": "the account's spending limit is reached; raise it",
    "invalid_api_key": "check engine.endpoint.key",
    "model_not_found": "the server's batch API does not have engine.endpoint.model; use another",
}


@dataclass
class BatchAnswers:
    """The contents of an ended batch's output and error files, by request key.

    `by_key` has the answers, permanent errors included. `passing` has the reason for each request
    that failed but may be sent again. `refusal` says why the run must end, "" if it need not.
    """

    by_key: dict[str, HostedAnswer] = field(default_factory=dict)
    passing: dict[str, str] = field(default_factory=dict)
    refusal: str = ""


def batch_url(path: EndpointPath) -> str:
    """Return an API path in the form that batches and their files use.

    It always begins with /v1/, whatever the base URL is.
    """
    return f"/v1/{path}"


def request_line(request: HostedRequest, path: EndpointPath) -> bytes:
    """Return a request's line for a batch's input file, with the newline."""
    url = batch_url(path)
    line = {"custom_id": request.key, "method": "POST", "url": url, "body": request.body}
    return json.dumps(line).encode() + b"\n"


def split_requests(
    requests: Iterable[HostedRequest], path: EndpointPath
) -> Iterator[tuple[list[HostedRequest], bytes]]:
    """Distribute requests over input files within the API's limits; yield (requests, content).

    A request that is too large for any file is yielded alone, with b"" as the content.
    """
    chosen: list[HostedRequest] = []
    lines: list[bytes] = []
    size = 0
    for request in requests:
        line = request_line(request, path)
        if len(line) > MOST_FILE_BYTES:
            yield [request], b""
            continue
        if chosen and (len(chosen) == MOST_REQUESTS or size + len(line) > MOST_FILE_BYTES):
            yield chosen, b"".join(lines)
            chosen, lines, size = [], [], 0
        chosen.append(request)
        lines.append(line)
        size += len(line)
    if chosen:
        yield chosen, b"".join(lines)


def read_lines(files: Iterable[bytes], keys: Sequence[str], path: EndpointPath) -> BatchAnswers:
    """Parse the output and error `files` of a batch whose requests have these keys.

    A request whose line cannot be read gets no answer.
    """
    found, asked = BatchAnswers(), set(keys)
    for data in files:
        for text in data.split(b"\n"):
            if text.strip():
                _read_line(text, asked, path, found)
    for key in found.by_key:
        found.passing.pop(key, None)
    return found


def _read_line(text: bytes, asked: set[str], path: EndpointPath, found: BatchAnswers) -> None:
    try:
        line = json.loads(text)
        key = line["custom_id"]
        response, error = line.get("response"), line.get("error")
        body = response["body"] if response else None
        status = int(response["status_code"]) if response else 0
    except NOT_AS_AGREED:
        return
    if not isinstance(key, str) or key not in asked:
        return
    if status == 200:
        try:
            found.by_key[key] = answer_of(body, path)
        except NOT_AS_AGREED:
            found.passing[key] = f"the answer is no JSON of /{path}"
        return
    code, message = error_parts(error if status == 0 else body)
    said = f"{status}: {message}" if status else f"{code}: {message}"
    remedy = REFUSING.get(code) or remedy_of(status, code)
    if remedy is not None:
        found.refusal = f"the server answers {said}. Remedy: {remedy}"
    elif code in UNTRIED or status == 429 or is_passing(status):
        found.passing[key] = said
    else:
        reason = f"the server answers {said}. Correct the row, or the job's prompt"
        found.by_key[key] = HostedAnswer(error=("RequestRefused", reason))


def error_parts(error: Any) -> tuple[str, str]:
    """Return the (code, message) of an error in the API's JSON; the message is cut to one line."""
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        error = error["error"]
    if not isinstance(error, dict):
        return "", " ".join(str(error).split())[:QUOTED_TEXT]
    code, message = error.get("code"), error.get("message")
    return str(code or ""), " ".join(str(message or code).split())[:QUOTED_TEXT]
