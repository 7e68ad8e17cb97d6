"""What the stores of Google and Azure ask of obstore, and what they make of its answers."""

from __future__ import annotations

import base64
import os
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import obstore.store
import pytest
from helpers.web_server import served
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

from prefect_raybatch.errors import (
    AccessDenied,
    ConfigError,
    CorruptRun,
    CredentialsUnusable,
    SourceError,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.storage import CloudStore, FileInfo, open_store
from prefect_raybatch.storage import bucket as bucket_module
from prefect_raybatch.storage.clouds import connection
from prefect_raybatch.storage.clouds.answers import CloudAnswer, cloud_answer
from prefect_raybatch.storage.clouds.connection import CloudConnection

WHEN = datetime(2026, 1, 2, tzinfo=UTC)
AWAY = "Generic error\n\nDebug source:\n  status: 503,\n"
GONE = AWAY.replace("503", "404")


def meta(path: str) -> dict[str, Any]:
    return {"path": path, "size": 3, "e_tag": '"e"', "version": "7", "last_modified": WHEN}


INFO = FileInfo("x", 3, "e", None)


class Link(CloudConnection):
    """A connection whose client is the seconds that a request may take beyond a minute."""

    def __init__(self) -> None:
        super().__init__("gs", "b", {"base_url": "http://h:9", "bearer_token": "hush"})
        self.warned: list[tuple[object, ...]] = []
        self.silence.warn = lambda *said: self.warned.append(said)  # type: ignore[method-assign]

    def client(self, extra: int = 0) -> Any:
        return extra


class Calls(list[tuple[object, ...]]):
    """The calls of obstore, answered by `answers`, the last of which stays."""

    answers: list[Any]

    def of(self, operation: str) -> Any:
        def call(*given: object, **named: object) -> Any:
            body = given[2:] and given[2]
            if hasattr(body, "read"):
                given = (*given[:2], ("streamed", body.read()))
            self.append((operation, *given, named))
            found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(found, Exception):
                raise found
            return found

        return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    for name in ("get", "put", "head", "delete", "list", "list_with_delimiter"):
        monkeypatch.setattr(obstore, name, made.of(name))
    return made


@pytest.fixture
def store() -> CloudStore:
    return CloudStore("gs://b/p", Link())


def body(data: bytes, size: int = 3) -> Any:
    return SimpleNamespace(meta={"size": size}, bytes=lambda: data)


PUT = {"mode": "overwrite", "use_multipart": False}
CREATE = {**PUT, "mode": "create"}
PAGED = {"chunk_size": 1000}
WITH_FOLDERS = {"objects": [meta("p/d/z"), meta("p/d/a")], "common_prefixes": ["p/d/", "p/e"]}


@pytest.mark.parametrize(
    ("ask", "answers", "result", "asked"),
    [
        (lambda s: s.put("x", b"abc"), [meta("")], INFO, [("put", 0, "p/x", b"abc", PUT)]),
        (lambda s: s.put_if_absent("x", b"a"), [meta("")], True, [("put", 0, "p/x", b"a", CREATE)]),
        (lambda s: s.put_if_absent("x", b"abc"), [AlreadyExistsError("x"), body(b"oth")], False,
         [("put", 0, "p/x", b"abc", CREATE), ("get", 0, "p/x", {})]),
        (lambda s: [info.path for info in s.list("d", recursive=False)], [WITH_FOLDERS],
         ["d/a", "d/z"], [("list_with_delimiter", 0, "p/d", {})]),
        (lambda s: list(s.folders()), [WITH_FOLDERS], ["d", "e"],
         [("list_with_delimiter", 0, "p", {})]),
        (lambda s: list(s.above().folders()), [WITH_FOLDERS], ["d", "e"],
         [("list_with_delimiter", 0, None, {})]),
        (lambda s: list(s.list()), [[[meta("p/x")]]], [INFO], [("list", 0, "p", PAGED)]),
        (lambda s: list(s.list("d")), [[[meta("p/d/x")]]], [FileInfo("d/x", 3, "e", None)],
         [("list", 0, "p/d", PAGED)]),
        (lambda s: list(s.above().list()), [[[meta("x")]]], [INFO], [("list", 0, None, PAGED)]),
        (lambda s: [f.path for f in s.above().list("", recursive=False)], [WITH_FOLDERS],
         ["p/d/a", "p/d/z"], [("list_with_delimiter", 0, None, {})]),
        (lambda s: s.delete(["x"]), [None], None, [("delete", 0, "p/x", {})]),
        (lambda s: s.delete(["x"]), [NotFoundError(GONE)], None,
         [("delete", 0, "p/x", {})]),
        (lambda s: s.read_range(INFO, 1, 3), [SimpleNamespace(bytes=lambda: b"bc")], b"bc",
         [("get", 0, "p/x", {"options": {"range": (1, 3), "if_match": '"e"'}})]),
    ],
)  # fmt: skip
def test_what_is_asked_of_obstore(
    ask: Any, answers: list[Any], result: object, asked: list[Any], store: CloudStore, calls: Calls
) -> None:
    calls.answers = answers
    found = ask(store)
    assert found == result and calls == asked
    infos = found if isinstance(found, list) else [found]
    whens = {info.modified for info in infos if isinstance(info, FileInfo)}
    assert whens <= {WHEN.timestamp(), None}


@pytest.mark.parametrize("size", ["large", "too large for one PUT"])
def test_how_files_are_sent(
    size: str, store: CloudStore, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    monkeypatch.setattr(bucket_module, "SINGLE_PUT_BYTES", 2)
    monkeypatch.setattr(bucket_module, "SLOWEST", 1)
    monkeypatch.setattr(bucket_module, "PART_BYTES", 5)
    whole = size != "large"
    monkeypatch.setattr(CloudStore, "most_put_bytes", 2 if whole else 3)
    parts = {"chunk_size": 5, "max_concurrency": 4}
    upload = ("put", 20, "p/x", ("streamed", b"abc"), parts)
    seen = ("head", 0, "p/x", {})

    def at_once(mode: object) -> tuple[object, ...]:
        return ("put", 3, "p/x", ("streamed", b"abc"), {"mode": mode, "use_multipart": False})

    calls.answers = [meta("")]
    assert store.put_file("x", tmp_path / "f") == INFO and calls == [upload, seen]
    store.put("x", b"aa")
    assert calls[2] == ("put", 0, "p/x", b"aa", PUT)
    calls.clear()
    calls.answers = [NotFoundError(GONE), meta("")] if whole else [meta("")]
    assert store.put_file_if_absent("x", tmp_path / "f") is True
    assert calls == ([seen, upload] if whole else [at_once("create")])
    calls.clear()
    assert store.replace_file("x", tmp_path / "f", INFO) is True
    tied = at_once({"e_tag": '"e"', "version": "7"})
    assert calls == [seen, upload if whole else tied]
    calls.clear()
    assert store.replace_file("x", tmp_path / "f", FileInfo("x", 3, "other", None)) is False
    assert calls == [seen]


def test_a_small_file_replaces_a_version(store: CloudStore, calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    calls.answers = [{**meta(""), "version": None}, PreconditionError("x")]
    assert store.replace_file("x", tmp_path / "f", INFO) is False
    assert calls[1] == ("put", 0, "p/x", b"abc", {"mode": {"e_tag": '"e"'}, "use_multipart": False})


def test_what_does_not_fit_is_told(store: CloudStore, calls: Calls, clock: Any) -> None:
    calls.answers = [body(b"abc")]
    with pytest.raises(CorruptRun, match="gs://b/p/x has 3 bytes, and at most 2 are read"):
        store.read("x", 2)
    calls.answers = [PreconditionError("x")]
    with pytest.raises(SourceError, match="gs://b/p/x changed while it was being read"):
        store.read_range(INFO, 1, 3)
    calls.answers = [body(b"ab")]
    with pytest.raises(StoreUnavailable, match=r"the last: 2 of 3 bytes arrived\)"):
        store.read("x")
    calls.answers = [PreconditionError("x\n\nDebug source:\n  status: 412,\n")]
    with pytest.raises(StoreError, match=r"gs://b/p/x: the store refused to write \(x\)"):
        store.put("x", b"")


def test_a_listing_that_breaks_off_begins_again(
    store: CloudStore, calls: Calls, clock: Any
) -> None:
    def broken() -> Any:
        yield [meta("p/b"), meta("p/a")]
        raise BaseError(AWAY)

    calls.answers = [broken(), [[meta("p/b"), meta("p/a")], [meta("p/c")]]]  # in the same order
    assert [info.path for info in store.list()] == ["a", "b", "c"] and clock.slept == [0.2]
    assert calls == [("list", 0, "p", PAGED)] * 2


PAUSES = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("seconds", "said", "pauses"),
    [
        *[(60.0, "away", PAUSES), (1.4, "away", PAUSES[:3]), (0.0, "away", PAUSES[:2])],
        (60.0, "token request", PAUSES[:2]),
    ],
)
def test_a_call_is_repeated_after_growing_pauses(
    store: CloudStore, calls: Calls, clock: Any, seconds: float, said: str, pauses: list[float]
) -> None:
    calls.answers = [OSError(said)]
    store.retry_seconds = seconds
    words = f"in {len(pauses) + 1} tries" if said == "away" else "gcloud auth .*token request"
    with pytest.raises((StoreUnavailable, CredentialsUnusable), match=f"gs://b/p/x: .*{words}"):
        store.stat("x")
    assert clock.slept == pauses
    warning = ("gs://b/p/x", "http://h:9", 1000.0, 1000.0 + seconds, said)
    assert store.connection.warned == [warning] * len(pauses)


@pytest.mark.parametrize(
    ("status", "code", "text", "kind", "words"),
    [
        (0, "", "x", StoreUnavailable, r"^az://c/x: no valid .* https://h in 4 tries \(.*: x\)"),
        *[(status, "", "x", StoreUnavailable, "4 tries") for status in (408, 429, 500, 502)],
        *[(400, code, "x", StoreUnavailable, "4 tries")
          for code in ("ServerBusy", "OperationTimedOut", "InternalError")],
        (501, "", "x", StoreError, r"^az://c/x: the store refused to write \(x\)"),
        *[(status, "", "x", StoreError, "refused to write") for status in (499, 505)],
        (404, "NoSuchBucket", "x", StoreError, "^az://c/x: the bucket .* at https://h"),
        (404, "ContainerNotFound", "x", StoreError, "does not exist at https://h"),
        (404, "", "x", FileNotFoundError, "No such file or directory: 'az://c/x'"),
        (401, "", "x", CredentialsUnusable, r"^az://c/x: .* expired \(x\)\. Renew them"),
        (403, "", "has Expired", CredentialsUnusable, "Renew"),
        (403, "", "AuthenticationRequired", CredentialsUnusable, "Renew"),
        (403, "", "x", AccessDenied, r"^az://c/x: access denied \(x\).*blobs/write"),
        (400, "", "expired", StoreError, "refused to write"),
        (0, "", "a token request", CredentialsUnusable, "AZURE_STORAGE_ACCOUNT_KEY.*managed ident"),
    ],
)  # fmt: skip
def test_what_becomes_of_an_answer(
    status: int, code: str, text: str, kind: type[Exception], words: str
) -> None:
    error = CloudAnswer(status, code, text).error("az", "write", "az://c/x", 4, "https://h")
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ("x", 0, ""),
        ("Generic error\n\nDebug source:\n    status: 404,\n  more", 404, ""),
        ("a\n  status: 500,\n<Code>A</Code>\n\nDebug source:\n  status: 403,\n<Code>B</Code>", 403,
         "A"),
        ("Debug source:\n  status: 500,\nDebug source:\n  status: 429,\n  status: 503,\n", 503, ""),
        ("<Code>A</Code> <Code>ServerBusy</Code> (code: 503)", 503, "ServerBusy"),
        ("object (code: 404) is (code: 412) \n\nDebug source:\nx", 412, ""),
        ("a\n  error: InvalidCertificate(\n  A,\n\nDebug source:\nx", 0, ""),
    ],
)  # fmt: skip
def test_where_status_and_code_are_read(error: str, status: int, code: str) -> None:
    assert cloud_answer(OSError(error), "shown") == CloudAnswer(status, code, "shown")


# --- connections --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("scheme", "options", "env", "endpoint"),
    [
        ("gs", {}, {}, "https://storage.googleapis.com:443"),
        ("gs", {"base_url": "http://u:p@h:9/x"}, {"GOOGLE_BASE_URL": "http://e"}, "http://h:9"),
        ("gs", {}, {"GOOGLE_BASE_URL": "http://e"}, "http://e:80"),
        ("az", {"account_name": "a"}, {}, "https://a.blob.core.windows.net:443"),
        ("az", {}, {"AZURE_STORAGE_ACCOUNT_NAME": "e"}, "https://e.blob.core.windows.net:443"),
        ("az", {"account_name": "a"}, {"AZURE_STORAGE_ENDPOINT": "http://e"}, "http://e:80"),
        ("az", {"account_name": "a"}, {"AZURE_ENDPOINT": "http://f"}, "http://f:80"),
        ("az", {"account_name": "a", "endpoint": "http://h:9"}, {"AZURE_ENDPOINT": "http://f"},
         "http://h:9"),
    ],
)  # fmt: skip
def test_the_endpoint_of_a_cloud(
    scheme: str, options: Any, env: Any, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert CloudConnection(scheme, "b", options).endpoint() == endpoint


def test_what_obstore_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    for kind in ("GCSStore", "AzureStore"):
        monkeypatch.setattr(
            obstore.store, kind, lambda *a, kind=kind, **k: seen.append((kind, a, k)) or len(seen)
        )
    options = {"account_name": "a", "endpoint": "http://h:9"}
    azure = CloudConnection("az", "c", options)
    assert [azure.client(), azure.client(5), azure.client(), azure.client(5)] == [1, 2, 1, 2]
    CloudConnection("gs", "b", {}).client()
    for (kind, names, given), (expected, bucket, config, seconds) in zip(
        seen,
        [
            ("AzureStore", "c", options, 60),
            ("AzureStore", "c", options, 65),
            ("GCSStore", "b", {}, 60),
        ],
        strict=True,
    ):
        limit = timedelta(seconds=seconds)
        assert (kind, names, given["config"]) == (expected, (bucket,), config)
        assert given["retry_config"] == {"max_retries": 0, "retry_timeout": limit}
        assert given["client_options"] == {
            "allow_http": kind == "AzureStore",
            "connect_timeout": timedelta(seconds=10),
            "timeout": limit,
        }
    monkeypatch.setattr(obstore.store, "GCSStore", lambda *_, **__: 1 / 0)
    with pytest.raises(ConfigError, match="rejects the options of gs://b: division by zero"):
        CloudConnection("gs", "b", {}).client()


def test_connections_are_shared_by_options_and_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CloudConnection, "known", {})
    one = CloudConnection.shared("gs", "b", {"bearer_token": "k"})
    assert one is CloudConnection.shared("gs", "b", {"bearer_token": "k"})
    others = [
        CloudConnection.shared("gs", "c", {"bearer_token": "k"}),
        CloudConnection.shared("gs", "b", {"bearer_token": "l"}),
        CloudConnection.shared("az", "b", {"account_name": "k"}),
    ]
    for name in ("GOOGLE_X", "AZURE_X"):
        monkeypatch.setenv(name, "1")
        others.append(CloudConnection.shared("gs", "b", {"bearer_token": "k"}))
    assert len({id(link) for link in (one, *others)}) == 6
    assert (others[0].scheme, others[0].bucket, others[0].options) == (
        *("gs", "c"),
        {"bearer_token": "k"},
    )
    for number in range(11):
        CloudConnection.shared("gs", f"bucket-{number}", {})
    assert len(CloudConnection.known) == 17
    CloudConnection.shared("gs", "last", {})
    assert len(CloudConnection.known) == 1


def test_secrets_are_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    quoted = 'of "two" words'
    link = CloudConnection("gs", "b", {"bearer_token": quoted})
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "planted")
    monkeypatch.setenv("GOOGLE_KEY_NAME", "shown")
    text = f'{quoted} of \\"two\\" words planted shown http://u:p@h:9/x?sig=1 "http://i"  a\n b'
    assert link.scrub(text) == '*** *** *** shown http://h:9 "http://i" a b'
    assert link.scrub("a\n\nDebug source:\nb\n\nDebug source:") == "a"
    assert link.scrub("x" * 301) == "x" * 300
    assert CloudConnection("gs", "b", {}).scrub("abc") == "abc"


@pytest.mark.parametrize(("status", "date"), [(200, True), (404, True), (200, False)])
def test_the_clock_of_a_cloud_is_its_answers_date(status: int, date: bool, clock: Any) -> None:
    class Dated(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(status)
            if date:
                self.send_header("Date", "Fri, 02 Jan 2026 00:00:00 GMT")
            self.end_headers()

    with served(Dated) as url:
        store = open_store("gs://b/x", {"base_url": url})
        assert store.now() == (WHEN.timestamp() if date else 1000.0)


@pytest.mark.parametrize("line", [b"no HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nDate: today\r\n\r\n"])
def test_an_answer_without_a_valid_date_has_no_time(line: bytes) -> None:
    class Odd(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.wfile.write(line)

    with served(Odd) as url:
        assert CloudConnection("gs", "b", {"base_url": url}).clock() is None


def test_a_cloud_without_a_clock_is_not_waited_for(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.1)
    for url in (silent, "http://127.0.0.1:9"):
        assert CloudConnection("gs", "b", {"base_url": url}).clock() is None


def test_a_cloud_store_is_opened_with_the_account_of_its_uri() -> None:
    link = open_store("az://box@acct/out", {"account_key": base64.b64encode(b"k").decode()})
    assert link.connection.options["account_name"] == "acct"
    assert set(link.connection.options) == {"account_name", "account_key"}
    assert (link.connection.scheme, link.connection.bucket) == ("az", "box")
    assert open_store("az://box@acct/x", {"account_name": "acct"}).connection.bucket == "box"
    assert "account_name" not in open_store("gs://b/x").connection.options
