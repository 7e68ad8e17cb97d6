"""Keys go to the server that they were given for, and never on to where it redirects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from attacks import METADATA_URLS, PLANTED, REDIRECTS
from helpers.policies import set_policy
from helpers.specs import reads
from helpers.web_server import served

from prefect_raybatch.doctor import services
from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError, StoreError
from prefect_raybatch.flow.blocks.cluster import RayCluster
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.policy.in_force import operator_policy, policy_applied
from prefect_raybatch.remote.client import JobServer
from prefect_raybatch.source import peek
from prefect_raybatch.source.tables.iceberg import open_catalog
from prefect_raybatch.stages.images.decode import BadImage
from prefect_raybatch.stages.images.http import Http
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.storage.internet import MOVED
from prefect_raybatch.storage.redirects import redirect_problem

KEY = PLANTED


@dataclass
class Redirect:
    """A server at `url` that redirects to `place`, and the requests that got there."""

    url: str
    place: str
    arrived: list[str]


@contextmanager
def redirecting(status: int, final: int = 200, place: str = "") -> Iterator[Redirect]:
    """A server that redirects to `place`, by default to another one of this machine."""
    arrived: list[str] = []

    class Target(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            arrived.append(f"{self.command} {self.path} {dict(self.headers)} {body}")
            self.send_response(final)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_HEAD = do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with served(Target) as target:
        place = place or target.replace("127.0.0.1", "localhost")

        class Front(Target):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(status)
                self.send_header("Location", f"{place}{self.path}")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_HEAD = do_PUT = do_GET

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


def test_a_redirect_on_the_same_host_names_it_without_user_and_query() -> None:
    problem = redirect_problem(f"http://nightly:{KEY}@h:81/a", f"/b?sig={KEY}")
    assert problem.fault.startswith("http://h:81 redirects to http://h:81, but requests with ")
    assert "an invalid URL" in redirect_problem("http://h", "http://h:port/").fault
    problem = redirect_problem("http://h:81/a", f"http://{KEY}@[fd00::1]:82/{KEY}")
    assert problem.fault.startswith("http://h:81 redirects to http://[fd00::1]:82, but")
    assert "http://h redirects to http://h, but" in redirect_problem("http://h/a", None).fault


def test_the_doctor_follows_no_redirect_with_keys() -> None:
    with redirecting(302) as server:
        found = services.job_server(ClusterAccess(job_server=server.url, headers={"X-Key": KEY}))
        assert found.mark == "fail" and f"redirects to {server.place}" in found.found
        assert "use its address" in found.remedy and server.arrived == []


def test_a_catalog_of_a_job_that_redirects_is_no_source() -> None:
    with redirecting(307) as server:
        catalog = {"type": "rest", "uri": server.url, "credential": f"nightly:{KEY}"}
        with pytest.raises(RayBatchError, match=f"redirects to {server.place}"):
            peek(reads(uri="a.b", catalog=catalog))
        assert server.arrived == []


@pytest.mark.parametrize("status", REDIRECTS)
@pytest.mark.parametrize("call", ["read", "stat", "list", "put", "upload"])
def test_the_s3_client_follows_no_redirect(tmp_path: Path, call: str, status: int) -> None:
    """Its requests hold a session's token, and its answers would be read as the input."""
    (tmp_path / "a").write_text("a")
    calls: dict[str, Callable[[Store], Any]] = {
        "read": lambda store: store.read("a"),
        "stat": lambda store: store.stat("a"),
        "list": lambda store: list(store.list()),
        "put": lambda store: store.put("a", b"a"),
        "upload": lambda store: store.put_file("a", tmp_path / "a"),
    }
    with redirecting(status) as server:
        options = {"endpoint_url": server.url, "key": "a", "secret": KEY, "token": KEY}
        with pytest.raises(StoreError, match=f"redirects to {server.place}, ") as caught:
            calls[call](open_store("s3://bucket/folder", options))
        assert server.arrived == [] and KEY not in str(caught.value)


@pytest.mark.parametrize("listed", [[], ["localhost:1"], ["*.localhost"]])
@pytest.mark.parametrize("status", sorted(MOVED))
def test_a_source_is_not_redirected_to_a_host_that_the_policy_does_not_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, listed: list[str]
) -> None:
    with redirecting(status) as server:
        hosts = [urlsplit(server.url).netloc, *listed]
        set_policy(monkeypatch, tmp_path, hosts=hosts, allow_private=True)
        source = reads(uri=f"{server.url}/a.csv?sig={KEY}", web={"allow_private": True})
        words = rf"redirects to {server.place}.*may not name the host localhost"
        with policy_applied(operator_policy()), pytest.raises(ConfigError, match=words) as caught:
            peek(source)
        assert server.arrived == [] and KEY not in str(caught.value)


def test_a_source_is_redirected_to_a_host_that_the_policy_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redirecting(302, final=404) as server:
        set_policy(monkeypatch, tmp_path, hosts=["127.0.0.1", "localhost"], allow_private=True)
        source = reads(uri=f"{server.url}/a.csv", web={"allow_private": True})
        with policy_applied(operator_policy()), pytest.raises(SourceError, match="HTTP 404"):
            peek(source)
        assert len(server.arrived) == 1


@pytest.mark.parametrize("place", [*METADATA_URLS, "file:///etc/passwd", "ftp://localhost/a"])
def test_no_redirect_leads_to_a_machines_keys_or_files(place: str) -> None:
    """Whatever a policy allows."""
    with redirecting(302, place=place) as server:
        source = reads(uri=f"{server.url}/a.csv", web={"allow_private": True})
        with pytest.raises(SourceError, match=r"not public|not http"):
            peek(source)
        with pytest.raises(BadImage, match=r"not public|not http"):
            Http(1000, seconds=5, allow_private=True).fetch(f"{server.url}/a.png")


def test_headers_of_a_source_stay_with_its_host(tmp_path: Path) -> None:
    with redirecting(302, final=401) as server:
        source = reads(
            uri=f"{server.url}/a.csv",
            options={"headers": {"Authorization": KEY, "X-Key": KEY}},
            web={"allow_private": True},
        )
        with pytest.raises(SourceError, match=rf"redirects to {server.place}\S*, which answers"):
            peek(source)
        assert server.arrived and KEY not in " ".join(server.arrived)
