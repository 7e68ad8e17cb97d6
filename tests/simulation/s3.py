"""S3 below the package's own S3 store: single requests, as the wire would carry them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from botocore.exceptions import ClientError

from prefect_raybatch.storage import S3Store
from prefect_raybatch.storage.s3_client import Connection

from .wire import Wire

BUCKET = "sim"
PAGE = 3  # files in an answer to a listing: a store may send fewer than it was asked for


class Body:
    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aenter__(self) -> Body:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self, size: int | None = None) -> bytes:
        found, self.data = self.data[:size], self.data[len(self.data[:size]) :]
        return found


class Client:
    """The methods of the client that the store calls, each one request."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    async def put_object(self, **asked: Any) -> dict[str, Any]:
        body = asked["Body"]
        data = bytes(body) if isinstance(body, (bytes, bytearray, memoryview)) else body.read()
        if "ContentMD5" in asked:
            sent = hashlib.md5(data, usedforsecurity=False).digest()
            assert base64.b64encode(sent).decode() == asked["ContentMD5"]
        absent, match = asked.get("IfNoneMatch") == "*", asked.get("IfMatch")

        def apply(data: bytes) -> dict[str, Any]:
            there = self.wire.files.get(asked["Key"])
            if absent and there is not None:
                raise refused(412, "PreconditionFailed", "put_object")
            if match is not None and there is None:
                raise refused(404, "NoSuchKey", "put_object")
            if match is not None and match.strip('"') != there.etag:
                raise refused(412, "PreconditionFailed", "put_object")
            return {"ETag": f'"{self.wire.write(asked["Key"], data).etag}"'}

        kind = "if absent " if absent else "if match " if match else ""
        return self.wire.sent(f"PUT {kind}{asked['Key']}", asked["Key"], apply, data)

    async def get_object(self, **asked: Any) -> dict[str, Any]:
        def apply() -> dict[str, Any]:
            there = self.wire.files.get(asked["Key"])
            if there is None:
                raise refused(404, "NoSuchKey", "get_object")
            if "IfMatch" in asked and asked["IfMatch"].strip('"') != there.etag:
                raise refused(412, "PreconditionFailed", "get_object")
            data = there.data
            if "Range" in asked:
                first, last = asked["Range"].removeprefix("bytes=").split("-")
                data = data[int(first) : int(last) + 1]
            return {"Body": Body(data), "ContentLength": len(data), "ETag": f'"{there.etag}"'}

        return self.wire.asked(f"GET {asked['Key']}", apply)

    async def head_object(self, **asked: Any) -> dict[str, Any]:
        def apply() -> dict[str, Any]:
            there = self.wire.files.get(asked["Key"])
            if there is None:
                raise refused(404, "404", "head_object")
            return {"ContentLength": len(there.data), "ETag": f'"{there.etag}"'}

        return self.wire.asked(f"HEAD {asked['Key']}", apply)

    async def list_objects_v2(self, **asked: Any) -> dict[str, Any]:
        prefix, after = asked.get("Prefix", ""), asked.get("ContinuationToken", "")

        def apply() -> dict[str, Any]:
            shown = self.wire.shown(prefix)
            page: dict[str, Any] = {"Contents": [], "CommonPrefixes": [], "IsTruncated": False}
            page["ResponseMetadata"] = {"HTTPHeaders": {"date": self.wire.date()}}
            seen: dict[str, None] = {}
            for key in sorted(shown):
                if "Delimiter" in asked and "/" in key[len(prefix) :]:
                    folder = prefix + key[len(prefix) :].partition("/")[0] + "/"
                    if folder > after:
                        seen.setdefault(folder)
                elif key > after:
                    seen.setdefault(key)
            for name in list(seen)[:PAGE]:
                if name.endswith("/"):
                    page["CommonPrefixes"].append({"Prefix": name})
                    continue
                file = shown[name]
                when = datetime.fromtimestamp(file.modified, UTC)
                item = {"Key": name, "Size": len(file.data), "LastModified": when}
                page["Contents"].append({**item, "ETag": f'"{file.etag}"'})
            if len(seen) > PAGE:
                page |= {"IsTruncated": True, "NextContinuationToken": list(seen)[PAGE - 1]}
            return page

        return self.wire.asked(f"LIST {prefix}", apply)

    async def delete_objects(self, **asked: Any) -> dict[str, Any]:
        keys = [item["Key"] for item in asked["Delete"]["Objects"]]

        def apply() -> dict[str, Any]:
            for key in keys:
                self.wire.remove(key)
            return {}

        return self.wire.asked(f"DELETE {len(keys)} such as {min(keys, default='')}", apply)

    async def list_multipart_uploads(self, **asked: Any) -> dict[str, Any]:
        return self.wire.asked("LIST uploads", dict)


class FileSystem:
    """What the store's connection takes for s3fs's file system."""

    def __init__(self, wire: Wire) -> None:
        self.client = Client(wire)

    async def set_session(self) -> None:
        pass

    async def get_s3(self, bucket: str) -> Client:
        assert bucket == BUCKET
        return self.client

    def _get_s3_method_kwargs(self, method: object) -> dict[str, Any]:
        return {}

    async def _put_file(self, source: str, target: str, **_: Any) -> None:
        await self.client.put_object(
            Key=target.removeprefix(f"{BUCKET}/"), Body=Path(source).read_bytes()
        )


class Wired(Connection):
    """The connection of every S3 store of a schedule."""

    def __init__(self, wire: Wire) -> None:
        super().__init__({})
        self.system = FileSystem(wire)
        self.silence.answered = True

    def filesystem(self) -> FileSystem:
        return self.system

    def renew(self, old: object) -> None:
        pass

    def run(self, fs: Any, send: Callable[[Any], Awaitable[Any]]) -> Any:
        sending: Any = send(fs)
        try:
            sending.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("a request waited for something that is not of this world")


def refused(status: int, code: str, operation: str) -> ClientError:
    said = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(said, operation)


def open_s3(wire: Wire, uri: str) -> S3Store:
    return S3Store(quote(uri, safe=":/._-"), Wired(wire))
