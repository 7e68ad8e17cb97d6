"""Does a Ray cluster answer at an address? Asked before Ray is: that waits for minutes, silent."""

from __future__ import annotations

import os
import socket
import time

from prefect_raybatch.bounded import within
from prefect_raybatch.errors import ClusterUnavailable

CONNECT_SECONDS = 2.0  # seconds for a connection, and again for the answer
REACH_SECONDS = 4.5  # seconds in all, the name's look-up included, which has no limit of its own
MEND = "start it (ray start --head), or correct cluster.address or RAY_ADDRESS"

# An HTTP/2 request by hand (RFC 9113), so that no gRPC library is loaded beside Ray's own. That
# somebody accepts the connection is no answer: a proxy, or a head that hangs, does as well.
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


def check_reachable(address: str) -> None:
    """Raises `ClusterUnavailable` within 5 s when no Ray head answers at host:port, or for `auto`
    when none runs on this machine."""
    if trouble := silent(address):
        raise ClusterUnavailable(f"no Ray cluster answers at {address}: {trouble}; {MEND}")


def silent(address: str) -> str:
    """Why nobody answers at the address; "" where somebody does, or where it is of another form
    (which Ray itself refuses)."""
    if address == "auto":  # before the clock runs: Ray takes seconds to import
        from prefect_raybatch.stages import ray_internals  # noqa: F401
    try:
        return within(REACH_SECONDS, lambda: _trouble(address))
    except TimeoutError as error:
        return str(error)


def _trouble(address: str) -> str:
    place = _running_cluster() if address == "auto" else address
    if not place:
        return "none was started on this machine"
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or "://" in place:
        return ""
    where = "" if place == address else f"{place}: "
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=CONNECT_SECONDS
        ) as line:
            # Behind TLS nothing can be asked without Ray's keys.
            plain = os.environ.get("RAY_USE_TLS", "0").lower() in ("", "0", "false")
            if plain and not _serves(line):
                return f"{where}something listens there, but does not answer as a Ray head does"
    except OSError as error:
        return f"{where}{error.strerror or error or type(error).__name__}"
    return ""


def _serves(line: socket.socket) -> bool:
    """Whether a gRPC service answers a question after its health, whatever it says of it."""
    header = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in QUESTION
    )
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
            return False
        got += more
        while len(got) >= 9 and len(got) >= (size := 9 + int.from_bytes(got[:3])):
            kind, stream, body = got[3], int.from_bytes(got[5:9]), got[9:size]
            if kind == HEADERS and stream == 1:
                return body[:1] == bytes([STATUS_200])
            got = got[size:]
        if not more:
            return False
    return False


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def _running_cluster() -> str | None:
    from prefect_raybatch.stages.ray_internals import running_cluster

    return running_cluster()
