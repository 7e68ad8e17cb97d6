"""One file over http(s), as a read-only store.

The file is downloaded once, into a temporary file, so that all readers get the same version and may
seek back. A broken transfer resumes if the server's ETag shows that the file is unchanged.
"""

from __future__ import annotations

import http.client
import io
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, NoReturn, cast
from urllib.parse import unquote, urljoin, urlsplit

from prefect_raybatch.errors import ConfigError, SourceError, StoreError, StoreUnavailable
from prefect_raybatch.job.secrets import url_identity
from prefect_raybatch.storage.base import FileInfo, SeekableReader, Store, too_large
from prefect_raybatch.storage.internet import (
    AGAIN,
    MOVED,
    HostAway,
    UrlRefused,
    checked_url,
    connection,
    resolved,
    shown_url,
)

MOST_REDIRECTS = 5
WEB_TRIES = 5
WEB_PAUSE = 0.5  # seconds before the second try, twice that before each further one
WEB_WAIT = 60.0  # seconds for a name, an answer, or the next bytes
PART = 1 << 18


@dataclass(frozen=True)
class WebRules:
    """Limits of what may be fetched: at most `max_bytes` per file.

    With `allow_private`, hosts may have private addresses and any port. `check_url` raises
    ConfigError for a URL that the job may not read; it is called for each redirect as well.
    `setting` and `limit` are the names of the job fields that hold `allow_private` and `max_bytes`,
    for messages.
    """

    max_bytes: int
    allow_private: bool = False
    check_url: Callable[[str], None] = lambda _: None
    setting: str = "source.web.allow_private"
    limit: str = "source.web.max_mb"


class WebStore(Store):
    """A read-only store with one file, the one at `url`; its path is the last part of the URL.

    `headers` are sent only to the URL's own host.
    """

    def __init__(self, url: str, headers: Mapping[str, str], rules: WebRules) -> None:
        self.uri = url_identity(url)
        self.name = unquote(urlsplit(url).path.rpartition("/")[2])
        self._url, self._headers, self._rules = url, dict(headers), rules
        self._lock = threading.Lock()
        self._begun: _Download | None = None

    def _download(self) -> _Download:
        with self._lock:
            if self._begun is None:
                self._begun = _Download(self._url, self._headers, self._rules, self.uri)
            return self._begun

    def stat(self, path: str) -> FileInfo:
        """Return the file's size and ETag, as of the first request of this store for it.

        The download begins with that request. If the server sent no Content-Length, downloads the
        whole file to learn its size.
        """
        return self._download().info(path)

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Handle(self._download()), PART))

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        with self.open(path) as handle:
            data = handle.read(-1 if max_bytes is None else max_bytes + 1)
        if max_bytes is not None and len(data) > max_bytes:
            raise too_large(self.uri, self.stat(path).size, max_bytes)
        return data

    def list(self, prefix: str = "", recursive: bool = True) -> Iterator[FileInfo]:
        yield self.stat(self.name)

    def folders(self) -> Iterator[str]:
        return iter(())

    def _only_read(self) -> NoReturn:
        raise StoreError(f"{self.uri}: http(s) sources are read-only")

    def put(self, path: str, data: bytes) -> FileInfo:
        self._only_read()

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._only_read()

    def put_file(self, path: str, local_path: str | os.PathLike[str]) -> FileInfo:
        self._only_read()

    def put_file_if_absent(self, path: str, local_path: str | os.PathLike[str]) -> bool:
        self._only_read()

    def replace_file(
        self, path: str, local_path: str | os.PathLike[str], expected: FileInfo
    ) -> bool:
        self._only_read()

    def delete(self, paths: Iterable[str]) -> None:
        self._only_read()

    def now(self) -> float:
        return time.time()

    def unfinished(self, before: float, remove: bool) -> tuple[FileInfo, ...]:
        return ()

    def sub(self, prefix: str) -> Store:
        self._only_read()

    def above(self) -> Store | None:
        return None


class _Broken(Exception):
    """Raised when a transfer failed, but a later request may succeed or resume it."""


@contextmanager
def _temporary_disk() -> Iterator[None]:
    """Within the block, convert errors of the download's temporary file to StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{tempfile.gettempdir()}: a file downloaded over http(s) cannot be stored "
            f"({error.strerror or error}). Free some space, or set TMPDIR to another folder"
        ) from error


class _Download:
    """A download: a temporary file with the bytes of the URL's file so far. Thread-safe."""

    def __init__(self, url: str, headers: Mapping[str, str], rules: WebRules, shown: str) -> None:
        self._url, self._headers, self._rules, self._shown = url, headers, rules, shown
        self._lock = threading.Lock()
        # Closed by garbage collection: pyarrow may still read ahead in a thread of its own.
        with _temporary_disk():
            self._file = tempfile.TemporaryFile(prefix="raybatch-")  # noqa: SIM115
        self._have, self._whole = 0, False
        self._size: int | None = None
        self._etag: str | None = None
        self._answer: http.client.HTTPResponse | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._tries = 0
        self.fetch(1)

    def info(self, path: str) -> FileInfo:
        if self._size is None:
            self.fetch(None)
        return FileInfo(path, self._size or 0, self._etag, None)

    def read_at(self, offset: int, size: int) -> bytes:
        self.fetch(offset + size)
        with _temporary_disk():
            return os.pread(self._file.fileno(), size, offset)

    def fetch(self, upto: int | None) -> None:
        """Download at least the first `upto` bytes, or all (None).

        Raises StoreUnavailable after WEB_TRIES failed tries without new bytes between them, and
        SourceError for a file that has changed, is too large or is refused.
        """
        with self._lock:
            while not self._whole and (upto is None or self._have < upto):
                try:
                    self._step()
                except (_Broken, HostAway) as error:
                    self._end()
                    self._tries += 1
                    if self._tries >= WEB_TRIES:
                        raise StoreUnavailable(f"{error} ({WEB_TRIES} tries)") from None
                    time.sleep(WEB_PAUSE * 2 ** (self._tries - 1))
                except BaseException:
                    self._end()
                    raise

    def _step(self) -> None:
        if self._answer is None:
            self._answer = self._ask()
        try:
            data = self._answer.read1(PART)
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(f"{self._shown}: {str(error) or type(error).__name__}") from None
        if data:
            with _temporary_disk():
                os.pwrite(self._file.fileno(), data, self._have)
            self._have += len(data)
            self._tries = 0
            if self._have > self._rules.max_bytes:
                raise SourceError(self._too_large())
            return
        if self._size is not None and self._have < self._size:
            raise _Broken(f"{self._shown}: {self._have} of {self._size} bytes arrived")
        self._whole, self._size = True, self._have
        self._end()

    def _ask(self) -> http.client.HTTPResponse:
        """Send a GET that asks for the bytes not yet stored; return its response.

        Follows redirects. The response's first unread byte is the first one that is not stored.
        """
        url, headers = self._url, self._headers
        for _ in range(MOST_REDIRECTS + 1):
            answer = self._get(url, headers)
            if answer.status in (401, 403) and self._headers and not headers:
                raise SourceError(
                    f"{self._shown} redirects to {shown_url(url)}, which answers HTTP "
                    f"{answer.status} {answer.reason}. source.options.headers are sent only to the "
                    "host in source.uri: set source.uri to the URL at the other host"
                )
            if answer.status not in MOVED:
                return self._accepted(answer)
            target = answer.headers.get("Location")
            self._end()
            if not target:
                raise SourceError(f"{self._shown}: HTTP {answer.status} without a Location")
            moved = urljoin(url, target)
            if urlsplit(moved)[:2] != urlsplit(url)[:2]:
                headers = {}  # credentials are only for the host in the URL
            url = moved
        raise SourceError(f"{self._shown}: more than {MOST_REDIRECTS} redirects")

    def _get(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        where = shown_url(url)
        remedy = f"set {self._rules.setting} to true if the job may read from hosts of this network"
        until = time.monotonic() + WEB_WAIT
        try:
            self._rules.check_url(url)
        except ConfigError as error:
            if url == self._url:
                raise
            raise ConfigError(f"{self._shown} redirects to {where}. {error}") from None
        try:
            parts = checked_url(url, self._rules.allow_private, self._rules.setting)
            address = resolved(parts, until, self._rules.allow_private, remedy)
        except UrlRefused as error:
            raise SourceError(f"source.uri: {error}") from None
        given = {"User-Agent": "prefect_raybatch", "Accept-Encoding": "identity", **headers}
        if self._have and self._etag is not None:  # else from the start, to compare
            given |= {"Range": f"bytes={self._have}-", "If-Range": f'"{self._etag}"'}
        self._connection = connection(parts, address, WEB_WAIT, [])
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            self._connection.request("GET", path, headers=given)
            return self._connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            raise SourceError(
                f"{where}: the TLS certificate is not valid: {error.verify_message}"
            ) from None
        except (UnicodeError, http.client.InvalidURL) as error:
            raise SourceError(f"{where} is not a valid URL: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(f"{where}: {str(error) or type(error).__name__}") from None

    def _accepted(self, answer: http.client.HTTPResponse) -> http.client.HTTPResponse:
        status, said = answer.status, f"{self._shown}: HTTP {answer.status} {answer.reason}"
        if status in AGAIN or status >= 500:
            raise _Broken(said)
        if status in (401, 403):
            raise SourceError(
                f"{said}. Set the credentials in source.options.headers, or use a newly signed URL"
            )
        if status in (404, 410):
            raise SourceError(f"source.uri: {said}. Check the URL")
        begins = f"bytes {self._have}-"
        if status != 200 and not (
            status == 206 and answer.headers.get("Content-Range", "").startswith(begins)
        ):
            raise SourceError(said)
        if answer.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity"):
            raise SourceError(
                f"{self._shown}: the server sent a Content-Encoding that was not requested"
            )
        if answer.headers.get_content_type() == "text/html":
            raise SourceError(
                f"{self._shown}: the answer is a web page, most likely a login page, not a file of "
                "rows. Check the URL, or set credentials in source.options.headers"
            )
        tag = answer.headers.get("ETag", "")
        etag = tag.strip('"') if tag.startswith('"') else None  # weak ETags do not identify bytes
        length = answer.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() else None
        if status == 200:
            if self._have and (etag, size) != (self._etag, self._size):
                raise SourceError(f"{self._shown} changed while it was being read. Start again")
            if self._have:  # this answer begins at byte 0
                self._skip(answer)
            self._etag, self._size = etag, size
        if (self._size or 0) > self._rules.max_bytes:
            raise SourceError(self._too_large())
        return answer

    def _skip(self, answer: http.client.HTTPResponse) -> None:
        """Read from `answer` the bytes already stored; raise SourceError if they differ."""
        at = 0
        while at < self._have:
            try:
                data = answer.read1(min(PART, self._have - at))
            except (OSError, http.client.HTTPException) as error:
                raise _Broken(f"{self._shown}: {error}") from None
            if not data:
                raise _Broken(f"{self._shown}: only {at} bytes arrived")
            with _temporary_disk():
                kept = os.pread(self._file.fileno(), len(data), at)
            if data != kept:
                raise SourceError(f"{self._shown} changed while it was being read. Start again")
            at += len(data)

    def _too_large(self) -> str:
        size = f"has {self._size:,} bytes" if self._size else "has more bytes"
        return (
            f"{self._shown} {size}, more than {self._rules.limit} "
            f"({self._rules.max_bytes // 10**6}) allows. Raise it if the disk for temporary files "
            "has room"
        )

    def _end(self) -> None:
        with suppress(OSError):
            if self._connection is not None:
                self._connection.close()
        self._connection = self._answer = None


class _Handle(SeekableReader):
    """A seekable file over a `_Download`, which downloads on demand."""

    def __init__(self, download: _Download) -> None:
        super().__init__()
        self._download = download

    @property
    def size(self) -> int:
        return self._download.info("").size

    def read_at(self, start: int, stop: int) -> bytes:
        return self._download.read_at(start, stop - start)
