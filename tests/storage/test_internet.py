"""Which URLs and addresses of the internet are refused, and how the others are contacted."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from prefect_raybatch.storage import internet
from prefect_raybatch.storage.internet import (
    HostAway,
    UrlRefused,
    allowed,
    carried,
    connection,
    cut_sockets,
    resolved,
    shown_url,
    time_left,
)


@pytest.mark.parametrize(
    ("address", "addresses"),
    [
        ("10.0.0.1", []),
        ("2606:2800::1", []),
        # 10.1.2.3 where RFC 6052 puts it for prefixes of 96, 48, 64 and 56 bits, among the others.
        ("64:ff9b:1::a01:203", ["10.1.2.3", "0.0.0.10"]),
        ("64:ff9b:1:a01:2:300::", ["10.1.2.3", "2.3.0.0", "1.2.3.0"]),
        ("64:ff9b:1:0:a:102:300:0", ["3.0.0.0", "0.0.10.1", "10.1.2.3", "0.10.1.2"]),
        ("64:ff9b:1:a:1:203::", ["0.10.1.2", "1.2.3.0", "10.1.2.3"]),
        # The server and, with its bits inverted, the client of Teredo.
        ("2001:0:0a01:0203:0:ffff:f5fe:fdfc", ["10.1.2.3", "10.1.2.3"]),
        ("2606:2800::5efe:a01:203", ["10.1.2.3"]),
        ("2606:2800::200:5efe:a01:203", ["10.1.2.3"]),
        ("2606:2800::100:5efe:a01:203", []),
    ],
)
def test_which_addresses_another_carries(address: str, addresses: list[str]) -> None:
    assert [str(one) for one in carried(ipaddress.ip_address(address))] == addresses


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("fec0::1", False, False),  # site-local
        ("240.0.0.1", False, False),  # reserved
        ("ff02::1", False, False),
        ("168.63.129.16", False, False),  # metadata, though public
        ("64:ff9b:1::5db8:d822", False, True),
        ("2001:0:5db8:d822:0:ffff:a247:27dd", False, True),
        ("2001:0:a9fe:a9fe:0:ffff:a247:27dd", False, False),
        ("64:ff9b:1::a9fe:a9fe", False, False),
        ("2606:2800::5efe:a01:203", False, True),
        ("2606:2800::5efe:5db8:d822", True, True),
        ("2606:2800::5efe:a9fe:a9fe", False, False),
    ],
)
def test_addresses_that_lead_inside_are_not_public(
    address: str, public: bool, private: bool
) -> None:
    assert (allowed(address, False), allowed(address, True)) == (public, private)


def test_a_url_is_shown_without_what_it_may_hide() -> None:
    assert shown_url("http://u:p@h/x?sig=1#a#b") == "http://**********@h/x?..."
    assert shown_url("http://h/x?a?b#c") == "http://h/x?..."
    assert shown_url("http://h/x#a") == "http://h/x"
    assert shown_url("http://h/" + "x" * 300) == "http://h/" + "x" * 191


def test_a_host_is_looked_up_with_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    found: list[Any] = [(0, 0, 0, "", ("93.184.216.34", 1)), (0, 0, 0, "", ("10.0.0.1", 1))]

    def look_up(*given: Any, **named: Any) -> Any:
        asked.append((*given, named))
        return found

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    until = time.monotonic() + 60
    assert resolved(urlsplit("https://h/x"), until, True, "do this") == "93.184.216.34"
    with pytest.raises(UrlRefused, match=r"h:81/x\?\.\.\.: h has .* 10\.0\.0\.1, .*; do this"):
        resolved(urlsplit("http://h:81/x?k"), until, False, "do this")
    stream = {"type": socket.SOCK_STREAM}
    assert asked == [("h", 443, stream), ("h", 81, stream)]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (socket.gaierror(socket.EAI_NONAME, "x"), UrlRefused, "^http://h/x: there is no host h"),
        (socket.gaierror(socket.EAI_AGAIN, "later"), HostAway, "^http://h/x: .*h failed: later"),
        (UnicodeError("x"), UrlRefused, "^http://h/x: h is not a valid host name"),
    ],
)
def test_a_failed_lookup_is_told(
    error: Exception, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    parts = urlsplit("http://h/x")
    with pytest.raises(kind, match=words):
        resolved(parts, time.monotonic() + 60, False, "")
    with pytest.raises(HostAway, match=r"^http://h/x: timed out"):
        resolved(parts, time.monotonic() - 1, False, "")


def test_a_slow_lookup_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [over.wait(60)])
    with pytest.raises(HostAway, match=r"^http://h/x: looking up the host timed out"):
        resolved(urlsplit("http://h/x"), time.monotonic() + 0.1, False, "")
    over.set()


def test_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internet, "time", SimpleNamespace(monotonic=lambda: 5.0))
    assert time_left(5.5, "x") == 0.5
    with pytest.raises(HostAway, match="x: timed out"):
        time_left(5.0, "x")


@pytest.mark.parametrize(
    ("url", "port"), [("http://h/x", 80), ("https://h/x", 443), ("https://h:9/x", 9)]
)
def test_a_connection_goes_to_the_address_and_names_the_host(
    url: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    asked: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda *given: asked.append(given) or ours)
    handles: list[socket.socket] = []
    made = connection(urlsplit(url), "192.0.2.1", 7.0, handles)
    secure = url.startswith("https")
    assert isinstance(made, http.client.HTTPSConnection) == secure
    assert (made.host, made.port, made.timeout) == ("h", port, 7.0)
    if secure:
        theirs.close()  # before it has spoken TLS
        with pytest.raises(OSError):
            made.connect()
    else:
        made.connect()
    assert asked == [(("192.0.2.1", port), 7.0)] and len(handles) == 1
    for _ in range(2):
        cut_sockets(handles)
    assert secure or theirs.recv(1) == b"", "the other side sees the end"
