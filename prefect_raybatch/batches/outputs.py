"""Writes the answers of a run as the lines of an OpenAI batch output file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from heapq import merge
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_raybatch.runs.open_run import OpenRun

BAD_REQUEST, SERVER_ERROR = 400, 500


def output_lines(run: OpenRun, plan: str, model: str, created: int, number: str) -> Iterator[str]:
    """Yield a line for each request of a finished run, in input order.

    `plan` is the plan's hash, from which ids are made, so they are those of every later call;
    `created` are seconds since 1970; `number` names the column of row numbers.
    """
    rows = merge(
        ((row[number], row, True) for row in _rows(run.dataset())),
        ((row[number], row, False) for row in _rows(run.quarantine())),
        key=lambda one: int(one[0]),
    )
    for at, row, answered in rows:
        token = hashlib.sha256(f"{plan}:{at}".encode()).hexdigest()[:32]
        made = _answer(row, token, model, created) if answered else _error(row, token)
        yield json.dumps(made, ensure_ascii=False)


def _rows(dataset: Any) -> Iterator[dict[str, Any]]:
    # One thread and little read ahead keep the order and the memory small.
    for batch in dataset.to_batches(use_threads=False, batch_readahead=1, fragment_readahead=1):
        yield from batch.to_pylist()


def _answer(row: Mapping[str, Any], token: str, model: str, created: int) -> dict[str, Any]:
    prompt, output = row["prompt_tokens"], row["output_tokens"]
    body = {
        "id": f"chatcmpl-{token}",
        "object": "chat.completion",
        "created": created,
        "model": json.loads(row["body"]).get("model") or model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": row["response"]},
                "logprobs": None,
                "finish_reason": row["finish_reason"],
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        },
    }
    return _line(row["custom_id"], token, 200, body, None)


def _error(row: Mapping[str, Any], token: str) -> dict[str, Any]:
    status = BAD_REQUEST if row["stage"] == "prepare" else SERVER_ERROR
    error = {"code": row["error"], "message": row["message"], "line": row["input"]["line"]}
    return _line(row["input"]["custom_id"], token, status, None, error)


def _line(custom_id: str, token: str, status: int, body: object, error: object) -> dict[str, Any]:
    return {
        "id": f"batch_req_{token}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{token}", "body": body},
        "error": error,
    }
