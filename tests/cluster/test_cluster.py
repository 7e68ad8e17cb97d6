"""Where engines are placed, on a real Ray cluster with GPUs that are only said to be there."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pynvml
import pytest
from chaos.cluster import Nodes
from helpers import environ
from helpers.engines import FAILS, FakeEngine, PassedOnEngine
from helpers.nvidia import Card, show
from helpers.processes import until
from helpers.small import make_job
from helpers.spanning import SpanningEngine
from helpers.without_ray import outside_ray

from prefect_raybatch import warm_engines
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.ray_process import WORKER_PYTHON
from prefect_raybatch.compile.job import cluster_spec, compile_job
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.sizing.sizes import Capacity
from prefect_raybatch.stages.block import is_passthrough, units_of
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage

GPUS = 2
ROWS = 48


class PlacedEngine(FakeEngine):
    """Notes its GPUs, and waits for `TOGETHER` engines to be there: one after the other would never
    be."""

    def __init__(self, launch: EngineLaunch):
        import ray

        super().__init__(launch)
        folder, together = Path(launch.env["PLACES"]), int(launch.env["TOGETHER"])
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        (folder / f"{os.getpid()}.json").write_text(json.dumps(gpus))
        until = time.monotonic() + 120
        while len(list(folder.glob("*.json"))) < together:
            if time.monotonic() > until:
                (folder / "alone").touch()
                return
            time.sleep(0.05)


class HeldEngine(FakeEngine):
    """Notes each block that it begins, in a folder of its node; answers once its node and, for the
    last row, all others are told to go on."""

    def __call__(self, table: pa.Table) -> pa.Table:
        import ray

        table = EngineStage.without_committed(self, table)  # type: ignore[arg-type]
        if is_passthrough(table):
            return table
        folder, node = Path(self.spec.env["PLACES"]), ray.get_runtime_context().get_node_id()
        shards = {unit.shard for unit in units_of(table)}
        for shard in shards:
            (folder / node).mkdir(exist_ok=True)
            (folder / node / f"{shard}-{uuid.uuid4().hex}").touch()
        waits = [folder / f"go-{node}", *([folder / "go-last"] if ROWS - 1 in shards else [])]
        until(lambda: all(wait.exists() for wait in waits), 240, "the word to go on")
        return super().__call__(table)


@pytest.fixture(scope="module")
def gpu_cluster() -> Iterator[None]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray sets it for all tests after these
        ray.init(
            address="local", num_cpus=5, num_gpus=GPUS, include_dashboard=False,
            logging_level="error", log_to_driver=False,
        )  # fmt: skip
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture
def second_node(gpu_cluster: None) -> Iterator[None]:
    import ray

    nodes = Nodes(ray.get_runtime_context().gcs_address, env={"PYTHONPATH": environ.python_path()})
    try:
        nodes.add_node("127.0.0.22", 1, gpus=1)
        yield
    finally:
        nodes.stop()
        until(lambda: len(ray_nodes()) == 1, 120, "its end, which the cluster may notice late")


def run_placed(
    folder: Path, together: int, stage: type = PlacedEngine, **engine: Any
) -> list[list[str]]:
    """Runs a small job; the GPUs of each engine that started."""
    table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
    pq.write_table(table, folder / "in.parquet")
    places = folder / "places"
    places.mkdir()
    env = {"PLACES": str(places), "TOGETHER": str(together)}
    job = make_job(
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": 4},
        engine={"num_cpus": 0.5, "env": env, **engine},
        output={"uri": str(folder / "out")},
        limits={"max_failed_rows": 1},
    )
    run = plan_run(job, "key")
    progress = infer_run(job, run, engine=stage)
    assert progress.tally.rows == ROWS and progress.tally.failed == (FAILS < ROWS)
    assert not (places / "alone").exists(), "engines did not start together"
    return [json.loads(file.read_text()) for file in places.glob("*.json")]


@pytest.mark.whole
def test_engines_fill_all_gpus_evenly_and_start_together(gpu_cluster: None, tmp_path: Path) -> None:
    found = run_placed(tmp_path, 2 * GPUS, engines_per_gpu=2)  # replicas: auto
    assert Counter(gpu for gpus in found for gpu in gpus) == {str(i): 2 for i in range(GPUS)}
    assert all(len(gpus) == 1 for gpus in found)


def passed_on(
    folder: Path, places: Path, name: str, rows: range, engines: int = 1
) -> tuple[set[str], set[str]]:
    """Runs a small job on that many engines; the processes that have started one there so far, and
    those that have passed one on."""
    table = pa.table({"id": list(rows), "Company": [f"Company {i}" for i in rows]})
    pq.write_table(table, folder / f"{name}.parquet")
    places.mkdir(exist_ok=True)
    job = make_job(
        name=name,
        source={"uri": str(folder / f"{name}.parquet"), "rows_per_shard": 1},
        engine={
            "num_cpus": 0.5,
            "replicas": engines,
            "env": {"PLACES": str(places), "ENGINES": str(engines)},
        },
        output={"uri": str(folder / name)},
        limits={"max_failed_rows": 1, "engine_deaths": 1},
    )
    run = plan_run(job, "key")
    progress = infer_run(job, run, engine=PassedOnEngine)
    finalize_run(job, run, progress)
    dead = PassedOnEngine.AT in rows
    assert progress.tally.rows == len(rows) and progress.tally.failed == dead
    notes = [file.name.split("-") for file in places.iterdir()]
    started, passed = ({pid for what, pid in notes if what == kind} for kind in ("start", "next"))
    return started, passed


@pytest.mark.whole
def test_engines_are_passed_on_from_run_to_run_and_give_their_gpus_back(
    gpu_cluster: None, tmp_path: Path
) -> None:
    import ray

    one, other = tmp_path / "one", tmp_path / "other"
    with warm_engines():
        started, _ = passed_on(tmp_path, one, "first", range(100, 104))
        assert len(started) == 1
        # Takes it over. A row ends its process, and another one takes its place, until that row is
        # left out.
        after, passed = passed_on(tmp_path, one, "second", range(2, 6))
        assert passed >= started and after > started
        # It waits with its GPU, and goes for engines of another environment that take them all.
        others, _ = passed_on(tmp_path, other, "third", range(300, 304), engines=GPUS)
        assert len(others) == GPUS and not others & after
    until = time.monotonic() + 60
    while ray.available_resources().get("GPU") != GPUS and time.monotonic() < until:
        time.sleep(0.1)
    assert ray.available_resources()["GPU"] == GPUS


@pytest.mark.whole
def test_a_range_of_replicas_starts_with_its_fewest(gpu_cluster: None, tmp_path: Path) -> None:
    found = run_placed(tmp_path, 1, replicas=[1, 2], tensor_parallel_size=2)
    assert found and all(len(gpus) == 2 for gpus in found)


@pytest.mark.whole
def test_engines_follow_nodes_that_join_and_leave_in_the_middle_of_a_run(
    gpu_cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A range of replicas grows on a node that joins, and shrinks when that is told to leave: what
    its engine has begun is committed, nothing is done twice, and its process ends. As the last
    shard runs, the other engines' GPUs are free again."""
    import ray

    notice = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "200"}
    nodes = Nodes(
        ray.get_runtime_context().gcs_address,
        env={"PYTHONPATH": environ.python_path(), **notice},
    )
    table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
    pq.write_table(table, tmp_path / "in.parquet")
    places = tmp_path / "places"
    places.mkdir()
    (head,) = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 1},
        engine={
            "num_cpus": 0.5,
            "replicas": [1, 4],
            "max_concurrent_batches": 2,
            "env": {"PLACES": str(places)},
        },
        output={"uri": str(tmp_path / "out")},
        limits={"max_failed_rows": 1},
    )
    run = plan_run(job, "key")
    commits = Path(run.uri) / "_raybatch/commits"

    def begun(node: str) -> list[int]:
        return [int(file.name.partition("-")[0]) for file in (places / node).glob("*")]

    def engines() -> int:
        return cluster.actor_states("(HeldEngine)").get("ALIVE", 0)

    outcome: Future[Progress] = Future()

    def work() -> None:
        try:
            outcome.set_result(infer_run(job, run, engine=HeldEngine))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    with caplog.at_level("WARNING", "prefect_raybatch"):
        try:
            until(lambda: engines() == GPUS, 120, "an engine on each GPU of the head")
            process = nodes.begin_node("127.0.0.23", 2, gpus=1)
            until(lambda: len(ray_nodes()) == 2, 120, "the node that joins")
            (joined,) = ray_nodes() - {head}
            until(lambda: engines() == GPUS + 1 and len(begun(joined)) > 1, 120, "its engine")
            process.terminate()
            until(lambda: "node 127.0.0.23 leaves the cluster" in caplog.text, 120, "the notice")
            (places / f"go-{joined}").touch()
            process.wait(120)  # long before its notice is over
            assert not outcome.done()
            taken = begun(joined)
            assert {f"{shard:08d}.json" for shard in taken} <= {p.name for p in commits.iterdir()}
            until(lambda: engines() == GPUS, 120, "its engine's end")
            (places / f"go-{head}").touch()
            until(lambda: engines() == 1, 120, "the engines that have nothing left to do")
            until(lambda: ray.available_resources().get("GPU", 0) == GPUS - 1, 120, "their GPUs")
            assert not outcome.done()
            (places / "go-last").touch()
            progress = outcome.result(120)
        finally:
            for node in (*ray_nodes(), "last"):
                (places / f"go-{node}").touch()
            thread.join(120)
            nodes.stop()
    assert progress.tally.rows == ROWS and progress.engine_deaths == 0
    assert sorted(begun(head) + taken) == list(range(ROWS))  # each once


def ray_nodes() -> set[str]:
    import ray

    return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


def test_what_a_cluster_says_of_itself(gpu_cluster: None) -> None:
    have = cluster.capacity()
    assert (have.cpus, have.gpus, have.gpus_by_node) == (5, GPUS, (GPUS,))
    assert have.cpus_a_gpu == pytest.approx(5 / GPUS)
    assert cluster.glance(cluster_spec(make_job())) == have
    spec = compile_job(make_job(sampling={"max_tokens": 999}))
    model = {"source": "demo", "revision": None, "identity": "-"}
    assert sized.engines_to_plan_for(spec.sizes, spec.cluster, model, 40.0) == GPUS


# --- without a cluster --------------------------------------------------------------------------


@pytest.mark.nightly
def test_an_engine_spans_nodes_and_gives_its_gpus_back_after_each_pass(
    second_node: None, tmp_path: Path
) -> None:
    table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
    pq.write_table(table, tmp_path / "in.parquet")
    places = tmp_path / "places"
    places.mkdir()
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": ROWS // 2},
        engine={
            "num_cpus": 0.5,
            "pipeline_parallel_size": GPUS + 1,
            "distributed_executor_backend": "ray",
            "env": {"PLACES": str(places)},
        },
        output={"uri": str(tmp_path / "out")},
    )
    progress = infer_run(job, plan_run(job, "key"), engine=SpanningEngine)
    assert (progress.tally.rows, progress.tally.failed, progress.passes) == (ROWS, FAILS < ROWS, 2)
    first, second = (json.loads(file.read_text()) for file in sorted(places.glob("*.json")))
    for noted in (first, second):  # the second pass had the GPUs that the first gave back
        assert noted["own"] == [] and noted["backend"] == "ray"
        by_node = Counter(node for node, _ in noted["workers"])
        assert sorted(by_node.values()) == [1, GPUS]
        assert len({(node, *gpus) for node, gpus in noted["workers"]}) == GPUS + 1


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No cluster anywhere."""
    outside_ray(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_a_machine_with_gpus_is_seen_without_starting_ray(alone: pytest.MonkeyPatch) -> None:
    show(alone, Card("NVIDIA H200", 143771), Card("NVIDIA H200", 143771))
    have = cluster.glance(cluster_spec(make_job()))
    assert have and (have.gpus, have.accelerators) == (2, ("H200",))
    assert have.gpu_bytes == 143771 << 20
    assert have.cpus_a_gpu == have.cpus / 2
    alone.setenv("CUDA_VISIBLE_DEVICES", "1")
    one = cluster.glance(cluster_spec(make_job()))
    assert one and one.gpus == 1
    show(alone, Card(error=pynvml.NVML_ERROR_NO_PERMISSION))  # cut into parts
    assert cluster.glance(cluster_spec(make_job())).gpus == 0


def test_a_cluster_elsewhere_is_not_asked_when_a_plan_is_made(alone: pytest.MonkeyPatch) -> None:
    show(alone, Card())
    assert cluster.glance(cluster_spec(make_job(cluster={"address": "head:6379"}))) is None
    assert (
        cluster.glance(cluster_spec(make_job(cluster={"job_server": "http://head:8265"}))) is None
    )
    alone.setenv("RAY_ADDRESS", "head:6379")
    assert cluster.glance(cluster_spec(make_job())) is None
    here = make_job(cluster={"address": "local"})  # whatever the environment says
    assert cluster.address_of(cluster_spec(here)) is None
    found = cluster.glance(cluster_spec(here))
    assert found and found.gpus == 1 and not here.cluster.elsewhere


def test_rays_line_about_its_log_level_is_not_printed(
    alone: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = b"[2026-11-21 I 7 7] logging.cc:303: Set ray log level from environment variable X to 3"

    def init(**_: Any) -> None:
        os.write(2, line + b"\nanother line\n")

    alone.setattr("ray.init", init)
    alone.setattr("ray.shutdown", lambda: None)
    alone.setattr(cluster, "capacity", lambda: Capacity(1, 0, 1, "here"))
    with cluster.connected(cluster_spec(make_job())):
        os.write(2, b"after it\n")
    said = capfd.readouterr().err
    assert "logging.cc" not in said
    assert said.endswith("another line\nafter it\n")


def test_a_service_without_standard_error_starts_ray(alone: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    alone.setattr("ray.init", lambda **_: started.append(True))
    alone.setattr("ray.shutdown", lambda: None)
    alone.setattr(cluster, "capacity", lambda: Capacity(1, 0, 1, "here"))
    alone.setattr(sys, "stderr", None)
    with cluster.connected(cluster_spec(make_job())):
        pass
    assert started == [True]


def test_workers_start_with_the_python_that_the_environment_names(
    alone: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = list[dict[str, Any]]()
    alone.setattr("ray.init", lambda **given: options.append(given))
    alone.setattr("ray.shutdown", lambda: None)
    alone.setattr(cluster, "capacity", lambda: Capacity(1, 0, 1, "here"))
    python = tmp_path / "my engines"
    alone.setenv(WORKER_PYTHON, str(python))
    with (
        pytest.raises(ConfigError, match="is not the absolute path of a program"),
        cluster.connected(cluster_spec(make_job())),
    ):
        raise AssertionError
    python.symlink_to(sys.executable)
    with cluster.connected(cluster_spec(make_job())):
        pass
    alone.delenv(WORKER_PYTHON)
    with cluster.connected(cluster_spec(make_job())):
        pass
    named, without = options
    assert named["runtime_env"] == {"py_executable": f"'{python}'"}
    assert "runtime_env" not in without


def test_gpus_of_several_nodes_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 96.0}},
        {"Alive": False, "Resources": {"CPU": 999.0, "GPU": 999.0}},
    ]
    total = {"CPU": 176.0, "GPU": 12.0, "accelerator_type:L4": 1.0, "accelerator_type:H100": 1.0}
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.cluster_resources", lambda: total)

    class Context:
        gcs_address = "head:6379"

    monkeypatch.setattr("ray.get_runtime_context", Context)
    assert cluster.capacity() == Capacity(
        176, 12, 3, "head:6379", (4, 8), ("H100", "L4"), cpus_a_gpu=4
    )


def test_a_node_that_takes_no_connection_is_gone_before_ray_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        known = [
            {
                "NodeID": name,
                "Alive": alive,
                "NodeManagerAddress": "127.0.0.1",
                "NodeManagerPort": place.getsockname()[1],
            }
            for name, alive, place in (("a", True, one), ("b", True, two), ("c", False, one))
        ]
        monkeypatch.setattr(ray, "nodes", lambda: known)
        assert cluster.nodes() == {"a", "b"}
        two.close()
        assert cluster.nodes() == {"a"}
