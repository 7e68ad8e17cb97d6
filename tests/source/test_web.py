"""A file by http(s) as input: fetched once, whole and unchanged, from where it may be fetched."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import make_job
from helpers.specs import reads
from helpers.web_server import served

from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.errors import (
    ConfigError,
    CorruptRun,
    SourceError,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.source import needs_snapshot, peek, snapshot
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.spec.run import Identity
from prefect_raybatch.storage import open_store, web

ROWS = [{"id": i, "text": f"x{i}" * 50} for i in range(3000)]
CSV = ("id,text\n" + "".join(f"{r['id']},{r['text']}\n" for r in ROWS)).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}
    seen: list[dict[str, str]] = []
    cuts = 0  # answers that break off in the middle

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        cls = type(self)
        cls.seen.append({**self.headers, "path": self.path})
        kind, _, name = self.path.partition("?")[0].lstrip("/").partition("/")
        whole = self.path.removeprefix(f"/{kind}/")
        body = cls.files.get(whole, cls.files.get(name, CSV))
        if kind == "moved":
            self.answer(302, Location=f"/tagged/{name}")
        elif kind == "status":
            self.answer(int(name.partition(".")[0]))
        elif kind == "page":
            self.answer(200, b"<html>", Content_Type="text/html; charset=utf-8")
        elif kind == "endless":
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True
        elif kind == "login" and self.headers.get("Authorization") != "Bearer k":
            self.answer(401)
        else:
            self.file(kind, body)

    def file(self, kind: str, body: bytes) -> None:
        cls = type(self)
        headers = {"ETag": f'"{len(body)}"'} if kind in ("tagged", "login") else {}
        begin = 0
        if kind == "tagged" and (given := self.headers.get("Range")):
            begin = int(given.removeprefix("bytes=").partition("-")[0])
            headers["Content_Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
        if kind == "changing":
            body = body.replace(b"x1", b"y%d" % len(cls.seen))
        if cls.cuts:
            cls.cuts -= 1
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(body) - begin))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body[begin : begin + 200_000])
            self.close_connection = True
            return
        self.answer(206 if begin else 200, body[begin:], **headers)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(Handler) as address:
        yield address


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "WEB_PAUSE", 0.01)
    Handler.seen.clear()
    Handler.cuts = 0


def by_web(uri: Any, **fields: Any) -> ReadSpec:
    return reads(uri=uri, **{"web": {"allow_private": True}, **fields})


def copied(tmp_path: Any, source: ReadSpec) -> tuple[Any, list[dict[str, Any]]]:
    made = snapshot(source, open_store(str(tmp_path / "run")), "attempt")
    tables = [pq.read_table(tmp_path / "run" / file.uri) for file in made.files]
    return made, pa.concat_tables(tables).to_pylist()


@pytest.mark.parametrize("kind", ["tagged", "plain", "moved", "endless"])
def test_a_file_is_fetched_once_and_named_in_the_plan(server, tmp_path, kind):
    source = by_web(f"{server}/{kind}/a.csv?v=2&X-Amz-Signature=s3cret")
    assert needs_snapshot(source) and not Handler.seen
    made, rows = copied(tmp_path, source)
    assert rows == ROWS
    assert len(Handler.seen) == (2 if kind == "moved" else 1)
    assert made.table["uri"] == f"{server}/{kind}/a.csv?v=2"
    tag = "no ETag" if kind in ("plain", "endless") else str(len(CSV))
    assert made.table["version"] == f"{tag}, {len(CSV):,} bytes"
    assert 2000 < peek(source).rows < 4000
    assert peek(source).schema == made.schema


def test_urls_that_differ_in_a_hidden_value_are_two_files(server, tmp_path):
    """Each has types of its own, and is told from the other without its value."""
    Handler.files["a.csv?st=CA"] = b"id,text\n1,a\n"
    Handler.files["a.csv?st=s3cret"] = b"id,text\n2,b\n"
    url = f"{server}/plain/a.csv?st="
    made, rows = copied(tmp_path, by_web([f"{url}CA", f"{url}s3cret"]))
    assert sorted(rows, key=str) == [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]
    first, second = made.table["uri"].split()
    assert first != second and first.partition("#")[0] == second.partition("#")[0] == f"{url}..."
    Handler.files["a.csv?st=s3cret"] = b"id,other\n2,b\n"
    with pytest.raises(SourceError, match=r"\?st=\.\.\.#\w+ has no column") as caught:
        copied(tmp_path, by_web([f"{url}CA", f"{url}s3cret"]))
    assert "s3cret" not in str(caught.value)


def test_a_url_with_two_signatures_is_one_file(server, tmp_path):
    uris = [f"{server}/plain/a.csv?X-Amz-Signature={key}" for key in ("s3cret", "hush")]
    with pytest.raises(SourceError, match=r"a\.csv is listed twice, by .*Signature=\*") as caught:
        copied(tmp_path, by_web(uris))
    assert "s3cret" not in str(caught.value) and "hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.arrow"])
def test_each_format_and_a_limit(server, tmp_path, name):
    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(ROWS)
    if name == "a.parquet":
        pq.write_table(table, sink)
    elif name == "a.arrow":
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        sink.write(json.dumps(ROWS).encode())
    Handler.files[name] = sink.getvalue().to_pybytes()
    source = by_web(f"{server}/tagged/{name}", columns=["text"], limit=5)
    assert needs_snapshot(source)
    assert copied(tmp_path, source)[1] == [{"text": row["text"]} for row in ROWS[:5]]
    assert peek(source).schema.names == ["text"]


@pytest.mark.parametrize("kind", ["tagged", "plain"])
def test_a_transfer_that_breaks_off_goes_on(server, tmp_path, kind):
    Handler.cuts = 3
    assert copied(tmp_path, by_web(f"{server}/{kind}/a.csv"))[1] == ROWS
    ranges = [seen.get("Range") for seen in Handler.seen]
    assert len(ranges) == 4 and (ranges[-1] is None) == (kind == "plain")


def test_a_file_that_changes_meanwhile_is_not_patched_together(server, tmp_path):
    Handler.cuts = 1
    with pytest.raises(SourceError, match="changed while it was being read"):
        copied(tmp_path, by_web(f"{server}/changing/a.csv"))


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("/status/404.csv", SourceError, "HTTP 404 Not Found. Check the URL"),
        ("/status/410.csv", SourceError, "HTTP 410 Gone. Check the URL"),
        ("/status/503.csv", StoreUnavailable, "HTTP 503 .*5 tries"),
        ("/login/a.csv", SourceError, "HTTP 401 .*source.options.headers"),
        ("/page/a.csv", SourceError, "a web page"),
        ("/plain/a", SourceError, "Set source.format to"),
    ],
)
def test_what_does_not_come_is_said_with_the_remedy(server, tmp_path, path, error, words):
    with pytest.raises(error, match=words):
        copied(tmp_path, by_web(server + path))


def test_keys_go_in_headers_and_not_to_other_hosts(server, tmp_path):
    headers = {"headers": {"Authorization": "Bearer k"}}
    assert copied(tmp_path, by_web(f"{server}/login/a.csv", options=headers))[1] == ROWS
    assert "Bearer" not in repr(by_web(f"{server}/a.csv", options=headers))


def test_where_from_and_how_much(server, tmp_path):
    with pytest.raises(SourceError, match=r"source.uri: .*set source.web.allow_private"):
        copied(tmp_path, reads(uri=f"{server}/plain/a.csv"))
    with pytest.raises(SourceError, match=r"127.0.0.1, which is not public; set"):
        copied(tmp_path, reads(uri="http://127.0.0.1/a.csv"))
    with pytest.raises(SourceError, match=r"not public"):
        copied(tmp_path, by_web("http://169.254.169.254/latest/a.csv"))
    Handler.files["big.csv"] = b"id\n" + b"1\n" * 600_000
    with pytest.raises(SourceError, match=r"has 1,200,003 bytes, more than .*max_mb \(1\)"):
        small = {"max_mb": 1, "allow_private": True}
        copied(tmp_path, by_web(f"{server}/plain/big.csv", web=small))
    with pytest.raises(SourceError, match=r"more than source.web.max_mb \(1\)"):
        copied(tmp_path, by_web(f"{server}/endless/big.csv", web=small))


AZURE = "sv=2022-11-02&sr=b&sp=r&st={0}&se={0}&skoid={0}&sktid={0}&skt={0}&ske={0}&skv={0}&sig={0}"


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Algorithm={0}&X-Amz-Date={0}&X-Amz-Signature={0}&x-amz-security-token={0}",
        "X-Goog-Credential={0}&X-Goog-Expires={0}&X-Goog-Signature={0}",
        AZURE,
        "Expires={0}&Signature={0}&Key-Pair-Id={0}",
        "Policy={0}&Signature={0}&Key-Pair-Id={0}",
        "AWSAccessKeyId={0}&Expires={0}&Signature={0}",
        "GoogleAccessId={0}&Expires={0}&Signature={0}",
        "OSSAccessKeyId=STS.{0}&Expires={0}&Signature={0}&security-token={0}",
        f"{AZURE}&x-ms-version={{0}}",
        "token={0}&token_path=%2Fa&expires={0}",
        "token=eyJhbGciOiJIUzI1NiJ9.eyJ1cmwiOi{0}.c2ln{0}",
        "token=GHSAT0AAAAAAC{0}",
        *("access_token=ya29.{0}", "private_token={0}", "job_token={0}", "oauth_token={0}"),
    ],
)
def test_a_renewed_signature_leaves_the_job_the_same(query: str):
    def told(version: int, signature: str) -> Identity:
        url = f"https://host/a.csv?v={version}&{query.format(signature)}"
        return fingerprint(make_job(source={"uri": url}))

    one, renewed, other = told(1, "s3cret"), told(1, "renewed"), told(2, "s3cret")
    assert one == renewed and one.fingerprint != other.fingerprint
    assert one.parts["source.uri"] == ["https://host/a.csv?v=1"]


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("dl", "dl="),
        ("q=a/b%20c", "q=a%2Fb+c"),
        ("f=attachment%3B%20a*%3DUTF-8''b.csv", "f=attachment%3B+a%2A%3DUTF-8%27%27b.csv"),
    ],
)
def test_each_way_to_write_a_parameter_gives_the_same_job(written: str, canonical: str):
    one, other = (
        fingerprint(make_job(source={"uri": f"https://h/a.csv?{query}"}))
        for query in (written, canonical)
    )
    assert one == other and one.parts["source.uri"] == [f"https://h/a.csv?{canonical}"]


@pytest.mark.parametrize(
    "name",
    [
        *("st", "sp", "sr", "se", "sv", "policy", "expires", "key-pair-id", "code", "key"),
        *("token", "user_key", "sort-key", "auth", "%73t"),
    ],
)
@pytest.mark.parametrize("beside", ["", "&X-Amz-Signature=x"])
def test_a_parameter_that_signs_nothing_tells_one_input_from_another(name: str, beside: str):
    """Its value may be a key, or a date or state: it counts, and nobody can read it."""

    def told(value: str) -> Identity:
        return fingerprint(make_job(source={"uri": f"https://h/a.csv?{name}={value}{beside}"}))

    one, other = told("s3cret"), told("NY")
    assert one == told("s3cret") and one.fingerprint != other.fingerprint
    shown = [found.parts["source.uri"][0].partition("#") for found in (one, other)]
    assert [url for url, _, _ in shown] == [f"https://h/a.csv?{unquote(name)}=..."] * 2
    assert shown[0] != shown[1]


@pytest.mark.parametrize("uri", ["http://h/", "https:///a.csv", "http://u:p@h/a.csv"])
def test_urls_that_name_no_file_are_no_jobs(uri):
    with pytest.raises(ConfigError, match=r"names no file|contains a user"):
        make_job(source={"uri": uri})


@pytest.mark.parametrize("call", ["pwrite", "pread"])
def test_a_full_disk_for_temporary_files_is_named(server, tmp_path, monkeypatch, call):
    def failing(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    rules = web.WebRules(1 << 20, allow_private=True)
    store = web.WebStore(f"{server}/tagged/in.csv", {}, rules)
    monkeypatch.setattr(os, call, failing)
    with pytest.raises(StoreError, match=r"cannot be stored \(No space left.*set TMPDIR"):
        store.read("in.csv")


@pytest.mark.parametrize("kind", ["tagged", "endless"])
def test_no_more_is_read_than_a_reader_takes(server, kind):
    store = web.WebStore(f"{server}/{kind}/in.csv", {}, web.WebRules(1 << 20, allow_private=True))
    assert store.read("in.csv", len(CSV)) == CSV
    with pytest.raises(CorruptRun, match=f"{len(CSV)} bytes, and at most 99 are read"):
        store.read("in.csv", 99)
