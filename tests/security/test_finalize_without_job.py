"""Without a job, a run directory decides neither which cluster is joined nor which server asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_server import batch_server
from helpers.checked_nights import CheckedNights
from helpers.hosted import hosted_job
from helpers.small import SmallRun, small_run

from prefect_raybatch.api import finalize_partial, finalize_whole, infer_run, plan_run
from prefect_raybatch.cluster import side_by_side
from prefect_raybatch.errors import ClusterUnavailable
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.ledger.layout import BATCHES
from prefect_raybatch.runs import agreement
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.storage import open_store

CLUSTERS: dict[str, dict[str, Any]] = {
    "address": {"address": "10.0.0.1:6379"},
    "job server": {"job_server": "http://10.0.0.1:8265"},
    "block": {"block": "ray-cluster/planted"},
    "kubernetes": {"kubernetes": {"image": "planted"}},
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[ClusterAccess]:
    """Clusters on which a result would be written; each result is large enough."""
    asked: list[ClusterAccess] = []

    @contextmanager
    def away(cluster: ClusterSpec, user: object) -> Iterator[None]:
        asked.append(cluster.access)
        raise ClusterUnavailable("not started in this test")
        yield

    monkeypatch.setattr(side_by_side, "WORTH_A_START", 0)
    monkeypatch.setattr(side_by_side, "connected", away)
    return asked


def planted(root: Path, committed: int, **cluster: Any) -> SmallRun:
    run = small_run(root / "out/run", cluster=cluster, output={"uri": str(root / "out")})
    for shard in range(committed):
        run.commit(shard)
    return run


@pytest.mark.parametrize("kind", CLUSTERS)
def test_no_cluster_of_a_plan_is_joined(
    kind: str, tmp_path: Path, joined: list[ClusterAccess]
) -> None:
    run = planted(tmp_path, 3, **CLUSTERS[kind])
    assert finalize_partial(run.store.uri).good == 15
    run.commit(3)
    assert finalize_whole(run.store.uri).good == 20
    assert joined and set(map(str, joined)) == {str(ClusterAccess())}


def test_the_cluster_of_the_callers_job_is_joined(
    tmp_path: Path, joined: list[ClusterAccess]
) -> None:
    run = planted(tmp_path, 3, **CLUSTERS["address"])
    finalize_partial(run.store.uri, job=run.job)
    run.commit(3)
    finalize_whole(run.store.uri, run.job)
    assert [access.address for access in joined] == ["10.0.0.1:6379"] * 2


def test_no_server_of_a_plan_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_ray: None
) -> None:
    monkeypatch.setenv("RAYBATCH_SECRET_OTHER", "a-key-of-another-server")
    with batch_server() as server:
        endpoint = {"batch": True, "key": "${RAYBATCH_SECRET_OTHER}"}
        job = hosted_job(server.url, tmp_path, {"Company": ["Company 0"]}, endpoint=endpoint)
        run = plan_run(job, "night")
        infer_run(job, run)
        store = open_store(run.uri)
        assert list(store.list(BATCHES))
        server.calls.clear()
        assert finalize_whole(run.uri).good == 1
        assert not server.calls
        finalize_whole(run.uri, job)
        assert ("GET", "/files") in server.calls and not list(store.list(BATCHES))


def test_no_folder_of_a_plan_is_searched_for_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = CheckedNights(tmp_path)
    job = nights.checked()
    run = plan_run(job, "n1")
    nights.infer(job, run)
    moved = tmp_path / "moved"
    (tmp_path / "out").rename(moved)
    searched: list[str] = []
    monkeypatch.setattr(agreement, "series_before", lambda output, *_: searched.append(output))
    finalize_whole(str(moved / "n1"))
    assert searched == [str(moved)]
