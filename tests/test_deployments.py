"""deployments/: the files, and the whole way through a real Prefect server and worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pyarrow.parquet as pq
import pytest
import yaml
from prefect.utilities.callables import parameter_schema

from prefect_raybatch import BatchJob, batch_inference, runs
from prefect_raybatch import flow as flows
from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import companies, write_customers
from prefect_raybatch.storage import open_store
from prefect_raybatch.verify import verify

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "deployments"
BIN = Path(sys.executable).parent
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    item["name"]: item
    for item in yaml.safe_load((FOLDER / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
}


# --- the files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dev", "nightly"])
def test_parameters_are_a_job_and_hold_no_keys(name: str) -> None:
    item = DEPLOYMENTS[name]
    job = BatchJob.from_dict(item["parameters"]["job"])
    assert not job.source.options and not job.output.options
    assert item["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert item["pull"] and item["entrypoint"] == "prefect_raybatch.flow.batch_inference"


def test_the_dev_job_is_the_demo_over_the_file_beside_it(tmp_path: Path) -> None:
    job = BatchJob.from_dict(DEPLOYMENTS["dev"]["parameters"]["job"])
    assert (job.prompt.system, job.prompt.template) == (SYSTEM, TEMPLATE)
    assert job.sampling.choice == list(LABELS) and job.engine.model == "demo"
    write_customers(tmp_path / "again.csv", 300, 7)
    assert (tmp_path / "again.csv").read_bytes() == (ROOT / job.source.uris[0]).read_bytes()


def test_the_parameter_form() -> None:
    schema = parameter_schema(batch_inference).model_dump()
    assert list(schema["properties"]) == ["job", "run_key", "scheduled_for"]
    assert schema["required"] == ["job"]
    assert schema["properties"]["scheduled_for"]["anyOf"][0]["format"] == "date-time"
    form_is_whole(schema)


def form_is_whole(schema: dict[str, Any]) -> None:
    """Every reference leads somewhere, and every field of the job has title, text and place."""
    groups = schema["definitions"]

    def follow(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/definitions/") in groups, value
            for inner in value.values():
                follow(inner)
        elif isinstance(value, list):
            for inner in value:
                follow(inner)

    follow(schema)
    assert {"BatchJob", "Source", "Prompt", "Sampling", "Engine", "Output", "Limits"} <= set(groups)
    for name, group in groups.items():
        positions = []
        for field, given in group["properties"].items():
            # What a field shares with the group it refers to is written there alone.
            shown = {**groups.get(given.get("$ref", "").rpartition("/")[2], {}), **given}
            assert shown["title"] and shown["description"], f"{name}.{field}"
            positions.append(shown["position"])
        assert len(set(positions)) == len(positions), name
    assert groups["Source"]["properties"]["format"]["enum"] == ["auto", "parquet", "csv", "jsonl"]
    assert groups["Engine"]["properties"]["device"]["enum"] == ["auto", "gpu", "cpu"]
    assert "schema" in groups["Output"]["properties"]  # by its alias, as a person writes it


def test_a_missed_night_gets_the_key_it_would_have_had(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    class Planned(Exception):
        pass

    def plan_shards(job: BatchJob, key: str) -> None:
        keys.append(key)
        raise Planned

    monkeypatch.setattr(flows, "plan_shards", plan_shards)
    job = BatchJob.from_dict(DEPLOYMENTS["dev"]["parameters"]["job"])
    night = datetime(2026, 3, 1, 2, 0, tzinfo=ZoneInfo("Europe/Berlin"))
    monkeypatch.setattr(flows, "scheduled_start", lambda: night)
    for arguments in ({}, {"scheduled_for": night}, {"scheduled_for": night.astimezone(UTC)}):
        with pytest.raises(Planned):
            batch_inference.fn(job, **arguments)
    assert set(keys) == {"dev-20260301T010000Z"} == {runs.default_run_key(job, night)}
    with pytest.raises(Planned):
        batch_inference.fn(job, "mine", scheduled_for=night)
    assert keys[-1] == "mine"
    with pytest.raises(Exception, match="timezone"):  # which night would that be?
        batch_inference.validate_parameters({"job": job, "scheduled_for": "2026-03-01T02:00:00"})


def test_the_kubernetes_manifests_fit_together() -> None:
    text = (FOLDER / "kuberay.yaml").read_text(encoding="utf-8")
    found = {item["kind"]: item for item in yaml.safe_load_all(text)}
    assert set(found) == {"RayCluster", "RayJob"}
    cluster = found["RayCluster"]["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    version = cluster["rayVersion"]
    assert version.startswith("2.60.")
    for group in groups:
        pod = group["template"]["spec"]
        shm = {v["name"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"}
        for container in pod["containers"]:
            mounts = {m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"}
            assert mounts and mounts <= shm
            assert "limits" in container["resources"]
    assert found["RayJob"]["spec"]["clusterSelector"] == {
        "ray.io/cluster": found["RayCluster"]["metadata"]["name"]
    }
    assert found["RayJob"]["spec"]["entrypoint"].startswith("raybatch run ")
    assert found["RayJob"]["spec"]["shutdownAfterJobFinishes"] is False


# --- the whole way ------------------------------------------------------------------------------


class Prefect:
    """A server with a database of its own, and commands against it."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_"))}
        self.env = {
            **kept,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")])),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        self.home, self.started = home, list[subprocess.Popen[bytes]]()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.home / f"{arguments[0]}.log").open("ab")
        process = subprocess.Popen(
            ["prefect", *arguments], env=self.env, cwd=ROOT, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def call(self, *arguments: str) -> str:
        done = subprocess.run(
            ["prefect", *arguments], env=self.env, cwd=ROOT, capture_output=True, text=True,
            timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, path: str, body: Any = None) -> Any:
        answer = (
            httpx.get(f"{self.url}/{path}", timeout=30)
            if body is None
            else httpx.post(f"{self.url}/{path}", json=body, timeout=30)
        )
        answer.raise_for_status()
        return answer.json()

    def until(self, look: Callable[[], Any], seconds: float, what: str) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if value := look():
                    return value
            time.sleep(0.5)
        logs = [path.read_text()[-3000:] for path in self.home.glob("*.log")]
        pytest.fail(f"{what} did not come within {seconds:g} s:\n" + "\n".join(logs))

    def state(self, run: str) -> dict[str, Any]:
        return dict(self.ask(f"flow_runs/{run}")["state"])

    def stop(self) -> None:
        for process in reversed(self.started):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    made = Prefect(tmp_path_factory.mktemp("prefect"))
    try:
        made.start("server", "start", "--host", "127.0.0.1", "--port", str(made.port))
        made.until(lambda: made.ask("health"), 120, "the server")
        yield made
    finally:
        made.stop()


@pytest.mark.e2e
def test_deployed_scheduled_run_by_a_worker_and_proved(prefect: Prefect, tmp_path: Path) -> None:
    prefect.call("work-pool", "create", "raybatch", "--type", "process")
    prefect.call("--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    found = {item["name"]: item for item in prefect.ask("deployments/filter", {})}
    assert set(found) == {"dev", "nightly"}
    for item in found.values():
        form_is_whole(item["parameter_openapi_schema"])
        assert item["work_pool_name"] == "raybatch"
        assert item["global_concurrency_limit"]["limit"] == 1
        assert item["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    (schedule,) = found["nightly"]["schedules"]
    assert schedule["slug"] == "nightly" and schedule["active"]
    # Nothing of the machine that deploys goes with the deployment that other machines run.
    assert str(ROOT) not in str({**found["nightly"], "entrypoint": ""})

    night = found["nightly"]["id"]
    coming = prefect.until(
        lambda: prefect.ask("flow_runs/filter", {"deployments": {"id": {"any_": [night]}}}),
        60,
        "the nightly deployment's next runs",
    )
    for run in coming:
        start = datetime.fromisoformat(run["expected_start_time"])
        assert start.astimezone(ZoneInfo("Europe/Berlin")).strftime("%H:%M") == "02:00"
        assert start > datetime.now(UTC)

    dev, out = found["dev"]["id"], str(tmp_path / "out")
    job = {**found["dev"]["parameters"]["job"], "output": {"uri": out, "column": "industry"}}
    body = {"parameters": {"job": job, "scheduled_for": "2026-03-01T02:00:00+01:00"}}
    prefect.start("worker", "start", "--pool", "raybatch", "--name", "test")
    run = prefect.ask(f"deployments/{dev}/create_flow_run", body)["id"]
    prefect.until(lambda: prefect.state(run)["type"] == "RUNNING", 90, "the run's start")

    second = prefect.ask(f"deployments/{dev}/create_flow_run", body)["id"]
    refused = prefect.until(
        lambda: (s := prefect.state(second)) and s["type"] == "CANCELLED" and s,
        60,
        "the refusal of a second run",
    )
    assert "concurrency limit" in refused["message"]
    assert prefect.state(run)["type"] == "RUNNING", "the first had ended: nothing was tested"

    end = prefect.until(
        lambda: (s := prefect.state(run))["type"] not in ("RUNNING", "PENDING") and s,
        240,
        "the end",
    )
    assert end["type"] == "COMPLETED", end
    proof = verify(open_store(f"{out}/dev-20260301T010000Z"))
    assert proof.ok and (proof.rows, proof.data, proof.quarantined) == (300, 300, 0)
    answers = pq.read_table(f"{out}/dev-20260301T010000Z/data")["industry"].to_pylist()
    truth = [label for _, label in companies(300, 7, "all")]
    assert sum(a == b for a, b in zip(answers, truth, strict=True)) >= 0.95 * 300
