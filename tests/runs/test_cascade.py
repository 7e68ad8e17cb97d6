"""Cascades: a small model answers all rows, a larger one those of which it is unsure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.batch_server import batch_server
from helpers.engines import with_answers
from helpers.nights import Nights
from helpers.openai_server import OpenAIServer, completion, openai_server

from prefect_raybatch.api import dry_run, finalize_run, infer_run, plan_run, preview_rows
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.api.tune import tune_cascade
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cluster import pipeline
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.plan_run import precheck_resolved
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.spec.cascade import most_rows
from prefect_raybatch.stages.block import passes_by
from prefect_raybatch.stages.columns import CHANCES, ERROR, STEPS
from prefect_raybatch.stages.endpoint.stage import EndpointStage
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.hosted_batches import shard
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
    rows = ROWS

    def __init__(self, spec: EngineLaunch) -> None:
        self.spec = spec

    def __call__(self, table: pa.Table) -> pa.Table:
        if passes_by(table):
            return table
        numbers = table["number"].to_pylist()
        type(self).asked += numbers
        made = with_answers(table, table[ERROR].to_pylist(), list(map(self.text, numbers)))
        chances = [number % self.rows / self.rows + 0.02 for number in numbers]
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


def test_at_most_sends_the_least_sure_rows_and_the_report_says_what_was_cut(server, tmp_path):
    report, folder = run_of(job_of(server, tmp_path, escalate={"at_most": 0.2}))
    chosen = [row["number"] for row in rows_of(folder) if row["answered_by"] == "large"]
    sureness = sorted(range(ROWS), key=lambda n: (max(n / ROWS + 0.02, 0.98 - n / ROWS), n))
    assert chosen == sorted(sureness[:4]) and len(server.bodies) == 4
    assert "output.escalate.at_most (0.2) left 8 to demo" in report.notes[0]
    assert "guarantee" in report.notes[0]


def test_without_an_unsure_row_the_larger_model_starts_no_engine(server, tmp_path, monkeypatch):
    started: list[object] = []
    monkeypatch.setattr(EndpointStage, "__init__", lambda self, launch: started.append(launch))
    report, folder = run_of(job_of(server, tmp_path, escalate={"when": {"probability_below": 0.1}}))
    assert {row["answered_by"] for row in rows_of(folder)} == {"demo"} and not started
    assert report.good == ROWS and report.cascade[1].asked == 0
    assert verify(open_store(str(folder))).faults == []


def test_at_most_below_one_row_sends_none(server, tmp_path):
    report, folder = run_of(job_of(server, tmp_path, escalate={"at_most": 0.01}))
    assert {row["answered_by"] for row in rows_of(folder)} == {"demo"} and not server.bodies
    assert report.cascade[1].asked == 0


def test_answers_that_fail_the_schema_go_to_the_larger_model(server, tmp_path):
    job = job_of(
        server,
        tmp_path,
        sampling={"max_tokens": 20},
        output={"schema_model": FORM},
        escalate={"when": {"fails_schema": True}},
        limits={"max_failed_rows": 0},
    )
    report, folder = run_of(job)
    for row in rows_of(folder):
        expected = ("car", "demo") if row["number"] % 4 else ("bank", "large")
        assert (row["label"], row["answered_by"]) == expected
    assert report.good == ROWS and len(server.bodies) == 5
    assert verify(open_store(str(folder))).faults == []


def test_rows_of_low_mean_logprob_go_to_the_larger_model(server, tmp_path):
    when = {"logprob_below": -0.5}
    _, folder = run_of(
        job_of(server, tmp_path, sampling={"max_tokens": 20}, escalate={"when": when})
    )
    by = {row["number"]: row["answered_by"] for row in rows_of(folder)}
    assert by == {n: "large" if n / ROWS + 0.02 - 1 < -0.5 else "demo" for n in range(ROWS)}
    assert "logprobs" not in rows_of(folder)[0]


def test_a_row_without_a_request_fails_once_and_can_be_retried(server, tmp_path):
    names = [None if n == 9 else f"Company {n}" for n in range(ROWS)]
    table = pa.table({"Company": names, "number": range(ROWS)})
    pq.write_table(table, tmp_path / "in.parquet")
    job = job_of(server, tmp_path, limits={"max_failed_rows": 5})
    report, folder = run_of(job)
    assert (report.good, report.failed) == (ROWS - 1, 1)
    (failed,) = rows_of(folder, "_quarantine")
    assert failed["_row"] == 9 and failed["stage"] == "prepare"
    assert verify(open_store(str(folder))).faults == []


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("copied", [False, True])
def test_a_run_killed_anywhere_resumes(server, tmp_path, monkeypatch, copied):
    job = job_of(server, tmp_path)
    if copied:
        lines = "".join(f"Company {n},{n}\n" for n in range(ROWS))
        (tmp_path / "in.csv").write_text("Company,number\n" + lines)
        job = job_of(
            server, tmp_path, source={"uri": str(tmp_path / "in.csv"), "rows_per_shard": 6}
        )
    usual, left = pipeline.Pipeline.__call__, [0]

    def dying(self: Any, units: Any, isolated: bool) -> Iterator[Any]:
        for receipt in usual(self, units, isolated):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            yield receipt

    monkeypatch.setattr(pipeline.Pipeline, "__call__", dying)
    kills = 0
    while True:
        left[0] = 1  # shard, then the process dies; four shards for each model
        try:
            report, folder = run_of(job)
            break
        except Killed:
            kills += 1
            found = verify(open_store(str(tmp_path / "out" / "night")))
            assert all("not finished" in text for text in found.faults), found.faults
    assert kills == 7
    rows = rows_of(folder)
    assert [row["_row"] for row in rows] == list(range(ROWS))
    assert [row["answered_by"] == "large" for row in rows] == list(map(unsure, range(ROWS)))
    assert report.cascade[1].asked == sum(map(unsure, range(ROWS)))
    store = open_store(str(folder))
    assert verify(store).faults == []
    assert sorted(set(asked_of(server))) == sorted(
        f"Company {n}" for n in filter(unsure, range(20))
    )
    before = [dict(row) for row in rows]
    reap(store, 0.0)
    assert rows_of(folder) == before and verify(store).faults == []
    bodies = len(server.bodies)
    left[0] = -1  # a finished run starts nothing
    again, _ = run_of(job)
    assert again.good == ROWS and len(server.bodies) == bodies


def test_verify_names_a_changed_result_of_the_first_model(server, tmp_path):
    _, folder = run_of(job_of(server, tmp_path))
    (part,) = (folder / "_raybatch/asks/data").glob("*.parquet")
    part.unlink()
    assert any("asks/data" in text for text in verify(open_store(str(folder))).faults)


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ({"escalate": {"to": {"model": "x", "task": "embed"}}}, "task"),
        ({"escalate": {"when": {}}}, "when"),
        ({"escalate": {"to": {}}}, "to"),
        ({"escalate": {"when": {"fails_schema": True}}}, "output.schema_model"),
        ({"output": {"postprocess": "helpers.functions:label"}}, "output.postprocess"),
        ({"output": {"probabilities": True}}, "output.probabilities"),
        ({"reuse": "latest"}, "reuse"),
        ({"engine": {"max_model_len": "auto"}}, "max_model_len"),
        ({"escalate": {"at_most": 0}}, "at_most"),
    ],
)
def test_what_does_not_combine_is_refused_by_name(server, tmp_path, groups, field):
    with pytest.raises(ConfigError, match=field):
        job_of(server, tmp_path, **groups)


def test_no_record_holds_the_key_of_the_larger_model(server, tmp_path):
    to = {"endpoint": {"url": server.url, "model": "large", "key": "sk-large-secret"}}
    job = job_of(server, tmp_path, escalate={"to": to})
    _, folder = run_of(job)
    assert server.authorizations == {"Bearer sk-large-secret"}
    for path in folder.rglob("*"):
        assert not path.is_file() or b"sk-large-secret" not in path.read_bytes(), path


def test_a_damaged_cascade_is_repaired_without_asking_the_intact_rows_again(server, tmp_path):
    job = job_of(server, tmp_path)
    _, folder = run_of(job)
    before = rows_of(folder)
    asked = len(server.bodies)
    (part,) = (folder / "data").glob("*.parquet")
    part.unlink()
    fixed = repair_run(str(folder))
    assert fixed.run_key is not None
    _, folder = run_of(job)
    assert rows_of(folder) == before and verify(open_store(str(folder))).faults == []
    assert sorted(Small.asked) == list(range(ROWS)), "the first model is not asked again"
    assert len(server.bodies) == 2 * asked


def test_failed_rows_are_retried_by_both_models(server, tmp_path):
    names = [None if n in (9, 0) else f"Company {n}" for n in range(ROWS)]
    pq.write_table(pa.table({"Company": names, "number": range(ROWS)}), tmp_path / "in.parquet")
    _, folder = run_of(job_of(server, tmp_path, limits={"max_failed_rows": 5}))
    found = plan_retry(str(folder), overrides={"prompt.on_null": "empty"})
    assert isinstance(found, Retry)
    progress = infer_run(found.job, found.run)
    report = finalize_run(found.job, found.run, progress)
    rows = {row["_row"]: row["answered_by"] for row in rows_of(Path(found.run.uri))}
    assert rows == {0: "demo", 9: "large"} and report.good == 2


def test_tune_finds_the_threshold_on_a_sample_and_writes_the_job_file(
    server, tmp_path, monkeypatch, capsys
):
    """Of 1,000 rows both models agree on those of which the first one is surer than 0.9."""
    monkeypatch.setattr(Small, "rows", 100)
    names = [f"Company {n}" for n in range(1000)]
    pq.write_table(pa.table({"Company": names, "number": range(1000)}), tmp_path / "in.parquet")

    def sure(number: int) -> float:
        chance = number % 100 / 100 + 0.02
        return max(chance, 1 - chance)

    def answer(_: int, body: dict[str, Any]) -> Any:
        number = int(body["messages"][-1]["content"].split("\n")[0].split()[-1])
        return 200, {}, completion(json.dumps({"label": "car" if sure(number) > 0.9 else "bank"}))

    server.fault = answer
    job = job_of(server, tmp_path, source={"uri": str(tmp_path / "in.parquet")})
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()))
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", str(path), "--cascade", "--agreement", "0.9"])
    assert ended.value.code == 0
    written = yaml.safe_load((tmp_path / "job.tuned.yaml").read_text())
    below = written["output"]["escalate"]["when"]["probability_below"]
    true = 1 - np.mean([below <= sure(n) <= 0.9 for n in range(1000)])
    assert 0.9 <= true < 0.99
    said = capsys.readouterr().out
    assert "output.escalate.when.probability_below" in said and "95% confidence" in said
    assert not list((tmp_path / "out").rglob("*.parquet")), "the sample's runs are removed"
    assert len(server.bodies) < 1000


@pytest.mark.parametrize(
    ("groups", "agreement", "remedy"),
    [
        ({}, 0.95, "Lower --agreement"),
        ({}, 1.5, "between 0 and 1"),
        ({"source": {"limit": 5}}, 0.95, "source.limit"),
    ],
)
def test_a_sample_that_can_show_nothing_is_refused(server, tmp_path, groups, agreement, remedy):
    source = {"uri": str(tmp_path / "in.parquet"), **groups.get("source", {})}
    with pytest.raises(ConfigError, match=remedy):
        tune_cascade(job_of(server, tmp_path, source=source), agreement)


def test_without_a_threshold_there_is_nothing_to_tune(server, tmp_path):
    job = job_of(
        server,
        tmp_path,
        output={"schema_model": FORM},
        sampling={},
        escalate={"when": {"fails_schema": True}},
    )
    with pytest.raises(ConfigError, match=r"when\.probability_below"):
        tune_cascade(job)


def test_columns_of_the_input_keep_their_names_and_extras_are_those_of_the_deciding_model(
    server, tmp_path
):
    names = [f"Company {n}" for n in range(ROWS)]
    columns = {"Company": names, "number": range(ROWS), "response": ["old"] * ROWS}
    pq.write_table(pa.table({**columns, "_row": range(ROWS)}), tmp_path / "in.parquet")
    output = {"extras": ["finish_reason", "prompt_tokens", "output_tokens"]}
    _, folder = run_of(job_of(server, tmp_path, output=output))
    for row in rows_of(folder):
        by_larger = unsure(row["number"])
        assert row["response"] == "old" and row["_row"] == row["_row_2"] == row["number"]
        assert row["response_2"] == ("bank" if by_larger else "car")
        assert (row["prompt_tokens"], row["output_tokens"]) == ((11, 7) if by_larger else (3, 1))
        assert row["finish_reason"] == "stop"


def test_an_input_column_of_that_name_is_refused_before_anything_is_asked(server, tmp_path):
    table = pa.table({"Company": ["a"], "number": [0], "answered_by": ["me"]})
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match="'answered_by' is also an input column"):
        plan_run(job_of(server, tmp_path), "night")
    assert not Small.asked and not server.bodies


def test_a_row_that_fails_at_the_larger_model_is_in_quarantine(server, tmp_path):
    server.fault = lambda number, body: (200, {}, completion("neither"))
    number = sum(map(unsure, range(ROWS)))
    report, folder = run_of(job_of(server, tmp_path, limits={"max_failed_rows": ROWS}))
    assert (report.good, report.failed) == (ROWS - number, number)
    assert {row["answered_by"] for row in rows_of(folder)} == {"demo"}
    assert verify(open_store(str(folder))).faults == []


def test_plan_and_preview_show_both_models(server, tmp_path):
    job = job_of(server, tmp_path, escalate={"at_most": 0.25})
    found = dry_run(job)
    assert found.first is not None and found.at_most == 0.25
    assert (found.first.model["source"], found.model["source"]) == ("demo", "endpoint")
    assert ("answered_by", "string") in found.result and not found.problems
    shown = preview_rows(job, 3, answers=False)
    assert shown.larger is not None and len(shown.prompts) == len(shown.larger.prompts) == 3


def test_the_larger_model_may_answer_by_the_batch_api(tmp_path, monkeypatch):
    """Also a shard of which it is asked about no row."""
    monkeypatch.setattr(shard, "FIRST_POLL", 0.01)
    monkeypatch.setattr(shard, "LIST_LOOK_EVERY", 0.01)
    with batch_server() as server:
        to = {"endpoint": {"url": server.url, "model": "large", "batch": True}}
        form = {"max_tokens": 20}
        rule = {"to": to, "when": {"logprob_below": -0.5}}
        _, folder = run_of(job_of(OpenAIServer(), tmp_path, sampling=form, escalate=rule))
    by = {row["number"]: row["answered_by"] for row in rows_of(folder)}
    assert by == {n: "large" if n / ROWS + 0.02 - 1 < -0.5 else "demo" for n in range(ROWS)}
    assert verify(open_store(str(folder))).faults == []


def test_no_difference_is_accepted_in_a_cascade(server, tmp_path):
    plan_run(job_of(server, tmp_path), "night")
    other = job_of(server, tmp_path, prompt={"template": "About {Company}"})
    with pytest.raises(ConfigError, match="in a cascade"):
        plan_run(other, "night", accept=["prompt.template"])


@pytest.mark.parametrize(
    ("share", "rows", "most"), [(0.29, 100, 29), (0.57, 100, 57), (0.1, 4, 0), (1.0, 7, 7)]
)
def test_a_share_of_the_rows_is_counted_exactly(share: float, rows: int, most: int) -> None:
    assert most_rows(share, rows) == most


def test_the_precheck_takes_a_first_model_of_hugging_face(server, tmp_path):
    """Its commit is not known before the run is planned; the larger model's is."""
    job = job_of(server, tmp_path, engine={"model": "someone/small"})
    resolved = precheck_resolved(resolve(job), open_store(str(tmp_path / "out/night")))
    assert resolved.checked and resolved.first is not None and not resolved.first.checked


def test_checked_answers_with_other_thoughts_agree(tmp_path):
    nights, thoughts = Nights(tmp_path), count()
    answer = json.dumps({"label": "car"})
    nights.answer = lambda prompt: f"<think>{next(thoughts)}</think>{answer}"
    nights.write("a", "b", "c")
    form = tmp_path / "form.json"
    form.write_text(json.dumps(FORM))
    escalate = {"to": {"model": "demo"}, "when": {"fails_schema": True}, "check": 3}
    output = {"uri": str(tmp_path / "out"), "schema_model": str(form), "escalate": escalate}
    job = nights.job(
        output={**output, "reasoning_parser": "qwen3", "reasoning_column": "thoughts"}, reuse=None
    )
    report = nights.night("n1", job)
    rows = nights.result("n1")
    assert sorted(row["thoughts"] for row in rows) == ["0", "1", "2"] and next(thoughts) == 6
    assert report.notes[1].startswith("checked: demo (larger) gave 3 of 3 rows the answer of demo")
