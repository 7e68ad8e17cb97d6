"""What the stores of Google and Azure promise over a network that fails, as S3's is tested."""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.clouds import Cloud
from helpers.tls import untrusted_server
from s3server import S3Proxy, proxy

from prefect_raybatch.errors import (
    AccessDenied,
    ConfigError,
    CredentialsUnusable,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.storage import Store, Sums, open_store, put_file_proved, put_proved
from prefect_raybatch.storage import bucket as bucket_module
from prefect_raybatch.storage.clouds import connection
from prefect_raybatch.storage.permissions import PERMISSIONS

CONDITIONS = ("x-goog-if-generation-match", "if-none-match", "if-match")
Decide = Callable[[str, str, Mapping[str, str]], str]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE", 0.02)


@pytest.fixture
def between(cloud: Cloud) -> Iterator[S3Proxy]:
    with proxy(cloud, lambda *request: "pass") as running:
        yield running


@pytest.fixture
def store(cloud: Cloud, between: S3Proxy) -> Store:
    opened = cloud.opened(**{cloud.address: between.endpoint})
    opened.retry_seconds = 60.0
    return opened


def first(what: str, times: int, *methods: str, conditional: bool = False) -> Decide:
    """`what` for the first requests of these methods, then "pass"."""
    left = times

    def decide(method: str, path: str, headers: Mapping[str, str]) -> str:
        nonlocal left
        fits = not conditional or any(name.lower() in CONDITIONS for name in headers)
        if method not in methods or not fits or not left:
            return "pass"
        left -= 1
        return what

    return decide


def decisions(between: S3Proxy) -> list[str]:
    return [decision for _, _, decision in between.seen]


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_answer_is_still_our_win(store: Store, between: S3Proxy, lost: int) -> None:
    between.decide = first("lose", lost, "PUT", conditional=True)
    assert store.put_if_absent("commits/1", b"mine")
    assert decisions(between).count("lose") == lost
    between.decide = first("lose", lost, "PUT", conditional=True)
    assert not store.put_if_absent("commits/1", b"theirs")
    assert store.read("commits/1") == b"mine"


def test_of_fifty_writers_over_a_bad_network_one_wins(store: Store, between: S3Proxy) -> None:
    chance = random.Random(7)

    def shaky(method: str, path: str, headers: Mapping[str, str]) -> str:
        spoilt = ["lose", "503", "429", "reset"] if method == "PUT" else []
        return chance.choice(["pass", "pass", "pass", "pass", *spoilt])

    between.decide = shaky
    for number in range(2):
        barrier = threading.Barrier(50)

        def write(body: bytes, barrier: threading.Barrier = barrier, number: int = number) -> bool:
            barrier.wait()
            return store.put_if_absent(str(number), body)

        bodies = [os.urandom(16) for _ in range(50)]
        with ThreadPoolExecutor(50) as pool:
            told = list(pool.map(write, bodies))
        winners = [body for body, won in zip(bodies, told, strict=True) if won]
        assert winners == [store.read(str(number))]


@pytest.mark.parametrize("what", ["429", "503", "reset", "cut-up"])
def test_errors_that_pass_are_retried(store: Store, between: S3Proxy, what: str) -> None:
    calls: list[tuple[str, Callable[[], object]]] = [
        ("PUT", lambda: store.put("x", b"12345")),
        ("GET", lambda: store.read("x")),
        ("HEAD", lambda: store.stat("x")),
        ("GET", lambda: list(store.list())),
        ("PUT", lambda: store.put_if_absent("y", b"1")),
    ]
    for number, (method, call) in enumerate(calls):
        between.decide = first(what, 2, method)
        assert call()
        assert decisions(between).count(what) == 2 * (number + 1)
    between.decide = first(what, 2, "DELETE", "POST")
    store.delete(["x", "y"])
    assert list(store.list()) == []


def test_a_body_that_is_cut_off_is_read_again(store: Store, between: S3Proxy) -> None:
    body = os.urandom(200_000)
    store.put("x", body)
    between.decide = first("cut-down", 2, "GET")
    assert store.read("x") == body
    between.decide = first("cut-down", 2, "GET")
    with store.open("x") as handle:
        assert handle.seek(1000) and handle.read(100_000) == body[1000:101_000]
    assert decisions(between).count("cut-down") == 4


@pytest.mark.parametrize("what", ["429", "503", "reset"])
def test_errors_that_stay_are_told(store: Store, between: S3Proxy, cloud: Cloud, what: str) -> None:
    store.retry_seconds = 0.2
    between.decide = lambda *request: what
    with pytest.raises(StoreUnavailable, match=r"commits/1: no valid answer .* tries") as caught:
        store.put_if_absent("commits/1", b"x")
    assert str(cloud.options[cloud.secret]) not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_a_refusal_names_the_permission(store: Store, between: S3Proxy, cloud: Cloud) -> None:
    store.put("x", b"1")
    between.decide = lambda *request: "403"
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("x"),
        "list": lambda: list(store.list()),
        "write": lambda: store.put_if_absent("y", b""),
        "delete": lambda: store.delete(["x"]),
    }
    for operation, call in calls.items():
        with pytest.raises(AccessDenied) as caught:
            call()
        assert PERMISSIONS[cloud.scheme][operation] in str(caught.value), operation
    assert decisions(between).count("403") == 4, "a refusal is not tried again"


def test_a_store_that_is_silent_is_away(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.3)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        store = cloud.opened(**{cloud.address: f"{address}/testaccount"})
        store.retry_seconds = 0.5
        with pytest.raises(StoreUnavailable, match=f"{address}.*Check that the store is up"):
            store.read("x")


@pytest.mark.parametrize("how", ["lose", "reset", "503"])
def test_a_large_file_is_there_whole_whatever_the_network_does(
    store: Store, between: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 1 << 10)
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5 << 20)
    bodies = [os.urandom(11 << 20), os.urandom(1 << 20)]
    for number, body in enumerate(bodies):
        (tmp_path / str(number)).write_bytes(body)
    between.decide = first(how, 2, "PUT", "POST")
    assert store.put_file("parts", tmp_path / "0").size == 11 << 20
    assert store.read("parts") == bodies[0]
    between.decide = first(how, 2, "PUT")
    store.put_file_if_absent("a", tmp_path / "0")
    assert store.read("a") == bodies[0]
    seen = store.stat("a")
    between.decide = first(how, 2, "PUT")
    store.replace_file("a", tmp_path / "1", seen)
    assert store.read("a") == bodies[1]
    assert how in decisions(between)


def test_a_body_that_was_changed_on_the_way_is_sent_again(
    store: Store, between: S3Proxy, tmp_path: Path
) -> None:
    body = os.urandom(4096)
    (tmp_path / "file").write_bytes(body)
    for put in (
        lambda: put_proved(store, "a", body),
        lambda: put_file_proved(store, "b", tmp_path / "file", Sums.of(body)),
    ):
        between.decide = first("flip", 1, "PUT")
        put()
    assert store.read("a") == store.read("b") == body
    assert decisions(between).count("flip") == 2


def test_a_missing_bucket_and_a_wrong_key_are_not_tried_again(cloud: Cloud) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        cloud.opened("none").read("x")
    with pytest.raises((CredentialsUnusable, AccessDenied)):
        cloud.opened(**{cloud.secret: "bm90LXRoZS1rZXk="}).read("x")


CLOUD_KEYS = {
    "gs": {"bearer_token": "t"},
    "az": {"account_name": "a", "account_key": "a2V5"},
}


def store_at(url: str, scheme: str) -> Store:
    address = "base_url" if scheme == "gs" else "endpoint"
    return open_store(f"{scheme}://b/x", {address: url, **CLOUD_KEYS[scheme]})


@pytest.mark.parametrize("scheme", CLOUD_KEYS)
@pytest.mark.parametrize("content", [b"\x30\x82", None], ids=["no PEM", "missing"])
@pytest.mark.parametrize("system", [True, False], ids=["others", "no others"])
def test_a_file_of_certificates_that_cannot_be_used_is_no_outage(
    scheme: str,
    content: bytes | None,
    system: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = tmp_path / "ca.der"
    if content is not None:
        wrong.write_bytes(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(wrong))
    if not system:
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("asked again"))
    with untrusted_server(tmp_path) as url:
        store = store_at(url, scheme)
        said = rf"{scheme}://b.*: SSL_CERT_FILE: '.*ca\.der' is not a readable PEM file"
        with pytest.raises(ConfigError, match=said):
            store.read("a")


@pytest.mark.parametrize("scheme", CLOUD_KEYS)
def test_a_certificate_that_is_not_trusted_is_no_outage(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("asked again"))
    with untrusted_server(tmp_path) as url:
        store = store_at(url, scheme)
        said = rf"{scheme}://b/x/a: the TLS certificate of {url} is not valid: \w+\. Set SSL_CERT"
        with pytest.raises(ConfigError, match=said):
            store.read("a")
