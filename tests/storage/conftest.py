"""The servers of clouds, one of each for the tests of a file, and a clock for retries."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from helpers.clouds import CLOUDS, Cloud, cloud_server

from prefect_raybatch.storage import s3
from prefect_raybatch.storage.clouds import store


@pytest.fixture(scope="module")
def gs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with cloud_server("gs", tmp_path_factory.mktemp("gs")) as running:
        yield running


@pytest.fixture(scope="module")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with cloud_server("az", tmp_path_factory.mktemp("az")) as running:
        yield running


@pytest.fixture(scope="module", params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Cloud:
    found: Cloud = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def silent() -> Iterator[str]:
    """The endpoint of a server that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.at, self.slept = 1000.0, list[float]()

    def monotonic(self) -> float:
        return self.at

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.at += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the stores' retries, whose pauses are as long as they can be."""
    made = Clock()
    longest = SimpleNamespace(uniform=lambda *bounds: {(0.5, 1.0): 1.0}[bounds])
    for module in (s3, store):
        monkeypatch.setattr(module, "time", made)
        monkeypatch.setattr(module, "random", longest)
    return made
