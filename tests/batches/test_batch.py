"""OpenAI batch files through the stages of a run, with a stand-in engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import FakeEngine
from openai.types.chat import ChatCompletion

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.batches.files import batch_fields, batch_key, write_output
from prefect_raybatch.batches.requests import chat_request, rows_of_requests
from prefect_raybatch.cli.drive import job_of_fields
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import ConfigError, SourceError

ASK = [{"role": "user", "content": "What is a shard?"}]


def request(custom_id: object, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": ASK, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def row(**body: Any) -> dict[str, Any]:
    line = json.dumps(request("a", **body)).encode()
    ((number, custom_id, text, fault),) = rows_of_requests([(7, line)], ["demo"])
    return {"line": number, "custom_id": custom_id, "body": text, "fault": fault}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"custom_id": NaN}', "NaN"),
        (b"[]", "not an object"),
        (b"{}", "custom_id is missing"),
        (b'{"custom_id": 1}', "custom_id is missing"),
        (b'{"custom_id": "\\ud800"}', "surrogate"),
        (json.dumps(request("a") | {"method": "GET"}).encode(), "set it to POST"),
        (json.dumps(request("a", "/v1/audio")).encode(), "use /v1/chat/completions"),
        (json.dumps(request("a") | {"body": 1}).encode(), "body is missing"),
        (json.dumps(request("a", model="other")).encode(), "--served-as"),
        (json.dumps(request("a", model=["demo"])).encode(), "--served-as"),
    ],
)
def test_a_wrong_line_becomes_a_row_with_its_fault(line: bytes, said: str) -> None:
    ((_, _, body, fault),) = rows_of_requests([(7, line)], ["demo"])
    assert body is None
    assert isinstance(fault, str) and fault.startswith("line 7: ") and said in fault


def test_a_second_use_of_a_custom_id_is_wrong_and_a_blank_line_is_none() -> None:
    line = json.dumps(request("a")).encode()
    first, second = rows_of_requests([(1, line), (2, b" \r"), (3, line)], ["demo"])
    assert first[3] is None and "earlier line" in str(second[3]) and second[0] == 3


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "function"}]}, "body.tools"),
        ({"tool_choice": "auto"}, "body.tool_choice"),
        ({"n": 2}, "body.n"),
        ({"n": True}, "body.n"),
        ({"stream": True}, "body.stream"),
        ({"\ud800": 1}, "body.\\ud800"),
        ({"response_format": {"type": "xml"}}, "body.response_format"),
        ({"messages": []}, "body.messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "body.messages[0].role"),
        ({"messages": [{**ASK[0], "name": "Ann"}]}, "body.messages[0].name"),
        ({"messages": [{"role": "user", "content": [1]}]}, "body.messages[0].content"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError) as refused:
        chat_request(row(**body))
    assert f"line 7: {field}" in str(refused.value)
    str(refused.value).encode()


def test_the_fields_of_a_body_become_messages_and_sampling() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = chat_request(
        row(max_completion_tokens=5, seed=3, stop=None, n=1, user="u", response_format=form)
    )
    assert made["messages"] == ASK
    assert made["sampling"] == {
        "max_tokens": 5,
        "seed": 3,
        "structured_outputs": {"json": schema},
    }


def test_every_line_is_answered_in_order_by_the_same_ids(without_ray: None, tmp_path: Path) -> None:
    lines = [json.dumps(request(f"id {i}")) for i in range(16)]
    lines[3], lines[5] = "not json", json.dumps(request("id 5", n=2))
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")

    def answer() -> list[dict[str, Any]]:
        job = job_of_fields(batch_fields(str(source), str(output), "demo", [], 64), {}, "job")
        run = plan_run(resolve(job), batch_key(resolve(job).identity.fingerprint))
        report = finalize_run(job, run, infer_run(job, run, engine=Numbered))
        write_output(str(output), report, "demo", job.output.row_number)
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]

    first = answer()
    custom = [f"id {i}" for i in range(16)]
    custom[3] = ""
    assert [line["custom_id"] for line in first] == custom
    for i, line in enumerate(first):
        status = 400 if i in (3, 5) else 500 if i == Numbered.FAILS else 200
        assert line["response"]["status_code"] == status
        assert (line["error"] is None) == (status == 200)
        if status == 200:
            body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
            assert body.choices[0].message.content == f"answer {i}" and body.usage is not None
        else:
            assert line["error"]["line"] == i + 1
    output.unlink()
    assert answer() == first


class Numbered(FakeEngine):
    """Answers by the number of the line."""

    def numbers(self, table: Any) -> list[int]:
        return [line - 1 for line in table["line"].to_pylist()]


def test_a_file_without_requests_and_a_url_to_write_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n\n", encoding="utf-8")
    with pytest.raises(SourceError, match="no requests"):
        batch_fields(str(source), str(tmp_path / "out.jsonl"), "demo", [], 64)
    with pytest.raises(ConfigError, match="-o"):
        batch_fields(str(source), "https://host/out.jsonl", "demo", [], 64)
