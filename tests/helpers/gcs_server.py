"""A small Google Cloud Storage server for the tests: the XML API with preconditions, in memory.

It keeps what these pages promise of objects, preconditions, ranges, listings and multipart uploads:

- https://cloud.google.com/storage/docs/xml-api/reference-methods
- https://cloud.google.com/storage/docs/xml-api/reference-headers (x-goog-if-generation-match)
- https://cloud.google.com/storage/docs/xml-api/get-bucket-list (list-type=2)
- https://cloud.google.com/storage/docs/xml-api/reference-status (codes of errors)
- https://cloud.google.com/storage/docs/multipart-uploads
- https://cloud.google.com/storage/docs/hashes-etags (the ETag of a simple upload is its MD5)
- https://developers.google.com/identity/protocols/oauth2/service-account#jwt-auth (requests that a
  service account's key has signed)

`python -m helpers.gcs_server PORT TOKEN BUCKET ...` serves until it is ended, with the key of the
service account in GCS_SERVER_KEY, if that is set. Libraries that call it without releasing Python's
lock need it in a process of its own: `serving_apart`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from helpers.processes import until

PAGE = 1000  # objects in one answer to a listing, as at Google


@dataclass(frozen=True)
class Stored:
    """One generation of an object."""

    body: bytes
    etag: str
    generation: int
    modified: float = field(default_factory=time.time)


class GcsServer(ThreadingHTTPServer):
    """Serves `buckets` to those who send `token` or sign with `account_key`.

    One lock makes each request atomic.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, token: str, *buckets: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = token
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.denied: set[str] = set()  # of read, list, write and delete: answered by 403
        self.lock = threading.Lock()
        self.generation = int(time.time() * 1e6)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def options(self) -> dict[str, Any]:
        """What `open_store` takes."""
        return {"base_url": self.endpoint, "bearer_token": self.token}

    @cached_property
    def account_key(self) -> rsa.RSAPrivateKey:
        """The key of the one service account, made up at its first use."""
        if given := os.environ.get("GCS_SERVER_KEY"):
            found = serialization.load_pem_private_key(given.encode(), None)
            assert isinstance(found, rsa.RSAPrivateKey)
            return found
        return rsa.generate_private_key(65537, 2048)

    @cached_property
    def account_pem(self) -> str:
        form, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self.account_key.private_bytes(serialization.Encoding.PEM, form, bare).decode()

    @property
    def account_options(self) -> dict[str, Any]:
        """What `open_store` and libraries of tables take: the key of the service account."""
        key = {"type": "service_account", "client_email": "me@p.iam.gserviceaccount.com"}
        key |= {"private_key_id": "1", "private_key": self.account_pem}
        return {"base_url": self.endpoint, "service_account_key": json.dumps(key)}

    def admits(self, authorization: str | None) -> bool:
        """Whether a request may pass: by its token, or by one that the account's key signed."""
        token = (authorization or "").removeprefix("Bearer ")
        if token == self.token:
            return True
        signed, _, signature = token.rpartition(".")
        try:
            told = json.loads(_decoded(signed.partition(".")[2]))
            public = self.account_key.public_key()
            public.verify(_decoded(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        except (InvalidSignature, ValueError):
            return False
        return bool(told["exp"] > time.time())

    @property
    def env(self) -> dict[str, str]:
        """The same as environment variables."""
        return {"GOOGLE_BASE_URL": self.endpoint, "GOOGLE_BEARER_TOKEN": self.token}

    def store(self, bucket: str, name: str, body: bytes, etag: str = "") -> Stored:
        self.generation += 1
        etag = etag or hashlib.md5(body, usedforsecurity=False).hexdigest()
        found = Stored(body, f'"{etag}"', self.generation)
        self.buckets[bucket][name] = found
        return found

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


class Refusal(Exception):
    """An answer that is an error: status and code."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: GcsServer

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        bucket, _, name = unquote(address.path.lstrip("/")).partition("/")
        query = {k: v[0] for k, v in parse_qs(address.query, keep_blank_values=True).items()}
        try:
            if not self.server.admits(self.headers.get("Authorization")):
                raise Refusal(401, "AuthenticationRequired")
            with self.server.lock:
                if bucket not in self.server.buckets:
                    raise Refusal(404, "NoSuchBucket")
                if self._operation(name) in self.server.denied:
                    raise Refusal(403, "AccessDenied")
                self._answer(*self._act(bucket, name, query, body))
        except Refusal as refusal:
            status, code = refusal.args
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}.</Message>"
            self._answer(status, {}, f"{text}</Error>".encode())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _operation(self, name: str) -> str:
        changes = {"PUT": "write", "POST": "write", "DELETE": "delete"}
        return changes.get(self.command, "read" if name else "list")

    def _act(
        self, bucket: str, name: str, query: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if not name:
            return 200, {"Content-Type": "application/xml"}, self._listing(bucket, query)
        if "uploads" in query or "uploadId" in query:
            return self._multipart(bucket, name, query, body)
        if self.command == "PUT":
            self._check_generation(bucket, name)
            return 200, _headers(self.server.store(bucket, name, body)), b""
        found = self.server.buckets[bucket].get(name)
        if found is None or query.get("generation", str(found.generation)) != str(found.generation):
            raise Refusal(404, "NoSuchKey")
        if self.command == "DELETE":
            self._check_generation(bucket, name)
            del self.server.buckets[bucket][name]
            return 204, {}, b""
        wanted = self.headers.get("If-Match")
        if wanted not in (None, "*", found.etag):
            raise Refusal(412, "PreconditionFailed")
        return self._content(found)

    def _content(self, found: Stored) -> tuple[int, dict[str, str], bytes]:
        headers = _headers(found)
        bounds = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if bounds is None:
            return 200, headers, found.body
        size = len(found.body)
        first, last = bounds.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            raise Refusal(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return 206, headers, found.body[start:stop]

    def _check_generation(self, bucket: str, name: str) -> None:
        wanted = self.headers.get("x-goog-if-generation-match")
        found = self.server.buckets[bucket].get(name)
        if wanted is not None and int(wanted) != (found.generation if found else 0):
            raise Refusal(412, "PreconditionFailed")

    def _multipart(
        self, bucket: str, name: str, query: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        uploads = self.server.uploads
        if "uploads" in query:
            upload = uuid.uuid4().hex
            uploads[upload] = {}
            text = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}"
            text = (
                f"<InitiateMultipartUploadResult>{text}</UploadId></InitiateMultipartUploadResult>"
            )
            return 200, {"Content-Type": "application/xml"}, text.encode()
        parts = uploads.get(query["uploadId"])
        if parts is None:
            raise Refusal(404, "NoSuchUpload")
        if self.command == "PUT":
            parts[int(query["partNumber"])] = body
            digest = hashlib.md5(body, usedforsecurity=False).hexdigest()
            return 200, {"ETag": f'"{digest}"'}, b""
        del uploads[query["uploadId"]]
        if self.command == "DELETE":
            return 204, {}, b""
        self._check_generation(bucket, name)
        wanted = [int(found.text or 0) for found in ElementTree.fromstring(body).iter("PartNumber")]
        whole = b"".join(parts[number] for number in wanted)
        etag = f"{uuid.uuid4().hex}-{len(wanted)}"
        found = self.server.store(bucket, name, whole, etag)
        text = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key>"
        text += f"<ETag>{escape(found.etag)}</ETag>"
        text = f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>"
        return 200, _headers(found), text.encode()

    def _listing(self, bucket: str, query: Mapping[str, str]) -> bytes:
        if self.command != "GET":
            raise Refusal(405, "MethodNotAllowed")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after, limit = query.get("continuation-token", ""), int(query.get("max-keys", PAGE))
        after = max(after, query.get("start-after", ""))
        lines: dict[str, str] = {}
        for name, found in sorted(self.server.buckets[bucket].items()):
            if not name.startswith(prefix):
                continue
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            shown = name[: cut + 1] if cut >= 0 else name
            if shown <= after or shown in lines:
                continue
            if len(lines) == min(limit, PAGE):
                last = list(lines)[-1]
                more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
                lines[""] = f"<IsTruncated>true</IsTruncated>{more}"
                break
            lines[shown] = _item(shown, found) if cut < 0 else _folder(shown)
        text = "".join(lines.values())
        return f"<?xml version='1.0'?><ListBucketResult>{text}</ListBucketResult>".encode()

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _headers(found: Stored) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "x-goog-generation": str(found.generation),
        "Last-Modified": formatdate(found.modified, usegmt=True),
        "Content-Type": "application/octet-stream",
    }


def _item(name: str, found: Stored) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(found.modified))
    text = f"<Key>{escape(name)}</Key><Size>{len(found.body)}</Size>"
    text += f"<LastModified>{when}.000Z</LastModified><ETag>{escape(found.etag)}</ETag>"
    return f"<Contents>{text}<Generation>{found.generation}</Generation></Contents>"


def _folder(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"


@contextmanager
def serving(server: GcsServer) -> Iterator[GcsServer]:
    """Run a server in a thread of this process."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving_apart(*buckets: str) -> Iterator[GcsServer]:
    """Run a server in a process of its own; what is given only knows where and its keys."""
    known = GcsServer("secret-token", *buckets)
    known.server_close()  # its port is free for the process
    port = str(known.server_address[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.gcs_server", port, known.token, *buckets],
        env={**os.environ, "GCS_SERVER_KEY": known.account_pem},
        stderr=subprocess.DEVNULL,
    )

    def answers() -> bool:
        with suppress(OSError):
            socket.create_connection(known.server_address[:2], timeout=60).close()
            return True
        return False

    try:
        until(lambda: answers() or process.poll() is not None, 60, "the GCS server")
        yield known
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    port, token, *buckets = sys.argv[1:]
    GcsServer(token, *buckets, port=int(port)).serve_forever()
