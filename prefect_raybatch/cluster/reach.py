"""Checks whether a Ray cluster answers at an address, since Ray itself would wait for minutes."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Sequence

from prefect_raybatch.bounded import within
from prefect_raybatch.cluster.tokens import token_missing, token_sent, token_wrong
from prefect_raybatch.errors import ClusterUnavailable, ConfigError, Problem
from prefect_raybatch.job.cluster import ClusterAccess

CONNECT_SECONDS = 2.0  # seconds to connect, and again to wait for the answer
# Seconds for the whole check. The name lookup counts, because nothing else limits its time.
REACH_SECONDS = 4.5
REMEDY = "Start it (ray start --head), or correct cluster.address or RAY_ADDRESS"

# A hand-written HTTP/2 request (RFC 9113), because a gRPC library would conflict with Ray's own. An
# accepted connection is not enough: a proxy or a hanging head accepts it as well.
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
STATUS_200 = 0x88  # the first byte of the header of an answer (RFC 7541, appendix A)
QUESTION = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"gcs"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
# The health service answers without a token; this service requires the right one.
ALIVE = b"/ray.rpc.NodeInfoGcsService/CheckAlive"
UNAUTHENTICATED = b"\x0bgrpc-status\x0216"  # gRPC's code for it, in an answer's header
SOCKET_PATH_BYTES = 107  # Linux's limit for the path of a Unix socket
# The longest socket paths below the folder for temporary files: of Ray's object store, and of vLLM,
# which names the sockets to its core by a UUID.
RAY_SOCKET = "/ray/session_2026-11-25_18-59-00_123456_1234567/sockets/plasma_store"
VLLM_SOCKET = "/01234567-89ab-cdef-0123-456789abcdef"


def check_temp_folder() -> None:
    """Raise `ConfigError` if the path of the folder for temporary files is too long.

    A local Ray cluster and its engines create Unix sockets there, and Linux limits the length of a
    socket's path.
    """
    of_ray = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    _check_sockets("Ray", "RAY_TMPDIR", of_ray, os.environ.get(of_ray) or "/tmp", RAY_SOCKET)
    _check_sockets("vLLM", "TMPDIR", "TMPDIR", tempfile.gettempdir(), VLLM_SOCKET)


def _check_sockets(owner: str, remedy: str, variable: str, folder: str, socket_name: str) -> None:
    longest = SOCKET_PATH_BYTES - len(socket_name)
    if len(os.fsencode(folder)) > longest:
        raise ConfigError(
            f"{variable}={folder} is too long: {owner} creates sockets in it, and Linux limits "
            f"their paths to {SOCKET_PATH_BYTES} bytes. Set {remedy} to a path of at most "
            f"{longest} bytes, such as /tmp"
        )


def check_reachable(address: str, access: ClusterAccess | None = None) -> None:
    """Raise `ClusterUnavailable` within seconds if no Ray head answers at `address` (host:port).

    The address `auto` means the head on this machine. Raises `ConfigError` if the head requires a
    token, and there is none or the head rejects it. The token is that of `access` or, without one,
    of the environment (see `token_sent`).
    """
    if trouble := unreachable_reason(address):
        raise ClusterUnavailable(f"no Ray cluster answers at {address}: {trouble}. {REMEDY}")
    if refused := token_refusal(address, access or ClusterAccess(address)):
        raise ConfigError(str(refused))


def token_refusal(address: str, access: ClusterAccess) -> Problem | None:
    """Return the problem if the head at `address` requires a token, and it is missing or wrong.

    The token is that of `access` or, without one, of the environment (see `token_sent`). Returns
    None if the head accepts the request or does not answer within seconds. Also returns None if Ray
    uses TLS, because this module cannot check the token then. Without this check Ray would retry
    for 20 s, or forever.
    """
    token = token_sent(access)
    try:
        if not within(REACH_SECONDS, lambda: _refuses(address, token)):
            return None
    except (OSError, TimeoutError):
        return None
    who = f"the Ray cluster at {address}"
    return token_wrong(who, access) if token else token_missing(who, access)


def _refuses(address: str, token: str | None) -> bool:
    host, port = _host_and_port(address)
    if host is None or not _plain():
        return False
    asked = [(name, ALIVE if name == b":path" else value) for name, value in QUESTION]
    if token is not None:
        asked.append((b"authorization", f"Bearer {token}".encode()))
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as line:
        return UNAUTHENTICATED in _answer(line, asked)


def unreachable_reason(address: str) -> str:
    """Return why no Ray head answers at the address; "" if one answers.

    Returns "" for an invalid address as well, because Ray itself reports that.
    """
    if address == "auto":  # before the timeout starts: Ray takes seconds to import
        from prefect_raybatch.stages import ray_internals  # noqa: F401
    try:
        return within(REACH_SECONDS, lambda: _trouble(address))
    except TimeoutError as error:
        return str(error)


def _trouble(address: str) -> str:
    place = _running_cluster() if address == "auto" else address
    if not place:
        return "none was started on this machine"
    host, port = _host_and_port(place)
    if host is None:
        return ""
    where = "" if place == address else f"{place}: "
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as line:
            if _plain() and _answer(line, QUESTION)[:1] != bytes([STATUS_200]):
                return f"{where}something listens there, but it is not a Ray head"
    except OSError as error:
        return f"{where}{error.strerror or error or type(error).__name__}"
    return ""


def _host_and_port(address: str) -> tuple[str | None, int]:
    """Return (host, port) of an address or `auto`; (None, 0) if it is invalid."""
    place = (_running_cluster() or "") if address == "auto" else address
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or "://" in place:
        return None, 0
    return host.strip("[]"), int(port)


def _plain() -> bool:
    """Return whether Ray connects without TLS. This module cannot connect with TLS."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("", "0", "false")


def _answer(line: socket.socket, question: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Send a gRPC request with the headers `question`; return the raw response header.

    Returns b"" if the server closes the connection or does not answer within CONNECT_SECONDS.
    """
    header = b"".join(b"\0" + _text(name) + _text(value) for name, value in question)
    line.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(SETTINGS, 0, 0, b"")
        + _frame(HEADERS, END_HEADERS, 1, header)
        + _frame(DATA, END_STREAM, 1, bytes(5))
    )
    until, got = time.monotonic() + CONNECT_SECONDS, b""
    while (left := until - time.monotonic()) > 0:
        line.settimeout(left)
        try:
            more = line.recv(4096)
        except TimeoutError:
            return b""
        got += more
        while len(got) >= 9 and len(got) >= (size := 9 + int.from_bytes(got[:3])):
            kind, stream, body = got[3], int.from_bytes(got[5:9]), got[9:size]
            if kind == HEADERS and stream == 1:
                return body
            got = got[size:]
        if not more:
            return b""
    return b""


def _text(text: bytes) -> bytes:
    """Encode a text for an HTTP/2 header: its length, then the text (RFC 7541, 5.1 and 5.2)."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    more, rest = bytearray([127]), len(text) - 127
    while rest >= 128:
        more.append(rest % 128 + 128)
        rest //= 128
    return bytes([*more, rest]) + text


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def _running_cluster() -> str | None:
    from prefect_raybatch.stages.ray_internals import running_cluster

    return running_cluster()
