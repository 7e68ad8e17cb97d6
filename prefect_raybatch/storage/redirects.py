"""Refuses redirects, so that requests with credentials are never sent on to another host."""

from __future__ import annotations

import urllib.request
from http.client import HTTPMessage
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

from prefect_raybatch.errors import Problem


def redirect_problem(url: str, location: str | None) -> Problem:
    """Return the problem and remedy to report for a redirect from `url` to `location`.

    The text names only the location's host, because its path and query may hold credentials.
    """
    try:
        target = urljoin(url, location or "")
        _ = urlsplit(target).port  # raises for an invalid one
    except ValueError:
        return Problem(f"{_bare(url)} redirects to an invalid URL", "Use another address")
    return Problem(
        f"{_bare(url)} redirects to {_bare(target)}, but requests with credentials are not sent "
        "on to another host",
        "If that is the right server, use its address",
    )


def _bare(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class _RefuseRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        """Follow no redirect: urllib then raises `HTTPError`."""
        return None


def open_without_redirects(request: urllib.request.Request | str, seconds: float) -> Any:
    """Send a request as `urllib.request.urlopen` does, but raise `HTTPError` for a redirect."""
    return urllib.request.build_opener(_RefuseRedirect).open(request, timeout=seconds)
