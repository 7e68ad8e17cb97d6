"""The client of a hosted model, against a server in this process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from helpers.openai_server import OpenAIServer, completion, failing, openai_server
from helpers.web_server import served

from prefect_raybatch.errors import ConfigError, EndpointUnavailable
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.spec.options import HiddenOptions
from prefect_raybatch.stages.endpoint import client, limiter
from prefect_raybatch.stages.endpoint.answers import HostedAnswer
from prefect_raybatch.stages.endpoint.client import EndpointEngine, HostedRequest
from prefect_raybatch.stages.endpoint.limiter import Limiter

LONG = {"messages": [{"role": "user", "content": "long"}]}
SHORT = {"messages": [{"role": "user", "content": "short"}]}


def spec_of(url: str, key: str = "", timeout: float = 60.0) -> EndpointSpec:
    return EndpointSpec(
        url=url,
        path="chat/completions",
        model="large",
        secret=HiddenOptions({"key": key} if key else None),
        requests_per_minute=None,
        tokens_per_minute=None,
        max_in_flight=8,
        timeout=timeout,
        price_in=None,
        price_out=None,
        batch=False,
    )


@contextmanager
def engine_for(url: str, timeout: float = 60.0) -> Iterator[EndpointEngine]:
    spec = spec_of(url, timeout=timeout)
    engine = EndpointEngine(spec, "", Limiter(None, None, 8, timeout))
    try:
        yield engine
    finally:
        engine.close()


def request(
    body: dict[str, Any],
    tokens: int = 10,
    answered: Callable[[HostedAnswer], None] = lambda answer: None,
) -> HostedRequest:
    return HostedRequest(body, tokens, json.dumps(body), answered)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(client, "MOST_BACKOFF", 0.05)


def test_a_file_of_certificates_that_is_no_pem_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "ca.der"
    wrong.write_bytes(b"\x30\x82")
    monkeypatch.setenv("SSL_CERT_FILE", str(wrong))
    said = r"engine\.endpoint: SSL_CERT_FILE: '.*ca\.der' is not a readable PEM"
    with pytest.raises(ConfigError, match=said), engine_for("https://127.0.0.1:9/v1"):
        pass


def test_a_row_over_the_limit_that_the_server_reports_does_not_hold_up_the_others(
    server: OpenAIServer,
) -> None:
    told = {"x-ratelimit-limit-tokens": "6000"}
    server.fault = lambda number, body: (200, told, completion("yes"))
    with engine_for(server.url) as engine:
        assert engine.ask([request(SHORT)])[0].error is None  # now the limit is known
        long, short = engine.ask([request(LONG, 8200), request(SHORT)])
    assert long.error is not None and long.error[0] == "PromptTooLong"
    assert "8,200 tokens, more than the server's limit of tokens per minute" in long.error[1]
    assert short.error is None


def test_a_row_that_alone_is_over_the_servers_limit_is_not_tried_again(
    server: OpenAIServer,
) -> None:
    said = "Request too large for large on tokens per min (TPM): Limit 30000, Requested 41221."
    server.fault = lambda number, body: failing(429, said) if body == LONG else None
    with engine_for(server.url) as engine:
        long, short = engine.ask([request(LONG), request(SHORT)])
    assert long.error is not None and long.error[0] == "RequestRefused" and said in long.error[1]
    assert short.error is None and server.bodies.count(LONG) == 1


def test_a_row_that_always_gets_429_while_others_are_answered_ends(server: OpenAIServer) -> None:
    def fault(number: int, body: dict[str, Any]) -> Any:
        return failing(429, "busy", retry_after_ms="1") if body == LONG else None

    server.fault = fault
    with engine_for(server.url) as engine:
        over = threading.Event()

        def keep_asking() -> None:
            while not over.is_set():
                engine.ask([request(SHORT)])

        others = threading.Thread(target=keep_asking)
        others.start()
        try:
            (long,) = engine.ask([request(LONG)])
        finally:
            over.set()
            others.join()
    assert long.error is not None and long.error[0] == "RequestRefused"
    assert server.bodies.count(LONG) >= client.LIMITED_TRIES


def test_rows_wait_while_the_quota_of_all_is_used_up(server: OpenAIServer) -> None:
    """Whatever was answered before: a row waits for its limit, however often it gets 429."""
    asked: list[int] = []

    def fault(number: int, body: dict[str, Any]) -> Any:
        if body == LONG:
            asked.append(number)
            if len(asked) == 2:
                engine_of[0].ask([request(SHORT)])  # answered between the first two
            if len(asked) <= client.LIMITED_TRIES + 5:
                return failing(429, "used up", retry_after_ms="1")

    server.fault = fault
    with engine_for(server.url) as engine:
        engine_of = [engine]
        assert engine.ask([request(SHORT)])[0].error is None
        (long,) = engine.ask([request(LONG)])
    assert long.error is None and len(asked) == client.LIMITED_TRIES + 6


@pytest.fixture
def judged_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only answers to other requests tell whether a request fails because of its row."""
    monkeypatch.setattr(client, "ROW_TRIES_ALONE", 1 << 30)
    monkeypatch.setattr(limiter, "SLOWER", 1.0)  # or a second request would wait for the first


def test_an_outage_after_answers_to_others_blames_no_row(
    server: OpenAIServer, judged_beside_others: None
) -> None:
    """The server answers what is in flight as it stops, and then nothing for some time."""
    tries: list[int] = []

    def fault(number: int, body: dict[str, Any]) -> Any:
        if body == SHORT:
            stopping.wait(60)
            return None
        tries.append(number)
        stopping.set()
        if len(tries) == 2:
            others.join(60)  # answered after the first failure
        return failing(503, "restarting") if len(tries) <= client.ROW_TRIES + 5 else None

    stopping, server.fault = threading.Event(), fault
    with engine_for(server.url) as engine:
        others = threading.Thread(target=engine.ask, args=[[request(SHORT)]])
        others.start()
        (long,) = engine.ask([request(LONG)])
    assert long.error is None and len(tries) == client.ROW_TRIES + 6


def test_a_row_that_always_fails_while_others_are_answered_ends(
    server: OpenAIServer, judged_beside_others: None
) -> None:

    def fault(number: int, body: dict[str, Any]) -> Any:
        if body == LONG:
            engine_of[0].ask([request(SHORT)])  # answered between two failures
            return failing(500, "boom")

    server.fault = fault
    with engine_for(server.url) as engine:
        engine_of = [engine]
        (long,) = engine.ask([request(LONG)])
    assert long.error is not None and long.error[0] == "ServerError"
    assert server.bodies.count(LONG) == client.ROW_TRIES


def test_the_last_row_that_fails_ends_alone_if_others_were_answered_between_its_failures(
    server: OpenAIServer, judged_beside_others: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the run is answered, so the server is silent but for this row."""
    tries: list[int] = []

    def fault(number: int, body: dict[str, Any]) -> Any:
        if body == LONG:
            tries.append(number)
            if len(tries) == 2:
                engines[0].ask([request(SHORT)])
            if len(tries) == client.ROW_TRIES:
                monkeypatch.setattr(client, "SERVER_OUTAGE", 0.0)
            return failing(504, "gateway timeout")

    server.fault = fault
    with engine_for(server.url) as engine:
        engines = [engine]
        (long,) = engine.ask([request(LONG)])
    assert long.error is not None and long.error[0] == "ServerError"
    assert len(tries) == client.ROW_TRIES


@pytest.mark.parametrize("value", ["s3cr3t\n", " s3cr3t "])
def test_space_around_a_key_is_not_sent(
    value: str, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", value)
    assert spec_of(server.url, "${MY_KEY}").api_key() == "s3cr3t"


@pytest.mark.parametrize("value", ["", " ", "s3\ncr3t", "s3cr3t\u00e4"])
def test_a_key_that_no_header_takes_is_refused_without_being_quoted(
    value: str, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(ConfigError, match=r"^engine\.endpoint\.key: .*\$\{MY_KEY\}") as refused:
        spec_of(server.url, "${MY_KEY}").api_key()
    assert "cr3t" not in str(refused.value)


def test_a_row_that_times_out_for_long_ends_alone_if_the_server_lists_its_models(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the last answer was: the row may be the last of its run, and the only one asked."""
    monkeypatch.setattr(client, "SERVER_OUTAGE", 0.1)
    held = threading.Event()

    def fault(number: int, body: dict[str, Any]) -> Any:
        if body == LONG:
            held.wait(60)

    server.fault = fault
    with engine_for(server.url, timeout=0.3) as engine:
        (long,) = engine.ask([request(LONG)])
        held.set()
    assert long.error is not None and long.error[0] == "ServerError"
    assert "TimeoutError" in long.error[1] or "ReadTimeout" in long.error[1]


def test_a_failure_after_a_long_pause_is_no_outage(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SERVER_OUTAGE", 0.1)

    def fault(number: int, body: dict[str, Any]) -> Any:
        if number == 0:
            threading.Event().wait(0.2)  # longer than that since the last answer
            return failing(503, "restarting")

    server.fault = fault
    with engine_for(server.url) as engine:
        assert engine.ask([request(SHORT)])[0].error is None


class Dripping(BaseHTTPRequestHandler):
    """Answers each request with spaces that never end, as a gateway does to keep a connection."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "large"}]}')

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            return  # the client has given up

    def log_message(self, *_: Any) -> None:
        pass


def test_the_timeout_is_that_of_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SERVER_OUTAGE", 0.1)
    with served(Dripping) as url, engine_for(f"{url}/v1", timeout=0.3) as engine:
        (answer,) = engine.ask([request(SHORT)])
    assert answer.error is not None and "TimeoutError" in answer.error[1]


def test_an_error_that_was_billed_is_counted_and_kept(server: OpenAIServer) -> None:
    usage = {"prompt_tokens": 1000, "completion_tokens": 5}
    none = json.dumps({"choices": [], "usage": usage}).encode()
    server.fault = lambda number, body: (200, {}, none) if body == LONG else None
    kept: list[HostedAnswer] = []
    with engine_for(server.url) as engine:
        (long,) = engine.ask([request(LONG, answered=kept.append)])
        used = engine.limiter.usage()
    assert long.error is not None and long.error[0] == "NoAnswer" and kept == [long]
    assert (used.requests, used.prompt_tokens, used.output_tokens) == (1, 1000, 5)


def test_a_server_that_is_not_there_ends_no_thread_open() -> None:
    before = threading.active_count()
    with pytest.raises(EndpointUnavailable), engine_for("http://127.0.0.1:9/v1"):
        pass
    assert threading.active_count() <= before


def test_a_closed_engine_cancels_what_it_is_asked(server: OpenAIServer) -> None:
    with engine_for(server.url) as engine:
        engine.close()
        with pytest.raises(CancelledError):
            engine.ask([request(SHORT)])
    assert not server.bodies


def test_an_engine_that_stops_cancels_what_it_is_asked_meanwhile(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has ended and is not closed yet: another block is in between."""
    engine = EndpointEngine(spec_of(server.url), "", Limiter(None, None, 8, 60.0))
    send, scheduled = asyncio.run_coroutine_threadsafe, threading.Event()
    close, answers = asyncio.SelectorEventLoop.close, list[Future[Any]]()

    def noted(*given: Any) -> Any:
        future = send(*given)
        scheduled.set()
        return future

    def ask_then_close(loop: asyncio.SelectorEventLoop) -> None:
        scheduled.clear()
        answers.append(pool.submit(engine.ask, [request(SHORT)]))
        assert scheduled.wait(60)
        close(loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", noted)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "close", ask_then_close)
    with ThreadPoolExecutor(1) as pool:
        engine.close()
        with pytest.raises(CancelledError):
            answers[0].result(60)
    assert not server.bodies
