"""Flows that judge their answers: a drain or cancellation meanwhile, an alarm, a block."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.heard import caught_events
from helpers.openai_server import Answer, OpenAIServer, completion, openai_server
from prefect.exceptions import TerminationSignal
from prefect.states import State
from pydantic import SecretStr

from prefect_raybatch import BatchJob, api, batch_inference
from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.blocks import HostedModel
from prefect_raybatch.errors import ConfigError, StoreError
from prefect_raybatch.flow import cancelling, tasks
from prefect_raybatch.flow.cancelling import ENDED_BY_ITSELF
from prefect_raybatch.flow.tasks import with_blocks
from prefect_raybatch.job.edits import edited, judging_job
from prefect_raybatch.ledger import drains
from prefect_raybatch.quality import alarm
from prefect_raybatch.runs import judge
from prefect_raybatch.runs.drain import drain_run

pytestmark = pytest.mark.usefixtures("prefect_api", "without_ray")
ROWS = 12


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's run commits every four rows."""

    def small(*arguments: Any) -> BatchJob:
        return edited(judging_job(*arguments), {"source.rows_per_shard": 4}, "the judge")

    monkeypatch.setattr(api, "judging_job", small)


def job_of(folder: Path, server: OpenAIServer, **judge: Any) -> BatchJob:
    uri = folder / "in.parquet"
    pq.write_table(pa.table({"Company": [f"Company {n}" for n in range(ROWS)]}), uri)
    hosted = {"url": server.url, "max_in_flight": 1}
    asked = {"endpoint": {**hosted, "model": "large"}, "prompt": "Is {response} right?", **judge}
    return BatchJob(
        name="judged",
        source={"uri": str(uri), "rows_per_shard": 4},
        prompt={"template": "{Company}"},
        output={"uri": str(folder / "out")},
        engine={"endpoint": {**hosted, "model": "large"}},
        quality={"judge": asked},
    )


class Verdicts:
    """Gives every answer the same label; before the sixth one it does something once."""

    def __init__(self, once: Any) -> None:
        self.once, self.asked, self.label = once, list[str](), "right"

    def __call__(self, _: int, body: dict[str, Any]) -> Answer | None:
        text = body["messages"][-1]["content"]
        if not text.startswith("Is "):
            return None
        self.asked.append(text)
        if len(self.asked) == 6:
            self.once()
        return 200, {}, completion(json.dumps({"label": self.label}))


def drained(run: Path) -> None:
    """Drain the judge's run; its heartbeat, by which it is found, comes from another thread."""
    end = time.monotonic() + 60
    while True:
        try:
            drain_run(str(run))
            return
        except ConfigError:
            assert time.monotonic() < end
            time.sleep(0.05)


def committed(run: Path) -> int:
    (place,) = (run / "_raybatch/judge").iterdir()
    return len(list((place / "runs/night-judge/_raybatch/commits").iterdir()))


def ended(job: BatchJob, key: str) -> State:
    state: State = batch_inference(job, key, return_state=True)
    return state


def judges_on(job: BatchJob, run: Path, verdicts: Verdicts) -> None:
    """Judge the answers that no committed shard has; paid verdicts of others may be kept too."""
    before = 4 * committed(run)
    assert 0 < before < ROWS
    kept = verdicts.asked[:before]
    verdicts.asked.clear()
    verdicts.once = lambda: None
    report = batch_inference(job, run.name)
    assert report.judgement is not None and report.judgement.rows == ROWS
    assert 0 < len(verdicts.asked) <= ROWS - before and not set(kept) & set(verdicts.asked)


def test_a_drain_while_judging_ends_the_flow_as_drained_and_a_retry_judges_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "DRAIN_LOOK", 0.0)
    run = tmp_path / "out/night"
    with openai_server() as server:
        verdicts = Verdicts(lambda: drained(run))
        server.fault = verdicts
        job = job_of(tmp_path, server)
        state = ended(job, "night")
        assert (state.name, state.type.value) == ("Drained", "CANCELLED")
        assert str(state.message).startswith("drained: 2 of 3 shards are committed; 1 is left.")
        judges_on(job, run, verdicts)


@pytest.mark.whole
def test_a_cancellation_while_judging_that_no_worker_notices_ends_the_flow_as_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch of the flow run sends SIGTERM, as for one in inference."""
    run, watches = tmp_path / "out/night", list[Any]()

    class Watch(cancelling.CancelWatch):
        def __init__(self) -> None:
            super().__init__()
            watches.append(self)

    def cancelled() -> None:
        cancelling.NOTICED.add(watches[-1].run)
        os.kill(os.getpid(), signal.SIGTERM)

    def ends(number: int, _: object) -> None:  # as Prefect's engine does in a worker's process
        raise TerminationSignal(signal=number)

    monkeypatch.setattr(tasks, "CancelWatch", Watch)
    before = signal.signal(signal.SIGTERM, ends)
    try:
        with openai_server() as server:
            verdicts = Verdicts(cancelled)
            server.fault = verdicts
            job = job_of(tmp_path, server)
            state = ended(job, "night")
            assert state.type.value == "CANCELLED" and len(watches) == 1
            assert str(state.message).startswith(f"{ENDED_BY_ITSELF} Continue with: ")
            judges_on(job, run, verdicts)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.whole
def test_a_fallen_accuracy_emits_one_event_also_if_judging_was_stopped_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "DRAIN_LOOK", 0.0)
    monkeypatch.setattr(alarm, "BASELINE_RUNS", 1)
    emitted = caught_events(monkeypatch)
    run = tmp_path / "out/n3"
    with openai_server() as server:
        job = job_of(tmp_path, server)
        verdicts = Verdicts(lambda: None)
        server.fault = verdicts
        for key, label in (("n1", "right"), ("n2", "wrong")):
            verdicts.label = label
            planned = plan_run(job, key)
            finalize_run(job, planned, infer_run(job, planned))
        verdicts.asked.clear()
        verdicts.once = lambda: drained(run)
        assert ended(job, "n3").name == "Drained"
        for name in ("put_pages", "put_judgement"):  # also if the store fails meanwhile
            with monkeypatch.context() as patch:
                patch.setattr(judge, name, store_fails)
                assert ended(job, "n3").is_failed()
        assert "raybatch.run.completed" not in names(emitted)
        assert "raybatch.accuracy.fell" not in names(emitted)
        for _ in range(2):  # a further repeat tells nothing
            assert ended(job, "n3").is_completed()
    assert names(emitted).count("raybatch.run.completed") == 1
    (fell,) = [event for event in emitted if event["event"] == "raybatch.accuracy.fell"]
    assert fell["resource"]["prefect.resource.name"] == "n3"
    payload = fell["payload"]
    assert payload["about"].startswith("judge: the accuracy fell, probably with run n2 (e-v")
    assert payload["run"] == str(run) and payload["e_values"]["judge"] >= alarm.ALARM


def test_a_judge_takes_url_key_and_prices_from_a_block(tmp_path: Path) -> None:
    key = "sk-of-a-judge-0123456789"
    with openai_server() as server:
        server.fault = Verdicts(lambda: None)
        block = HostedModel(url=server.url, model="large", key=SecretStr(key), price_in=1e6)
        block.save("judge", overwrite=True)
        job = job_of(tmp_path, server, endpoint={"block": "hosted-model/judge"})
        report = batch_inference(job, "blocked")
        assert server.authorizations == {None, f"Bearer {key}"}  # the rows need no key
        limited = {"limits.max_cost": 5.0, "engine.endpoint.price_in": 1.0}
        limited["engine.endpoint.price_out"] = 1.0
        with pytest.raises(ConfigError, match=r"quality\.judge\.endpoint\.price_out"):
            with_blocks(edited(job, limited, "the job"))
        other = edited(job, {"quality.judge.endpoint.url": "http://other/v1"}, "the job")
        with pytest.raises(ConfigError, match=r"quality\.judge\.endpoint\.url: .*nowhere else"):
            with_blocks(other)
    assert report.judgement is not None and report.judgement.judge == "large"
    assert report.cost["judge"] == pytest.approx(11 * ROWS)
    written = [file for file in Path(report.run).rglob("*") if file.is_file()]
    assert written and not any(key.encode() in file.read_bytes() for file in written)


def test_a_fallen_accuracy_is_sent_again_unless_a_record_says_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a process that ended between the judgement and the event."""
    monkeypatch.setattr(alarm, "BASELINE_RUNS", 1)
    emitted = caught_events(monkeypatch)
    with openai_server() as server:
        job = job_of(tmp_path, server)
        verdicts = Verdicts(lambda: None)
        server.fault = verdicts
        for key, label in (("n1", "right"), ("n2", "wrong"), ("n3", "wrong")):
            verdicts.label = label
            planned = plan_run(job, key)
            finalize_run(job, planned, infer_run(job, planned))
        assert not emitted
        for _ in range(2):
            assert ended(job, "n3").is_completed()
            assert names(emitted).count("raybatch.accuracy.fell") == 1
        sent = tmp_path / "out/n3/_raybatch/events-sent.json"
        sent.write_bytes(sent.read_bytes()[:-3])  # twice is better than never
        assert ended(job, "n3").is_completed()
        first, again = [e for e in emitted if e["event"] == "raybatch.accuracy.fell"]
        assert first["id"] == again["id"]


def store_fails(*_: Any) -> None:
    raise StoreError("no room left")


def names(emitted: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in emitted]
