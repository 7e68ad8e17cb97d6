"""Engines over several nodes: real Ray nodes, with GPUs that are only said to be there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chaos.cluster import RayCluster
from helpers.small import make_job
from helpers.spanning import SpanningEngine

from prefect_raybatch.runs.infer_run import infer_run
from prefect_raybatch.runs.plan_run import plan_run

HOSTS = ("127.0.0.21", "127.0.0.22")
ROWS = 8


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
