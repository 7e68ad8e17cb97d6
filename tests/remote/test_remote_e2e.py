"""Runs that outlive their flow, with real vLLM, a real Ray job server and a real Prefect server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.environ import clean
from helpers.ray_head import ROOT, free_ports, start_head

from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import write_customers
from prefect_raybatch.remote.server import JobServer

pytestmark = pytest.mark.e2e

BIN = Path(sys.executable).parent
ROWS, SHARD = 6000, 100


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Prefect server of this module's own, and what makes processes use it."""
    (port,) = free_ports(1)
    env = {
        **clean(),
        "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
    }
    command = [str(BIN / "prefect"), "server", "start", "--port", str(port)]
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: asked(env, "print(client.hello().status_code)") == 200, 120)
        yield env
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


@pytest.fixture(scope="module")
def server(env: dict[str, str]) -> Iterator[JobServer]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with start_head(4, PYTHONPATH=str(ROOT)) as url:
        yield JobServer(url)
    del os.environ["RAY_AUTH_MODE"]


def until(holds: Any, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
    return found


def asked(env: dict[str, str], code: str) -> Any:
    """What a line of code with a Prefect `client` prints, as JSON; None when it fails."""
    whole = (
        "import json, time\nfrom uuid import UUID\n"
        "from prefect.client.orchestration import get_client\n"
        "from prefect.states import Cancelling\n"
        f"with get_client(sync_client=True) as client:\n    {code}\n"
    )
    done = subprocess.run([sys.executable, "-c", whole], env=env, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def start(folder: Path, env: dict[str, str], url: str) -> subprocess.Popen[bytes]:
    job = {
        "name": "industries",
        "source": {"uri": str(folder / "customers.csv"), "rows_per_shard": SHARD},
        "prompt": {"system": SYSTEM, "template": TEMPLATE},
        "sampling": {"temperature": 0, "max_tokens": 16, "choice": list(LABELS)},
        "engine": {"model": "demo", "max_model_len": 256},
        "output": {"uri": str(folder / "out"), "column": "industry"},
        "cluster": {"job_server": url},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    if not (folder / "customers.csv").exists():
        write_customers(folder / "customers.csv", ROWS, 3)
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [str(BIN / "raybatch"), "run", "job.yaml", "--run-key", "k"],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def committed(folder: Path) -> int:
    return len(list((folder / "out/k/_raybatch/commits").glob("*.json")))


def working(folder: Path, process: subprocess.Popen[bytes], commits: int) -> None:
    def holds() -> bool:
        assert process.poll() is None, (folder / "log.txt").read_text()
        return committed(folder) >= commits

    until(holds, 150)


def job_of(server: JobServer, folder: Path) -> Any:
    (job,) = [j for j in server.jobs() if j.metadata.get("raybatch_run") == str(folder / "out/k")]
    return job


def engines() -> list[str]:
    """Engine actors of any Ray on this machine that belongs to this module's head."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        title = " ".join(process.info["cmdline"] or ())
        mine = (process.info["environ"] or {}).get("PYTHONPATH", "").startswith(str(ROOT))
        if mine and ("EngineStage" in title or "VLLM::" in title):
            found.append(title)
    return found


def test_a_flow_killed_in_the_middle_finds_its_job_again(
    tmp_path: Path, env: dict[str, str], server: JobServer
) -> None:
    flow = start(tmp_path, env, server.url)
    working(tmp_path, flow, 3)
    os.killpg(flow.pid, signal.SIGKILL)
    flow.wait()
    before, job = committed(tmp_path), job_of(server, tmp_path)
    assert job.live and before < ROWS // SHARD
    until(lambda: committed(tmp_path) > before, 60)  # nobody watches, the work goes on
    assert engines(), "the engines are told by their names"

    again = start(tmp_path, env, server.url)
    assert again.wait(240) == 0, (tmp_path / "log.txt").read_text()
    assert job_of(server, tmp_path).id == job.id  # one job for both flows
    assert job_of(server, tmp_path).status == "SUCCEEDED"
    records = [p.name for p in (tmp_path / "out/k/_raybatch/jobs").iterdir()]
    assert sorted(records) == ["0001.end.json", "0001.json"]
    command = [str(BIN / "raybatch"), "verify", str(tmp_path / "out/k"), "--json"]
    proof = subprocess.run(command, env=env, capture_output=True, text=True)
    assert proof.returncode == 0 and json.loads(proof.stdout)["data"] == ROWS
    assert pq.read_table(tmp_path / "out/k/data")["_row"].to_pylist() == list(range(ROWS))
    logs = asked(env, "print(json.dumps([l.message for l in client.read_logs()]))")
    assert any("all 60 shards are committed" in text for text in logs), logs


def test_cancelling_ends_job_and_engines_within_30_s_and_keeps_commits(
    tmp_path: Path, env: dict[str, str], server: JobServer
) -> None:
    until(lambda: not engines(), 30)
    flow = start(tmp_path, env, server.url)
    working(tmp_path, flow, 3)
    job = job_of(server, tmp_path)
    id = str(UUID(job.metadata["raybatch_flow_run"]))
    labels = asked(env, f"print(json.dumps(client.read_flow_run(UUID('{id}')).labels))")
    assert labels["raybatch.job"] == job.id
    cancel = f"client.set_flow_run_state(UUID('{id}'), Cancelling(), force=True); print(1)"
    assert asked(env, cancel) == 1  # what the page does; then a worker ends the process
    began = time.monotonic()
    flow.send_signal(signal.SIGTERM)
    until(lambda: not job_of(server, tmp_path).live and not engines(), 30)
    assert time.monotonic() - began < 30
    assert job_of(server, tmp_path).status == "STOPPED"
    flow.wait(30)
    kept = committed(tmp_path)
    time.sleep(3)
    assert 3 <= kept == committed(tmp_path) < ROWS // SHARD
    command = [str(BIN / "raybatch"), "reconcile", server.url, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["actions"] == [], done.stderr
