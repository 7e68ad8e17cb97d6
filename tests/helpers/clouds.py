"""The servers of Google's and Azure's storage that a test of stores runs on."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.azurite import running_azurite
from helpers.gcs_server import GcsServer, serving
from prefect_raybatch.storage import Store, open_store

CLOUDS = ("gs", pytest.param("az", marks=pytest.mark.whole))


@dataclass(frozen=True)
class Cloud:
    """A server, its scheme and what `open_store` takes for it. It has one bucket: `bucket`."""

    scheme: str
    endpoint: str
    options: dict[str, Any]
    secret: str  # the option that holds the credential
    address: str  # the option that holds the server's URL
    env: dict[str, str]  # the options as environment variables

    def opened(self, bucket: str = "bucket", **options: str) -> Store:
        """Open a folder of its own."""
        uri = f"{self.scheme}://{bucket}/{uuid.uuid4()}"
        return open_store(uri, {**self.options, **options})


@contextmanager
def cloud_server(scheme: str, folder: Path) -> Iterator[Cloud]:
    """Run the server of a scheme, which may keep files in `folder`."""
    if scheme == "gs":
        with serving(GcsServer("secret-token", "bucket")) as running:
            names = ("bearer_token", "base_url")
            yield Cloud("gs", running.endpoint, running.options, *names, running.env)
    else:
        with running_azurite(folder, "bucket") as started:
            names = ("account_key", "endpoint")
            yield Cloud("az", started.endpoint, started.options, *names, started.env)
