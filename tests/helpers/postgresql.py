"""A PostgreSQL server of a test's own: Debian's, in a folder that goes away, with one user."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.ports import free_ports

PASSWORD = "pg-s3cret"


def _found(name: str) -> str | None:
    return shutil.which(name) or next(
        iter(sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), reverse=True)), None
    )


def is_installed() -> bool:
    return _found("initdb") is not None


def _program(name: str) -> str:
    found = _found(name)
    assert found, f"{name} is not installed; apt-get install postgresql"
    return found


@contextmanager
def postgresql() -> Iterator[str]:
    """URL of its database, without user and password; the user is reader, with PASSWORD."""
    folder = tempfile.mkdtemp(prefix="pg-")
    # It does not run as root.
    owner: dict[str, Any] = {}
    if os.getuid() == 0:
        owner = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        shutil.chown(folder, "nobody", "nogroup")
    with open(f"{folder}/password", "w") as file:
        file.write(PASSWORD)
    os.chmod(f"{folder}/password", 0o644)
    data = f"{folder}/data"
    made = [_program("initdb"), "-D", data, "-N", "-U", "reader", "-E", "UTF8", "--locale=C"]
    made += ["--auth=scram-sha-256", f"--pwfile={folder}/password"]
    subprocess.run(made, check=True, capture_output=True, cwd=folder, **owner)
    (port,) = free_ports()
    served = [_program("postgres"), "-D", data, "-F", "-p", str(port), "-k", folder]
    served += ["-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=8MB"]
    server = subprocess.Popen(
        served, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **owner
    )
    try:
        until = time.monotonic() + 120
        while subprocess.call([_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]):
            assert server.poll() is None and time.monotonic() < until, "it does not start"
            time.sleep(0.1)
        yield f"postgresql://127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def for_prefect() -> Iterator[dict[str, str]]:
    """The variables that give a Prefect server such a database of its own."""
    with postgresql() as url:
        url = url.replace("postgresql://", f"postgresql+asyncpg://reader:{PASSWORD}@")
        yield {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url}
