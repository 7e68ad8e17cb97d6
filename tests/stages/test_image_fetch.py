"""Images from rows, files, stores and a real HTTP server that misbehaves in each known way."""

from __future__ import annotations

import base64
import io
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.clouds import CLOUDS, cloud_server
from helpers.small import make_job
from helpers.specs import images_of
from helpers.web_server import served
from PIL import Image
from s3server import S3Server, proxy

from prefect_raybatch.compile.job import prompt_spec
from prefect_raybatch.job.images import Images
from prefect_raybatch.policy.in_force import policy_applied
from prefect_raybatch.policy.policy import JobPolicy
from prefect_raybatch.stages.block import Failure, Messages
from prefect_raybatch.stages.images import http
from prefect_raybatch.stages.images.decode import BadImage
from prefect_raybatch.stages.images.http import Http, ImageUnavailable
from prefect_raybatch.stages.images.places import ImagePlaces
from prefect_raybatch.stages.images.rows import RowImages, TooManyAway, row_images
from prefect_raybatch.storage import bucket as bucket_module
from prefect_raybatch.storage import open_store
from prefect_raybatch.storage.internet import allowed


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 4), (255, 0, 0)).save(out, "PNG")
    return out.getvalue()


PNG = png()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[str] = []
    headers_seen: list[dict[str, str]] = []
    flaky = 0
    over = threading.Event()  # the server is being closed

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        type(self).headers_seen.append(dict(self.headers))
        name, _, rest = self.path.lstrip("/").partition("/")
        getattr(self, f"_{name.partition('?')[0]}")(rest)

    def _good(self, _: str) -> None:
        self._send(200, PNG, Content_Type="image/png")

    def _chunked(self, _: str) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(PNG), PNG))

    def _status(self, code: str) -> None:
        self._send(int(code.partition("?")[0]), b"no")

    def _flaky(self, _: str) -> None:
        type(self).flaky += 1
        self._send(*((503, b"") if type(self).flaky < 3 else (200, PNG)))

    def _html(self, _: str) -> None:
        self._send(200, b"\n<!DOCTYPE html><title>log in</title>", Content_Type="text/html")

    def _gzip(self, _: str) -> None:
        self._send(200, PNG, Content_Encoding="gzip")

    def _huge(self, _: str) -> None:
        self._send(200, PNG[:20], Content_Length=str(10**12))

    def _endless(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        try:
            while True:
                self.wfile.write(PNG + b"\0" * 65536)
        except OSError:
            pass

    def _short(self, _: str) -> None:
        self.close_connection = True
        self._send(200, PNG[:20], Content_Length=str(len(PNG)))

    def _hang(self, _: str) -> None:
        self.over.wait()
        self.close_connection = True

    def _drip(self, _: str) -> None:
        self.close_connection = True
        try:
            self.send_response(200)
            self.end_headers()
            while not self.over.wait(0.1):
                self.wfile.write(b"x")
                self.wfile.flush()
        except OSError:
            pass

    def _slowheader(self, _: str) -> None:
        self.close_connection = True
        try:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.over.wait(0.1):
                self.wfile.write(b"X-A: y\r\n")
                self.wfile.flush()
        except OSError:
            pass

    def _to(self, target: str) -> None:
        self._send(302, Location=target)

    def _loop(self, depth: str) -> None:
        left = int(depth)
        self._send(302, Location=f"/loop/{left - 1}" if left else "/good")

    def _nowhere(self, _: str) -> None:
        self._send(302)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    _Handler.over.clear()
    with served(_Handler) as address:
        yield address
        _Handler.over.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RETRY_PAUSE", 0.01)
    _Handler.asked.clear()
    _Handler.headers_seen.clear()
    _Handler.flaky = 0


HERE = Http(1_000_000, seconds=5, allow_private=True)
BRISK = Http(1_000_000, seconds=0.4, allow_private=True)


@pytest.mark.parametrize("path", ["/good", "/chunked", "/loop/2", "/to//good", "/good?a=1#b"])
def test_an_image_is_fetched(server, path):
    assert HERE.fetch(server + path) == PNG


def test_the_request_asks_for_no_coding_and_names_its_host(server):
    HERE.fetch(server.replace("127.0.0.1", "localhost") + "/good")
    (seen,) = _Handler.headers_seen
    assert seen["Accept-Encoding"] == "identity" and "Cookie" not in seen
    assert seen["Host"].startswith("localhost:")


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert HERE.fetch(server + "/good") == PNG


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/status/404", "HTTP 404"),
        ("/status/403", "HTTP 403"),
        ("/status/204", "HTTP 204"),
        ("/html", r"HTML or XML \(text/html\), not an image"),
        ("/gzip", "Content-Encoding gzip"),
        ("/huge", "1000000000000 bytes, more than prompt.images.max_bytes"),
        ("/endless", "more than prompt.images.max_bytes 1000000"),
        ("/loop/3", "more than 3 redirects"),
        ("/nowhere", "without a Location"),
        ("/to/file:///etc/passwd", "file:///etc/passwd: the scheme 'file'"),
        ("/to/http://169.254.169.254/latest/meta-data", "169.254.169.254"),
        ("/to/http://user:secret@127.0.0.1/", "user or a password"),
    ],
)
def test_what_stays_wrong_fails_its_row_at_the_first_try(server, path, words):
    with pytest.raises(BadImage, match=words) as caught:
        HERE.fetch(server + path)
    assert "secret" not in str(caught.value)
    assert len(_Handler.asked) == (4 if "loop" in path else 1)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/status/429", "HTTP 429"),
        ("/status/500", "HTTP 500"),
        ("/status/503", "HTTP 503"),
        ("/short", "received 20 of|IncompleteRead"),
    ],
)
def test_what_may_pass_is_tried_three_times(server, path, words):
    with pytest.raises(ImageUnavailable, match=words):
        HERE.fetch(server + path)
    assert len(_Handler.asked) == 3


def test_what_passes_is_fetched(server):
    assert HERE.fetch(server + "/flaky") == PNG and _Handler.flaky == 3


@pytest.mark.parametrize("path", ["/hang", "/drip", "/slowheader"])
def test_a_server_that_hangs_or_drips_is_given_up_in_time(server, path):
    with pytest.raises(ImageUnavailable):
        BRISK.fetch(server + path)  # the server goes on until it is closed


def test_a_port_where_nobody_listens_may_come_back():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ImageUnavailable, match="refused"):
        HERE.fetch(f"http://127.0.0.1:{port}/x")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1/x", "not public"),
        ("http://localhost/x", "not public"),
        ("http://[::1]/x", "not public"),
        ("http://10.0.0.1/x", "not public"),
        ("http://2130706433/x", "not public"),  # 127.0.0.1 as a number
        ("http://[::ffff:127.0.0.1]/x", "not public"),
        ("http://example.com:8080/x", "port 8080"),
        ("http://example.com:99999/x", "not a valid URL"),
        ("http:///x", "not a URL with a host"),
        ("http://exa mple.com/", "not a URL with a host"),
        ("http://h\r\nX: y/", "not a URL with a host|not a valid URL|no name"),
        ("http://u:secret@example.com/x", "user or a password"),
    ],
)
def test_urls_that_no_row_may_name(url, words):
    with pytest.raises(BadImage, match=words) as caught:
        Http(1000).fetch(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1:248:1893:25c8:1946", True, True),
        ("127.0.0.1", False, True),
        ("10.1.2.3", False, True),
        ("192.168.0.1", False, True),
        ("100.64.0.1", False, True),
        ("0.0.0.0", False, False),
        ("224.0.0.1", False, False),
        ("169.254.169.254", False, False),
        ("fe80::1%eth0", False, False),
        ("fd00:ec2::254", False, False),
        ("fd12::1", False, True),
        ("::1", False, True),
        ("::", False, False),
        ("::ffff:10.0.0.1", False, True),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::7f00:1", False, True),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:7f00:1::", False, True),
        ("2002:a9fe:a9fe::1", False, False),
        ("::7f00:1", False, True),
        ("64:ff9b::5db8:d822", True, True),
    ],
)
def test_which_addresses_may_be_asked(address, public, private):
    assert allowed(address, False) is public and allowed(address, True) is private


def test_a_name_with_one_private_address_is_refused(monkeypatch):
    entries = [(2, 1, 6, "", (ip, 80)) for ip in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    with pytest.raises(BadImage, match=r"10\.0\.0\.1"):
        Http(1000).fetch("http://example.com/x")


def test_a_name_is_resolved_once_and_that_address_is_asked(server, monkeypatch):
    calls = []

    def look_up(host, port, **_):
        calls.append(host)
        return [(2, 1, 6, "", ("127.0.0.1" if len(calls) == 1 else "10.255.255.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    original = socket.create_connection
    asked = []
    monkeypatch.setattr(
        socket, "create_connection", lambda to, *a, **k: asked.append(to) or _dial(to, original)
    )
    assert HERE.fetch(server.replace("127.0.0.1", "cdn.test") + "/good") == PNG
    assert calls == ["cdn.test"] and asked[0][0] == "127.0.0.1"
    assert _Handler.headers_seen[0]["Host"].startswith("cdn.test:")


def _dial(to, _):
    made = socket.socket()
    made.settimeout(5)
    made.connect(to)
    return made


def test_a_query_is_in_no_message(server):
    with pytest.raises(BadImage) as caught:
        HERE.fetch(server + "/status/404?X-Signature=secret")
    assert "secret" not in str(caught.value)


# --- rows, files and stores ---------------------------------------------------------------------


def test_bytes_and_hugging_faces_struct_are_taken(tmp_path):
    places = ImagePlaces()
    assert places.fetch(PNG) == PNG == places.fetch(bytearray(PNG))
    assert places.fetch({"bytes": PNG, "path": "a.png"}) == PNG
    (tmp_path / "a.png").write_bytes(PNG)
    assert ImagePlaces(str(tmp_path)).fetch({"bytes": None, "path": "a.png"}) == PNG


def test_a_data_url_is_decoded_and_bounded():
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert ImagePlaces().fetch(url) == PNG == ImagePlaces(max_bytes=len(PNG)).fetch(url)
    assert ImagePlaces().fetch(url.replace("data:image/png", "DATA:")) == PNG
    with pytest.raises(BadImage, match="the data URL has more bytes than"):
        ImagePlaces(max_bytes=len(PNG) - 3).fetch(url)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "int, not an image"),
        ({"bytes": None, "path": None}, "NoneType"),
        ("", "empty"),
        ("a\0b", "NUL"),
        ("a.png", "source.media_root"),
        ("ftp://host/x", "scheme 'ftp'"),
        ("data:image/png,AAAA", "form data:image/png;base64"),
        ("data:image/png;base64,A", "not valid base64"),
        ("data:image/png;base64,%20AA", "not valid base64"),
        ("s3://bucket", "does not name a file"),
    ],
)
def test_what_is_no_reference_is_named(value, words):
    with pytest.raises(BadImage, match=words):
        ImagePlaces().fetch(value)


def test_only_files_inside_of_the_media_root_are_read(tmp_path: Path):
    root, outside = tmp_path / "media", tmp_path / "secret.png"
    (root / "deep").mkdir(parents=True)
    outside.write_bytes(PNG)
    (root / "deep" / "a.png").write_bytes(PNG)
    (root / "out").symlink_to(outside)
    (root / "way").symlink_to(tmp_path)
    (root / "in").symlink_to(root / "deep" / "a.png")
    os.mkfifo(root / "pipe")
    places = ImagePlaces(str(root), max_bytes=len(PNG))
    for good in ("deep/a.png", "in", str(root / "deep" / "a.png"), f"file://{root}/deep/a.png"):
        assert places.fetch(good) == PNG
    for bad, words in {
        "out": "outside",
        "way/secret.png": "outside",
        "deep/../deep/a.png": r"'\.\.'",
        "../secret.png": r"'\.\.'",
        f"file://{root}/%2e%2e/secret.png": r"'\.\.'",
        str(outside): "outside",
        "/etc/passwd": "outside",
        "/dev/zero": "outside",
        "deep": "cannot be read|not a file",
        "pipe": "not a file",
        "nothing.png": "No such file",
        "deep/a.png/x": "Not a directory",
    }.items():
        with pytest.raises(BadImage, match=words):
            places.fetch(bad)
    (root / "large.png").write_bytes(PNG + b"\0")
    with pytest.raises(BadImage, match="max_bytes"):
        places.fetch("large.png")


# --- from a store -------------------------------------------------------------------------------


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where there is a red image `a.png`."""
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE", 0.02)
    s3.create_bucket("photos")
    open_store("s3://photos/some", s3.options).put("a.png", PNG)
    return "s3://photos/some"


def in_store(server: S3Server, endpoint: str | None = None, **given: Any) -> ImagePlaces:
    options = {**server.options, "endpoint_url": endpoint or server.endpoint}
    return ImagePlaces(options=options, seconds=0.5, **given)


def test_images_come_from_a_store_by_the_inputs_keys(s3: S3Server, bucket: str):
    places = in_store(s3)
    assert places.fetch(f"{bucket}/a.png") == PNG
    assert places.fetch({"bytes": None, "path": f"{bucket}/a.png"}) == PNG
    with pytest.raises(BadImage, match=r"s3://photos/some/b\.png does not exist"):
        places.fetch(f"{bucket}/b.png")
    with pytest.raises(BadImage, match="no-such-bucket"):
        places.fetch("s3://no-such-bucket/a.png")
    with pytest.raises(BadImage, match="more bytes than"):
        in_store(s3, max_bytes=len(PNG) - 1).fetch(f"{bucket}/a.png")


def test_a_row_names_only_the_stores_that_the_policy_lets_a_job_read(s3: S3Server, bucket: str):
    job = make_job(
        source={"uri": f"{bucket}/in.parquet", "options": dict(s3.options)},
        prompt={"template": "What?", "images": {"columns": "image"}},
    )

    def places(**allowed: tuple[str, ...]) -> ImagePlaces:
        with policy_applied(JobPolicy("test", **allowed)):
            prompt = prompt_spec(job)
        images = row_images(prompt, {}, s3.options)
        assert images is not None
        return images.places

    open_store("s3://photos/secret", s3.options).put("a.png", PNG)
    limited = places(read=("/data", bucket), write=("az://c", "gs://b/out"))
    assert limited.fetch(f"{bucket}/a.png") == PNG
    assert limited.fetch({"bytes": PNG, "path": "s3://photos/secret/a.png"}) == PNG
    for uri in (
        "s3://photos/secret/a.png",
        "S3A://photos/secret/a.png",
        f"{bucket}/../secret/a.png",
        f"{bucket}/%2e%2e/secret/a.png",
        f"{bucket}-2/a.png",
        "gs://b/a.png",
        "az://c@other/a.png",
        "abfss://c@other.dfs.core.windows.net/a.png",
    ):
        with pytest.raises(BadImage, match="policy allows"):
            limited.fetch(uri)
    for policy in (places(read=("s3://",)), places(write=("*",)), places(read=("s3://photos",))):
        assert policy.fetch("s3://photos/secret/a.png") == PNG
    assert prompt_spec(job).images.store_folders is None  # the owner's own job


@pytest.mark.parametrize("scheme", CLOUDS)
def test_images_come_from_google_and_azure(
    scheme: str, tmp_path: Path, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
):
    with cloud_server(scheme, tmp_path) as cloud:
        store = cloud.opened()
        store.put("a.png", PNG)
        places = ImagePlaces(options=cloud.options, seconds=5.0)
        assert places.fetch(f"{store.uri}/a.png") == PNG
        with pytest.raises(BadImage, match=r"b\.png does not exist"):
            places.fetch(f"{store.uri}/b.png")
        with pytest.raises(BadImage, match="more bytes than"):
            ImagePlaces(options=cloud.options, max_bytes=1).fetch(f"{store.uri}/a.png")
        # Rows may name images in several stores: the environment has the keys of the others.
        for name, value in {**cloud.env, **s3.env}.items():
            monkeypatch.setenv(name, value)
        assert places.fetch(f"{bucket}/a.png") == PNG
        assert in_store(s3).fetch(f"{store.uri}/a.png") == PNG


def test_a_cloud_without_credentials_blames_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:9")
    with pytest.raises(ImageUnavailable, match="application default credentials"):
        ImagePlaces(seconds=0.1).fetch("gs://bucket/a.png")


@pytest.mark.parametrize("how", ["503", "500", "reset", "cut-down"])
def test_a_store_that_stumbles_is_asked_again(s3: S3Server, bucket: str, how: str):
    left = [how, how]
    with proxy(s3, lambda method, path, headers: left.pop() if left else "pass") as between:
        assert in_store(s3, between.endpoint).fetch(f"{bucket}/a.png") == PNG
        assert [decision for _, _, decision in between.seen].count(how) == 2


@pytest.mark.parametrize("how", ["503", "expired"])
def test_what_a_store_may_give_another_time_is_no_bad_image(s3: S3Server, bucket: str, how: str):
    with (
        proxy(s3, lambda method, path, headers: how) as between,
        pytest.raises(ImageUnavailable, match=how),
    ):
        in_store(s3, between.endpoint).fetch(f"{bucket}/a.png")


@pytest.mark.parametrize(("away", "lost"), [(2, False), (3, True)])
def test_a_store_that_is_away_for_over_a_fifth_loses_the_shard(
    s3: S3Server, bucket: str, away: int, lost: bool
):
    store = open_store(bucket, s3.options)
    names = [f"{'away' if n < away else 'here'}-{n}.png" for n in range(10)]
    for name in names:
        store.put(name, PNG)
    table = pa.table({"image": [f"{bucket}/{name}" for name in names]})
    asked: list[Messages | Failure] = [[{"role": "user", "content": "What?"}] for _ in names]
    with proxy(s3, lambda method, path, headers: "503" if "away" in path else "pass") as between:
        images = RowImages(images_of(Images(columns=["image"])), in_store(s3, between.endpoint))
        if lost:
            with pytest.raises(TooManyAway, match="503"):
                images.fetched(table, asked)
            return
        rows = images.fetched(table, asked)[0]
    kinds = [row.kind if isinstance(row, Failure) else "" for row in rows]
    assert kinds == ["ImageUnavailable"] * away + [""] * (10 - away)
