"""A server with the OpenAI API that counts what it is asked, and fails as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from .web_server import served

Answer = tuple[int, dict[str, str], bytes]  # status, headers, body


@dataclass
class OpenAIServer:
    """`fault` may answer a request (its number from 0, its body) in place of the model."""

    url: str = ""
    fault: Callable[[int, dict[str, Any]], Answer | None] = lambda number, body: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    answered: list[str] = field(default_factory=list)  # keys of requests that got an answer
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any], key: str, authorization: str | None) -> Answer:
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.times.append(time.monotonic())
            self.keys.append(key)
            self.authorizations.add(authorization)
        found = self.fault(number, body)
        if found is not None:
            return found
        text = body["messages"][-1]["content"]
        content = f"about {text}"
        form = body.get("response_format")
        if form:
            schema = form["json_schema"]["schema"]
            content = json.dumps({"label": schema["properties"]["label"]["enum"][0]})
        with self.lock:
            self.answered.append(key)
        return 200, {}, completion(content)


def completion(content: str | None, finish: str = "stop") -> bytes:
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def failing(status: int, message: str, **headers: str) -> Answer:
    body = json.dumps({"error": {"message": message, "code": message}}).encode()
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body


@contextmanager
def openai_server(models: tuple[str, ...] = ("large",)) -> Iterator[OpenAIServer]:
    server = OpenAIServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            listed = {"data": [{"id": name} for name in models]}
            self.say(200, {}, json.dumps(listed).encode())

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            key = self.headers["Idempotency-Key"]
            self.say(*server.answer(body, key, self.headers["Authorization"]))

        def say(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", headers.get("x-length", str(len(body))))
            with suppress(ConnectionError):  # the client was killed
                self.end_headers()
                self.wfile.write(body)
            self.close_connection = "x-length" in headers

        def log_message(self, *_: Any) -> None:
            pass

    with served(Handler) as address:
        server.url = f"{address}/v1"
        yield server
