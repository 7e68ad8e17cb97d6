"""Settings for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers import environ
from hypothesis import HealthCheck, settings

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


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A small Ray cluster of this module's own; its workers can import the tests' helpers."""
    import ray

    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()
