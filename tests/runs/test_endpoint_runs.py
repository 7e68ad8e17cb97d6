"""Runs with a hosted model: real stages and HTTP, and a server that counts and fails."""

from __future__ import annotations

import itertools
import json
import re
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.dataset as ds
import pytest
from helpers.findings import one
from helpers.hosted import finished_run, hosted_job
from helpers.openai_server import OpenAIServer, completion, failing, openai_server

from prefect_raybatch.api import dry_run, infer_run, plan_run, preview_rows
from prefect_raybatch.api.tune import tune
from prefect_raybatch.cluster import pipeline as pipeline_module
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.cluster.sizes import for_attempt
from prefect_raybatch.compile.job import compile_planned
from prefect_raybatch.doctor import places
from prefect_raybatch.driver import monitor
from prefect_raybatch.driver.heartbeat import Heartbeat, Listener, read_heartbeats
from prefect_raybatch.errors import (
    ConfigError,
    EndpointRefused,
    EndpointUnavailable,
    StoreUnavailable,
    is_transient,
)
from prefect_raybatch.flow.page import live_rows, progress_line
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.report.report import result_rows
from prefect_raybatch.runs.run import load_run
from prefect_raybatch.runs.starts import seconds_of_others
from prefect_raybatch.sizing.sizes import assumed
from prefect_raybatch.stages.block import losses
from prefect_raybatch.stages.endpoint import client, limiter
from prefect_raybatch.stages.endpoint.body import LABEL_JSON_TOKENS
from prefect_raybatch.stages.endpoint.limiter import LIMIT_WINDOW, TRAVEL
from prefect_raybatch.stages.endpoint.stage import EndpointStage
from prefect_raybatch.stages.vllm import process_note
from prefect_raybatch.storage import open_store
from prefect_raybatch.storage.base import FileInfo

ROWS = 20
ENDLESS = completion("x").replace(b'"prompt_tokens": 11', b'"prompt_tokens": 1e999')
KEY = "sk-very-secret-0123456789"
runs = itertools.count()


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as made:
        yield made


@pytest.fixture(autouse=True)
def prompt_retries(monkeypatch: pytest.MonkeyPatch, without_ray: None) -> None:
    monkeypatch.setattr(client, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(client, "MOST_BACKOFF", 0.01)


def job_of(server: OpenAIServer, folder: Path, **groups: Any) -> BatchJob:
    groups["source"] = groups.get("source", {"rows_per_shard": 5})
    names = {"Company": [f"Company {n}" for n in range(ROWS)]}
    return hosted_job(server.url, folder, names, **groups)


def answers(folder: Path) -> dict[str, str]:
    table = ds.dataset(folder / "data").to_table()
    return dict(zip(table["Company"].to_pylist(), table["response"].to_pylist(), strict=True))


def quarantined(folder: Path) -> list[dict[str, Any]]:
    return ds.dataset(folder / "_quarantine").to_table().to_pylist()


def test_each_row_is_asked_once_and_its_answer_is_in_the_result(server, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_SECRET_LARGE", KEY)
    job = job_of(server, tmp_path, endpoint={"key": "${RAYBATCH_SECRET_LARGE}"})
    report, folder = finished_run(job)
    assert answers(folder) == {f"Company {n}": f"about Company {n}" for n in range(ROWS)}
    assert len(server.bodies) == len(set(server.keys)) == ROWS
    assert server.authorizations == {f"Bearer {KEY}"}
    assert report.tokens["prompt_tokens"] == 11 * ROWS
    assert report.tokens["output_tokens"] == 7 * ROWS
    assert not (folder / "_raybatch" / "journal").exists()
    written = [file for file in folder.rglob("*") if file.is_file()]
    assert written and not any(KEY.encode() in file.read_bytes() for file in written)


def pipeline_of(job: BatchJob) -> Pipeline:
    run = plan_run(job, "night")
    ledger = Ledger(open_store(run.uri))
    plan, shards = load_run(ledger, run)
    spec = compile_planned(job, plan)
    size = for_attempt(spec.sizes, plan, assumed(spec.sizes))
    return Pipeline(spec, plan, shards, ledger.store, uuid.uuid4().hex, size)


def test_a_refusal_ends_the_other_blocks_of_the_engine_with_the_same_error(server, tmp_path):
    together = threading.Barrier(2)

    def fault(number: int, body: dict[str, Any]) -> Any:
        text = body["messages"][-1]["content"]
        if text in ("Company 0", "Company 5"):  # of the first and the second shard
            together.wait(60)
        if text == "Company 5":
            refused.wait(60)
        return failing(401, "bad key") if text == "Company 0" else None

    refused, server.fault = threading.Event(), fault
    pipeline = pipeline_of(job_of(server, tmp_path))
    prepare, launch, _ = pipeline.stages(False)
    assert launch is not None
    units = [Unit(shard, 0, 5) for shard in range(2)]
    tasks = pipeline.read_tasks(units, False)
    blocks = [prepare(table) for task in tasks for table in pipeline.reader.read(task)]
    stage = EndpointStage(launch)
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(stage, blocks[1])
        first = stage(blocks[0])
        refused.set()
        for table in (first, second.result(60)):
            assert "401" in losses(table)[0].message and losses(table)[0].fatal
    stage.close()


def test_a_store_that_is_away_while_the_journal_is_read_costs_no_row_a_try(
    server, tmp_path, monkeypatch
):
    pipeline = pipeline_of(job_of(server, tmp_path))
    prepare, launch, _ = pipeline.stages(False)
    (task,) = pipeline.read_tasks([Unit(0, 0, 5)], False)
    (block,) = map(prepare, pipeline.reader.read(task))
    stage = EndpointStage(launch)
    store = type(launch.store)

    def away(self: Any, prefix: str = "") -> Any:
        raise StoreUnavailable("503")

    with monkeypatch.context() as patch:
        patch.setattr(store, "list", away)
        (loss,) = losses(stage(block))
    assert loss.kind == "StoreUnavailable" and not loss.fatal and not server.bodies
    gone = FileInfo("_raybatch/journal/00000000/of-a-finished-run.jsonl", 1, None, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "list", lambda self, prefix="": iter([gone]))
        assert stage(block).num_rows == len(server.bodies) == 5
    stage.close()


def test_the_actor_in_place_of_one_that_died_asks_no_vllm(server, tmp_path, monkeypatch):
    died = process_note.PredecessorNote(process_note.ROWS, cause=process_note.SILENT)
    monkeypatch.setattr(process_note.ProcessNote, "read_predecessor", lambda self: died)
    _, folder = finished_run(job_of(server, tmp_path))
    assert len(answers(folder)) == len(server.bodies) == ROWS


def test_the_key_goes_to_the_engines_alone(server, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_SECRET_LARGE", KEY)
    monkeypatch.setattr(pipeline_module, "limiter_of", lambda *_: None)  # an actor, on Ray
    job = job_of(server, tmp_path, endpoint={"key": "${RAYBATCH_SECRET_LARGE}"})
    pipeline = pipeline_of(job)
    prepare, launch, finish = pipeline.stages(False)
    assert KEY.encode() in cloudpickle.dumps(launch) and KEY not in repr(launch)
    for other in (prepare, finish, pipeline.reader, pipeline.spec):
        assert KEY.encode() not in cloudpickle.dumps(other)


def test_sampling_fields_and_labels_go_to_the_server(server, tmp_path):
    sampling = {"max_tokens": 9, "seed": 3, "choice": ["Retail", "Other"]}
    _, folder = finished_run(job_of(server, tmp_path, sampling=sampling))
    body = server.bodies[0]
    room = 9 + LABEL_JSON_TOKENS  # for the JSON around a label
    assert (body["model"], body["max_tokens"], body["seed"]) == ("large", room, 3)
    assert set(answers(folder).values()) == {"Retail"}


def test_a_row_that_the_server_refuses_is_quarantined_with_its_words(server, tmp_path):
    server.fault = lambda number, body: (
        failing(400, "maximum context length is 8 tokens")
        if body["messages"][-1]["content"] == "Company 7"
        else None
    )
    report, folder = finished_run(job_of(server, tmp_path))
    (row,) = quarantined(folder)
    assert row["error"] == "RequestRefused" and "maximum context length" in row["message"]
    assert report.good == ROWS - 1 and len(server.bodies) == ROWS
    assert ("Model", f"large@{server.url}") in result_rows(report)


@pytest.mark.parametrize(
    "fault",
    [
        failing(500, "internal"),
        failing(503, "overloaded"),
        (200, {}, b"<html>not JSON</html>"),
        (200, {}, b'{"choices": []}'),
        (200, {"x-length": "9999"}, completion("cut")[:20]),
        failing(429, "slow down", retry_after_ms="5"),
    ],
    ids=["500", "503", "html", "no choices", "truncated", "429"],
)
def test_a_fault_that_passes_is_retried_with_the_same_idempotency_key(fault, server, tmp_path):
    server.fault = lambda number, body: fault if number % 4 == 1 and number < 20 else None
    _, folder = finished_run(job_of(server, tmp_path))
    assert len(answers(folder)) == ROWS
    assert len(server.bodies) > ROWS and len(set(server.keys)) == ROWS


def test_a_row_that_always_fails_while_others_are_answered_is_quarantined(server, tmp_path):
    server.fault = lambda number, body: (
        failing(500, "boom") if body["messages"][-1]["content"] == "Company 3" else None
    )
    job = job_of(server, tmp_path, source={"uri": str(tmp_path / "in.parquet"), "limit": ROWS})
    _, folder = finished_run(job)
    (row,) = quarantined(folder)
    assert row["error"] == "ServerError" and "500" in row["message"]
    assert (
        sum(b["messages"][-1]["content"] == "Company 3" for b in server.bodies) >= client.ROW_TRIES
    )


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (failing(413, "request entity too large"), "RequestRefused"),
        ((200, {}, b"<html>not JSON</html>"), "ServerError"),
        ((200, {"x-length": "9999"}, completion("cut")[:20]), "ServerError"),
        ((200, {}, b'{"choices": [{"message": {"content": 7}}]}'), "NoAnswer"),
        ((200, {}, b"[" * 100_000), "ServerError"),
        ((200, {}, ENDLESS), "ServerError"),
        (failing(400, "[" * 100_000), "RequestRefused"),
    ],
    ids=["413", "html", "truncated", "a number", "deep", "endless", "long"],
)
def test_a_row_with_an_answer_that_is_none_is_quarantined(fault, kind, server, tmp_path):
    server.fault = lambda number, body: (
        fault if body["messages"][-1]["content"] == "Company 3" else None
    )
    report, folder = finished_run(job_of(server, tmp_path))
    (row,) = quarantined(folder)
    assert row["error"] == kind and row["input"]["Company"] == "Company 3"
    assert report.good == ROWS - 1


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [(401, "bad key", "key"), (402, "no credit", "credit"), (429, "insufficient_quota", "quota")],
)
def test_what_no_retry_helps_ends_the_run_and_keeps_what_was_paid(
    status, message, remedy, server, tmp_path
):
    server.fault = lambda number, body: failing(status, message) if number >= 10 else None
    job = job_of(server, tmp_path, endpoint={"max_in_flight": 1})
    with pytest.raises(EndpointRefused, match=remedy):
        finished_run(job)
    server.fault = lambda number, body: None
    _, folder = finished_run(job)
    assert len(answers(folder)) == ROWS
    assert len(server.answered) == len(set(server.answered)) == ROWS  # none is paid twice


def test_an_unknown_model_or_a_server_that_is_not_there_ends_the_run_before_a_row(server, tmp_path):
    with pytest.raises(EndpointRefused, match=r"engine\.endpoint\.model.*use one of large"):
        finished_run(job_of(server, tmp_path, endpoint={"model": "larger"}), "unknown")
    with pytest.raises(EndpointUnavailable, match=r"engine\.endpoint\.url.*cannot be reached"):
        finished_run(job_of(server, tmp_path, endpoint={"url": "http://127.0.0.1:9/v1"}), "away")
    assert not server.bodies


def test_a_key_whose_variable_is_not_set_is_named(server, tmp_path, monkeypatch):
    monkeypatch.delenv("RAYBATCH_SECRET_LARGE", raising=False)
    with pytest.raises(ConfigError, match=r"engine\.endpoint\.key.*RAYBATCH_SECRET_LARGE"):
        plan_run(job_of(server, tmp_path, endpoint={"key": "${RAYBATCH_SECRET_LARGE}"}), "night")
    assert not server.bodies


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ({"endpoint": {"requests_per_minute": 0}}, "requests_per_minute"),
        ({"endpoint": {"url": "ftp://a/v1"}}, "url"),
        ({"endpoint": {"url": "https://user:pw@a/v1"}}, "url"),
        ({"endpoint": {"url": "https://a/v1/chat/completions"}}, "url"),
        ({"endpoint": {"key": "two words"}}, "key"),
        ({"endpoint": {"key": "RAYBATCH_SECRET_LARGE"}}, r"key: .*write \$\{NAME\}"),
        ({"endpoint": {"key": "$OPENAI_API_KEY"}}, r"key: .*write \$\{NAME\}"),
        ({"sampling": {"top_k": 5}}, "top_k"),
        ({"sampling": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"prompt": {"template": "{Company}", "prefill": "A"}}, "prefill"),
    ],
)
def test_a_field_that_cannot_work_is_refused_by_name(groups, field, server, tmp_path):
    with pytest.raises(ConfigError, match=field):
        job_of(server, tmp_path, **groups)


def test_tokens_cost_what_the_job_says(server, tmp_path):
    prices = {"price_in": 1e6, "price_out": 2e6, "max_in_flight": 1}
    report, _ = finished_run(job_of(server, tmp_path, endpoint=prices), "priced")
    assert report.cost["total"] == pytest.approx(ROWS * (11 + 2 * 7))


def test_a_server_that_answers_nothing_more_is_worth_a_retry(server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "SERVER_OUTAGE", 0.2)
    server.fault = lambda number, body: failing(503, "overloaded") if number >= 5 else None
    with pytest.raises(EndpointUnavailable, match=r"answered nothing.*503") as error:
        finished_run(job_of(server, tmp_path, endpoint={"max_in_flight": 1}))
    assert is_transient(error.value)
    server.fault = lambda number, body: None
    assert len(answers(finished_run(job_of(server, tmp_path))[1])) == ROWS


def test_a_limit_that_holds_the_run_up_is_told(server, tmp_path, monkeypatch):
    """The server answers 429 until somebody is told so."""
    monkeypatch.setattr(monitor, "LOOK", 0.02)
    told = threading.Event()
    lines = []

    class Reader(Listener):
        def on_heartbeat(self, beat: Heartbeat) -> None:
            if "429" in beat.about:
                lines.extend((progress_line(beat), live_rows(beat)[0]["now"]))
                told.set()

    limited = failing(429, "slow down", retry_after="2")
    server.fault = lambda number, body: None if told.is_set() or number < 5 else limited
    job = job_of(server, tmp_path, endpoint={"requests_per_minute": 60_000, "max_in_flight": 1})
    run = plan_run(job, "told")
    infer_run(job, run, Reader())
    assert told.is_set() and len(lines) >= 2
    for line in lines:
        assert re.search(r"(waiting \d s|slowed): 429, limit 60000 requests per minute", line), line
    assert not any("starting engines" in line for line in lines)


def test_an_outage_is_no_stall(server, tmp_path, monkeypatch):
    """The server is away until somebody is told so; a stall would end the run."""
    monkeypatch.setattr(monitor, "LOOK", 0.02)
    monkeypatch.setattr(monitor, "ASK_ENGINES", 0.02)
    monkeypatch.setattr(limiter, "OUTAGE_LOG_SECONDS", 0.0)
    monkeypatch.setattr(client, "ROW_TRIES_ALONE", 1 << 30)  # no row is blamed
    told = threading.Event()
    lines: list[str] = []

    class Reader(Listener):
        def on_heartbeat(self, beat: Heartbeat) -> None:
            if "no answer from the server" in beat.about:
                lines.extend((progress_line(beat), live_rows(beat)[0]["now"]))
                told.set()

    away = failing(503, "overloaded")
    server.fault = lambda number, body: None if told.is_set() or number < 5 else away
    job = job_of(server, tmp_path, endpoint={"max_in_flight": 1})
    infer_run(job, plan_run(job, "away"), Reader())
    for line in lines:
        assert re.search(r"no answer from the server for \d+ s \(503\)", line), line
    assert lines[1].startswith("waiting: no answer")


def test_a_new_attempt_waits_until_requests_of_others_count_no_longer(server, tmp_path):
    server.fault = lambda number, body: failing(401, "bad key")
    job = job_of(server, tmp_path)
    with pytest.raises(EndpointRefused):
        finished_run(job)
    ledger = Ledger(open_store(str(tmp_path / "out" / "night")))
    (beat,) = read_heartbeats(ledger.store, ledger.attempts()).values()
    assert seconds_of_others(ledger, "ours", beat.at) >= LIMIT_WINDOW + TRAVEL
    assert seconds_of_others(ledger, "ours", beat.at + 3600) == 0
    alone = next(iter(read_heartbeats(ledger.store, ledger.attempts())))
    assert seconds_of_others(ledger, alone, beat.at) == 0  # its own requests are known


def test_a_preview_shows_messages_and_answers_and_tune_has_nothing_to_try(server, tmp_path):
    job = job_of(server, tmp_path, source={"uri": str(tmp_path / "in.parquet")})
    shown = preview_rows(job, 3)
    assert [prompt.text for prompt in shown.prompts] == [f"user: Company {n}" for n in range(3)]
    assert [row["response"] for row in shown.answers] == [f"about Company {n}" for n in range(3)]
    with pytest.raises(ConfigError, match=r"engine\.endpoint"):
        tune(job)


def test_doctor_asks_the_server_for_the_model(server, tmp_path):
    there = one(places.check_model, job_of(server, tmp_path))
    assert there.mark == "pass" and "large is at http" in there.found
    other = one(places.check_model, job_of(server, tmp_path, endpoint={"model": "larger"}))
    assert other.mark == "fail" and "use one of large" in other.found


def test_a_plan_needs_no_tokenizer_of_a_hosted_model(server, tmp_path):
    lines = tmp_path / "in.jsonl"
    body = {"model": "large", "messages": [{"role": "user", "content": "Company"}]}
    url = "/v1/chat/completions"
    lines.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}))
    source = {"uri": str(lines), "format": "openai_batch"}
    job = job_of(server, tmp_path, source=source, prompt={})
    assert dry_run(job).problems == ()
    with pytest.raises(ConfigError, match="remove --tokens"):
        dry_run(job, sample=1)
