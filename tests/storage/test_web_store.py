"""One file over http(s): what is asked of its server, and which answers are taken."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.web_server import served

from prefect_raybatch.errors import ConfigError, SourceError, StoreError, StoreUnavailable
from prefect_raybatch.storage import FileInfo, web

BODY = bytes(range(256)) * 4096
Answer = tuple[int, dict[str, str], bytes]


class Server(BaseHTTPRequestHandler):
    """Gives `answers` in turn, the last one again and again, and notes the requests."""

    protocol_version = "HTTP/1.1"
    answers: list[Answer] = []
    seen: list[tuple[str, dict[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, dict(self.headers)))
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(Server) as url:
        yield url


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    # Its own module of time: threads of other tests sleep, too.
    monkeypatch.setattr(web, "time", SimpleNamespace(**{**vars(time), "sleep": made.append}))
    return made


def opened(url: str, *answers: Answer, most: int = 1 << 21, **rules: Any) -> web.WebStore:
    Server.answers[:], Server.seen[:] = answers, []
    given = web.WebRules(most, **{"allow_private": True, **rules})
    return web.WebStore(url, {"X-Key": "hush"}, given)


TAG = {"ETag": '"e"'}
CUT = (200, {**TAG, "Content-Length": str(len(BODY))}, BODY[:1000])
REST = (206, {"Content-Range": f"bytes 1000-{len(BODY) - 1}/{len(BODY)}"}, BODY[1000:])


def test_a_store_of_one_file(address: str) -> None:
    store = opened(f"{address}/d/a%20b.csv?v=1&token=t", (200, TAG, BODY))
    assert not Server.seen and store.name == "a b.csv"
    assert store.uri.rpartition("#")[0] == f"{address}/d/a%20b.csv?v=1&token=..."
    info = FileInfo("a b.csv", len(BODY), "e", None)
    assert list(store.list()) == [info] and store.stat("x").path == "x"
    assert store.read("x") == BODY and list(store.folders()) == [] and store.above() is None
    with store.open("x") as handle:
        assert handle.seek(-6, os.SEEK_END) and handle.read(3) == BODY[-6:-3]
    assert store.unfinished(9e9, True) == () and isinstance(handle, io.BufferedReader)
    ((path, headers),) = Server.seen
    assert path == "/d/a%20b.csv?v=1&token=t" and headers["X-Key"] == "hush"
    assert headers["User-Agent"] == "prefect_raybatch"
    assert headers["Accept-Encoding"] == "identity" and "Range" not in headers
    calls: list[Callable[[], object]] = [
        *(lambda: store.put("x", b""), lambda: store.put_if_absent("x", b"")),
        *(lambda: store.put_file("x", "y"), lambda: store.put_file_if_absent("x", "y")),
        *(lambda: store.replace_file("x", "y", info), lambda: store.delete(["x"])),
        lambda: store.sub("x"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=rf"^{address}/d/a%20b.csv.*read-only"):
            call()


@pytest.mark.parametrize("tag", ['"e"', 'W/"e"', None])
def test_a_broken_transfer_goes_on_where_it_broke(
    address: str, slept: list[float], tag: str | None
) -> None:
    tagged = tag == '"e"'
    given = {"ETag": tag} if tag else {}
    cut = (200, {**given, "Content-Length": str(len(BODY))}, BODY[:1000])
    store = opened(f"{address}/x", cut, (503, {}, b""), REST if tagged else (200, given, BODY))
    assert store.read("x") == BODY and slept == [0.5, 1.0]
    ranges = [(h.get("Range"), h.get("If-Range")) for _, h in Server.seen]
    again = ("bytes=1000-", '"e"') if tagged else (None, None)
    assert ranges == [(None, None), again, again]
    assert store.stat("x").etag == ("e" if tagged else None)


@pytest.mark.parametrize(
    "answers",
    [
        [CUT, (200, TAG, BODY[:-1])],
        [CUT, (200, {"ETag": '"f"'}, BODY)],
        [(*CUT[:2], BODY[:1000]), (200, TAG, b"other" + BODY[5:])],
    ],
)
def test_a_file_that_changed_meanwhile_is_refused(
    address: str, slept: list[float], answers: list[Answer]
) -> None:
    with pytest.raises(SourceError, match=f"^{address}/x changed while it was being read"):
        opened(f"{address}/x", *answers).read("x")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(403, {}, b"")], r"/x: HTTP 403 Forbidden\. Set the credentials in source\.opt"),
        ([(404, {}, b"")], r"source\.uri: \S+/x: HTTP 404"),
        ([(204, {}, b"")], "/x: HTTP 204 No Content$"),
        ([(206, {"Content-Range": "bytes 1-2/3"}, b"ab")], "/x: HTTP 206"),
        ([CUT, (206, {"Content-Range": "bytes 999-2/3"}, b"ab")], "/x: HTTP 206"),
        ([CUT, (206, {}, b"ab")], "/x: HTTP 206"),
        ([(200, {"Content-Encoding": "gzip"}, b"")], "Content-Encoding that was not requested"),
        ([(200, {"Content-Type": "text/HTML; a=b"}, b"")], "/x: the answer is a web page"),
        ([(302, {}, b"")], "/x: HTTP 302 without a Location"),
        ([(302, {"Location": "/x"}, b"")], "/x: more than 5 redirects"),
        ([(302, {"Location": "ftp://h/x"}, b"")], r"source\.uri: ftp://h/x: the scheme 'ftp'"),
        ([(200, {}, b"12345678")], r"/x has 8 bytes, more than a\.limit \(0\) allows"),
    ],
)
def test_answers_that_are_refused(
    address: str, slept: list[float], answers: list[Answer], words: str
) -> None:
    most = 7 if "a.limit" in words.replace("\\", "") else 1 << 21
    with pytest.raises(SourceError, match=words):
        opened(f"{address}/x", *answers, most=most, limit="a.limit").read("x")
    assert len(Server.seen) == (6 if "redirects" in words else len(answers))


def test_answers_that_are_taken(address: str) -> None:
    for headers in ({"Content-Encoding": " Identity "}, {"Content-Type": "text/plain"}):
        assert opened(f"{address}/x", (200, headers, b"1234567"), most=7).read("x") == b"1234567"
    moved = [(302, {"Location": f"/{n}?k"}, b"") for n in range(5)]
    assert opened(f"{address}/x", *moved, (200, {}, b"a")).read("x") == b"a"
    assert [path for path, _ in Server.seen] == ["/x", *(f"/{n}?k" for n in range(5))]
    other = address.replace("127.0.0.1", "localhost")
    store = opened(f"{address}/x", (307, {"Location": f"{other}/y"}, b""), (200, {}, b"a"))
    assert store.read("x") == b"a" and ["X-Key" in h for _, h in Server.seen] == [True, False]


@pytest.mark.parametrize("status", [408, 425, 429, 500])
def test_a_server_that_stays_away_is_given_up(
    address: str, slept: list[float], status: int
) -> None:
    with pytest.raises(StoreUnavailable, match=rf"/x: HTTP {status} .*\(5 tries\)"):
        opened(f"{address}/x", (status, {}, b"")).stat("x")
    assert slept == [0.5, 1.0, 2.0, 4.0] and len(Server.seen) == 5
    with pytest.raises(StoreUnavailable, match=rf"/x: 1000 of {len(BODY)} bytes arrived \(5 tri"):
        opened(f"{address}/x", CUT, (206, {"Content-Range": "bytes 1000-"}, b"")).read("x")


def test_the_job_decides_which_urls_are_read(address: str) -> None:
    def check(url: str) -> None:
        if not url.endswith("/x"):
            raise ConfigError("not that")

    moved = (302, {"Location": "/y?key"}, b"")
    with pytest.raises(ConfigError, match=rf"^{address}/x redirects to {address}/y\?\.\.\.\. not"):
        opened(f"{address}/x", moved, check_url=check).read("x")
    with pytest.raises(ConfigError, match=r"^not that"):
        opened(f"{address}/z", moved, check_url=check).read("x")
    with pytest.raises(SourceError, match=r"; set a\.b to true if the job may read"):
        opened("http://127.0.0.1/x", moved, allow_private=False, setting="a.b").read("x")
