"""A run that outlives its flow, with real vLLM, a real Ray job server and a real Prefect server.

Its cluster is made by the flow at an API server of Kubernetes that stands in; behind it is a real
head, as KubeRay would start one.

That a cancelled flow ends its job is in test_browser.py, where it is cancelled by a click.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from helpers.kube_server import KubeServer
from helpers.prefect_server import ROOT, Prefect
from helpers.processes import ENGINE, below, held, until
from helpers.ray_head import Head

from prefect_raybatch.api import plan_run
from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import write_customers
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.kuberay.manifest import HOLDER
from prefect_raybatch.kuberay.run_cluster import notes_of
from prefect_raybatch.remote.client import JobServer, RayJob

pytestmark = [pytest.mark.e2e, pytest.mark.whole, pytest.mark.timeout(1200)]

BIN = Path(sys.executable).parent
ROWS, SHARD, KEY = 600, 50, "outlives-its-flow"
ACCEPTED = "sampling.max_tokens"


@pytest.fixture
def env(prefect_process: Prefect, kube: KubeServer) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "KUBECONFIG": os.environ["KUBECONFIG"]}
    return {**prefect_process.env, **own, "RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def server(ray_head: Head, monkeypatch: pytest.MonkeyPatch) -> JobServer:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return JobServer(ray_head.url)


def job_at(folder: Path, url: str) -> dict[str, Any]:
    return {
        "name": "industries",
        "source": {"uri": str(folder / "customers.csv"), "rows_per_shard": SHARD},
        "prompt": {"system": SYSTEM, "template": TEMPLATE},
        "sampling": {"temperature": 0, "max_tokens": 16, "choice": list(LABELS)},
        "engine": {"model": "demo", "max_model_len": 256},
        "output": {"uri": str(folder / "out"), "column": "industry"},
        "cluster": {
            "kubernetes": {"image": "raybatch:1", "gpus_per_worker": 0, "url": url},
            "prepare": {"concurrency": 1},  # each process of Ray imports for itself
        },
    }


def planned_otherwise(folder: Path, url: str) -> None:
    """The run is there already, by a job that differs from the file's in one field."""
    write_customers(folder / "customers.csv", ROWS, 3)
    job = job_at(folder, url)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    earlier = {**job, "sampling": {**job["sampling"], "max_tokens": 12}}
    plan_run(BatchJob.from_dict(earlier), KEY)


def start(folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [str(BIN / "raybatch"), "run", "job.yaml", "--run-key", KEY, "--accept", ACCEPTED]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )


def committed(folder: Path) -> int:
    return len(list((folder / f"out/{KEY}/_raybatch/commits").glob("*.json")))


def working(folder: Path, process: subprocess.Popen[bytes], commits: int) -> None:
    def holds() -> bool:
        assert process.poll() is None, (folder / "log.txt").read_text()
        return committed(folder) >= commits

    until(holds, 300, "the first commits")


def job_of(server: JobServer, folder: Path) -> RayJob:
    at = str(folder / "out" / KEY)
    (job,) = [job for job in server.jobs() if job.metadata.get("raybatch_run") == at]
    return job


def logs(prefect: Prefect, latest: bool = False) -> list[str]:
    """What the flow runs of this run key logged, or the latest of them."""
    named = prefect.ask("flow_runs/filter", {"flow_runs": {"name": {"any_": [KEY]}}})
    ids = [run["id"] for run in sorted(named, key=lambda run: run["created"])]
    asked = {"logs": {"flow_run_id": {"any_": ids[-1:] if latest else ids}}}
    return [x["message"] for x in prefect.ask("logs/filter", asked)]


def test_a_flow_killed_in_the_middle_finds_its_job_again(
    tmp_path: Path,
    env: dict[str, str],
    server: JobServer,
    prefect_process: Prefect,
    ray_head: Head,
    kube: KubeServer,
) -> None:
    made: list[tuple[str, str]] = []

    def operate(what: str, found: dict[str, Any]) -> None:
        made.append((what, found["metadata"]["name"]))
        if what == "made":
            kube.come_up(found["metadata"]["name"], 1)

    kube.operate = operate
    planned_otherwise(tmp_path, server.url)
    with held(lambda: below(ray_head.pid, *ENGINE), lambda: committed(tmp_path), 5.0):
        flow = start(tmp_path, env)
        working(tmp_path, flow, 1)
        os.killpg(flow.pid, signal.SIGKILL)
        flow.wait()
        (name,) = kube.names  # the first flow's, which nobody renews now
        first = notes_of(kube[name])[HOLDER]
        before, job = committed(tmp_path), job_of(server, tmp_path)
        assert job.live and before < ROWS // SHARD
        # Nobody watches, the work goes on.
        until(lambda: committed(tmp_path) > before, 60, "a commit")

        # The job is held until the second flow follows it: beside other work a flow takes longer
        # to start than the job to end.
        at_work = below(ray_head.pid, "prefect_raybatch.remote")
        for process in at_work:
            process.suspend()
    again = start(tmp_path, env)
    try:
        following = f"following the Ray job {job.id}"
        until(lambda: following in logs(prefect_process), 300, "a flow that follows")
        assert kube.names == [name] and notes_of(kube[name])[HOLDER] != first
    finally:
        for process in at_work:
            process.resume()
    assert again.wait(240) == 0, (tmp_path / "log.txt").read_text()
    assert made == [("made", name), ("gone", name)], "one cluster for both flows, and it is ended"
    assert job_of(server, tmp_path).id == job.id  # one job for both flows
    assert job_of(server, tmp_path).status == "SUCCEEDED"
    records = [p.name for p in (tmp_path / "out" / KEY / "_raybatch/jobs").iterdir()]
    assert sorted(records) == ["0001.end.json", "0001.json"]
    command = [str(BIN / "raybatch"), "verify", str(tmp_path / "out" / KEY), "--json"]
    proof = subprocess.run(command, env=env, capture_output=True, text=True)
    assert proof.returncode == 0 and json.loads(proof.stdout)["data"] == ROWS
    assert pq.read_table(tmp_path / "out" / KEY / "data")["_row"].to_pylist() == list(range(ROWS))
    lasts = (
        f"all {ROWS // SHARD} shards are committed",
        f"{ROWS} rows = {ROWS} answered",
    )
    deleted = f"deleted the RayCluster {name}"

    def told_so_far() -> str:
        return "\n".join(logs(prefect_process, latest=True))

    # The server records logs after it has answered.
    until(lambda: all(t in told_so_far() for t in (*lasts, deleted)), 120, "the last lines")
    told = logs(prefect_process, latest=True)
    for last in lasts:
        assert sum(last in text for text in told) == 1, "\n".join(told)
    assert f"using the RayCluster {name}, previously held by {first}" in told
    assert deleted in told
    # What a person accepted went to the cluster with the job, and stands in what it left.
    assert not any("does not use it" in text for text in told)
    root = tmp_path / "out" / KEY
    for left in ("_SUCCESS", "_raybatch/report.json", "_raybatch/jobs/0001.json"):
        (one,) = json.loads((root / left).read_bytes())["accepted"]
        assert (one["field"], one["old"], one["new"]) == (ACCEPTED, "12", "16"), left
    # Its engines worked when it was followed: it never says that they start.
    shown = [text for text in told if f"of {ROWS} rows (" in text]
    assert shown and not any("starting engines" in text for text in shown), "\n".join(shown)
