"""A real Ray cluster that asks for a token: joined with the right one, else told in a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ray_head import Head, start_head
from helpers.small import make_job

from prefect_raybatch.cluster.connect import connected
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.doctor import services
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.remote.client import JobServer

TOKEN, OTHER = "0123456789abcdef" * 3, "f" * 48
WITH_TOKEN = """
import json, sys
from prefect_raybatch.cluster.connect import connected
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.job.cluster import ClusterAccess
from helpers.small import make_job
import os
job = make_job(cluster={"block": "ray-cluster/locked"})
access = ClusterAccess(sys.argv[1], token=sys.stdin.read(), block="ray-cluster/locked")
job = job.model_copy(update={"cluster": job.cluster.with_access(access)})
with connected(cluster_spec(job)) as have:
    import ray
    one = ray.get(ray.remote(num_cpus=0)(lambda: 1).remote())
left = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
print(json.dumps({"cpus": have.cpus, "one": one, "left": left}))
"""


@pytest.fixture(scope="module")
def locked() -> Iterator[Head]:
    path = os.pathsep.join(sys.path)
    with start_head(2, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN, PYTHONPATH=path) as head:
        yield head


@pytest.fixture(autouse=True)
def no_token_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def reached(access: ClusterAccess) -> BatchJob:
    job = make_job(cluster={"block": "ray-cluster/locked"})
    return job.model_copy(update={"cluster": job.cluster.with_access(access)})


def test_a_cluster_by_address_is_joined_with_the_token_of_its_block(locked: Head) -> None:
    def refused(token: str | None) -> str:
        access = ClusterAccess(locked.address, token=token, block="ray-cluster/locked")
        with pytest.raises(ConfigError) as found, connected(cluster_spec(reached(access))):
            pass
        return str(found.value)

    assert refused(None).startswith(
        f"the Ray cluster at {locked.address} requires Ray's token, but"
    )
    wrong = refused(OTHER)
    assert wrong.startswith(
        f"the Ray cluster at {locked.address} rejects Ray's token from the block"
    )
    assert OTHER not in wrong
    # Ray keeps a token for the life of a process, and other tests of this one join other clusters.
    done = subprocess.run(
        [sys.executable, "-c", WITH_TOKEN, locked.address],
        input=TOKEN,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"cpus": 2.0, "one": 1, "left": {}}


def test_its_job_server_takes_the_token_as_a_header(locked: Head) -> None:
    def server(token: str | None) -> JobServer:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        access = ClusterAccess(None, locked.url, headers, token, "ray-cluster/locked")
        return JobServer(locked.url, patience=60, access=access)

    assert server(TOKEN).jobs() == [] and server(TOKEN).find("raybatch-none") is None
    with pytest.raises(
        ConfigError, match=r"requires Ray's token, but none was sent\. Save it as the token"
    ):
        server(None).jobs()
    with pytest.raises(ConfigError, match="rejects Ray's token from the block ray-cluster/locked"):
        server(OTHER).jobs()
    for token, found in (
        (TOKEN, "Ray 2."),
        (None, "none was sent"),
        (OTHER, "rejects Ray's token"),
    ):
        finding = services.job_server(server(token).access)
        assert found in finding.found and (token == TOKEN or "token" in finding.remedy)
