"""Settings for all tests, and the servers that they share.

A server is started when the first test asks for it and ends with the session. What tests keep
apart on it is theirs to choose: a bucket or a prefix, names of flows and work pools, run keys. A
test about a server's own life starts one for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import environ
from helpers.prefect_server import Prefect, prefect_server, settings_for
from helpers.ray_head import ROOT, Head, start_head
from hypothesis import HealthCheck, settings
from s3server import S3Server, start_s3

for name, value in environ.BUSY.items():
    os.environ.setdefault(name, value)
os.environ["PYTHONPATH"] = environ.python_path()

# A slow example is no failure, and no timing decides anything.
settings.register_profile(
    "prefect_raybatch",
    deadline=None,
    max_examples=60,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(  # make chaos: the same tests, for minutes
    "chaos", settings.get_profile("prefect_raybatch"), max_examples=1000
)
settings.load_profile("prefect_raybatch")

# Files that use a shared server stay in one process where several run the tests (pytest -n), so
# that there is one of it; these come first, being the longest. Other files go to whoever is free.
SHARED = ("ray_head", "prefect_process", "s3_server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts each file as a whole into a group: that of the first server in `SHARED` that one of its
    tests uses, or its own."""
    groups: dict[Path, str] = {}
    for server in reversed(SHARED):
        for item in items:
            if server in getattr(item, "fixturenames", ()):
                groups[item.path] = server
    for item in items:
        group = groups.get(item.path, str(item.path))
        item.add_marker(pytest.mark.xdist_group(group))
    order = {server: place for place, server in enumerate(SHARED)}
    items.sort(key=lambda item: order.get(groups.get(item.path, ""), len(SHARED)))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with start_s3(tmp_path_factory.mktemp("s3")) as server:
        print(f"\nS3 tests run on {server.kind}")
        yield server


@pytest.fixture(scope="module")
def s3(s3_server: S3Server, request: pytest.FixtureRequest) -> S3Server:
    """The S3 server, with a bucket of this module's own: BUCKET, or the module's name."""
    module = request.module.__name__.rpartition(".")[2]
    name = module.removeprefix("test_").replace("_", "-")
    s3_server.create_bucket(getattr(request.module, "BUCKET", name))
    return s3_server


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Head]:
    """A Ray head of four CPUs with its job server; its workers can import the tests' helpers."""
    with start_head(4, PYTHONPATH=f"{ROOT}{os.pathsep}{environ.python_path()}") as head:
        yield head


@pytest.fixture(scope="module")
def local_ray(ray_head: Head) -> Iterator[None]:
    """This process as a driver of the shared head."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # as the head
        ray.init(
            address=ray_head.address,
            logging_level="error",
            log_to_driver=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="session")
def prefect_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """A Prefect server, and the worker that a test starts for it."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as made:
        yield made


@pytest.fixture(scope="session")
def deployed(prefect_process: Prefect) -> Prefect:
    """The shared Prefect server with deployments/prefect.yaml and a worker that runs them."""
    prefect_process.env["RAY_AUTH_MODE"] = "disabled"  # as the shared head
    prefect_process.deploy()
    prefect_process.work()
    return prefect_process


@pytest.fixture(scope="module")
def prefect_api(prefect_process: Prefect) -> Iterator[None]:
    """Flows of this process run against the shared Prefect server."""
    with settings_for(prefect_process):
        yield
