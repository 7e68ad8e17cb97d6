"""Runs over a batch API: real stages, records and HTTP, and a server that drops, lags and fails."""

from __future__ import annotations

import io
import json
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from helpers.batch_server import BatchServer, BatchService, batch_server
from helpers.findings import one
from helpers.hosted import finished_run, hosted_job
from openai.types import Batch as OpenAIBatch
from openai.types import FileObject
from openai.types.chat import ChatCompletion
from PIL import Image

from prefect_raybatch.api import dry_run, plan_run, preview_rows
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.cluster.sizes import for_attempt
from prefect_raybatch.compile.job import compile_planned
from prefect_raybatch.doctor import places
from prefect_raybatch.errors import CostExceeded, EndpointRefused
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited
from prefect_raybatch.ledger.layout import BATCHES
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.result.verify import verify
from prefect_raybatch.runs.run import load_run
from prefect_raybatch.sizing.sizes import assumed
from prefect_raybatch.stages.endpoint import client
from prefect_raybatch.stages.endpoint.limiter import BatchCounts, Limiter
from prefect_raybatch.stages.hosted_batches import records, shard
from prefect_raybatch.stages.hosted_batches.api import BatchEngine
from prefect_raybatch.stages.hosted_batches.lines import request_line
from prefect_raybatch.stages.hosted_batches.stage import BatchStage, cancel_batches, files_name
from prefect_raybatch.storage import open_store

ROWS, SHARDS = 20, 4
KEY = "sk-very-secret-0123456789"


@pytest.fixture
def server() -> Iterator[BatchServer]:
    with batch_server() as made:
        yield made


@pytest.fixture(autouse=True)
def prompt_answers(monkeypatch: pytest.MonkeyPatch, without_ray: None) -> None:
    monkeypatch.setattr(client, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(client, "MOST_BACKOFF", 0.01)
    monkeypatch.setattr(shard, "FIRST_POLL", 0.01)
    monkeypatch.setattr(shard, "LIST_LOOK_EVERY", 0.01)


def job_of(server: BatchServer, folder: Path, **groups: Any) -> BatchJob:
    names = groups.pop("names", [f"Company {n}" for n in range(ROWS)])
    groups["endpoint"] = {"batch": True, **groups.get("endpoint", {})}
    groups["source"] = {"rows_per_shard": ROWS // SHARDS}
    groups.setdefault("limits", {"max_failed_rows": ROWS})
    return hosted_job(server.url, folder, {"Company": names}, **groups)


def check_result(folder: Path, rows: int = ROWS) -> None:
    table = ds.dataset(folder / "data").to_table()
    answers = dict(zip(table["Company"].to_pylist(), table["response"].to_pylist(), strict=True))
    assert answers == {f"Company {n}": f"about Company {n}" for n in range(rows)}
    assert verify(open_store(str(folder))).ok


def test_each_shard_is_a_batch_and_each_row_is_in_the_result_once(server, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_SECRET_LARGE", KEY)
    endpoint = {"key": "${RAYBATCH_SECRET_LARGE}", "price_in": 1e6, "price_out": 2e6}
    report, folder = finished_run(job_of(server, tmp_path, endpoint=endpoint))
    check_result(folder)
    assert len(server.service.batches) == SHARDS
    assert server.service.paid.total() == len(server.service.paid) == ROWS
    assert report.cost["total"] == pytest.approx(ROWS * (11 + 2 * 7))
    assert not server.service.files  # nothing is left at the server
    assert not (folder / BATCHES).exists()
    written = [file for file in folder.rglob("*") if file.is_file()]
    assert written and not any(KEY.encode() in file.read_bytes() for file in written)


def test_images_travel_in_a_batch(server, tmp_path):
    out = io.BytesIO()
    Image.new("RGB", (9, 9)).save(out, "PNG")
    job = job_of(server, tmp_path)
    pictures = pa.table({"Company": ["Company 0"], "logo": [out.getvalue()]})
    pq.write_table(pictures, tmp_path / "in.parquet")
    _, folder = finished_run(edited(job, {"prompt.images.columns": ["logo"]}, "job"))
    (lines,) = server.service.lines.values()
    image, text = json.loads(lines[0])["body"]["messages"][-1]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "Company 0"}
    assert ds.dataset(folder / "data").to_table().num_rows == 1


def test_objects_of_the_stand_in_are_those_of_openais_api():
    service = BatchService(fate=lambda number: "expired")
    body = {"model": "large", "messages": [{"role": "user", "content": "a"}]}
    line = request_line(
        client.HostedRequest(body, 1, "key", lambda answer: None), "chat/completions"
    )
    file = service.upload("in.jsonl", line * 2)
    FileObject.model_validate(file, strict=True)
    batch = service.create(
        {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
    )
    OpenAIBatch.model_validate(batch, strict=True)
    ended = OpenAIBatch.model_validate(service.get(batch["id"]), strict=True)
    assert ended.status == "expired" and ended.output_file_id and ended.error_file_id
    answer = json.loads(service.content(ended.output_file_id))["response"]["body"]
    ChatCompletion.model_validate({**answer, "id": "c", "created": 1, "model": "large"})


@pytest.mark.parametrize(
    ("url", "groups", "first"),
    [
        ("/v1/completions", {"endpoint": {"api": "completions"}}, "about Company 0"),
        ("/v1/embeddings", {"engine": {"task": "embed"}}, pytest.approx([0.6, 0.8, 0.0])),
        (
            "/v1/chat/completions",
            {"sampling": {"n": 2, "temperature": 1.0, "logprobs": 0}},
            ["about Company 0", "about Company 01"],
        ),
    ],
)
def test_what_else_goes_to_a_batch(url, groups, first, server, tmp_path):
    server.service.fate = lambda number: "expired" if number == 0 else "completed"
    _, folder = finished_run(job_of(server, tmp_path, **groups))
    table = ds.dataset(folder / "data").to_table()
    assert table.num_rows == ROWS == server.service.paid.total()
    assert table["response"][0].as_py() == first
    assert {batch["endpoint"] for batch in server.service.batches.values()} == {url}
    assert {json.loads(one)["url"] for file in server.service.lines.values() for one in file} == {
        url
    }
    if "sampling" in groups:
        told = table["logprobs"][0].as_py()
        assert [[one["token"] for one in answer] for answer in told] == [["so", "\ufffd"]] * 2


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("POST", "files"),
        ("POST", "batches"),
        ("GET", "batches"),
        ("GET", "files"),
        ("DELETE", "files"),
    ],
)
def test_an_answer_that_is_dropped_costs_nothing(method, word, how, server, tmp_path):
    dropped = []

    def drop(called: str, path: str) -> str:
        if called != method or not path.startswith(f"/{word}") or len(dropped) % 2:
            dropped.append(path) if dropped else None
            return ""
        dropped.append(path)
        return how

    server.drop = drop
    _, folder = finished_run(job_of(server, tmp_path))
    check_result(folder)
    assert dropped and server.service.paid.total() == ROWS


def test_a_row_that_the_server_refuses_is_quarantined_with_its_words(server, tmp_path):
    names = [f"Company {n}" for n in range(ROWS - 1)] + ["a bad one"]
    report, folder = finished_run(job_of(server, tmp_path, names=names))
    check_result(folder, ROWS - 1)
    (row,) = ds.dataset(folder / "_quarantine").to_table().to_pylist()
    assert row["error"] == "RequestRefused" and "400: too long" in row["message"]
    assert report.failed == 1 and len(server.service.batches) == SHARDS


def test_what_an_expired_batch_has_answered_is_kept(server, tmp_path):
    server.service.fate = lambda number: "expired" if number < 2 else "completed"
    _, folder = finished_run(job_of(server, tmp_path))
    check_result(folder)
    assert server.service.paid.total() == ROWS and len(server.service.batches) > SHARDS


@pytest.mark.parametrize(
    ("answer", "field"),
    [(False, r"engine\.endpoint\.batch.*no batch API"), (True, r"engine\.endpoint\.model")],
)
def test_a_server_that_cannot_do_it_is_named_before_a_row_is_sent(answer, field, server, tmp_path):
    server.has_batches = answer
    job = job_of(server, tmp_path, endpoint={"model": "larger"} if answer else {})
    with pytest.raises(EndpointRefused, match=field):
        finished_run(job)
    told = one(places.check_model, job)
    assert told.mark == "fail" and re.search(field, told.found)
    assert not server.service.files


def test_a_used_up_quota_ends_the_run_and_keeps_what_was_paid(server, tmp_path):
    server.service.fate = lambda number: "quota" if number == 1 else "completed"
    job = job_of(server, tmp_path)
    with pytest.raises(EndpointRefused, match="quota"):
        finished_run(job)
    _, folder = finished_run(job)
    check_result(folder)
    assert server.service.paid.total() == ROWS


@pytest.fixture(autouse=True)
def stages_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the stages of runs that were broken off: their threads would outlive the test."""
    made: list[BatchStage] = []
    start = BatchStage.start

    def noted(self: BatchStage) -> None:
        made.append(self)
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(BatchStage, "start", noted)
        yield
    for stage in made:
        stage.close()


def stages_of(job: BatchJob) -> tuple[Pipeline, BatchStage, list[pa.Table]]:
    """Return the engine stage of a run, and its prepared blocks."""
    run = plan_run(job, "night")
    ledger = Ledger(open_store(run.uri))
    plan, shards = load_run(ledger, run)
    spec = compile_planned(job, plan)
    size = for_attempt(spec.sizes, plan, assumed(spec.sizes))
    pipeline = Pipeline(spec, plan, shards, ledger.store, "attempt", size)
    assert size.concurrent >= plan.shards  # all batches are at the server at once
    prepare, launch, _ = pipeline.stages(False)
    assert launch is not None
    units = [Unit(number, 0, ROWS // SHARDS) for number in range(SHARDS)]
    tasks = pipeline.read_tasks(units, False)
    blocks = [prepare(table) for task in tasks for table in pipeline.reader.read(task)]
    return pipeline, BatchStage(launch), blocks


def test_all_shards_wait_at_once_and_tell_how_many_requests_are_done(server, tmp_path, monkeypatch):
    server.service.clock = lambda: now[0]
    now, news = [0.0], threading.Condition()
    server.service.takes = 10.0
    tell = Limiter.note_batches

    def told(self: Limiter, number: int, batches: BatchCounts) -> None:
        tell(self, number, batches)
        with news:
            news.notify_all()

    monkeypatch.setattr(Limiter, "note_batches", told)
    pipeline, stage, blocks = stages_of(job_of(server, tmp_path))

    def wait_until(text: str) -> None:
        with news:
            assert news.wait_for(lambda: pipeline.server_wait() == text, 60), pipeline.server_wait()

    with ThreadPoolExecutor(SHARDS) as pool:
        answered = [pool.submit(stage, block) for block in blocks]
        wait_until("4 batches, 0 of 20 requests done")
        now[0] = 6.0
        wait_until("4 batches, 12 of 20 requests done")
        now[0] = 10.0
        for table in answered:
            assert table.result(60).num_rows == ROWS // SHARDS
    assert pipeline.server_wait() == ""
    stage.close()


def test_a_driver_whose_run_another_one_finishes_while_it_waits_returns_no_row_and_pays_none(
    server, tmp_path, monkeypatch
):
    job = job_of(server, tmp_path)
    _, stage, blocks = stages_of(job)
    others = iter([lambda: finished_run(job)])
    monkeypatch.setattr(BatchEngine, "pause", lambda self, seconds: next(others, lambda: None)())
    assert [stage(block).num_rows for block in blocks] == [0] * SHARDS
    check_result(tmp_path / "out" / "night")
    assert not (tmp_path / "out" / "night" / BATCHES).exists()
    assert len(server.service.batches) == SHARDS and server.service.paid.total() == ROWS


def test_counts_of_all_shards_are_added_up():
    limiter = Limiter(None, None, 8, 60.0)
    limiter.note_batches(1, BatchCounts(1, 200, 1000))
    limiter.note_batches(2, BatchCounts(2, 1000, 3000))
    assert limiter.usage().batches == "3 batches, 1,200 of 4,000 requests done"
    limiter.note_batches(2, BatchCounts())
    limiter.bill(10, 5)
    usage = limiter.usage()
    assert (usage.batches, usage.prompt_tokens) == ("1 batch, 200 of 1,000 requests done", 10)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, "costs"])
def test_a_cancelled_run_cancels_its_batches_and_the_next_one_goes_on(
    error, server, tmp_path, monkeypatch
):
    server.service.takes = 3600.0
    job = job_of(server, tmp_path)

    def observe(method: str, path: str) -> str:
        if (method, path.count("/")) == ("GET", 2) and path.startswith("/batches"):
            waits.set()
        return ""

    waits = threading.Event()
    server.drop = observe

    def pass_until_waiting(self: Pipeline, units: Any, isolated: bool) -> Iterator[Any]:
        self.on_pass()
        prepare, launch, _ = self.stages(isolated)
        assert launch is not None
        tasks = self.read_tasks(units, isolated)
        blocks = [prepare(table) for task in tasks for table in self.reader.read(task)]
        stage = BatchStage(launch)
        threads = [threading.Thread(target=stage, args=[b], daemon=True) for b in blocks]
        for thread in threads:
            thread.start()
        assert waits.wait(60)
        raise CostExceeded("limits.max_cost") if error == "costs" else error
        yield

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "__call__", pass_until_waiting)
        with pytest.raises(CostExceeded if error == "costs" else error):
            finished_run(job)
    states = {batch["status"] for batch in server.service.batches.values()}
    assert states == {"cancelled"}
    server.service.takes = 0.0
    _, folder = finished_run(job)
    check_result(folder)
    assert server.service.paid.total() == ROWS


@pytest.mark.parametrize("recorded", [True, False])
def test_a_batch_that_cannot_be_cancelled_keeps_no_other_from_it(
    recorded, server, tmp_path, caplog
):
    server.service.takes = 3600.0
    _, stage, _ = stages_of(job_of(server, tmp_path))
    store, endpoint = stage.launch.store, stage.launch.endpoint
    for number in range(50):
        file_id = server.service.upload("in.jsonl", b"")["id"]
        batch = server.service.create(
            {"input_file_id": file_id, "endpoint": "", "completion_window": "24h"}
        )
        slot = records.Slot(number, 0, file_id, ["key"])
        records.put_slot(store, slot)
        if recorded:
            records.put_batch(store, slot, batch["id"], False)
    server.uncancellable = {"batch_0", "batch_7"}
    cancel_batches(endpoint, store, "attempt")
    open_batches = {i for i, one in server.service.batches.items() if one["status"] != "cancelled"}
    assert open_batches == server.uncancellable
    assert "not all batches are known to be cancelled" in caplog.text
    assert "not /batches/batch_0/cancel" in caplog.text


def test_a_store_that_hangs_keeps_no_cancelled_run_from_its_end(
    server, tmp_path, monkeypatch, caplog
):
    _, stage, _ = stages_of(job_of(server, tmp_path))
    store, answers = stage.launch.store, threading.Event()

    def listed(prefix: str) -> Iterator[Any]:
        assert answers.wait(10)
        return iter(())

    monkeypatch.setattr(store, "list", listed)
    monkeypatch.setattr("prefect_raybatch.stages.hosted_batches.stage.CANCEL_SECONDS", 0.01)
    cancel_batches(stage.launch.endpoint, store, "attempt")
    answers.set()
    assert "no answer within 0.01 s" in caplog.text


def test_files_that_a_crash_left_at_the_server_are_removed_at_the_end(server, tmp_path):
    job = job_of(server, tmp_path)
    server.drop = lambda method, path: "after" if next(uploads) else ""
    uploads = (path == 2 for path in range(10**6))
    _, folder = finished_run(job)
    check_result(folder)
    assert not server.service.files
    server.service.upload("of another program.jsonl", b"{}")
    finished_run(job, "later")
    assert [file["filename"] for file in server.service.files.values()] == [
        "of another program.jsonl"
    ]


def test_files_of_a_run_in_the_same_place_on_another_machine_are_kept(server, tmp_path):
    """Two containers whose volumes have the same path begin the same job with the same key."""
    job, place = job_of(server, tmp_path), tmp_path / "out/night"
    run = plan_run(job, "night")
    theirs = f"{files_name(open_store(run.uri))}-00000000-0000.jsonl"
    server.service.upload(theirs, b"{}")
    shutil.rmtree(place)
    _, folder = finished_run(job)
    check_result(folder)
    assert folder == place
    assert [file["filename"] for file in server.service.files.values()] == [theirs]


def test_a_preview_asks_single_requests_and_the_plan_names_the_batches(server, tmp_path):
    job = job_of(server, tmp_path)
    shown = preview_rows(job, 3)
    assert [row["response"] for row in shown.answers] == [f"about Company {n}" for n in range(3)]
    assert not server.service.batches
    figures = {figure.name: figure for figure in dry_run(job, "plan").figures}
    assert figures["batches at once"].value == "4 of 4"
    assert "24 hours" in figures["batches at once"].why
