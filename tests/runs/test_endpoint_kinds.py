"""Embeddings and raw completions of a hosted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from helpers.batch_server import batch_server
from helpers.hosted import finished_run, hosted_job
from helpers.openai_server import OpenAIServer, completion, failing, openai_server
from openai.types import Completion, CreateEmbeddingResponse

from prefect_raybatch.api import preview_rows
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob

TEXTS = ["a", "bb", "a"]
OWN_SAMPLING = "helpers.functions:own_sampling"


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as made:
        yield made


def job_of(server: OpenAIServer, folder: Path, engine: dict[str, Any], **groups: Any) -> BatchJob:
    endpoint = engine.pop("endpoint", {})
    groups.setdefault("limits", {})
    return hosted_job(
        server.url, folder, {"Text": TEXTS}, engine=engine, endpoint=endpoint, **groups
    )


def rows_of(folder: Path) -> dict[str, list[Any]]:
    return ds.dataset(folder / "data").to_table().to_pydict()


@pytest.mark.parametrize(("normalize", "length"), [(True, 1.0), (False, 5.0)])
def test_embeddings_have_the_form_of_local_ones(
    server: OpenAIServer, without_ray: None, tmp_path: Path, normalize: bool, length: float
) -> None:
    output = {"column": "vector", "normalize": normalize, "extras": ["prompt_tokens"]}
    _, folder = finished_run(job_of(server, tmp_path, {"task": "embed"}, output=output))
    table = ds.dataset(folder / "data").to_table()
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 3)
    expected = [[0.6, 0.8, 0.0], [0.0, 0.6, 0.8], [0.6, 0.8, 0.0]]
    for vector, shape in zip(table["vector"].to_pylist(), expected, strict=True):
        assert vector == pytest.approx([length * number for number in shape])
    assert table["prompt_tokens"].to_pylist() == [11, 11, 11]
    assert {*server.paths} == {"/v1/embeddings"}
    assert sorted(body["input"] for body in server.bodies) == ["a", "bb"]  # equal texts once


def test_embeddings_that_are_none_fail_their_row(
    server: OpenAIServer, without_ray: None, tmp_path: Path
) -> None:
    wrong = {"data": [{"embedding": [1.0, None]}]}
    odd = {"data": [{"embedding": [1e999, 0.0, 0.0]}]}

    def fault(number: int, body: dict[str, Any]) -> Any:
        if body["input"] == "bb":
            return 200, {}, json.dumps(odd).encode()
        return (200, {}, json.dumps(wrong).encode()) if number == 0 else None

    server.fault = fault
    limits = {"max_failed_rows": 3}
    _, folder = finished_run(job_of(server, tmp_path, {"task": "embed"}, limits=limits))
    assert rows_of(folder)["Text"] == ["a", "a"]
    (failed,) = ds.dataset(folder / "_quarantine").to_table().to_pylist()
    assert failed["error"] == "NotFinite" and failed["input"]["Text"] == "bb"


def test_completions_get_the_prompt_as_it_is(
    server: OpenAIServer, without_ray: None, tmp_path: Path
) -> None:
    job = job_of(server, tmp_path, {"endpoint": {"api": "completions"}}, sampling={"seed": 3})
    assert preview_rows(job, 1)
    _, folder = finished_run(job)
    assert rows_of(folder)["response"] == ["after a", "after bb", "after a"]
    assert {*server.paths} == {"/v1/completions"}
    assert all(body["seed"] == 3 and "messages" not in body for body in server.bodies)


@pytest.mark.parametrize("groups", [{"prompt": {"template": "{Text}", "system": "Be kind."}}])
def test_a_chat_for_completions_is_refused(
    server: OpenAIServer, tmp_path: Path, groups: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"api: completions.*remove prompt\.system"):
        job_of(server, tmp_path, {"endpoint": {"api": "completions"}}, **groups)


@pytest.mark.parametrize(
    ("url", "body", "engine", "form"),
    [
        ("/v1/completions", {"prompt": "a"}, {"endpoint": {"api": "completions"}}, Completion),
        ("/v1/embeddings", {"input": ["a"]}, {"task": "embed"}, CreateEmbeddingResponse),
    ],
)
def test_a_batch_file_of_them_is_answered(
    server: OpenAIServer,
    without_ray: None,
    tmp_path: Path,
    url: str,
    body: dict[str, Any],
    engine: dict[str, Any],
    form: Any,
) -> None:
    lines = [
        {"custom_id": "right", "method": "POST", "url": url, "body": body},
        {"custom_id": "wrong", "method": "POST", "url": "/v1/chat/completions", "body": body},
    ]
    source = tmp_path / "requests.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    asked = {"uri": str(source), "format": "openai_batch"}
    _, folder = finished_run(job_of(server, tmp_path, {**engine}, source=asked, prompt={}))
    (line,) = (folder / "output.jsonl").read_text(encoding="utf-8").splitlines()
    output = json.loads(line)
    assert output["custom_id"] == "right"
    assert form.model_validate(output["response"]["body"], strict=True).model == "large"
    (line,) = (folder / "error.jsonl").read_text(encoding="utf-8").splitlines()
    error = json.loads(line)
    assert error["custom_id"] == "wrong" and url in error["error"]["message"]


CALL = '{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": NaN}}}]}'


@pytest.mark.parametrize(
    ("columns", "prompt", "error"),
    [
        ({"Chat": r'[{"role": "user", "content": "\ud83d"}]'}, {"messages": "Chat"}, "Unicode"),
        ({"Chat": f'[{CALL}, {{"role": "tool", "content": "1"}}]'}, {"messages": "Chat"}, "Value"),
        ({"Sampling": r'{"stop": ["\ud83d"]}'}, {"function": OWN_SAMPLING}, "Unicode"),
        ({"Sampling": '{"temperature": NaN}'}, {"function": OWN_SAMPLING}, "Value"),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_a_row_that_json_or_utf_8_cannot_hold_fails_alone(
    columns: dict[str, str],
    prompt: dict[str, str],
    error: str,
    batch: bool,
    without_ray: None,
    tmp_path: Path,
) -> None:
    good = {"Chat": '[{"role": "user", "content": "ü"}]', "Sampling": '{"stop": ["ü"]}'}
    table = {name: [good[name], text] for name, text in columns.items()}
    table["Company"] = ["good", "bad"]
    with batch_server() as server:
        job = hosted_job(server.url, tmp_path, table, prompt=prompt, endpoint={"batch": batch})
        _, folder = finished_run(job)
    assert rows_of(folder)["Company"] == ["good"]
    (failed,) = ds.dataset(folder / "_quarantine").to_table().to_pylist()
    assert error in failed["error"] and failed["input"]["Company"] == "bad"


def test_half_a_surrogate_pair_in_a_refusal_is_shown(
    server: OpenAIServer, without_ray: None, tmp_path: Path
) -> None:
    server.fault = lambda number, body: (
        failing(400, "no \ud83d") if "bb" in str(body["messages"]) else None
    )
    _, folder = finished_run(job_of(server, tmp_path, {}, limits={"max_failed_rows": 1}))
    (failed,) = ds.dataset(folder / "_quarantine").to_table().to_pylist()
    assert "no ?" in failed["message"]


def test_half_a_surrogate_pair_in_an_answer_becomes_a_replacement_character(
    server: OpenAIServer, without_ray: None, tmp_path: Path
) -> None:
    def fault(number: int, body: dict[str, Any]) -> Any:
        return (200, {}, completion("a\ud83dü😀")) if "bb" in str(body["messages"]) else None

    server.fault = fault
    _, folder = finished_run(job_of(server, tmp_path, {}))
    assert rows_of(folder)["response"] == ["about a", "a\ufffdü😀", "about a"]


@pytest.mark.parametrize(
    ("engine", "field"),
    [({"task": "embed"}, "input"), ({"endpoint": {"api": "completions"}}, "prompt")],
)
def test_text_parts_are_joined_and_other_parts_refused_where_there_is_no_chat(
    engine: dict[str, Any], field: str, server: OpenAIServer, without_ray: None, tmp_path: Path
) -> None:
    parts = [[{"type": "text", "text": "a"}, "b"], [{"type": "input_audio", "input_audio": {}}]]
    prompt = {"function": "helpers.functions:as_parts"}
    table = {"Parts": list(map(json.dumps, parts))}
    groups = {"engine": engine} if "task" in engine else engine
    _, folder = finished_run(hosted_job(server.url, tmp_path, table, prompt=prompt, **groups))
    assert [body[field] for body in server.bodies] == ["a\nb"]
    (failed,) = ds.dataset(folder / "_quarantine").to_table().to_pylist()
    assert failed["error"] == "ValueError" and "parts that are not text" in failed["message"]


def test_parts_go_to_a_chat_as_they_are(
    server: OpenAIServer, without_ray: None, tmp_path: Path
) -> None:
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    parts = [[cached], [{"type": "input_audio", "input_audio": {}}, "b"], ["a", "b"], []]
    prompt = {"function": "helpers.functions:as_parts"}
    table = {"Parts": list(map(json.dumps, parts))}
    finished_run(hosted_job(server.url, tmp_path, table, prompt=prompt))
    sent = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(sent, key=str) == sorted(parts, key=str)
