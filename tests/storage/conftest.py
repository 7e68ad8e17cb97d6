"""The servers of clouds, one of each for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.clouds import CLOUDS, Cloud, cloud_server


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
