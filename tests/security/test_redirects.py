"""Keys go to the server that they were given for, and never on to where it redirects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from attacks import PLANTED, REDIRECTS
from helpers.web_server import served

from prefect_raybatch.doctor import services
from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.flow.blocks.cluster import RayCluster
from prefect_raybatch.job.cluster_access import ClusterAccess
from prefect_raybatch.job.source import Source
from prefect_raybatch.remote.server import JobServer
from prefect_raybatch.source import peek
from prefect_raybatch.source.tables.iceberg import open_catalog

KEY = PLANTED


@dataclass
class Redirect:
    """A server at `url` that redirects to `place`, and the requests that got there."""

    url: str
    place: str
    arrived: list[str]


@contextmanager
def redirecting(status: int, final: int = 200) -> Iterator[Redirect]:
    arrived: list[str] = []

    class Target(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            arrived.append(f"{self.command} {self.path} {dict(self.headers)} {body}")
            self.send_response(final)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with served(Target) as target:
        place = target.replace("127.0.0.1", "localhost")

        class Front(Target):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(status)
                self.send_header("Location", f"{place}{self.path}")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_GET

        with served(Front) as front:
            yield Redirect(front, place, arrived)


REQUESTS: dict[str, Callable[[str], Any]] = {
    "find": lambda url: JobServer(url, patience=1).find("a"),
    "jobs": lambda url: JobServer(url, patience=1).jobs(),
    "submit": lambda url: JobServer(url, patience=1).submit("a", "true", {}, {}),
    "stop": lambda url: JobServer(url, patience=1).stop("a"),
    "block": lambda url: RayCluster(job_server=url, token=KEY, headers={"X": KEY}).get_client(),
    "catalog, token": lambda url: open_catalog({"type": "rest", "uri": url, "token": KEY}),
    "catalog, client": lambda url: open_catalog(
        {"type": "rest", "uri": url, "credential": f"nightly:{KEY}"}
    ),
    "catalog, header": lambda url: open_catalog(
        {"type": "rest", "uri": url, "header.X-Api-Key": KEY, "token": KEY}
    ),
}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_HEADERS", f'{{"Authorization": "Bearer {KEY}", "X-Key": "{KEY}"}}')
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", KEY)


@pytest.mark.parametrize("status", REDIRECTS)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_redirect_is_refused_with_its_host(request_name: str, status: int) -> None:
    with redirecting(status) as server:
        with pytest.raises(ConfigError, match=f"redirects to {server.place}, ") as caught:
            REQUESTS[request_name](server.url)
        assert server.arrived == [] and KEY not in str(caught.value)


def test_the_doctor_follows_no_redirect_with_keys() -> None:
    with redirecting(302) as server:
        found = services.job_server(ClusterAccess(job_server=server.url, headers={"X-Key": KEY}))
        assert found.mark == "fail" and f"redirects to {server.place}" in found.found
        assert "write its address" in found.remedy and server.arrived == []


def test_a_catalog_of_a_job_that_redirects_is_no_source() -> None:
    with redirecting(307) as server:
        catalog = {"type": "rest", "uri": server.url, "credential": f"nightly:{KEY}"}
        with pytest.raises(RayBatchError, match=f"redirects to {server.place}"):
            peek(Source(uri="a.b", catalog=catalog))
        assert server.arrived == []


def test_headers_of_a_source_stay_with_its_host(tmp_path: Path) -> None:
    with redirecting(302, final=401) as server:
        source = Source(
            uri=f"{server.url}/a.csv",
            options={"headers": {"Authorization": KEY, "X-Key": KEY}},
            web={"allow_private": True},
        )
        with pytest.raises(SourceError, match=rf"redirects to {server.place}\S*, which answers"):
            peek(source)
        assert server.arrived and KEY not in " ".join(server.arrived)
