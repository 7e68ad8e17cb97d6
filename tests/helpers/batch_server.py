"""A stand-in for a server's batch API, which also drops answers, lags, expires and half-fails.

`BatchService` is the server without HTTP, so that a simulation can use it; `batch_server` serves
it. Objects have the fields of OpenAI's API (test_hosted_batches.py checks that).
"""

from __future__ import annotations

import email
import email.policy
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .openai_server import completion, embedding, text_completion
from .web_server import served

LIVE = ("validating", "in_progress", "finalizing", "cancelling")


class NotFound(Exception):
    """There is no such object."""


class Forbidden(Exception):
    """The caller may not do this."""


@dataclass
class BatchService:
    """`fate` returns how a batch (its number from 0) ends:

    completed, expired (its first half is answered), half (each second line answers 500), failed (no
    line is read), invalid (the first bad line is named, and none is tried, if there is any), full
    (too many tokens in the queue), or quota (each line: no quota). A batch ends
    `takes` seconds after its creation, and is listed after `lag` seconds. `paid` counts answers by
    the key of their request.
    """

    clock: Callable[[], float] = time.monotonic
    takes: float = 0.0
    lag: float = 0.0
    fate: Callable[[int], str] = lambda number: "completed"
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: dict[str, list[bytes]] = field(default_factory=dict)  # of a batch
    born: dict[str, float] = field(default_factory=dict)
    paid: Counter[str] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def upload(self, name: str, data: bytes, purpose: str = "batch") -> dict[str, Any]:
        with self.lock:
            made = {
                "id": f"file-{len(self.born)}-{len(self.contents)}",
                "object": "file",
                "bytes": len(data),
                "created_at": 1,
                "filename": name,
                "purpose": purpose,
                "status": "processed",
            }
            self.born[made["id"]] = self.clock()
            self.files[made["id"]], self.contents[made["id"]] = made, data
            return made

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            if body["input_file_id"] not in self.files:
                raise NotFound
            lines = self.contents[body["input_file_id"]].splitlines()
            made = {
                "id": f"batch_{len(self.batches)}",
                "object": "batch",
                "endpoint": body["endpoint"],
                "completion_window": body["completion_window"],
                "input_file_id": body["input_file_id"],
                "status": "validating",
                "created_at": 1,
                "output_file_id": None,
                "error_file_id": None,
                "errors": None,
                "request_counts": {"total": len(lines), "completed": 0, "failed": 0},
            }
            self.born[made["id"]] = self.clock()
            self.batches[made["id"]], self.lines[made["id"]] = made, lines
            return dict(made)

    def get(self, batch_id: str) -> dict[str, Any]:
        with self.lock:
            if batch_id not in self.batches:
                raise NotFound
            self._advance(batch_id)
            return dict(self.batches[batch_id])

    def listed(self, limit: int, after: str | None) -> dict[str, Any]:
        """Return a page of the batches, the newest first."""
        with self.lock:
            now = self.clock()
            there = [i for i in reversed(self.batches) if now - self.born[i] >= self.lag]
            if after is not None:
                there = there[there.index(after) + 1 :]
            page = [self.get(one) for one in there[:limit]]
            return {"object": "list", "data": page, "has_more": len(there) > limit}

    def cancel(self, batch_id: str) -> dict[str, Any]:
        with self.lock:
            batch = self.get(batch_id)
            if batch["status"] in LIVE:
                age = self.clock() - self.born[batch_id]
                done = int(batch["request_counts"]["total"] * age / self.takes) if self.takes else 0
                self._end(batch_id, "cancelled", done)
            return self.get(batch_id)

    def content(self, file_id: str) -> bytes:
        with self.lock:
            if file_id not in self.contents:
                raise NotFound
            return self.contents[file_id]

    def delete(self, file_id: str) -> None:
        with self.lock:
            if self.contents.pop(file_id, None) is None:
                raise NotFound
            del self.files[file_id]

    def settle(self) -> None:
        """Let all batches end."""
        with self.lock:
            for batch_id in self.batches:
                self.born[batch_id] = -math.inf
                self._advance(batch_id)

    def _advance(self, batch_id: str) -> None:
        batch, age = self.batches[batch_id], self.clock() - self.born[batch_id]
        if batch["status"] not in LIVE:
            return
        total = batch["request_counts"]["total"]
        if age < self.takes:
            batch["status"] = "in_progress"
            batch["request_counts"]["completed"] = int(total * age / self.takes)
            return
        fate = self.fate(list(self.batches).index(batch_id))
        self._end(batch_id, fate, total // 2 if fate == "expired" else total)

    def _end(self, batch_id: str, fate: str, done: int) -> None:
        """End a batch; its first `done` requests are answered, where its fate is not to fail."""
        batch = self.batches[batch_id]
        bad = [n for n, line in enumerate(self.lines[batch_id], 1) if b"bad" in line]
        if fate == "invalid" and bad:
            error = {"code": "invalid", "message": "it is bad", "line": bad[0], "param": None}
            batch |= {"status": "failed", "errors": {"object": "list", "data": [error]}}
            return
        fate = "completed" if fate == "invalid" else fate
        if fate in ("failed", "full"):
            code = "token_limit_exceeded" if fate == "full" else "invalid_file"
            error = {"code": code, "message": f"it is {fate}", "line": None, "param": None}
            batch |= {"status": "failed", "errors": {"object": "list", "data": [error]}}
            return
        answers, errors = [], []
        for number, text in enumerate(self.lines[batch_id]):
            line = json.loads(text)
            asked, wrong = line["body"], line["url"] != batch["endpoint"]
            message = _text_of(asked)
            base = {"id": f"req_{number}", "custom_id": line["custom_id"]}
            if number >= done:
                error = {"code": f"batch_{fate}", "message": "not worked on"}
                errors.append({**base, "response": None, "error": error})
            elif wrong:
                errors.append({**base, "response": _failed(400, "another url"), "error": None})
            elif "bad" in message:
                errors.append({**base, "response": _failed(400, "too long"), "error": None})
            elif fate == "quota" and number:
                errors.append({**base, "response": _failed(429, "insufficient_quota")})
            elif fate == "half" and number % 2:
                errors.append({**base, "response": _failed(500, "internal"), "error": None})
            else:
                self.paid[line["custom_id"]] += 1
                body = _answer_to(asked, message)
                response = {"status_code": 200, "request_id": f"r{number}", "body": body}
                answers.append({**base, "response": response, "error": None})
        status = "completed" if fate in ("half", "quota") else fate
        counts = {"completed": len(answers), "failed": len(errors)}
        batch |= {"status": status, "request_counts": {**batch["request_counts"], **counts}}
        for name, kind, lines in (
            ("output_file_id", "output", answers),
            ("error_file_id", "error", errors),
        ):
            if lines:
                data = "".join(json.dumps(one) + "\n" for one in reversed(lines)).encode()
                file_name = f"{batch_id}_{kind}.jsonl"
                batch[name] = self.upload(file_name, data, "batch_output")["id"]


def _text_of(asked: dict[str, Any]) -> str:
    if "messages" in asked:
        return asked["messages"][-1]["content"]
    return asked["prompt"] if "prompt" in asked else asked["input"]


def _answer_to(asked: dict[str, Any], text: str) -> dict[str, Any]:
    if "input" in asked:
        return json.loads(embedding(text))
    answer = completion if "messages" in asked else text_completion
    return json.loads(answer(f"about {text}", body=asked))


def _failed(status: int, message: str) -> dict[str, Any]:
    body = {"error": {"message": message, "code": message}}
    return {"status_code": status, "request_id": "r", "body": body}


@dataclass
class BatchServer:
    """`drop` returns for a call (method and path) whether its answer is dropped, the call itself
    ("before" it has an effect), or nothing. `calls` has all of them in order. Batches in
    `uncancellable` (ids) are of another project: nobody here may cancel them."""

    service: BatchService
    url: str = ""
    drop: Callable[[str, str], str] = lambda method, path: ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    has_batches: bool = True
    uncancellable: set[str] = field(default_factory=set)


@contextmanager
def batch_server(service: BatchService | None = None) -> Iterator[BatchServer]:
    server = BatchServer(service or BatchService())

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer, else the client's acknowledgement costs 40 ms

        def handle(self) -> None:
            with suppress(ConnectionError):  # the client was killed
                super().handle()

        def do_GET(self) -> None:
            self.handle_call("GET")

        def do_POST(self) -> None:
            self.handle_call("POST")

        def do_DELETE(self) -> None:
            self.handle_call("DELETE")

        def handle_call(self, method: str) -> None:
            parts = urlsplit(self.path)
            path = parts.path.removeprefix("/v1")
            server.calls.append((method, path))
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            how = server.drop(method, path)
            if how != "before":
                try:
                    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                    status, value = 200, self.answer(method, path, query, data)
                except NotFound:
                    status, value = 404, {"error": {"message": f"no {path}", "code": None}}
                except Forbidden:
                    status, value = 403, {"error": {"message": f"not {path}", "code": None}}
            if how:
                self.close_connection = True
                return
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            with suppress(ConnectionError):  # the client was killed
                self.end_headers()
                self.wfile.write(body)

        def answer(self, method: str, path: str, query: dict[str, str], data: bytes) -> Any:
            service, words = server.service, path.strip("/").split("/")
            if words[0] == "batches" and not server.has_batches:
                raise NotFound
            match (method, *words):
                case ("GET", "models"):
                    return {"data": [{"id": "large"}]}
                case ("POST", "chat", "completions"):
                    asked = json.loads(data)
                    return _answer_to(asked, _text_of(asked))
                case ("POST", "files"):
                    return self.upload(data)
                case ("GET", "files"):
                    files = [f for f in service.files.values() if f["purpose"] == query["purpose"]]
                    return {"object": "list", "data": files, "has_more": False}
                case ("GET", "files", name, "content"):
                    return service.content(name)
                case ("DELETE", "files", name):
                    service.delete(name)
                    return {"id": name, "object": "file", "deleted": True}
                case ("POST", "batches"):
                    return service.create(json.loads(data))
                case ("GET", "batches"):
                    return service.listed(int(query.get("limit", 20)), query.get("after"))
                case ("GET", "batches", name):
                    return service.get(name)
                case ("POST", "batches", name, "cancel"):
                    if name in server.uncancellable:
                        raise Forbidden
                    return service.cancel(name)
            raise NotFound

        def upload(self, data: bytes) -> dict[str, Any]:
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            form = email.message_from_bytes(head + data, policy=email.policy.HTTP)
            parts = {
                part.get_param("name", header="content-disposition"): part
                for part in form.iter_parts()
            }  # type: ignore[attr-defined]
            assert parts["purpose"].get_content().strip() == "batch"
            content = parts["file"].get_payload(decode=True)
            return server.service.upload(parts["file"].get_filename(), content)

        def log_message(self, *_: Any) -> None:
            pass

    with served(Handler) as address:
        server.url = f"{address}/v1"
        yield server
