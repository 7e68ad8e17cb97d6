"""Fetch untrusted HTTP(S) URLs without reaching internal addresses.

A URL in data or in a job may point at a service that only this machine can reach. So a name is
resolved once, every address that it has must be public, and the connection is made to exactly that
address, because a second lookup could return another. Redirects are checked in the same way.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from prefect_raybatch.bounded import within
from prefect_raybatch.job.secrets import hide_users

PORTS = {"http": 80, "https": 443}
AGAIN = {408, 425, 429}  # statuses worth a retry, like all from 500 on
MOVED = {301, 302, 303, 307, 308}
# Metadata services, which give a machine in a cloud its credentials: never contacted.
METADATA = {
    *("100.100.100.200", "168.63.129.16", "192.0.0.192"),  # Alibaba, Azure, Oracle
    *("fd00:42::42", "fd00:c1::a9fe:a9fe", "fd00:ec2::254", "fd20:ce::254"),
}
# IPv6 networks that embed an IPv4 address, and its shift in bits. Python calls some global.
CARRIERS = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # translated (SIIT)
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
    (ipaddress.IPv6Network("::/96"), 0),  # compatible
)
LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")  # prefixes for a network's own NAT64
TEREDO = ipaddress.IPv6Network("2001::/32")
ISATAP = (0x00005EFE, 0x02005EFE)  # begins the lower half of an address that carries an IPv4 one
LOWER = 0xFFFFFFFF
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
T = TypeVar("T")


class UrlRefused(Exception):
    """Raised for a URL that must never be fetched."""


class HostAway(Exception):
    """Raised for a host that does not answer at present; a later try may succeed."""


def checked_url(url: str, allow_private: bool, setting: str) -> SplitResult:
    """Return the parts of a URL; raise UrlRefused if it must not be fetched.

    Raises UrlRefused for an invalid URL, a scheme other than http and https, and a URL with a user
    or a password. Unless `allow_private`, raises it also for a port other than 80 and 443.
    `setting` is the name of the job field that holds `allow_private`, for messages.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UrlRefused(f"{shown_url(url)} is not a valid URL: {error}") from None
    if parts.scheme not in PORTS:
        raise UrlRefused(f"{shown_url(url)}: the scheme {parts.scheme!r} is not http or https")
    if not parts.hostname or any(c <= " " or c == "\x7f" for c in url):
        raise UrlRefused(f"{shown_url(url)!r} is not a URL with a host")
    if parts.username is not None or parts.password is not None:
        raise UrlRefused(
            f"{parts.scheme}://...@{parts.hostname}: URLs with a user or a password are not fetched"
        )
    if port not in (None, *PORTS.values()) and not allow_private:
        raise UrlRefused(
            f"{shown_url(url)}: port {port} is not allowed. Use 80 or 443, or set {setting} to true"
        )
    return parts


def allowed(address: str, allow_private: bool) -> bool:
    """Return whether an address may be contacted.

    Public addresses may be contacted; with `allow_private`, private ones too. The addresses for
    which `_never` returns True are never allowed, such as a cloud's metadata service, which hands
    out the machine's credentials.
    """
    inner = innermost(ipaddress.ip_address(address.partition("%")[0]))
    if _never(inner) or any(_never(one) for one in carried(inner)):
        return False
    if allow_private:
        return True
    if isinstance(inner, ipaddress.IPv6Address) and (inner in LOCAL_NAT64 or inner in TEREDO):
        return False
    return inner.is_global and all(one.is_global for one in carried(inner))


def _never(address: Address) -> bool:
    """Return whether an address is never contacted.

    Never contacted are link-local, site-local, multicast and unspecified addresses, reserved IPv4
    addresses, and the metadata services of clouds.
    """
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:
        return True
    if isinstance(address, ipaddress.IPv4Address) and address.is_reserved:
        return True
    return (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or str(address) in METADATA
    )


def carried(address: Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that a gateway may translate an IPv6 address to."""
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    number, found = int(address), []
    if address in LOCAL_NAT64:  # RFC 6052 has a place for each length of the network's prefix
        found += [number & LOWER, (number >> 64 & 0xFFFF) << 16 | number >> 40 & 0xFFFF]
        found += [number >> 24 & LOWER, (number >> 64 & 0xFF) << 24 | number >> 32 & 0xFFFFFF]
    if address in TEREDO:
        found += [number >> 64 & LOWER, ~number & LOWER]
    if number >> 32 & LOWER in ISATAP:
        found.append(number & LOWER)
    return [ipaddress.IPv4Address(one) for one in found if one]


def innermost(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 address, else the address itself."""
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        for network, shift in CARRIERS:
            if address in network and int(address) > 0:
                return ipaddress.IPv4Address(int(address) >> shift & LOWER)
    return address


def shown_url(url: str) -> str:
    """Return a URL for a message: without user and query, and at most 200 characters of it.

    A query often holds a signature.
    """
    plain = str(hide_users(url.partition("#")[0].partition("?")[0]))
    return plain[:200] + ("?..." if "?" in url else "")


def resolved(parts: SplitResult, until: float, allow_private: bool, remedy: str) -> str:
    """Look up the host of a URL; return the address to contact.

    Raises UrlRefused if an address of the host is not allowed; `remedy` ends its message. Raises it
    also if the host does not exist or has an invalid name. Raises HostAway if the lookup fails, or
    is not finished at the time `until` (monotonic seconds).
    """
    host, where = parts.hostname or "", shown_url(parts.geturl())
    port = parts.port or PORTS[parts.scheme]

    def look_up() -> list[str]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    try:
        addresses = _in_time(look_up, until, where)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise UrlRefused(f"{where}: there is no host {host}") from None
        raise HostAway(f"{where}: looking up {host} failed: {error.strerror}") from None
    except UnicodeError:
        raise UrlRefused(f"{where}: {host} is not a valid host name") from None
    for address in addresses:
        if not allowed(address, allow_private):
            raise UrlRefused(
                f"{where}: {host} has the address {address}, which is not public; {remedy}"
            )
    return addresses[0]


def _in_time(work: Callable[[], T], until: float, where: str) -> T:
    try:
        return within(time_left(until, where), work)
    except TimeoutError:
        raise HostAway(f"{where}: looking up the host timed out") from None


def time_left(until: float, where: str) -> float:
    """Return the seconds until `until` (monotonic); raise HostAway if that is past."""
    left = until - time.monotonic()
    if left <= 0:
        raise HostAway(f"{where}: timed out")
    return left


def connection(
    parts: SplitResult, address: str, seconds: float, handles: list[socket.socket]
) -> http.client.HTTPConnection:
    """Return a connection to `address`, with the host name of the URL in TLS and in the request.

    `seconds` is its timeout. When it connects, it adds a duplicate of its socket to `handles`. With
    the duplicate, `cut_sockets` can end the transfer; the socket itself cannot be reached then, as
    TLS or the response has taken it over.
    """
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


def cut_sockets(handles: list[socket.socket]) -> None:
    """Shut down sockets, so that reads that wait for them end."""
    for handle in handles:
        with suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)
