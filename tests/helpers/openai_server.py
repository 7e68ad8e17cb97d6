"""A server with the OpenAI API that counts what it is asked, and fails as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from itertools import islice
from types import MappingProxyType
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
    paths: list[str] = field(default_factory=list)
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
        if "input" in body:
            return 200, {}, embedding(body["input"])
        if "prompt" in body:
            return 200, {}, text_completion(f"after {body['prompt']}", body)
        text = body["messages"][-1]["content"]
        content = f"about {text}"
        form = body.get("response_format")
        if form and form["type"] == "json_object":
            content = "{}"
        elif form:
            schema = form["json_schema"]["schema"]
            content = json.dumps({"label": schema["properties"]["label"]["enum"][0]})
        with self.lock:
            self.answered.append(key)
        return 200, {}, completion(content, body=body)


def completion(
    content: str | None, finish: str = "stop", body: Mapping[str, Any] = MappingProxyType({})
) -> bytes:
    """The answer to `body`: of several choices, all but the first end in their index."""

    def choice(index: int) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": f"{content}{index or ''}" if content else content,
        }
        logprobs = chat_logprobs(body.get("top_logprobs", 0)) if body.get("logprobs") else None
        return {"index": index, "message": message, "finish_reason": finish, "logprobs": logprobs}

    return _answered("chat.completion", choice, body)


def text_completion(text: str, body: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    def choice(index: int) -> dict[str, Any]:
        told = None
        if (most := body.get("logprobs")) is not None:
            tops = [dict(islice(LIKELY.items(), most)) for _ in TOKENS] if most else None
            told = {
                "tokens": list(TOKENS),
                "token_logprobs": list(TOKENS.values()),
                "top_logprobs": tops,
                "text_offset": [0, 1],
            }
        written = f"{text}{index or ''}"
        return {"index": index, "text": written, "finish_reason": "stop", "logprobs": told}

    return _answered("text_completion", choice, body)


def _answered(kind: str, choice: Callable[[int], dict[str, Any]], body: Mapping[str, Any]) -> bytes:
    """Choices in reverse order, which the API allows; each has seven tokens."""
    number = body.get("n") or 1
    usage = {"prompt_tokens": 11, "completion_tokens": 7 * number, "total_tokens": 11 + 7 * number}
    choices = [choice(index) for index in reversed(range(number))]
    return json.dumps({"object": kind, "choices": choices, "usage": usage}).encode()


# The tokens of an answer, and the most probable ones of each step. The second is half a character.
TOKENS = {"so": -0.5, "\\xc3": -1.5}
LIKELY = {"so": -0.5, "no": -1.0, "oh": -3.0}


def chat_logprobs(most: int) -> dict[str, Any]:
    def token(text: str, value: float) -> dict[str, Any]:
        spelled = [0xC3] if text not in LIKELY else list(text.encode())
        return {"token": text, "logprob": value, "bytes": spelled}

    tops = [token(*one) for one in islice(LIKELY.items(), most)]
    content = [{**token(*one), "top_logprobs": tops} for one in TOKENS.items()]
    return {"content": content, "refusal": None}


def embedding(text: str) -> bytes:
    """A vector of length 5 whose direction tells the number of characters."""
    numbers = [3.0, 4.0, 0.0] if len(text) % 2 else [0.0, 3.0, 4.0]
    data = [{"object": "embedding", "index": 0, "embedding": numbers}]
    usage = {"prompt_tokens": 11, "total_tokens": 11}
    return json.dumps({"object": "list", "data": data, "usage": usage}).encode()


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
            server.paths.append(self.path)
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
