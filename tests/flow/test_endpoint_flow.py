"""Flows with a hosted model: an outage, a block, and a real vllm serve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from helpers.openai_server import failing, openai_server
from helpers.vllm_server import MODEL, vllm_server
from openai.types import Completion
from pydantic import SecretStr

from prefect_raybatch import BatchJob, batch_inference
from prefect_raybatch.blocks import HostedModel
from prefect_raybatch.flow import tasks
from prefect_raybatch.stages.endpoint import client

pytestmark = pytest.mark.usefixtures("prefect_api", "without_ray")
ROWS = 12
KEY = "sk-of-a-block-0123456789"


def job_of(folder: Path, **endpoint: Any) -> BatchJob:
    uri = folder / "in.parquet"
    pq.write_table(pa.table({"Company": [f"Company {n}" for n in range(ROWS)]}), uri)
    return BatchJob(
        name="hosted",
        source={"uri": str(uri), "rows_per_shard": 4},
        prompt={"template": "{Company}"},
        output={"uri": str(folder / "out")},
        engine={"endpoint": {"max_in_flight": 1, **endpoint}},
    )


def test_a_flow_waits_for_a_server_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fails until the first attempt of the task has ended; the task's retry asks the
    remaining rows."""
    monkeypatch.setattr(client, "SERVER_OUTAGE", 0.2)
    monkeypatch.setattr(client, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(tasks.infer_shards, "retry_delay_seconds", 0)
    starts = 0
    opened = client.EndpointEngine.__init__

    def noted(*args: Any) -> None:
        nonlocal starts
        starts += 1
        opened(*args)

    monkeypatch.setattr(client.EndpointEngine, "__init__", noted)
    with openai_server() as server:
        down = failing(503, "overloaded")
        server.fault = lambda number, body: down if starts < 2 and number >= 5 else None
        report = batch_inference(job_of(tmp_path, url=server.url, model="large"), "night")
        assert starts == 2 and report.good == ROWS
        assert len(server.answered) == len(set(server.answered)) == ROWS  # none was paid twice
    rows = ds.dataset(f"{report.run}/data").to_table()
    answers = dict(zip(rows["Company"].to_pylist(), rows["response"].to_pylist(), strict=True))
    assert answers == {f"Company {n}": f"about Company {n}" for n in range(ROWS)}


def test_a_flow_takes_key_and_limits_from_a_block(tmp_path: Path) -> None:
    with openai_server() as server:
        block = HostedModel(url=server.url, model="large", key=SecretStr(KEY), price_in=1e6)
        block.save("flow", overwrite=True)
        report = batch_inference(job_of(tmp_path, block="hosted-model/flow"), "blocked")
        assert server.authorizations == {f"Bearer {KEY}"}
    assert report.good == ROWS and report.cost["total"] == pytest.approx(11 * ROWS)
    written = [file for file in Path(report.run).rglob("*") if file.is_file()]
    assert written and not any(KEY.encode() in file.read_bytes() for file in written)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # An engine in this process sets up vLLM's logging when it is first started. That holds the lock
    # of all loggers while Prefect's handler sends its lines, for which one of Prefect's threads may
    # need the same lock: before a flow runs, there is no such handler.
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())
    with vllm_server(tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.mark.whole
def test_a_real_server_answers_a_batch_file_and_refuses_a_long_prompt(
    vllm: str, tmp_path: Path
) -> None:
    texts = [f"What industry is this company in: Smith Law {n}" for n in range(6)]
    texts[3] = "long " * 4000
    url, line = "/v1/completions", {"method": "POST"}
    requests = [
        {"custom_id": str(n), "url": url, "body": {"prompt": text, "max_tokens": 5}, **line}
        for n, text in enumerate(texts)
    ]
    source = tmp_path / "requests.jsonl"
    source.write_text("\n".join(map(json.dumps, requests)), encoding="utf-8")
    job = BatchJob(
        name="raw",
        source={"uri": str(source), "format": "openai_batch"},
        prompt={},
        output={"uri": str(tmp_path / "out")},
        engine={"endpoint": {"url": vllm, "model": MODEL, "api": "completions"}},
    )
    report = batch_inference(job, "raw")
    lines = (Path(report.run) / "output.jsonl").read_text(encoding="utf-8").splitlines()
    outputs = [json.loads(line) for line in lines]
    assert [one["custom_id"] for one in outputs] == ["0", "1", "2", "4", "5"]
    for one in outputs:
        body = Completion.model_validate(one["response"]["body"], strict=True)
        assert body.usage is not None and 0 < body.usage.completion_tokens <= 5
        assert body.usage.prompt_tokens > 5
    (line,) = (Path(report.run) / "error.jsonl").read_text(encoding="utf-8").splitlines()
    error = json.loads(line)
    assert error["custom_id"] == "3" and error["response"]["status_code"] == 400
    assert "2048" in error["error"]["message"]  # the context, in the server's own words


LOCAL = {"model": MODEL, "device": "cpu"}
CHAT = {"template": "What industry is this company in: {Company}"}


def result_of(folder: Path, name: str, engine: dict[str, Any], **groups: Any) -> dict[str, Any]:
    source = folder / "companies.parquet"
    names = ["Smith Law", "Acme Health", "Corner Shop", "x"]
    pq.write_table(pa.table({"Company": names}), source)
    groups = {"prompt": CHAT, **groups}
    output = {"uri": str(folder / "out"), **groups.pop("output", {})}
    job = BatchJob.from_dict(
        {"name": "both", "source": {"uri": str(source)}, "output": output, "engine": engine}
        | groups
    )
    report = batch_inference(job, name)
    assert report.good == len(names)
    return ds.dataset(f"{report.run}/data").to_table().to_pydict()


@pytest.mark.whole
def test_several_answers_and_their_log_probabilities_are_those_of_the_local_engine(
    vllm: str, tmp_path: Path
) -> None:
    """By a seed, both draw the same answers."""
    sampling = {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 6, "logprobs": 3}
    output = {"extras": ["finish_reason", "prompt_tokens"]}
    groups = {"sampling": sampling, "output": output}
    ours = result_of(tmp_path, "local", LOCAL, **groups)
    hosted = {"endpoint": {"url": vllm, "model": MODEL}}
    theirs = result_of(tmp_path, "hosted", hosted, **groups)
    told = [result.pop("logprobs") for result in (ours, theirs)]
    assert ours == theirs
    for one, other in zip(*told, strict=True):
        for answer, same in zip(one, other, strict=True):
            assert [step["token"] for step in answer] == [step["token"] for step in same]
            for step, alike in zip(answer, same, strict=True):
                assert step["logprob"] == pytest.approx(alike["logprob"], abs=1e-3)
                tops = [[top["logprob"] for top in each["top"]] for each in (step, alike)]
                assert len(tops[0]) == 3 and tops[0] == pytest.approx(tops[1], abs=1e-3)
