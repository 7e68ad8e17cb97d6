"""Iceberg tables of a REST catalog, read and published to: once, with keys of the environment."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.iceberg_rest import RestCatalogServer, rest_catalog
from helpers.retries import FAILED, first_run
from helpers.small import make_job, read_json
from helpers.table_sources import companies, copied, refused

from prefect_raybatch.api import dry_run, plan_run, publish_run
from prefect_raybatch.errors import (
    ConfigError,
    PublishFailed,
    StoreUnavailable,
    is_transient,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.storage import open_store

ANSWERED = [n for n in range(20) if n not in FAILED]


@pytest.fixture
def rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RestCatalogServer]:
    with rest_catalog(tmp_path) as server:
        server.catalog.create_namespace("sales")
        server.catalog.create_table("sales.orders", schema=companies(0, 1).schema).append(
            companies(0, 30)
        )
        monkeypatch.setenv("LAKE_TOKEN", server.token)
        monkeypatch.setenv("LAKE_CLIENT", ":".join(server.client))
        yield server


def by_token(rest: RestCatalogServer, **more: Any) -> dict[str, Any]:
    return {"type": "rest", "uri": rest.url, "token": "${LAKE_TOKEN}", **more}


def test_a_table_is_read_with_a_token_or_a_credential_that_no_plan_keeps(tmp_path, rest):
    how = by_token(rest)
    made, rows = copied(tmp_path, "sales.orders", catalog=how, filter="id >= 25", columns=["id"])
    assert rows["id"].to_pylist() == [25, 26, 27, 28, 29]
    table = rest.catalog.load_table("sales.orders")
    assert made.table["version"] == str(table.current_snapshot().snapshot_id)
    by_client = {"type": "rest", "uri": rest.url, "credential": "${LAKE_CLIENT}"}
    assert copied(tmp_path, "sales.orders", catalog=by_client)[1].num_rows == 30
    job = make_job(
        source={"uri": "sales.orders", "catalog": how, "limit": 20},
        output={"uri": str(tmp_path / "out")},
        engine={"model": "demo"},
    )
    assert "${LAKE_TOKEN}" in job.model_dump_json()  # a name is no key, so a deployment keeps it
    assert dry_run(job).rows == 20 and plan_run(job, "one").rows == 20
    plan = Ledger(open_store(str(tmp_path / "out/one"))).load_plan()
    assert plan.job["source"]["catalog"] == {"type": "rest", "uri": rest.url}
    assert rest.token not in plan.to_bytes().decode()


def test_keys_that_the_catalog_refuses_end_a_run_and_a_catalog_that_fails_does_not(
    tmp_path, rest, monkeypatch
):
    monkeypatch.setenv("LAKE_TOKEN", "wrong-token")
    monkeypatch.setenv("LAKE_CLIENT", "nightly:wrong-secret")
    said = refused("sales.orders", "denied", "source.catalog", catalog=by_token(rest))
    by_client = {"type": "rest", "uri": rest.url, "credential": "${LAKE_CLIENT}"}
    said += refused("sales.orders", "denied", "invalid_client", catalog=by_client)
    assert "wrong-" not in said
    unset = {**by_token(rest), "token": "${NOT_SET}"}
    refused("sales.orders", "token: environment", error=ConfigError, catalog=unset)
    monkeypatch.setenv("LAKE_TOKEN", rest.token)
    refused("sales.gone", "has no table 'sales.gone'", catalog=by_token(rest))
    rest.refuse = lambda method, path: 503
    refused("sales.orders", error=StoreUnavailable, catalog=by_token(rest))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_run(tmp_path_factory.mktemp("finished")).store.uri)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "out/key")
    return tmp_path / "out/key"


def job_of(run: Path, catalog: dict[str, Any]) -> BatchJob:
    value = read_json(run / "_raybatch/plan.json")["job"]
    target = {"format": "iceberg", "table": "sales.answers", "catalog": catalog}
    value["output"] = {**value["output"], "publish": [target]}
    return BatchJob.from_dict(value)


def numbers(rest: RestCatalogServer) -> list[int]:
    return sorted(rest.catalog.load_table("sales.answers").scan().to_arrow()["_row"].to_pylist())


def test_a_run_is_published_once_by_two_publishers(run, rest):
    """The second does all of its work between the first one's look and commit."""
    job, done = job_of(run, by_token(rest)), []

    def other(step: str) -> None:
        if step == "looked" and not done:
            done.append(step)
            publish_run(job, str(run))

    publish_run(job, str(run), other)
    assert numbers(rest) == ANSWERED
    (run / "_raybatch/published/iceberg.json").unlink()
    publish_run(job, str(run))
    assert numbers(rest) == ANSWERED
    assert rest.token.encode() not in b"".join(p.read_bytes() for p in run.rglob("*.json"))


def test_an_answer_that_is_lost_after_the_commit_brings_no_row_twice(run, rest):
    job = job_of(run, by_token(rest))

    def hush(step: str) -> None:
        if step == "looked":
            rest.silent["/v1/namespaces/sales/tables/answers"] = True

    with pytest.raises(PublishFailed) as failed:
        publish_run(job, str(run), hush)
    assert is_transient(failed.value) and numbers(rest) == ANSWERED
    publish_run(job, str(run))
    assert numbers(rest) == ANSWERED


def test_a_target_that_refuses_keys_is_not_tried_again_and_one_that_fails_is(
    run, rest, monkeypatch
):
    monkeypatch.setenv("LAKE_TOKEN", "wrong-token")
    with pytest.raises(ConfigError, match=r"access denied, .*NotAuthorized") as denied:
        publish_run(job_of(run, by_token(rest)), str(run))
    assert not is_transient(denied.value) and "wrong-token" not in str(denied.value)
    monkeypatch.setenv("LAKE_TOKEN", rest.token)
    rest.refuse = lambda method, path: 503 if method == "POST" else None
    with pytest.raises(PublishFailed) as failed:
        publish_run(job_of(run, by_token(rest)), str(run))
    assert is_transient(failed.value)
    rest.refuse = lambda method, path: None
    publish_run(job_of(run, by_token(rest)), str(run))
    assert numbers(rest) == ANSWERED
