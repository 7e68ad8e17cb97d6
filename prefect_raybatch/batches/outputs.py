"""Writes the answers of a run as the lines of OpenAI batch output files."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any

from prefect_raybatch.job.openai_batch import BATCH_FORMAT
from prefect_raybatch.ledger.increments import is_first_phase
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.result_reader import rows_of_result
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.result import FinishSpec
from prefect_raybatch.storage import Store

OUTPUT_FILE, ERROR_FILE = "output.jsonl", "error.jsonl"  # in the run directory
DATA_KIND, ERROR_KIND = "data", "quarantine"
BAD_REQUEST, SERVER_ERROR = 400, 500


def put_answer_files(
    read: ReadSpec,
    finish: FinishSpec,
    model_request: ModelRequest,
    store: Store,
    plan: Plan,
    success: Success,
) -> None:
    """Write output.jsonl and error.jsonl to the directory of a run over an OpenAI batch file.

    Each file is written atomically. Does nothing if the input is no batch file. Does nothing also
    if `plan` is that of a run's first phase (`is_first_phase`), which infers the distinct requests,
    or uses the first model of a cascade. The files are written when the last phase ends.
    """
    if read.format == BATCH_FORMAT and not is_first_phase(plan):
        lines = AnswerLines.of(store, plan, success, finish, model_request)
        lines.put(store, OUTPUT_FILE, DATA_KIND)
        lines.put(store, ERROR_FILE, ERROR_KIND)


@dataclass(frozen=True)
class AnswerLines:
    """Makes the lines of OpenAI output files from a run's result, which is in `store`.

    `column` is the result column with the answers, `number` the column with the row numbers.
    `model` is the model name written for requests that have none. Ids derive from the plan's hash,
    so each call makes the same ids.
    """

    store: Store
    plan: Plan
    success: Success
    column: str
    number: str
    model: str

    @classmethod
    def of(
        cls,
        store: Store,
        plan: Plan,
        success: Success,
        finish: FinishSpec,
        model_request: ModelRequest,
    ) -> AnswerLines:
        model = (
            model_request.name if model_request.endpoint is None else model_request.endpoint.model
        )
        columns = finish.column, finish.row_number
        return cls(store, plan, success, *columns, model)

    def put(self, store: Store, name: str, *kinds: str) -> None:
        """Write the lines of `kinds` (DATA_KIND, ERROR_KIND) atomically to a file of `store`."""
        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch) / OUTPUT_FILE
            with local.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
                file.writelines(f"{line}\n" for line in self.lines(*kinds))
            store.put_file(name, local)

    def lines(self, *kinds: str) -> Iterator[str]:
        """Yield a JSON line for each row of the given kinds, in input order.

        DATA_KIND stands for answered rows, ERROR_KIND for failed ones.
        """
        of_kinds = (self._rows(kind) for kind in kinds)
        created = int(datetime.fromisoformat(self.plan.created).timestamp())
        for at, kind, row in merge(*of_kinds, key=itemgetter(0)):
            token = hashlib.sha256(f"{self.plan.hash}:{at}".encode()).hexdigest()[:32]
            if kind == ERROR_KIND:
                line = _error(row, token)
            else:
                asked = json.loads(row["body"])
                embeds = asked.get("input") is not None
                body = self._embedding(row) if embeds else self._answer(row, token, created)
                body["model"] = asked.get("model") or self.model
                line = _line(row["custom_id"], token, 200, body, None)
            yield json.dumps(line, ensure_ascii=False)

    def _rows(self, kind: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
        # One thread and little read ahead keep the order and the memory small.
        dataset = rows_of_result(self.store, self.success, kind)
        for batch in dataset.to_batches(use_threads=False, batch_readahead=1, fragment_readahead=1):
            for row in batch.to_pylist():
                yield int(row[self.number]), kind, row

    def _answer(self, row: Mapping[str, Any], token: str, created: int) -> dict[str, Any]:
        prompt, output = row["prompt_tokens"], row["output_tokens"]
        chats, text = json.loads(row["body"]).get("messages") is not None, row[self.column]
        choice = {
            "index": 0,
            **({"message": {"role": "assistant", "content": text}} if chats else {"text": text}),
            "logprobs": None,
            "finish_reason": row["finish_reason"],
        }
        return {
            "id": f"{'chatcmpl' if chats else 'cmpl'}-{token}",
            "object": "chat.completion" if chats else "text_completion",
            "created": created,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
            },
        }

    def _embedding(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tokens = row["prompt_tokens"]
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": row[self.column]}],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _error(row: Mapping[str, Any], token: str) -> dict[str, Any]:
    refused = row["stage"] == "prepare" or row["error"] == "RequestRefused"
    status = BAD_REQUEST if refused else SERVER_ERROR
    error = {"code": row["error"], "message": row["message"], "line": row["input"]["line"]}
    return _line(row["input"]["custom_id"], token, status, None, error)


def _line(custom_id: str, token: str, status: int, body: object, error: object) -> dict[str, Any]:
    return {
        "id": f"batch_req_{token}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{token}", "body": body},
        "error": error,
    }
