"""An image by http(s), from an address that a row may name.

A row is data, and its URL may point at what only this machine can reach. So a name is resolved
once, each address it has must be one of the open internet, and the connection is made to that very
address: asked again, the name might answer otherwise. Redirects are no exception.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from prefect_raybatch.bounded import within
from prefect_raybatch.stages.images.decode import BadImage, looks_like

REDIRECTS = 3
TRIES = 3
RETRY_PAUSE = 0.5  # seconds before the second try, twice that before the third
_CHUNK = 64 << 10
PORTS = {"http": 80, "https": 443}
AGAIN = {408, 425, 429}  # and all from 500 on
MOVED = {301, 302, 303, 307, 308}
_HEADERS = {
    "User-Agent": "prefect_raybatch",
    "Accept": "image/*",
    "Accept-Encoding": "identity",  # a compressed answer may be a bomb
    "Connection": "close",
}
# What a machine of a cloud asks for its own keys; allowed to nobody.
METADATA = {"fd00:ec2::254", "100.100.100.200", "192.0.0.192"}
# IPv6 networks that carry an IPv4 address, and where in it: Python calls some of them global.
CARRIERS = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
    (ipaddress.IPv6Network("::/96"), 0),
)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
T = TypeVar("T")


class ImageUnavailable(Exception):
    """An image that could not be fetched for now; it may well be there."""


@dataclass(frozen=True)
class Http:
    """How images are fetched. `seconds` bounds one try from the look-up of the name to the last
    byte; `allow_private` lets a row name addresses of this network, and any port."""

    max_bytes: int
    seconds: float = 20.0
    allow_private: bool = False

    def fetch(self, url: str) -> bytes:
        """The image's bytes. BadImage for what stays so (404, HTML, a private address);
        ImageUnavailable for what may pass, after a few tries."""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(RETRY_PAUSE * 2 ** (attempt - 1))
            try:
                return self._try(url)
            except ImageUnavailable as error:
                last = error
        raise ImageUnavailable(f"{last} ({TRIES} tries)")

    def _try(self, url: str) -> bytes:
        until = time.monotonic() + self.seconds
        for _ in range(REDIRECTS + 1):
            parts = checked_url(url, self.allow_private)
            found = self._ask(parts, until)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise BadImage(f"{shown_url(url)}: more than {REDIRECTS} redirects")

    def _ask(self, parts: SplitResult, until: float) -> bytes | str:
        """The body of one answer, or where it points to."""
        where = shown_url(parts.geturl())
        address = _resolved(parts, until, self.allow_private)
        handles: list[socket.socket] = []
        connection = _connection(parts, address, _left(until, where), handles)
        timer = threading.Timer(_left(until, where), _cut, [handles])
        timer.daemon = True
        timer.start()  # a server that sends a byte a second keeps within each time limit
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers=_HEADERS)
            found = self._answer(connection.getresponse(), where)
            _left(until, where)  # cut off, an answer without a length looks whole
            return found
        except (BadImage, ImageUnavailable):
            raise
        except ssl.SSLCertVerificationError as error:
            raise BadImage(
                f"{where}: its certificate is not valid: {error.verify_message}"
            ) from None
        except (UnicodeError, http.client.InvalidURL) as error:
            raise BadImage(f"{where} is no URL: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= until or isinstance(error, TimeoutError):
                raise ImageUnavailable(f"{where}: no answer within {self.seconds:g} s") from None
            said = str(error) or type(error).__name__
            raise ImageUnavailable(f"{where}: {said}") from None
        finally:
            timer.cancel()
            connection.close()
            for handle in handles:
                handle.close()

    def _answer(self, answer: http.client.HTTPResponse, where: str) -> bytes | str:
        status = answer.status
        if status in MOVED:
            target = answer.headers.get("Location")
            if not target:
                raise BadImage(f"{where}: HTTP {status} without a Location")
            return target
        if status in AGAIN or status >= 500:
            raise ImageUnavailable(f"{where}: HTTP {status} {answer.reason}")
        if status != 200:
            raise BadImage(f"{where}: HTTP {status} {answer.reason}")
        coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise BadImage(f"{where}: sent as {coding}, which was not asked for")
        length = answer.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) > self.max_bytes:
            raise BadImage(self._too_large(where, f"{length} bytes, "))
        return self._body(answer, where, int(length) if length.isdecimal() else None)

    def _body(self, answer: http.client.HTTPResponse, where: str, length: int | None) -> bytes:
        data = bytearray()
        while chunk := answer.read1(_CHUNK):
            if not data and (found := looks_like(chunk)):
                kind = answer.headers.get("Content-Type", "no type")
                raise BadImage(f"{where}: the answer is {found} ({kind}), not an image")
            data += chunk
            if len(data) > self.max_bytes:
                raise BadImage(self._too_large(where, ""))
        if length is not None and len(data) < length:
            raise ImageUnavailable(f"{where}: {len(data)} of {length} bytes came")
        return bytes(data)

    def _too_large(self, where: str, size: str) -> str:
        return f"{where}: {size}more than prompt.images.max_bytes {self.max_bytes}"


def checked_url(url: str, allow_private: bool) -> SplitResult:
    """A URL's parts; BadImage for one that is not asked, whatever its name stands for."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadImage(f"{shown_url(url)} is no URL: {error}") from None
    if parts.scheme not in PORTS:
        raise BadImage(
            f"{shown_url(url)}: a redirect to {parts.scheme or 'no scheme'}, not http(s)"
        )
    if not parts.hostname or any(c <= " " or c == "\x7f" for c in url):
        raise BadImage(f"{shown_url(url)!r} is no URL of a host")
    if parts.username is not None or parts.password is not None:
        raise BadImage(f"{parts.scheme}://...@{parts.hostname}: a URL with a user or a password")
    if port not in (None, *PORTS.values()) and not allow_private:
        raise BadImage(
            f"{shown_url(url)}: port {port}; 80 and 443 are asked, others where "
            "prompt.images.allow_private is true"
        )
    return parts


def allowed(address: str, allow_private: bool) -> bool:
    """Whether an address may be asked: one of the open internet, or a private one where these are
    allowed; never one by which a machine is given its own keys."""
    inner = innermost(ipaddress.ip_address(address.partition("%")[0]))
    if inner.is_link_local or inner.is_multicast or inner.is_unspecified or str(inner) in METADATA:
        return False
    return allow_private or inner.is_global


def innermost(address: Address) -> Address:
    """The IPv4 address that an IPv6 one carries, else itself."""
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        for network, shift in CARRIERS:
            if address in network and int(address) > 0:
                return ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF)
    return address


def shown_url(url: str) -> str:
    """A URL in a message: without its query, which often holds a signature."""
    plain = url.partition("#")[0].partition("?")[0]
    return plain[:200] + ("?..." if "?" in url else "")


def _resolved(parts: SplitResult, until: float, allow_private: bool) -> str:
    """The one address that is asked; BadImage unless every address of the name is allowed."""
    host, where = parts.hostname or "", shown_url(parts.geturl())
    port = parts.port or PORTS[parts.scheme]

    def look_up() -> list[str]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    try:
        addresses = _in_time(look_up, until, where)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise BadImage(f"{where}: there is no host {host}") from None
        raise ImageUnavailable(f"{where}: {host} cannot be looked up: {error.strerror}") from None
    except UnicodeError:
        raise BadImage(f"{where}: {host} is no name of a host") from None
    for address in addresses:
        if not allowed(address, allow_private):
            raise BadImage(
                f"{where}: {host} is {address}, which is not of the open internet; set "
                "prompt.images.allow_private if the rows may name hosts of this network"
            )
    return addresses[0]


def _in_time(work: Callable[[], T], until: float, where: str) -> T:
    try:
        return within(_left(until, where), work)
    except TimeoutError:
        raise ImageUnavailable(f"{where}: its name was not found in time") from None


def _left(until: float, where: str) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise ImageUnavailable(f"{where}: the time for it is over")
    return left


def _connection(
    parts: SplitResult, address: str, seconds: float, handles: list[socket.socket]
) -> http.client.HTTPConnection:
    """A connection to that address; the host's name stays in TLS and in the request. `handles`
    gets one of its own on the socket, since TLS takes that over and an answer keeps it."""
    host = parts.hostname or ""
    port = parts.port or PORTS[parts.scheme]

    def connect(_: object, timeout: object = None, source: object = None) -> socket.socket:
        made = socket.create_connection((address, port), seconds)
        handles.append(made.dup())
        return made

    made: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        made = http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
    else:
        made = http.client.HTTPConnection(host, port, timeout=seconds)
    made._create_connection = connect  # type: ignore[attr-defined]
    return made


def _cut(handles: list[socket.socket]) -> None:
    for handle in handles:
        with suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)
