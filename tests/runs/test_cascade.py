"""Cascades: a small model answers all rows, a larger one those of which it is unsure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
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
from helpers.command_line import called
from helpers.engines import with_answers
from helpers.nights import Nights
from helpers.openai_server import OpenAIServer, completion, openai_server
from helpers.ports import free_ports
from huggingface_hub import constants

from prefect_raybatch import demo
from prefect_raybatch.api import dry_run, finalize_run, infer_run, plan_run, preview_rows
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.api.tune import tune_cascade
from prefect_raybatch.cli import commands as cli
from prefect_raybatch.cli.show import describe_progress
from prefect_raybatch.cluster import pipeline
from prefect_raybatch.compare.threshold import TunedCascade
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import Counts, Heartbeat
from prefect_raybatch.errors import ConfigError, EndpointRefused
from prefect_raybatch.flow.page import live_rows, progress_line
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.increments import OF_LARGER, increment_of
from prefect_raybatch.ledger.layout import commit_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model import pinned
from prefect_raybatch.report.html import html
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import cascade_table, cascade_text, markdown
from prefect_raybatch.report.run_history import answers_table
from prefect_raybatch.result.reap import reap
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.plan_run import precheck_resolved
from prefect_raybatch.runs.repair import repair_run
from prefect_raybatch.runs.run_history import history_of
from prefect_raybatch.runs.status import report_of, status
from prefect_raybatch.sizing import threshold
from prefect_raybatch.spec.cascade import most_rows
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.stages.block import is_passthrough
from prefect_raybatch.stages.columns import CHANCES, ERROR, STEPS
from prefect_raybatch.stages.endpoint import client
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

    def __init__(self, launch: EngineLaunch) -> None:
        self.launch = launch

    def __call__(self, table: pa.Table) -> pa.Table:
        if is_passthrough(table):
            return table
        numbers = table["number"].to_pylist()
        type(self).asked += numbers
        made = with_answers(table, table[ERROR].to_pylist(), list(map(self.text, numbers)))
        chances = [number % self.rows / self.rows + 0.02 for number in numbers]
        if "logprobs" in self.launch.sampling:
            return STEPS.add_to(made, [[[[{"id": 5, "logprob": p - 1}]]] for p in chances])
        rows = [[("car", max(p, 1 - p)), ("bank", min(p, 1 - p))] for p in chances]
        return CHANCES.add_to(made, rows) if self.launch.labels else made

    def text(self, number: int) -> str:
        if not self.launch.labels and "logprobs" not in self.launch.sampling:
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

    def stage_of(endpoint: EndpointSpec | None, batch: bool = True) -> type:
        return Small if endpoint is None else usual(endpoint, batch)

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
    for page in (markdown(report), html(report)):
        assert "Stages of large" in page and "Engines of large" in page
    assert verify(open_store(str(folder))).faults == []


def test_finish_reasons_in_the_history_are_those_of_the_larger_model_alone(server, tmp_path):
    unsure = {"when": {"logprob_below": -0.5}}
    job = job_of(server, tmp_path, sampling={"max_tokens": 20}, escalate=unsure)
    report, _ = run_of(job)
    assert 0 < report.cascade[1].answered < ROWS
    assert report.answers["ends"] == {"stop": float(report.cascade[1].answered)}
    (page,) = history_of(job.output.uri)
    titles = [row[""] for row in answers_table(page)]
    assert titles[-1] == "finish reason stop, larger model"


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


def test_rows_that_go_on_to_the_larger_model_are_not_counted_as_failed(server, tmp_path, capsys):
    """Five of 20 answers do not match the schema, and a row without a company fails for good."""
    with_nulls(tmp_path, 3)
    job = job_of(
        server,
        tmp_path,
        sampling={"max_tokens": 20},
        output={"schema_model": FORM},
        escalate={"when": {"fails_schema": True}},
        limits={"max_failed_rows": 1},
    )
    run, told, pages = plan_run(job, "night"), [], []

    class Stopped(Exception):
        """Ends the run after the first model."""

    def observe(progress: Progress) -> None:
        if progress.later.rows and progress.done == ROWS:
            told.append(describe_progress(progress, "inferring", ""))
            beat = Heartbeat.of(Counts.whole(progress), 1.0)
            pages.append((progress_line(beat), {row[""]: row["now"] for row in live_rows(beat)}))
            assert Heartbeat.from_bytes(beat.to_bytes(), "beat") == beat
        elif progress.before.rows:
            raise Stopped

    with pytest.raises(Stopped):
        infer_run(job, run, observe)
    assert told[-1].endswith("left, 1 failed, 5 to the larger model")
    line, table = pages[-1]
    assert line.endswith("1 failed, 5 to the larger model")
    assert (table["failed"], table["to the larger model"]) == ("1", "5")
    asks = status(run.uri).first_phase
    assert asks is not None and (asks.quarantined, asks.to_larger) == (1, 5)
    assert [key.split("|")[1] for key in asks.failures] == ["ValueError"]
    report = finalize_run(job, run, infer_run(job, run))
    assert (report.good, report.failed) == (ROWS - 1, 1)
    assert status(run.uri).asked_larger == 5
    assert "20 of 20 (100%), 5 asked of the larger model" in called(capsys, "status", run.uri)[1]


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
    found = planned_retry(server, folder, {"prompt.on_null": "empty"})
    progress = infer_run(found.job, found.run)
    report = finalize_run(found.job, found.run, progress)
    rows = {row["_row"]: row["answered_by"] for row in rows_of(Path(found.run.uri))}
    assert rows == {0: "demo", 9: "large"} and report.good == 2


def test_a_retry_asks_the_server_of_the_larger_model_before_it_begins(server, tmp_path):
    with_nulls(tmp_path, 0)
    _, folder = run_of(job_of(server, tmp_path, limits={"max_failed_rows": 5}))
    nulls = {"prompt.on_null": "empty"}
    with openai_server(models=("other",)) as other:
        to = {"endpoint": {"url": other.url, "model": "gone"}}
        with pytest.raises(EndpointRefused, match=r"output\.escalate\.to\.endpoint"):
            plan_retry(str(folder), overrides={**nulls, "output.escalate.to": to})
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A Hugging Face Hub whose models all are the demo model: {name: its commit by now}."""
    commits = {name: f"{name} before" for name in ("a/small", "a/large", "a/other")}
    config = Path(demo.demo_model_path(), "config.json").read_bytes()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(pinned, "hub_commit", lambda name, *_: commits[name])
    monkeypatch.setattr(pinned, "hub_file", lambda *_: config)
    monkeypatch.setattr(pinned, "local_path", lambda _: demo.demo_model_path())
    return commits


@pytest.mark.parametrize(
    ("changes", "models"),
    [
        ({}, ("a/small before", "a/large before")),
        ({"output.escalate.to": {"model": "a/other"}}, ("a/small before", "a/other now")),
        ({"output.escalate.to.revision": "v1"}, ("a/small before", "a/large now")),
        ({"engine.model": "a/other"}, ("a/other now", "a/large before")),
        ({"output.escalate": {}}, ("a/small before",)),
    ],
)
def test_a_retry_keeps_the_commits_of_those_models_that_it_names_as_before(
    server, tmp_path, hub, changes, models
):
    groups = {
        "engine": {"device": "cpu", "model": "a/small"},
        "escalate": {"to": {"device": "cpu", "model": "a/large"}},
        "limits": {"max_failed_rows": ROWS},
    }
    _, folder = run_of(job_of(server, tmp_path, **groups))  # the larger model's answers fail
    for name in hub:
        hub[name] = f"{name} now"
    found = plan_retry(str(folder), overrides=changes)
    assert isinstance(found, Retry)
    plan = need_plan(Ledger(open_store(found.run.uri)))
    increment = increment_of(plan)
    first = [] if increment is None or increment.asks is None else [increment.asks["model"]]
    assert tuple(model["revision"] for model in (*first, plan.model)) == models


def planned_retry(
    server: OpenAIServer, run: Path | str, changes: Any = None, errors: Any = None
) -> Retry:
    """Plan a retry at the run's server of the larger model, which the caller has to name."""
    changes = {"output.escalate.to.endpoint.url": server.url, **(changes or {})}
    found = plan_retry(str(run), errors, changes)
    assert isinstance(found, Retry)
    return found


def retried(server: OpenAIServer, *arguments: Any) -> tuple[RunReport, dict[int, str]]:
    """Retry the failed rows of a run; return the report, and who answered each good row."""
    found = planned_retry(server, *arguments)
    report = finalize_run(found.job, found.run, infer_run(found.job, found.run))
    store = open_store(found.run.uri)
    assert verify(store).faults == []
    data = rows_of(Path(found.run.uri)) if report.good else []
    return report, {row["_row"]: row["answered_by"] for row in data}


def refused_by_larger(server: OpenAIServer, *numbers: int) -> None:
    """Have the larger model answer these rows with a text that is no label, and others `bank`."""

    def answer(_: int, body: dict[str, Any]) -> Any:
        name = body["messages"][-1]["content"].split("\n")[0]
        is_refused = name in [f"Company {number}" for number in numbers]
        return 200, {}, completion("neither" if is_refused else json.dumps({"label": "bank"}))

    server.fault = answer


def with_nulls(folder: Path, *numbers: int) -> None:
    names = [None if n in numbers else f"Company {n}" for n in range(ROWS)]
    pq.write_table(pa.table({"Company": names, "number": range(ROWS)}), folder / "in.parquet")


def test_a_row_that_failed_at_the_larger_model_goes_there_again_in_a_retry(server, tmp_path):
    """Rows 8 to 11 are the least sure, and `at_most` of two rows would be none."""
    refused_by_larger(server, 8, 10)
    limits = {"max_failed_rows": 5}
    job = job_of(server, tmp_path, escalate={"at_most": 0.2}, limits=limits)
    report, folder = run_of(job)
    assert report.failed == 2
    refused_by_larger(server, 8)
    report, rows = retried(server, folder)
    assert rows == {10: "large"} and report.failed == 1
    refused_by_larger(server)
    report, rows = retried(server, report.run)
    assert rows == {8: "large"}, "also in the retry of a retry"


def test_at_most_counts_over_a_run_and_its_retries(server, tmp_path):
    """Rows 9, 10 and 11 are unsure and failed before a model was asked. Two rows may go."""
    with_nulls(tmp_path, 9, 10, 11)
    limits = {"max_failed_rows": 5}
    rule = {"at_most": 0.1, "when": {"probability_below": 0.6}}  # unsure: 8 to 11
    job = job_of(server, tmp_path, escalate=rule, limits=limits)
    report, folder = run_of(job)
    assert report.cascade[1].asked == 1, "row 8"
    report, rows = retried(server, folder, {"prompt.on_null": "empty"})
    assert rows == {9: "demo", 10: "large", 11: "demo"}
    assert "output.escalate.at_most (0.1 of the first run's 20 rows" in report.notes[0]
    assert "left 2 to demo" in report.notes[0]


def test_an_unfinished_retry_keeps_its_share_from_the_next_one(server, tmp_path):
    with_nulls(tmp_path, 9, 10)
    refused_by_larger(server, 8)
    rule = {"at_most": 0.15, "when": {"probability_below": 0.6}}
    report, folder = run_of(job_of(server, tmp_path, escalate=rule, limits={"max_failed_rows": 5}))
    assert report.cascade[1].asked == 2, "rows 8 and 11, so one is left"
    nulls = ({"prompt.on_null": "empty"}, ["ValueError"])
    first = planned_retry(server, folder, *nulls)
    assert share_of(first.run.uri) == (ROWS, 0, 1)
    refused_by_larger(server)
    report, rows = retried(server, folder, None, ["AnswerNotValid"])
    assert share_of(report.run) == (ROWS, 1, 0) and rows == {8: "large"}
    _, rows = retried(server, folder, *nulls)
    assert rows == {9: "demo", 10: "large"}


def test_at_most_counts_retries_of_the_damaged_run_that_a_repaired_run_continues(server, tmp_path):
    with_nulls(tmp_path, 9, 10)
    refused_by_larger(server, 8)
    rule = {"at_most": 0.2, "when": {"probability_below": 0.6}}
    job = job_of(server, tmp_path, escalate=rule, limits={"max_failed_rows": 5})
    _, folder = run_of(job)
    _, rows = retried(server, folder, {"prompt.on_null": "empty"}, ["ValueError"])
    assert rows == {9: "large", 10: "large"}
    (folder / commit_path(0)).unlink()
    repair_run(str(folder))
    report, _ = run_of(job)
    assert report.run == f"{folder}.m1"
    report, _ = retried(server, report.run)
    assert share_of(report.run) == (ROWS, 1, 0)


def share_of(run: str) -> tuple[int, int, int]:
    """Return (rows of the first run, rows sent before, rows that may be sent more) of a retry."""
    increment = increment_of(need_plan(Ledger(open_store(run))))
    assert increment is not None and increment.share is not None
    return increment.share.rows, increment.share.sent, increment.share.more


def test_a_retry_may_raise_at_most(server, tmp_path):
    with_nulls(tmp_path, 9, 10)
    rule = {"at_most": 0.05, "when": {"probability_below": 0.6}}
    _, folder = run_of(job_of(server, tmp_path, escalate=rule, limits={"max_failed_rows": 5}))
    changes = {"prompt.on_null": "empty", "output.escalate.at_most": 0.1}
    _, rows = retried(server, folder, changes)
    assert rows == {9: "demo", 10: "large"}


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


def test_tune_writes_no_job_file_if_the_larger_model_must_answer_all_rows(
    server, tmp_path, monkeypatch, capsys
):
    """The first model is equally sure of all its answers, and all are wrong."""
    monkeypatch.setattr(Small, "rows", 100)
    names = [f"Company {n}" for n in range(300)]
    numbers = [85] * 300  # so no sample has fewer of the surest rows
    pq.write_table(pa.table({"Company": names, "number": numbers}), tmp_path / "in.parquet")
    server.fault = lambda _, body: (200, {}, completion(json.dumps({"label": "bank"})))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_of(server, tmp_path).to_dict()))
    code, out, _ = called(capsys, "tune", path, "--cascade", "--agreement", "0.9")
    assert code == 1 and not (tmp_path / "job.tuned.yaml").exists()
    assert "the same answer to 0 of" in out and "wrote" not in out and "next" not in out
    assert "no threshold keeps 0.9 of the answers equal" in " ".join(out.split())
    assert "unless large is asked about all rows" in " ".join(out.split())
    code, out, _ = called(capsys, "tune", path, "--cascade", "--agreement", "0.9", "--json")
    assert code == 1 and json.loads(out)["settings"] == {}


def test_tune_names_the_least_at_most_that_keeps_the_guarantee():
    found = threshold.TestedThreshold(0.8, 196, 80, 200, 0.95)
    tuned = TunedCascade(
        "small", "large", "f", 0.9, 0.95, 200, 150, found, 0.3, escalated=80, low=0.332, high=0.471
    )
    (line,) = (line for line in tuned.lines() if "at_most" in line)
    assert line.endswith("Set it to 0.48 or more")
    assert not any("at_most" in line for line in replace(tuned, at_most=0.48).lines())


def test_rows_that_the_larger_model_failed_are_not_compared_when_tuning(server, tmp_path):
    names = [f"Company {n}" for n in range(100)]
    pq.write_table(pa.table({"Company": names, "number": range(100)}), tmp_path / "in.parquet")

    def answer(_: int, body: dict[str, Any]) -> Any:
        number = int(body["messages"][-1]["content"].split("\n")[0].split()[-1])
        text = "neither" if number % 4 == 0 else json.dumps({"label": "car"})
        return 200, {}, completion(text)

    server.fault = answer
    found = tune_cascade(job_of(server, tmp_path), 0.95)
    assert (found.rows, found.same, found.unanswered) == (75, 75, 25)
    assert found.found is not None and found.sampled == 100
    assert found.lines()[1].startswith("25 sampled rows got no answer of the larger model")
    with pytest.raises(ConfigError, match=r"75 rows cannot show .*, and 25 sampled rows got no"):
        tune_cascade(job_of(server, tmp_path), 0.97)


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


def test_failed_rows_count_for_the_model_at_which_they_failed(server, tmp_path):
    """Row 3 makes no request; rows 8 and 10 fail at the larger model, which answers ten others."""
    with_nulls(tmp_path, 3)
    refused_by_larger(server, 8, 10)
    report, folder = run_of(job_of(server, tmp_path, limits={"max_failed_rows": ROWS}))
    assert (report.good, report.failed) == (ROWS - 3, 3)
    small, large = report.cascade
    assert (small.asked, small.answered, small.failed) == (ROWS, 7, 1)
    assert (large.asked, large.answered, large.failed) == (12, 10, 2)
    by = Counter(row["answered_by"] for row in rows_of(folder))
    assert by == {"demo": 7, "large": 10}
    assert verify(open_store(str(folder))).faults == []
    value = report.to_dict()["cascade"]
    assert [(one["answered"], one["failed"]) for one in value] == [(7, 1), (10, 2)]
    assert cascade_text(report) == "7 by demo (1 failed), 10 by large (2 failed)"
    shown = cascade_table(report)
    assert [(row["answered"], row["failed"], row["share"]) for row in shown] == [
        ("7", "1", "35.0%"),
        ("10", "2", "50.0%"),
    ]
    for text in (markdown(report), html(report)):
        assert "rows asked" in text and "failed" in text and "50.0%" in text
    assert report_of(str(folder)).cascade == report.cascade


def test_a_row_of_which_the_larger_engine_dies_failed_there(server, tmp_path, monkeypatch):
    usual = pipeline.Pipeline.__call__

    def without_row_8(self: Any, units: Any, isolated: bool) -> Iterator[Any]:
        if self.increment.ledger != OF_LARGER:
            yield from usual(self, units, isolated)
            return
        yield self.quarantine(Unit(1, 2, 1), Loss("EngineDied", "of this row"))
        yield from usual(self, [u for u in units if u.shard != 1], isolated)
        yield from usual(self, [Unit(1, 0, 2), Unit(1, 3, 3)], isolated)

    monkeypatch.setattr(pipeline.Pipeline, "__call__", without_row_8)
    report, _ = run_of(job_of(server, tmp_path, limits={"max_failed_rows": 1}))
    assert [(share.answered, share.failed) for share in report.cascade] == [(8, 0), (11, 1)]


def test_a_larger_model_that_is_missing_is_named_as_the_job_names_it(server, tmp_path):
    to = {"model": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=r"^output\.escalate\.to\.model: .*none"):
        dry_run(job_of(server, tmp_path, escalate={"to": to}))


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        ({"engine": {"device": "cpu", "dtype": "flot16"}}, r"engine\.dtype: .*flot16"),
        (
            {"escalate": {"to": {"model": "demo", "dtype": "flot16"}}},
            r"output\.escalate\.to\.dtype: .*flot16",
        ),
        (
            {"escalate": {"to": {"model": "demo", "max_model_len": 9999}}},
            r"output\.escalate\.to\.max_model_len: 9,999 is more",
        ),
    ],
)
def test_a_model_of_a_cascade_whose_engine_cannot_start_is_found_before_any_row_is_answered(
    server, tmp_path, groups, fault
):
    job = job_of(server, tmp_path, **groups)
    for check in (
        dry_run,
        lambda job: plan_run(job, "night"),
        lambda job: precheck_resolved(resolve(job), open_store(str(tmp_path / "out/night"))),
    ):
        with pytest.raises(ConfigError, match=rf"^{fault}"):
            check(job)
    assert not list((tmp_path / "out").rglob("plan.json"))


def test_a_larger_model_that_its_server_lacks_is_found_before_any_row_is_answered(tmp_path):
    field = r"^output\.escalate\.to\.endpoint\.model: the server has no model 'large'; use .*other"
    with openai_server(models=("other",)) as server, pytest.raises(EndpointRefused, match=field):
        plan_run(job_of(server, tmp_path), "night")
    assert not list((tmp_path / "out").rglob("plan.json"))


def test_a_larger_model_whose_server_is_away_may_be_back_when_it_is_needed(
    server, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(client, "FIRST_BACKOFF", 0.001)
    to = {"endpoint": {"url": f"http://127.0.0.1:{free_ports()[0]}/v1", "model": "large"}}
    run = plan_run(job_of(server, tmp_path, escalate={"to": to}), "night")
    assert (Path(run.uri) / "_raybatch/plan.json").exists()
    assert "output.escalate.to.endpoint.url: http://127.0.0.1:" in caplog.text
    assert "The run needs this server later" in caplog.text


def test_plan_and_preview_show_both_models(server, tmp_path):
    job = job_of(server, tmp_path, escalate={"at_most": 0.25})
    found = dry_run(job)
    assert found.first is not None and found.at_most == 0.25
    assert (found.first.model["source"], found.model["source"]) == ("demo", "endpoint")
    assert ("answered_by", "string") in found.result and not found.problems
    shown = preview_rows(job, 3, answers=False)
    assert shown.larger is not None and len(shown.prompts) == len(shown.larger.prompts) == 3


@pytest.mark.parametrize(("at_most", "asked"), [(0.25, 5), (1.0, 12)])
def test_a_run_costs_at_most_what_the_plan_says_under_its_assumptions(
    server, tmp_path, at_most, asked
):
    """The server bills 11 and 7 tokens a row; the plan assumes answers of full length, which for
    labels as JSON is what the requests allow, not sampling.max_tokens."""
    rule = {"at_most": at_most, "check": 2}
    job = job_of(server, tmp_path, escalate=rule)
    found = dry_run(job)
    assert found.cost is not None and found.cost.cost is not None and found.hosted is not None
    most = min(ROWS, round(at_most * ROWS) + 2)
    assert found.cost.rows == most
    told = (
        f"for {most} rows, if each answer is as long as it may be ({found.hosted.longest_answer} "
        "tokens) and the larger model is asked about as many rows as output.escalate.at_most "
        f"({at_most:g}) allows and 2 to check; by sampled rows"
    )
    assert found.cost.line().endswith(told)
    report, _ = run_of(job)
    assert {body["max_tokens"] for body in server.bodies} == {found.hosted.longest_answer}
    large = report.cascade[1]
    assert large.asked == asked + 2
    assert large.cost["total"] == pytest.approx(large.asked * (11 * 1.0 + 7 * 2.0) / 1e6)
    answers = found.hosted.longest_answer * 2.0 * most / 1e6
    assert answers <= found.cost.cost and large.cost["total"] < found.cost.cost


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
