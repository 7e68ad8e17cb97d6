"""Azurite, Microsoft's own emulator of Azure Blob Storage, for the tests.

https://learn.microsoft.com/azure/storage/common/storage-use-azurite
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote

from programs import require

from helpers.ports import free_ports
from helpers.processes import until

VERSION = "2021-08-06"  # of the protocol


@dataclass(frozen=True)
class Azurite:
    """A running server with one account, whose key is made up for each start."""

    port: int
    account: str = "testaccount"
    key: str = field(
        default_factory=lambda: base64.b64encode(secrets.token_bytes(64)).decode(), repr=False
    )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.account}"

    @property
    def options(self) -> dict[str, Any]:
        """What `open_store` takes."""
        return {"account_name": self.account, "account_key": self.key, "endpoint": self.endpoint}

    @property
    def env(self) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }

    def create_container(self, name: str) -> None:
        """Create a container, signed with the account's key.

        https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
        """
        date = formatdate(usegmt=True)
        headers = f"x-ms-date:{date}\nx-ms-version:{VERSION}\n"
        place = f"/{self.account}/{self.account}/{name}\nrestype:container"
        text = f"PUT{chr(10) * 12}{headers}{place}"
        digest = hmac.digest(base64.b64decode(self.key), text.encode(), hashlib.sha256)
        signature = base64.b64encode(digest).decode()
        asked = urllib.request.Request(
            f"{self.endpoint}/{name}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": VERSION,
                "Authorization": f"SharedKey {self.account}:{signature}",
            },
        )
        urllib.request.urlopen(asked, timeout=60).close()

    def sas(self, container: str, permissions: str) -> str:
        """Return a SAS of a container: r(ead), c(reate), w(rite), d(elete) and l(ist), in any.

        https://learn.microsoft.com/rest/api/storageservices/create-service-sas
        """
        expiry, version = "2099-01-01T00:00:00Z", "2019-12-12"
        place = f"/blob/{self.account}/{container}"
        fields = [permissions, "", expiry, place, "", "", "", version, "c", *[""] * 6]
        digest = hmac.digest(base64.b64decode(self.key), "\n".join(fields).encode(), hashlib.sha256)
        signature = quote(base64.b64encode(digest).decode(), safe="")
        return f"sv={version}&sr=c&sp={permissions}&se={quote(expiry)}&sig={signature}"

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=60).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True


@contextmanager
def running_azurite(folder: Path, *containers: str) -> Iterator[Azurite]:
    """Run Azurite with these containers; it keeps its files in `folder`."""
    require("azurite")
    server = Azurite(free_ports(1)[0])
    command = ["azurite-blob", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    command += ["--location", str(folder), "--blobPort", str(server.port)]
    accounts = {"AZURITE_ACCOUNTS": f"{server.account}:{server.key}"}
    with open(folder / "azurite.log", "wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **accounts}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: server.answers() or process.poll() is not None, 60, "Azurite")
        for name in containers:
            server.create_container(name)
        yield server
    finally:
        process.terminate()
        process.wait()
