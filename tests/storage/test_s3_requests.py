"""What the S3 store asks of its client, and what it makes of the client's answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from prefect_raybatch.errors import (
    AccessDenied,
    CredentialsUnusable,
    StoreError,
    StoreUnavailable,
)
from prefect_raybatch.storage import FileInfo, S3Store, Sums
from prefect_raybatch.storage.s3_client import Connection, request

WHEN = datetime(2026, 1, 2, tzinfo=UTC)
ABC_MD5 = base64.b64encode(hashlib.md5(b"abc").digest()).decode()


class Body:
    def __init__(self, data: bytes) -> None:
        self.data, self.closed = data, False

    async def __aenter__(self) -> Body:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True

    async def read(self, size: int | None = None) -> bytes:
        found, self.data = self.data[:size], self.data[len(self.data[:size]) :]
        return found


class Link(Connection):
    """A connection that notes each call of its client, and answers what the test says, else {}."""

    def __init__(self) -> None:
        super().__init__({"endpoint_url": "http://h:9", "key": "k"})
        self.silence.answered = True
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[Any] = []
        self.warned: list[tuple[object, ...]] = []
        self.renewed: list[object] = []
        self.silence.warn = lambda *said: self.warned.append(said)  # type: ignore[method-assign]

    def filesystem(self) -> Any:
        return self

    def renew(self, old: object) -> None:
        self.renewed.append(old)

    def run(self, fs: Any, send: Any) -> Any:
        return asyncio.run(send(fs))

    async def set_session(self) -> None:
        pass

    async def get_s3(self, bucket: str) -> Any:
        assert bucket == "b"
        return self

    def _get_s3_method_kwargs(self, method: object) -> dict[str, Any]:
        return {"RequestPayer": "me"}

    def __getattr__(self, operation: str) -> Any:
        if operation.startswith("_"):
            raise AttributeError(operation)

        async def call(**arguments: Any) -> Any:
            assert arguments.pop("Bucket") == "b" and arguments.pop("RequestPayer") == "me"
            self.calls.append((operation, arguments))
            answer = self.answers.pop(0) if self.answers else {}
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def store(link: Link) -> S3Store:
    return S3Store("s3://b/p", link)


def refused(status: int, code: str = "Code", text: str = "text") -> ClientError:
    said = {"Error": {"Code": code, "Message": text}}
    return ClientError({**said, "ResponseMetadata": {"HTTPStatusCode": status}}, "x")


def item(key: str) -> dict[str, Any]:
    return {"Key": key, "Size": 3, "ETag": '"e"', "LastModified": WHEN}


def got(data: bytes, **more: Any) -> dict[str, Any]:
    etag = f'"{hashlib.md5(data).hexdigest()}"'
    return {"Body": Body(data), "ContentLength": len(data), "ETag": etag, **more}


HEAD = {"ContentLength": 3, "ETag": '"e"'}
INFO = FileInfo("x", 3, "e", None)
TOKEN = {"IsTruncated": True, "NextContinuationToken": "t"}
LIST = "list_objects_v2"


PAGE = {"Prefix": "p/", "MaxKeys": 1000, "Delimiter": "/"}
FOLDERS = [{**TOKEN, "CommonPrefixes": [{"Prefix": "p/a/"}]}, {}]
KEYS = {"Objects": [{"Key": "p/x"}, {"Key": "p/y"}], "Quiet": True}
BODY = {"Key": "p/x", "Body": b"abc", "ContentMD5": ABC_MD5}
PART = {"Key": "p/x", "Range": "bytes=1-2", "IfMatch": '"e"'}
DATE = {"ResponseMetadata": {"HTTPHeaders": {"date": "Fri, 02 Jan 2026 00:00:00 GMT"}}}
NO_DATE: Any = {"ResponseMetadata": {"HTTPHeaders": {}}}
BAD_DATE = {"ResponseMetadata": {"HTTPHeaders": {"date": "today"}}}
ONE = (LIST, {"MaxKeys": 1, "Prefix": "p/"})


@pytest.mark.parametrize(
    ("ask", "answers", "result", "calls"),
    [
        (lambda s: s.put("x", b"abc"), [HEAD], INFO, [("put_object", BODY)]),
        (lambda s: s.put_if_absent("x", b"abc"), [{}], True,
         [("put_object", {**BODY, "IfNoneMatch": "*"})]),
        (lambda s: [info.path for info in s.list("d", recursive=False)],
         [{**TOKEN, "Contents": [item("p/d/x"), item("p/d/e/")]}, {"Contents": [item("p/d/y")]}],
         ["d/x", "d/y"],
         [(LIST, {**PAGE, "Prefix": "p/d/"}),
          (LIST, {**PAGE, "Prefix": "p/d/", "ContinuationToken": "t"})]),
        (lambda s: [(info, info.modified) for info in s.above().list()],
         [{"Contents": [item("x")]}], [(INFO, WHEN.timestamp())],
         [(LIST, {"Prefix": "", "MaxKeys": 1000})]),
        (lambda s: list(s.folders()), FOLDERS, ["a"],
         [(LIST, PAGE), (LIST, {**PAGE, "ContinuationToken": "t"})]),
        (lambda s: s.delete(["x", "y"]), [{}], None, [("delete_objects", {"Delete": KEYS})]),
        (lambda s: s.read_range(INFO, 1, 3), [got(b"bc")], b"bc", [("get_object", PART)]),
        (lambda s: s.now(), [DATE], WHEN.timestamp(), [ONE]),
        (lambda s: s.now(), [NO_DATE], 1000.0, [ONE]),
        (lambda s: s.now(), [BAD_DATE], 1000.0, [ONE]),
    ],
)  # fmt: skip
def test_what_is_asked_of_the_client(
    ask: Any, answers: list[Any], result: object, calls: object, store: S3Store, link: Link,
    clock: object,
) -> None:  # fmt: skip
    link.answers[:] = answers
    assert ask(store) == result and link.calls == calls


def test_checksums_are_computed_where_md5_is_not_for_security(
    store: S3Store, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an OpenSSL in FIPS mode."""

    def md5(data: bytes = b"", usedforsecurity: bool = True, real: Any = hashlib.md5) -> Any:
        assert usedforsecurity is False
        return real(data)

    link.answers[:] = [got(b"abc"), HEAD]
    monkeypatch.setattr(hashlib, "md5", md5)
    assert store.read("x") == b"abc" and store.put("x", b"abc") == INFO
    assert Sums.of(b"abc") == Sums.of_stream(io.BytesIO(b"abc"))


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        *[(["AccessDenied"], 403), (["InternalError"], 503), (["NoSuchKey", "SlowDown"], 503)],
        *[(["InvalidRequest"], 400), (["MethodNotAllowed", "SlowDown"], 405), (["NoSuchKey"], 0)],
        *[([], 0), ([None, "AccessDenied"], 200), (["ServiceUnavailable"], 503)],
        (["MalformedXML"], 200),
    ],
)
def test_a_batch_fails_for_its_first_key_that_is_not_deleted(
    link: Link, codes: list[str | None], status: int
) -> None:
    link.answers[:] = [{"Errors": [{"Code": code} if code else {} for code in codes]}]
    sent = request("delete_objects", {"Bucket": "b"}, None)(link)
    if not status:
        assert asyncio.run(sent) == {"Errors": [{"Code": code} for code in codes]}
        return
    with pytest.raises(ClientError, match="calling the delete_objects operation") as caught:
        asyncio.run(sent)
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    failed = next((code for code in codes if code != "NoSuchKey"), None)
    assert caught.value.response["Error"] == ({"Code": failed} if failed else {})


@pytest.mark.parametrize(
    ("limit", "told", "size", "read"),
    [
        (None, None, None, 200_000),
        (200_000, 200_000, 200_000, 200_000),
        (199_999, 200_000, 200_000, None),
        (200_000, None, None, 200_000),
        (199_999, None, 200_000, None),
        (70_000, None, 131_072, None),
    ],
)
def test_no_more_of_a_body_is_read_than_is_allowed(
    link: Link, limit: int | None, told: int | None, size: int | None, read: int | None
) -> None:
    body = Body(b"x" * 200_000)
    link.answers[:] = [{"Body": body, **({"ContentLength": told} if told else {})}]
    found = asyncio.run(request("get_object", {"Bucket": "b"}, limit)(link))
    assert found["Body"] == (None if read is None else b"x" * read)
    assert found.get("ContentLength") == size and body.closed


@pytest.mark.parametrize("remove", [False, True])
def test_only_old_uploads_are_removed(store: S3Store, link: Link, remove: bool) -> None:
    def begun(key: str, day: int) -> dict[str, Any]:
        return {"Key": key, "UploadId": f"id of {key}", "Initiated": WHEN.replace(day=day)}

    more = {"IsTruncated": True, "NextKeyMarker": "k", "NextUploadIdMarker": "u"}
    pages = [{**more, "Uploads": [begun("p/new", 2), begun("p/a", 1)]}, {"Uploads": []}]
    last = {"Uploads": [begun("p/d/b", 1)]}
    link.answers[:] = [pages[0], refused(404, "NoSuchKey"), last] if remove else [pages[0], last]
    found = store.unfinished(WHEN.timestamp(), remove)
    old = WHEN.replace(day=1).timestamp()
    assert found == (FileInfo("a", 0, None, None), FileInfo("d/b", 0, None, None))
    assert [info.modified for info in found] == [old, old]
    listing = "list_multipart_uploads"
    assert [call for call in link.calls if call[0] == listing] == [
        (listing, {"Prefix": "p/"}),
        (listing, {"Prefix": "p/", "KeyMarker": "k", "UploadIdMarker": "u"}),
    ]
    aborted = [arguments for name, arguments in link.calls if name == "abort_multipart_upload"]
    expected = [{"Key": f"p/{key}", "UploadId": f"id of p/{key}"} for key in ("a", "d/b")]
    assert aborted == (expected if remove else [])
    link.answers[:] = [{"Uploads": [begun("x", 1)]}]
    whole = S3Store("s3://b", link)
    assert [info.path for info in whole.unfinished(WHEN.timestamp(), False)] == ["x"]
    assert link.calls[-1] == (listing, {"Prefix": ""})


PAUSES = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("seconds", "pauses"), [(60.0, PAUSES), (1.4, PAUSES[:3]), (0.0, PAUSES[:2])]
)
def test_a_call_is_repeated_after_growing_pauses(
    store: S3Store, link: Link, clock: Any, seconds: float, pauses: list[float]
) -> None:
    link.answers[:] = [refused(503, "SlowDown")] * 99
    store.retry_seconds = seconds
    with pytest.raises(StoreUnavailable, match=f"in {len(pauses) + 1} tries"):
        store.stat("x")
    assert clock.slept == pauses and len(link.calls) == len(pauses) + 1
    assert link.warned == [
        ("s3://b/p/x", "http://h:9", 1000.0, 1000.0 + seconds, "503 SlowDown: text")
    ] * len(pauses)


def test_a_deletion_refused_for_an_unknown_reason_is_repeated_and_ends_with_it(
    store: S3Store, link: Link, clock: Any
) -> None:
    failed = {"Key": "p/x", "Code": "MalformedXML", "Message": "no"}
    link.answers[:] = [{"Errors": [failed]}, {}]
    store.delete(["x"])
    assert len(link.calls) == 2
    link.answers[:], store.retry_seconds = [{"Errors": [failed]}] * 99, 0.0
    with pytest.raises(
        StoreError, match=r"refused delete_objects in 3 .*MalformedXML: no"
    ) as caught:
        store.delete(["x"])
    assert not isinstance(caught.value, StoreUnavailable)


def test_expired_credentials_are_renewed_once(store: S3Store, link: Link, clock: Any) -> None:
    link.answers[:] = [refused(400, "ExpiredToken"), HEAD]
    assert store.stat("x") == INFO and link.renewed == [link]
    link.answers[:] = [refused(400, "ExpiredToken"), refused(400, "ExpiredToken")]
    with pytest.raises(CredentialsUnusable, match=r"s3://b/p/x: .*expired.*key and secret in the"):
        store.stat("x")
    assert link.renewed == [link, link] and clock.slept == []
    link.answers[:] = [refused(403)]
    with pytest.raises(AccessDenied, match=r"s3://b/p: .*s3:ListBucket on bucket 'b'"):
        list(store.list())
    assert len(link.renewed) == 2


@pytest.mark.parametrize(("fault", "known"), [(OSError("lost"), False), (refused(500), True)])
def test_a_store_that_answered_badly_is_known_to_be_there(
    store: S3Store, link: Link, fault: Exception, known: bool, clock: Any
) -> None:
    link.silence.answered = False
    seen: list[bool] = []
    link.silence.warn = lambda *_: seen.append(link.silence.answered)  # type: ignore[method-assign]
    link.answers[:] = [fault, HEAD]
    assert store.stat("x") == INFO and seen == [known] and link.silence.answered is True
