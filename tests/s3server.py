"""An S3 server for the tests, and a proxy that spoils chosen answers.

`start_s3` starts Ceph's radosgw, a real server whose put-if-absent is atomic. `make test` installs
it where it is missing (tests/programs.py).
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from helpers import environ
from helpers.ports import free_ports
from programs import require

SCRIPT = Path(__file__).with_name("radosgw.sh")


@dataclass
class S3Server:
    """A running server. Use as a context manager, or call `stop`; it also dies with this process.

    `key` and `secret` are made up for each start.
    """

    endpoint: str
    key: str
    secret: str = field(repr=False)
    process: subprocess.Popen[str] = field(repr=False)
    folder: Path = Path()
    objects: str = "memstore"

    @property
    def options(self) -> dict[str, str]:
        """What `open_store` takes."""
        return {
            "endpoint_url": self.endpoint,
            "key": self.key,
            "secret": self.secret,
            "region": "us-east-1",
        }

    @property
    def env(self) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }

    def create_bucket(self, name: str) -> None:
        import s3fs

        fs = s3fs.S3FileSystem(
            key=self.key,
            secret=self.secret,
            endpoint_url=self.endpoint,
            client_kwargs={"region_name": "us-east-1"},
            skip_instance_cache=True,
        )
        fs.call_s3("create_bucket", Bucket=name)  # mkdir sends a region that radosgw refuses

    def kill(self) -> None:
        """SIGKILL to the server with all its daemons, as in a loss of power."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Starts a killed server again, on the same address and (bluestore) the same objects."""
        log = self.folder / "server.out"
        log.unlink()
        self.process = _launch(self)
        if not _wait_until_ready(self, log):
            raise RuntimeError(f"radosgw did not come back:\n{log.read_text()[-1000:]}")

    def add_key(self) -> tuple[str, str]:
        """Another key pair for the same user."""
        key, secret = "TEST" + secrets.token_hex(8).upper(), secrets.token_hex(20)
        command = ["radosgw-admin", "key", "create", "--uid=test", "--key-type=s3"]
        command += [f"--access-key={key}", f"--secret-key={secret}"]
        env = {**os.environ, "CEPH_CONF": str(self.folder / "ceph.conf")}
        subprocess.run(command, env=env, check=True, capture_output=True)
        return key, secret

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_s3(tmpdir: str | os.PathLike[str], objects: str = "memstore") -> S3Server:
    """Start a server that keeps its files in `tmpdir`. RuntimeError, with its log, if it fails;
    the calling test is skipped where Ceph is left out.

    `objects` is where radosgw keeps them: "memstore", or "bluestore" for one to be killed.
    """
    require("ceph")
    folder = Path(tmpdir)
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(3):  # another process can take a port between the look and the use
        place = folder / f"radosgw-{attempt}"
        server = _start(place, objects)
        if _wait_until_ready(server, place / "server.out"):
            atexit.register(server.stop)
            return server
        server.stop()
    logs = [path.read_text(errors="replace")[-1000:] for path in folder.rglob("*.out")]
    raise RuntimeError("radosgw did not start:\n" + "\n".join(logs))


def _start(folder: Path, objects: str) -> S3Server:
    folder.mkdir()
    endpoint = f"http://127.0.0.1:{free_ports(2)[0]}"  # and one for what is behind it
    key, secret = "TEST" + secrets.token_hex(8).upper(), secrets.token_hex(20)
    server = S3Server(endpoint, key, secret, None, folder, objects)  # type: ignore[arg-type]
    server.process = _launch(server)
    return server


def _launch(server: S3Server) -> subprocess.Popen[str]:
    port = str(urlsplit(server.endpoint).port)
    command = ["bash", str(SCRIPT), str(server.folder), port]
    command += [server.key, server.secret, server.objects]
    command = environ.dying_with_us(*command)
    with open(server.folder / "server.out", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True)


def _wait_until_ready(server: S3Server, log: Path, seconds: float = 90) -> bool:
    """Whether the server is up within `seconds`; False at once when it has ended.

    radosgw answers before its user exists, so its script says when both are there.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.process.poll() is None:
        if "ready" in log.read_text().split():
            return True
        time.sleep(0.05)
    return False


# --- a proxy that spoils answers --------------------------------------------------------------

Decide = Callable[[str, str, Mapping[str, str]], str]


class Served(Protocol):
    """A server of any store."""

    @property
    def endpoint(self) -> str: ...


class S3Proxy(ThreadingHTTPServer):
    """Forwards to a server and does to each request what `decide(method, path, headers)` says.

    Names of headers are given as in If-None-Match, however the client writes them.

    "pass" forwards; "lose" forwards, then drops the connection instead of answering; "reset"
    drops it without forwarding; the names in `_REFUSALS` answer that without forwarding;
    "strip" forwards without If-None-Match, signed anew; "flip" and "truncate" likewise with a body
    that was changed, "garble" with one that no longer fits its signature; "slow SECONDS" forwards
    after a pause;
    "cut-up" drops the connection in the middle of the request's body, "cut-down" in the middle of
    the answer's. `seen` lists (method, path, decision).
    """

    daemon_threads = True

    def __init__(self, server: Served, decide: Decide) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.target = server
        self.decide = decide
        self.seen: list[tuple[str, str, str]] = []
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        path = urlsplit(self.target.endpoint).path  # Azurite's has the account
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


@contextlib.contextmanager
def proxy(server: Served, decide: Decide) -> Iterator[S3Proxy]:
    """A running `S3Proxy` before `server`."""
    running = S3Proxy(server, decide)
    thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


_REFUSALS = {
    "403": (403, "AccessDenied"),
    "429": (429, "TooManyRequests"),
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "expired": (400, "ExpiredToken"),
    "501": (501, "NotImplemented"),
    "507": (507, "InsufficientStorage"),
}


def _spoiled(body: bytes, decision: str) -> bytes:
    if decision == "truncate":
        return body[:-1]
    if decision in ("flip", "garble") and body:
        middle = len(body) // 2
        return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
    return body


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Proxy

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        with self.server.lock:
            headers = {name.title(): value for name, value in self.headers.items()}
            decision = self.server.decide(self.command, self.path, headers)
            self.server.seen.append((self.command, self.path, decision))
        body = self.rfile.read(size // 2 if decision == "cut-up" else size)
        if decision in ("reset", "cut-up"):
            return self._drop()
        if decision.startswith("slow "):
            time.sleep(float(decision.split()[1]))
        if decision in _REFUSALS:
            status, code = _REFUSALS[decision]
            text = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>"
            return self._reply(status, {"Content-Type": "application/xml"}, text.encode())
        try:
            anew = decision in ("strip", "flip", "truncate")
            status, headers, answer = self._forward(_spoiled(body, decision), anew)
        except OSError:  # the server is down: nor does the client get an answer
            return self._drop()
        if decision == "lose":
            return self._drop()
        self._reply(status, headers, answer, cut=decision == "cut-down")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _forward(self, body: bytes, anew: bool) -> tuple[int, dict[str, str], bytes]:
        headers = {k: v for k, v in self.headers.items() if k.lower() != "expect"}
        if anew and isinstance(self.server.target, S3Server):
            headers = self._signed_anew(self.server.target, headers, body)
        address = urlsplit(self.server.target.endpoint)
        upstream = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        with contextlib.closing(upstream):
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def _signed_anew(
        self, target: S3Server, headers: dict[str, str], body: bytes
    ) -> dict[str, str]:
        """`headers` without condition and checksum: the signature covers them, so it is made
        again."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        host = headers["Host"]
        request = AWSRequest(self.command, f"http://{host}{self.path}", {"Host": host}, body)
        credentials = Credentials(target.key, target.secret)
        S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        return {"Content-Length": str(len(body)), **dict(request.headers.items())}

    def _reply(
        self, status: int, headers: Mapping[str, str], body: bytes, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        empty = self.command == "HEAD"
        length = next((v for k, v in headers.items() if k.lower() == "content-length"), "0")
        self.send_header("Content-Length", length if empty else str(len(body)))
        self.end_headers()
        if not empty:
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            time.sleep(0.02)  # or the reset overtakes what was sent
            self._drop()

    def _drop(self) -> None:
        """Close with a reset, as a broken network does."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass
