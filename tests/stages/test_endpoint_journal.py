"""The journal of a hosted model's answers."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.hosted import finished_run, hosted_job
from helpers.openai_server import openai_server

from prefect_raybatch.ledger.layout import JOURNAL
from prefect_raybatch.stages.endpoint import journal
from prefect_raybatch.stages.endpoint.answers import HostedAnswer, HostedChoice
from prefect_raybatch.stages.endpoint.journal import Journal, read_journal
from prefect_raybatch.stages.endpoint.stage import EndpointStage
from prefect_raybatch.storage import LocalStore

STEPS = [[{"id": None, "token": "c", "logprob": -0.5}]]
ANSWER = HostedAnswer((HostedChoice("c", "length", STEPS), HostedChoice("d")), 1, 2)


class Slow(LocalStore):
    """Holds each put until it may go on."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def put(self, path: str, data: bytes) -> None:
        self.begun.set()
        assert self.may_go_on.wait(60)
        super().put(path, data)


def test_a_write_waits_for_the_one_that_has_the_answers(tmp_path: Path) -> None:
    store = Slow(str(tmp_path))
    made = Journal(store)
    made.add(3, "k", ANSWER)
    assert store.begun.wait(60)  # the journal's own thread has taken the answer
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(made.write)
        assert not asked.done()
        store.may_go_on.set()
        asked.result(60)
        assert read_journal(store, [3]) == {"k": ANSWER}
    made.close()


def test_a_block_is_given_on_when_its_answers_are_written(
    tmp_path: Path, monkeypatch: Any, without_ray: None
) -> None:
    """The journals are removed once all is committed: a later write would stay for ever."""
    monkeypatch.setattr(journal, "WRITE_EVERY", 3600.0)
    seen: list[int] = []
    stages: set[EndpointStage] = set()
    call = EndpointStage.__call__

    def noted(stage: EndpointStage, table: Any) -> Any:
        stages.add(stage)
        answered = call(stage, table)
        files = (tmp_path / "out").rglob("journal/*/*.jsonl")
        seen.append(sum(len(file.read_text().splitlines()) for file in files))
        return answered

    monkeypatch.setattr(EndpointStage, "__call__", noted)
    with openai_server() as server:
        job = hosted_job(server.url, tmp_path, {"Name": [f"item {n}" for n in range(6)]})
        _, folder = finished_run(job, "key")
    assert max(seen) == 6, seen
    assert not list(folder.rglob("*.jsonl"))
    for stage in stages:
        stage.close()


@pytest.mark.parametrize(
    "change",
    [
        {"choices": 3},
        {"choices": [{"text": 3, "finish": "stop", "steps": None}]},
        {"choices": [{"text": "c", "finish": "stop", "steps": [[{"token": "c"}]]}]},
        {"choices": [{"text": "c"}]},
        {"prompt_tokens": "1"},
        {"error": ["one"]},
        {"key": 3},
    ],
)
def test_a_damaged_line_counts_as_no_answer(tmp_path: Path, change: dict[str, Any]) -> None:
    store, line = LocalStore(str(tmp_path)), {"key": "k", **ANSWER.to_json()}
    lines = [json.dumps({**line, **change}), "[" * 100_000, json.dumps({**line, "key": "well"})]
    store.put(f"{JOURNAL}/00000003/a.jsonl", "\n".join(lines).encode())
    assert read_journal(store, [3]) == {"well": ANSWER}
