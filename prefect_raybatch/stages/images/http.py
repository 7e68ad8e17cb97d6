"""Fetches images over http(s) from URLs in rows; `storage.internet` decides which are allowed."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin

from prefect_raybatch.stages.images.decode import BadImage, looks_like
from prefect_raybatch.storage.internet import (
    AGAIN,
    MOVED,
    HostAway,
    UrlRefused,
    checked_url,
    connection,
    cut_sockets,
    resolved,
    shown_url,
    time_left,
)

REDIRECTS = 3
TRIES = 3
PRIVATE = "set prompt.images.allow_private: true if rows may name hosts of this network"
RETRY_PAUSE = 0.5  # seconds before the second try, twice that before the third
_CHUNK = 64 << 10
_HEADERS = {
    "User-Agent": "prefect_raybatch",
    "Accept": "image/*",
    "Accept-Encoding": "identity",  # a compressed answer may be a bomb
    "Connection": "close",
}


class ImageUnavailable(Exception):
    """An image could not be fetched because of a transient fault; a retry may succeed."""


@dataclass(frozen=True)
class Http:
    """Fetches images over http(s), within limits.

    `seconds` limits one try, from the name lookup to the last byte; `allow_private` lets rows name
    addresses of the private network, and any port.
    """

    max_bytes: int
    seconds: float = 20.0
    allow_private: bool = False

    def fetch(self, url: str) -> bytes:
        """Return the image's bytes.

        Raises BadImage for permanent faults (404, HTML, a private address), and ImageUnavailable
        for transient ones, after TRIES tries.
        """
        for attempt in range(TRIES):
            if attempt:
                time.sleep(RETRY_PAUSE * 2 ** (attempt - 1))
            try:
                return self._try(url)
            except UrlRefused as error:
                raise BadImage(str(error)) from None
            except (ImageUnavailable, HostAway) as error:
                last = error
        raise ImageUnavailable(f"{last} ({TRIES} tries)")

    def _try(self, url: str) -> bytes:
        until = time.monotonic() + self.seconds
        for _ in range(REDIRECTS + 1):
            parts = checked_url(url, self.allow_private, "prompt.images.allow_private")
            found = self._ask(parts, until)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise BadImage(f"{shown_url(url)}: more than {REDIRECTS} redirects")

    def _ask(self, parts: SplitResult, until: float) -> bytes | str:
        """Send one GET by `until` (monotonic time); return the body, or the target of a redirect.

        A redirect's target is a str. Raises BadImage and UrlRefused for permanent faults,
        ImageUnavailable and HostAway for transient ones.
        """
        where = shown_url(parts.geturl())
        address = resolved(parts, until, self.allow_private, PRIVATE)
        handles: list[socket.socket] = []
        asked = connection(parts, address, time_left(until, where), handles)
        timer = threading.Timer(time_left(until, where), cut_sockets, [handles])
        timer.daemon = True
        timer.start()  # a server that sends a byte per second never exceeds the socket's timeout
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            asked.request("GET", path, headers=_HEADERS)
            found = self._answer(asked.getresponse(), where)
            time_left(until, where)  # a response without a length looks whole when it is cut off
            return found
        except (BadImage, ImageUnavailable, HostAway):
            raise
        except ssl.SSLCertVerificationError as error:
            raise BadImage(
                f"{where}: its certificate is not valid: {error.verify_message}"
            ) from None
        except (UnicodeError, http.client.InvalidURL) as error:
            raise BadImage(f"{where} is not a valid URL: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= until or isinstance(error, TimeoutError):
                raise ImageUnavailable(f"{where}: no answer within {self.seconds:g} s") from None
            said = str(error) or type(error).__name__
            raise ImageUnavailable(f"{where}: {said}") from None
        finally:
            timer.cancel()
            asked.close()
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
            raise BadImage(
                f"{where}: the server sent Content-Encoding {coding}, which is not supported"
            )
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
            raise ImageUnavailable(f"{where}: received {len(data)} of {length} bytes")
        return bytes(data)

    def _too_large(self, where: str, size: str) -> str:
        return f"{where}: {size}more than prompt.images.max_bytes {self.max_bytes}"
