"""Runs with a hosted model that keep answers, and runs that reuse them: no answer is paid twice."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from helpers.batch_server import BatchServer, batch_server
from helpers.hosted import finished_run, hosted_job
from helpers.openai_server import OpenAIServer, failing, openai_server
from PIL import Image

from prefect_raybatch.api import dry_run
from prefect_raybatch.errors import ConfigError, EndpointRefused
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.layout import JOURNAL
from prefect_raybatch.result.verify import verify
from prefect_raybatch.stages.endpoint.stage import EndpointStage
from prefect_raybatch.stages.hosted_batches import shard
from prefect_raybatch.storage import open_store

pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as made:
        yield made


def job_of(url: str, folder: Path, names: list[str], **groups: Any) -> BatchJob:
    engine = {**groups.pop("engine", {})}
    source = {"rows_per_shard": 4, **groups.pop("source", {})}
    groups |= {"engine": engine, "endpoint": engine.pop("endpoint", {}), "source": source}
    columns = {"Name": names, **groups.pop("cells", {})}
    return hosted_job(url, folder, columns, reuse="latest", **groups)


def run_of(job: BatchJob, key: str) -> Path:
    _, folder = finished_run(job, key)
    assert verify(open_store(str(folder))).ok
    assert not list(folder.rglob(JOURNAL.rpartition("/")[2]))
    return folder


def answers(folder: Path) -> dict[str, Any]:
    table = ds.dataset(folder / "data").to_table()
    return dict(zip(table["Name"].to_pylist(), table["response"].to_pylist(), strict=True))


NAMES = [f"item {n}" for n in range(6)]


def test_the_next_run_asks_only_what_is_new(server: OpenAIServer, tmp_path: Path) -> None:
    server.fault = lambda _, body: (
        failing(400, "no") if body["messages"][-1]["content"] == "item 3" else None
    )
    run_of(job_of(server.url, tmp_path, [*NAMES, "item 0"]), "monday")
    assert len(server.bodies) == 6  # equal requests once
    server.fault = lambda number, body: None
    job = job_of(server.url, tmp_path, ["new", *reversed(NAMES)])
    plan = dry_run(job, "tuesday").reuse
    assert plan is not None and (plan.counts.asked, plan.counts.reused) == (2, 5)
    assert answers(run_of(job, "tuesday")) == {
        name: f"about {name}" for name in ("new", *reversed(NAMES))
    }
    assert len(server.bodies) == 6 + 2  # the new row, and the one that was refused


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"endpoint": {"model": "larger"}}},
        {"sampling": {"max_tokens": 5}},
        {"sampling": {"seed": 5}},
        {"engine": {"endpoint": {"api": "completions"}}},
    ],
    ids=["model", "max_tokens", "seed", "api"],
)
def test_another_model_api_or_sampling_asks_everything_again(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with openai_server(("large", "larger")) as server:
        run_of(job_of(server.url, tmp_path, NAMES), "monday")
        job = job_of(server.url, tmp_path, NAMES, **change)
        plan = dry_run(job, "tuesday").reuse
        assert plan is not None and plan.counts.reused == 0 and plan.differs
        run_of(job, "tuesday")
        assert len(server.bodies) == 2 * len(NAMES)


def test_limits_prices_and_keys_are_no_difference(server: OpenAIServer, tmp_path: Path) -> None:
    run_of(job_of(server.url, tmp_path, NAMES), "monday")
    endpoint = {"requests_per_minute": 60_000, "price_in": 1.0, "key": "sk-another", "timeout": 9}
    run_of(job_of(server.url, tmp_path, NAMES, engine={"endpoint": endpoint}), "tuesday")
    assert len(server.bodies) == len(NAMES)


def test_a_run_that_ends_early_keeps_what_it_paid(
    server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[EndpointStage] = []
    start = EndpointStage.start

    def noted(self: EndpointStage) -> None:
        stages.append(self)
        start(self)

    monkeypatch.setattr(EndpointStage, "start", noted)
    server.fault = lambda number, _: failing(401, "bad key") if number >= 3 else None
    job = job_of(server.url, tmp_path, NAMES, engine={"endpoint": {"max_in_flight": 1}})
    with pytest.raises(EndpointRefused):
        run_of(job, "monday")
    for stage in stages:
        stage.close()  # as the end of its process does
    server.fault = lambda number, body: None
    assert len(answers(run_of(job, "monday"))) == len(NAMES)
    assert len(server.answered) == len(set(server.answered)) == len(NAMES)


def test_vectors_are_reused(server: OpenAIServer, tmp_path: Path) -> None:
    groups = {"engine": {"task": "embed"}}
    first = answers(run_of(job_of(server.url, tmp_path, NAMES, **groups), "monday"))
    assert answers(run_of(job_of(server.url, tmp_path, NAMES, **groups), "tuesday")) == first
    assert len(server.bodies) == len(NAMES)


def test_an_image_is_known_by_its_content(server: OpenAIServer, tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()

    def draw(name: str, colour: int) -> None:
        out = io.BytesIO()
        Image.new("RGB", (9, 9), (colour, 0, 0)).save(out, "PNG")
        (tmp_path / "media" / name).write_bytes(out.getvalue())

    def run(key: str) -> None:
        uri = str(tmp_path / "in.parquet")
        source = {"uri": uri, "media_root": str(tmp_path / "media")}
        images = {"template": "{Name}", "images": {"columns": ["image"]}}
        cells = {"image": ["a.png", "b.png"]}
        groups = {"cells": cells, "source": source, "prompt": images}
        folder = run_of(job_of(server.url, tmp_path, ["a", "b"], **groups), key)
        assert ds.dataset(folder / "data").to_table().num_rows == 2

    draw("a.png", 1), draw("b.png", 2)
    run("monday")
    assert all(len(body["messages"][-1]["content"]) == 2 for body in server.bodies)
    draw("b.png", 3)
    run("tuesday")
    assert len(server.bodies) == 2 + 1


def test_a_batch_api_gets_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "FIRST_POLL", 0.01)
    batch = {"engine": {"endpoint": {"batch": True}}}

    def run(server: BatchServer, names: list[str], key: str) -> dict[str, Any]:
        return answers(run_of(job_of(server.url, tmp_path, names, **batch), key))

    with batch_server() as server:
        run(server, NAMES, "monday")
        assert len(run(server, [*NAMES, "new"], "tuesday")) == 7
        assert server.service.paid.total() == 7 and not server.service.files


def test_an_order_by_prefix_caches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.order: run.*remove"):
        job_of("http://127.0.0.1:9/v1", tmp_path, NAMES, engine={"order": "run"})
