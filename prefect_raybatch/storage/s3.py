"""A prefix of a bucket on S3, or on a compatible store, as a store."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from prefect_raybatch.errors import ConfigError, UnsafeStore
from prefect_raybatch.storage import bucket
from prefect_raybatch.storage.base import (
    FileInfo,
    header_time,
    in_batches,
    local_size,
    reading_local_file,
    too_large,
)
from prefect_raybatch.storage.bucket import BucketStore, part_size
from prefect_raybatch.storage.s3_answers import judge
from prefect_raybatch.storage.s3_client import Send, put_file_at_once, request, upload
from prefect_raybatch.storage.uri import join

Response = dict[str, Any]
ResponseCheck = Callable[[Response], None]


class ShortBody(OSError):
    """Raised for a body that is shorter than the object: a proxy or the network cut it."""


class S3Store(BucketStore):
    """A prefix of a bucket on S3 or a compatible store."""

    most_put_bytes = 5 * 2**30

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        def whole(found: Response) -> None:
            """Raise ShortBody unless the whole body arrived.

            An ETag that is the MD5 of the body proves it. Otherwise, size and ETag must be those
            that `stat` returns.
            """
            body, etag = found["Body"], found.get("ETag", "").strip('"')
            if body is None or hashlib.md5(body, usedforsecurity=False).hexdigest() == etag:
                return
            info = self.stat(path)
            if (len(body), etag) != (info.size, info.etag):
                raise ShortBody(
                    f"{len(body)} of {info.size} bytes arrived, or the object was replaced"
                )

        found = self._call("get_object", self._key(path), max_bytes, check=whole)
        if found["Body"] is None:
            raise too_large(join(self.uri, path), found["ContentLength"], max_bytes or 0)
        return cast(bytes, found["Body"])

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        folder = self._key(prefix) if prefix else self._prefix
        skip = len(self._prefix) + 1 if self._prefix else 0
        for page in self._pages(folder, recursive):
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):  # a "folder", as consoles write it
                    when = item["LastModified"].timestamp()
                    yield _s3_info(item["Key"][skip:], item["Size"], item["ETag"], when)

    def folders(self) -> Iterator[str]:
        for page in self._pages(self._prefix, recursive=False):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"].rstrip("/").rpartition("/")[2]

    def _pages(self, folder: str, recursive: bool) -> Iterator[Response]:
        asked: Response = {
            "Prefix": f"{folder}/" if folder else "",
            "MaxKeys": bucket.LISTING_PAGE,
        }
        if not recursive:
            asked["Delimiter"] = "/"
        while True:
            page = self._call("list_objects_v2", None, **asked)
            yield page
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def stat(self, path: str) -> FileInfo:
        found = self._call("head_object", self._key(path))
        return _s3_info(path, found["ContentLength"], found["ETag"])

    def put(self, path: str, data: bytes) -> FileInfo:
        done = self._call("put_object", self._key(path), Body=data, ContentMD5=_md5(data))
        return _s3_info(path, len(data), done["ETag"])

    def _create(self, path: str, data: bytes) -> bool:
        body: Response = {"Body": data, "ContentMD5": _md5(data), "IfNoneMatch": "*"}
        return self._call("put_object", self._key(path), accept=412, **body) is not None

    def _create_from_file(self, path: str, source: str) -> bool:
        return self._put_at_once(path, source, IfNoneMatch="*")

    def replace_file(
        self, path: str, local_path: str | os.PathLike[str], expected: FileInfo
    ) -> bool:
        source = os.fspath(local_path)
        size = local_size(source)
        if size <= self.most_put_bytes:
            # The header requires quotes, but radosgw compares it in a PUT with an ETag without.
            for wanted in (f'"{expected.etag}"', str(expected.etag)):
                if self._put_at_once(path, source, IfMatch=wanted):
                    return True
                if self.stat(path).etag != expected.etag:
                    return False
            raise UnsafeStore(
                f"{join(self.uri, path)}: the store does not support conditional replacement "
                "(If-Match in a PUT). Remove this file, then run the same command again"
            )
        if self.stat(path).etag != expected.etag:
            return False
        self._upload(path, source, size)
        return True

    def _put_at_once(self, path: str, source: str, **condition: str) -> bool:
        """PUT a local file in one request under a condition; return whether the condition held.

        It is a single request because some stores ignore conditions in a multipart upload.
        """
        key = self._key(path)
        with reading_local_file(source), open(source, "rb") as handle:
            md5 = hashlib.file_digest(handle, _weak_md5).digest()
        sent = {"Bucket": self._bucket, "Key": key, "ContentMD5": base64.b64encode(md5).decode()}
        send = put_file_at_once({**sent, **condition}, source)
        return self._until_answered("put_object", key, send, accept=412) is not None

    def _upload(self, path: str, source: str, size: int) -> None:
        key = self._key(path)
        send = upload(source, f"{self._bucket}/{key}", part_size(size))
        self._until_answered("put_object", key, send)

    def delete(self, paths: Iterable[str]) -> None:
        for some in in_batches(paths, bucket.LISTING_PAGE):
            batch = [{"Key": self._key(path)} for path in some]
            self._call("delete_objects", None, Delete={"Objects": batch, "Quiet": True})

    def _range(self, info: FileInfo, start: int, stop: int) -> bytes | None:
        def whole(found: Response) -> None:
            if len(found["Body"]) != stop - start:
                raise ShortBody(f"{len(found['Body'])} of {stop - start} bytes arrived")

        found = self._call(
            "get_object",
            self._key(info.path),
            accept=412,
            check=whole,
            Range=f"bytes={start}-{stop - 1}",
            IfMatch=f'"{info.etag}"',
        )
        return None if found is None else cast(bytes, found["Body"])

    def now(self) -> float:
        found = self._call("list_objects_v2", None, MaxKeys=1, Prefix=f"{self._prefix}/")
        date = found["ResponseMetadata"]["HTTPHeaders"].get("date")
        return header_time(date) or time.time()

    def unfinished(self, before: float, remove: bool) -> tuple[FileInfo, ...]:
        skip = len(self._prefix) + 1 if self._prefix else 0
        found = []
        for begun in self._uploads():
            key, when = begun["Key"], begun["Initiated"].timestamp()
            if when >= before:
                continue
            found.append(FileInfo(key[skip:], 0, None, None, when))
            if remove:  # 404: completed or aborted meanwhile
                self._call("abort_multipart_upload", key, accept=404, UploadId=begun["UploadId"])
        return tuple(found)

    def _uploads(self) -> Iterator[Response]:
        asked: Response = {"Prefix": f"{self._prefix}/" if self._prefix else ""}
        while True:
            page = self._call("list_multipart_uploads", None, **asked)
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            asked["KeyMarker"] = page["NextKeyMarker"]
            asked["UploadIdMarker"] = page["NextUploadIdMarker"]

    def _call(
        self,
        operation: str,
        key: str | None,
        max_bytes: int | None = None,
        accept: int | None = None,
        check: ResponseCheck = lambda found: None,
        **arguments: object,
    ) -> Any:
        """Run one client operation, repeated until answered; return the response with `Body` read.

        `Body` is None if it has more than `max_bytes` bytes. If `check(response)` raises an
        exception, this counts as a failure of the call. Returns None if the call fails with HTTP
        status `accept`. For any other failure, raises the error that `Answer.error` returns.
        """
        arguments["Bucket"] = self._bucket
        if key is not None:
            arguments["Key"] = key
        return self._until_answered(
            operation, key, request(operation, arguments, max_bytes), accept, check
        )

    def _until_answered(
        self,
        operation: str,
        key: str | None,
        send: Send,
        accept: int | None = None,
        check: ResponseCheck = lambda found: None,
    ) -> Any:
        """Call `send` until it is answered, with growing random pauses; return the response.

        Gives up after `retry_seconds`, but not before MIN_TRIES tries. Renews expired credentials
        once. `accept`, `check` and the errors are as in `_call`.
        """
        began, silence = time.monotonic(), self.connection.silence
        deadline, place = began + self.retry_seconds, f"s3://{self._bucket}/{key or self._prefix}"
        tries, renewed, pause, said = 0, False, bucket.FIRST_PAUSE, "nothing yet"

        def warn() -> None:
            silence.warn(place, self.connection.endpoint(fs), began, deadline, said)

        while True:
            fs = self.connection.filesystem()
            try:
                found = self.connection.run(fs, silence.watched(send, began, warn))
                check(found)
                silence.answered = True
                return found
            except Exception as error:
                answer = judge(error, self.connection.scrub)
            tries += 1
            silence.answered = silence.answered or answer.status > 0
            if answer.status == 0 and (problem := self.connection.ca_problem(fs)):
                raise ConfigError(f"{place}: {problem}") from None
            said = answer.reply
            if answer.status == accept:
                return None
            if answer.may_be_expired and not renewed:
                renewed = True
                self.connection.renew(fs)
                continue
            wait = random.uniform(0.5, 1.0) * pause
            late = time.monotonic() + wait > deadline and tries >= bucket.MIN_TRIES
            if late or not answer.worth_retrying:
                reached = self.connection.credentials(), self.connection.endpoint(fs)
                call = operation, self._bucket, key or self._prefix, tries
                # Not chained: the client's own texts can hold URLs with credentials.
                raise answer.error(*call, *reached) from None
            warn()
            time.sleep(wait)
            pause = min(2 * pause, bucket.LONGEST_PAUSE)


def _weak_md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _md5(data: bytes) -> str:
    """Return the Content-MD5 with which the store rejects a body that was changed in transit."""
    return base64.b64encode(_weak_md5(data).digest()).decode()


def _s3_info(path: str, size: int, etag: str, modified: float | None = None) -> FileInfo:
    return FileInfo(path, size, etag.strip('"'), None, modified)
