"""The example flow of a cascade, through Prefect: planted errors are left to the larger model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import with_answers
from helpers.openai_server import completion, openai_server
from helpers.prefect_server import ROOT

from prefect_raybatch.cluster import pipeline
from prefect_raybatch.demo import LABELS
from prefect_raybatch.demo.customers import companies
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.stages.block import is_passthrough
from prefect_raybatch.stages.columns import CHANCES, ERROR
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("prefect_api", "without_ray")]
ROWS = 60
TRUTH = dict(companies(ROWS, 11, "heldout"))


class Local(EngineStage):
    """Knows the industry of a company by its name, and is unsure of other names."""

    def __init__(self, launch: EngineLaunch) -> None:
        self.launch = launch

    def __call__(self, table: pa.Table) -> pa.Table:
        if is_passthrough(table):
            return table
        found = [TRUTH.get(name) for name in table["Company"].to_pylist()]
        texts = [label or "Other" for label in found]
        made = with_answers(table, table[ERROR].to_pylist(), texts)
        sure = [0.99 if label else 0.5 for label in found]
        chances = [
            [(one, p if one == text else (1 - p) / (len(LABELS) - 1)) for one in LABELS]
            for text, p in zip(texts, sure, strict=True)
        ]
        return CHANCES.add_to(made, chances)

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    usual = pipeline.stage_of

    def stage_of(endpoint: EndpointSpec | None, batch: bool = True) -> type:
        return Local if endpoint is None else usual(endpoint, batch)

    monkeypatch.setattr(pipeline, "stage_of", stage_of)
    monkeypatch.syspath_prepend(str(ROOT / "flows"))
    yield
    sys.modules.pop("cascade", None)


def test_the_larger_model_answers_the_planted_rows(local: None, tmp_path: Path) -> None:
    from cascade import PLANTED, cascade, planted

    right = dict(planted(ROWS))

    def answer(number: int, body: dict[str, Any]) -> Any:
        text = body["messages"][-1]["content"]
        (name,) = [name for name in right if name not in TRUTH and f"{name}" in text.split("\n")[0]]
        return 200, {}, completion(json.dumps({"label": right[name]}))

    with openai_server() as server:
        server.fault = answer
        report = cascade(str(tmp_path), server.url, "large", "", ROWS, date(2026, 1, 2))
        asked = len(server.bodies)
        again = cascade(str(tmp_path), server.url, "large", "", ROWS, date(2026, 1, 2))
        assert len(server.bodies) == asked and again.run == report.run
    hard = [name for name in right if name not in TRUTH]
    assert 0 < asked == len(hard) <= -(-ROWS // PLANTED)
    assert [share.answered for share in report.cascade] == [len(right) - asked, asked]
    assert report.accuracy is not None and report.accuracy.share == 1.0
    rows = pq.read_table(f"{report.run}/data").to_pylist()
    assert {row["Company"] for row in rows if row["answered_by"] == "large"} == set(hard)


def test_the_judge_finds_the_planted_rows_that_the_larger_model_answers_wrong(
    local: None, tmp_path: Path
) -> None:
    from cascade import cascade, planted

    right = dict(planted(ROWS))
    hard = [name for name in right if name not in TRUTH]

    def answer(number: int, body: dict[str, Any]) -> Any:
        text = body["messages"][-1]["content"]
        if body["model"] == "large":  # knows nothing either
            (name,) = [name for name in hard if name in text.split("\n")[0]]
            label = next(label for label in LABELS if label != right[name])
        else:
            (name,) = [name for name in right if f"company {name} was" in text]
            label = "right" if f"given as {right[name]}. Is" in text else "wrong"
        return 200, {}, completion(json.dumps({"label": label}))

    with openai_server(models=("large", "judge")) as server:
        server.fault = answer
        arguments = (str(tmp_path), server.url, "large", "judge", ROWS, date(2026, 1, 3))
        report = cascade(*arguments)
        asked = len(server.bodies)
        assert cascade(*arguments).judgement == report.judgement and len(server.bodies) == asked
    judgement, accuracy = report.judgement, report.accuracy
    assert judgement is not None and accuracy is not None
    assert judgement.rows - judgement.right == len(hard) == accuracy.rows - accuracy.right
    assert judgement.corrected is not None and judgement.corrected.share == accuracy.share
