"""Cascades: a small model answers all rows, a larger one those of which it is unsure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from helpers.engines import with_answers
from helpers.openai_server import OpenAIServer, completion, openai_server

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.cluster import pipeline
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.stages.block import passes_by
from prefect_raybatch.stages.columns import CHANCES, ERROR, STEPS
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.storage import open_store

ROWS = 20
LABELS = ["car", "bank"]
FORM = {
    "type": "object",
    "properties": {"label": {"type": "string", "enum": LABELS}},
    "required": ["label"],
    "additionalProperties": False,
}


class Small(EngineStage):
    """The first model: row N is answered `car`, with a probability of N / 20 + 0.02."""

    asked: list[int] = []

    def __init__(self, spec: EngineLaunch) -> None:
        self.spec = spec

    def __call__(self, table: pa.Table) -> pa.Table:
        if passes_by(table):
            return table
        numbers = table["number"].to_pylist()
        type(self).asked += numbers
        made = with_answers(table, table[ERROR].to_pylist(), list(map(self.text, numbers)))
        chances = [number / ROWS + 0.02 for number in numbers]
        if "logprobs" in self.spec.sampling:
            return STEPS.add_to(made, [[[[{"id": 5, "logprob": p - 1}]]] for p in chances])
        rows = [[("car", max(p, 1 - p)), ("bank", min(p, 1 - p))] for p in chances]
        return CHANCES.add_to(made, rows) if self.spec.labels else made

    def text(self, number: int) -> str:
        if not self.spec.labels and "logprobs" not in self.spec.sampling:
            return '{"label": "car"}' if number % 4 else '{"label": "ca'
        return "car"

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as made:

        def bank(number: int, body: dict[str, Any]) -> Any:
            return 200, {}, completion(json.dumps({"label": "bank"}))

        made.fault = bank
        yield made


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch, without_ray: None) -> None:
    usual = pipeline.stage_of
    Small.asked = []

    def stage_of(spec: Any, batch: bool = True) -> type:
        return Small if spec.engine.model.endpoint is None else usual(spec, batch)

    monkeypatch.setattr(pipeline, "stage_of", stage_of)


def job_of(server: OpenAIServer, folder: Path, **groups: Any) -> BatchJob:
    uri = folder / "in.parquet"
    if not uri.exists():
        names = [f"Company {n}" for n in range(ROWS)]
        pq.write_table(pa.table({"Company": names, "number": range(ROWS)}), uri)
    endpoint = {"url": server.url, "model": "large", "price_in": 1.0, "price_out": 2.0}
    escalate = {
        "to": {"endpoint": endpoint},
        "when": {"probability_below": 0.8},
        **groups.pop("escalate", {}),
    }
    return BatchJob.from_dict(
        {
            "name": "cascade",
            "source": {"uri": str(uri), "rows_per_shard": 6},
            "prompt": {"template": "{Company}"},
            "sampling": {"choice": LABELS},
            "engine": {"device": "cpu"},
            **groups,
            "output": {
                "uri": str(folder / "out"),
                "escalate": escalate,
                **groups.get("output", {}),
            },
        }
    )


def run_of(job: BatchJob, key: str = "night") -> tuple[RunReport, Path]:
    run = plan_run(job, key)
    progress = infer_run(job, run)
    return finalize_run(job, run, progress), Path(run.uri)


def rows_of(folder: Path, kind: str = "data") -> list[dict[str, Any]]:
    return list(ds.dataset(folder / kind, exclude_invalid_files=True).to_table().to_pylist())


def asked_of(server: OpenAIServer) -> Counter[str]:
    return Counter(body["messages"][-1]["content"].split("\n")[0] for body in server.bodies)


def unsure(number: int, below: float = 0.8) -> bool:
    chance = number / ROWS + 0.02
    return max(chance, 1 - chance) < below


def test_unsure_rows_go_to_the_larger_model_and_all_rows_are_in_one_result(server, tmp_path):
    report, folder = run_of(job_of(server, tmp_path))
    rows = rows_of(folder)
    assert [row["_row"] for row in rows] == list(range(ROWS))
    for row in rows:
        by_large = unsure(row["number"])
        assert row["response"] == ("bank" if by_large else "car")
        assert row["answered_by"] == ("large" if by_large else "demo")
        assert row["Company"] == f"Company {row['number']}"
    assert set(rows[0]) == {"Company", "number", "response", "answered_by", "_row"}
    assert sorted(Small.asked) == list(range(ROWS))
    number = sum(map(unsure, range(ROWS)))
    assert set(asked_of(server).values()) == {1} and len(server.bodies) == number
    small, large = report.cascade
    assert (small.model, small.asked, small.answered) == ("demo", ROWS, ROWS - number)
    assert (large.model, large.asked, large.answered) == ("large", number, number)
    assert large.tokens == {"prompt_tokens": 11 * number, "output_tokens": 7 * number}
    assert large.cost["total"] == pytest.approx(number * (11 + 14) / 1e6)
    assert report.tokens["output_tokens"] == ROWS + 7 * number
    assert report.good == ROWS and not report.failed
    assert verify(open_store(str(folder))).faults == []
