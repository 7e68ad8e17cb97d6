"""Engines whose GPUs are on several nodes: real Ray nodes with GPUs that are only said to be there.

vLLM's Ray executor runs on no CPU, so the engine is a fake that starts its workers as that does:
one in each bundle of the placement group that its actor is in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chaos.cluster import RayCluster
from helpers.engines import FakeEngine
from helpers.small import make_job

from prefect_raybatch.ledger.failures import ENGINE_DIED, Loss
from prefect_raybatch.runs.infer_run import infer_run
from prefect_raybatch.runs.plan_run import plan_run
from prefect_raybatch.stages.block import lost_all
from prefect_raybatch.stages.engine import EngineSpec

HOSTS = ("127.0.0.21", "127.0.0.22")
ROWS = 8


class SpanningEngine(FakeEngine):
    """Starts a worker in each bundle and notes their nodes. The first block it gets is lost."""

    def __init__(self, spec: EngineSpec):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        super().__init__(spec)
        self.folder = Path(spec.env["PLACES"])
        group = ray.util.get_current_placement_group()
        self.workers = [
            ray.remote(Worker)
            .options(
                num_cpus=0,
                num_gpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
            for bundle in range(len(group.bundle_specs))
        ]
        noted = {
            "own": ray.get_runtime_context().get_accelerator_ids()["GPU"],
            "workers": ray.get([worker.place.remote() for worker in self.workers]),
            "backend": spec.arguments["distributed_executor_backend"],
        }
        number = len(list(self.folder.glob("*.json")))
        (self.folder / f"{number}.json").write_text(json.dumps(noted))

    def __call__(self, table: pa.Table) -> pa.Table:
        if not (self.folder / "lost").exists():
            (self.folder / "lost").touch()
            return lost_all(table, Loss(ENGINE_DIED, "a worker of another node is gone"))
        return super().__call__(table)


class Worker:
    def place(self) -> tuple[str, list[str]]:
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]


@pytest.fixture
def two_nodes() -> Iterator[str]:
    cluster = RayCluster(HOSTS[0], 2, gpus=1)
    try:
        cluster.add_node(HOSTS[1], 2, gpus=1)
        yield cluster.address
    finally:
        cluster.stop()


def test_an_engine_spans_nodes_and_gives_its_gpus_back_after_each_pass(
    two_nodes: str, tmp_path: Path
) -> None:
    table = pa.table({"id": range(ROWS), "Company": [f"Company {i}" for i in range(ROWS)]})
    pq.write_table(table, tmp_path / "in.parquet")
    places = tmp_path / "places"
    places.mkdir()
    job = make_job(
        source={"uri": str(tmp_path / "in.parquet"), "rows_per_shard": 4},
        engine={
            "num_cpus": 0.5,
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "ray",
            "env": {"PLACES": str(places)},
        },
        output={"uri": str(tmp_path / "out")},
        cluster={"address": two_nodes},
    )
    progress = infer_run(job, plan_run(job, "key"), engine=SpanningEngine)
    assert (progress.tally.good, progress.passes) == (ROWS, 2)
    first, second = (json.loads(file.read_text()) for file in sorted(places.glob("*.json")))
    for noted in (first, second):  # the second pass had the GPUs that the first gave back
        assert noted["own"] == [] and noted["backend"] == "ray"
        assert len({node for node, _ in noted["workers"]}) == 2
        assert [gpus for _, gpus in noted["workers"]] == [["0"], ["0"]]
