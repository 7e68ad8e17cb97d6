"""OpenAI batch files through the stages of a run, with a stand-in engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from helpers.command_line import called
from helpers.engines import FakeEngine
from helpers.openai_server import failing, openai_server
from openai.types import Completion
from openai.types.chat import ChatCompletion

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.batches.files import batch_fields, batch_key, write_output
from prefect_raybatch.batches.requests import chat_request, embedding_request
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited, job_of_fields
from prefect_raybatch.job.openai_batch import TEXT_REQUEST
from prefect_raybatch.source.openai_batch import REQUEST_SCHEMA, rows_of_requests
from prefect_raybatch.stages.block import load_tokenizer
from prefect_raybatch.stages.columns import TOKENS

ASK = [{"role": "user", "content": "What is a shard?"}]


def request(custom_id: object, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": ASK, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def row(**body: Any) -> dict[str, Any]:
    line = json.dumps(request("a", **body)).encode()
    (values,) = rows_of_requests([(7, line)], ["demo"], set())
    return dict(zip(REQUEST_SCHEMA.names, values, strict=True))


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
        (json.dumps(request("a", model="other")).encode(), "source.served_as"),
        (json.dumps(request("a", model=["demo"])).encode(), "source.served_as"),
    ],
)
def test_a_wrong_line_becomes_a_row_with_its_fault(line: bytes, said: str) -> None:
    ((_, _, _, body, fault),) = rows_of_requests([(7, line)], ["demo"], set())
    assert body is None
    assert isinstance(fault, str) and fault.startswith("line 7: ") and said in fault


def test_a_second_use_of_a_custom_id_is_wrong_and_a_blank_line_is_none() -> None:
    line = json.dumps(request("a")).encode()
    first, second = rows_of_requests([(1, line), (2, b" \r"), (3, line)], None, set())
    assert first[4] is None and "earlier line" in str(second[4]) and second[0] == 3


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

    runs: list[Path] = []

    def answer() -> list[dict[str, Any]]:
        job = job_of_fields(batch_fields(str(source), str(output), ["demo"], {}, dict), {}, "job")
        run = plan_run(resolve(job), batch_key(resolve(job).identity.fingerprint))
        report = finalize_run(job, run, infer_run(job, run, engine=Numbered))
        write_output(str(output), report.run, job.output.options)
        runs.append(Path(report.run))
        return lines_of(output)

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
    parts = [lines_of(runs[0] / name) for name in ("output.jsonl", "error.jsonl")]
    assert [len(part) for part in parts] == [16 - 3, 3]
    assert sorted((*parts[0], *parts[1]), key=str) == sorted(first, key=str)
    output.unlink()
    assert answer() == first and len({*runs}) == 1


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


class Numbered(FakeEngine):
    """Answers by the number of the line."""

    def numbers(self, table: Any) -> list[int]:
        return [line - 1 for line in table["line"].to_pylist()]


def test_a_file_without_requests_and_a_url_to_write_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n\n", encoding="utf-8")
    with pytest.raises(SourceError, match="no requests"):
        batch_fields(str(source), str(tmp_path / "out.jsonl"), ["demo"], {}, dict)
    with pytest.raises(ConfigError, match="-o"):
        batch_fields(str(source), "https://host/out.jsonl", ["demo"], {}, dict)


def job_of(tmp_path: Path, lines: list[str], **groups: Any) -> BatchJob:
    """A job of the shortest kind, as a job file has it."""
    source = tmp_path / "requests.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    source_fields = {"uri": str(source), "format": "openai_batch", **groups.pop("source", {})}
    output = {"uri": str(tmp_path / "runs"), **groups.pop("output", {})}
    fields = {"name": "asked", "source": source_fields, "prompt": {}, "output": output, **groups}
    return BatchJob.from_dict(fields)


def run_of(job: BatchJob, **more: Any) -> Path:
    run = plan_run(job, "night")
    return Path(finalize_run(job, run, infer_run(job, run, **more)).run)


def test_a_job_with_an_endpoint_answers_a_batch_file(without_ray: None, tmp_path: Path) -> None:
    lines = [json.dumps(request(f"id {i}", temperature=0.5)) for i in range(6)]
    lines[1] = json.dumps(request("id 1", max_tokens=3, response_format={"type": "json_object"}))
    lines[2] = json.dumps(request("id 2", top_k=3))
    with openai_server() as server:
        server.fault = lambda _, body: refused_without(body, "temperature")
        endpoint = {"url": server.url, "model": "large"}
        folder = run_of(job_of(tmp_path, lines, engine={"endpoint": endpoint}))
        (own,) = [body for body in server.bodies if body["max_tokens"] == 3]
        (other, *_) = [body for body in server.bodies if body["max_tokens"] != 3]
    assert own["response_format"] == {"type": "json_object"} and own["temperature"] == 1.0
    assert other["temperature"] == 0.5 and other["max_tokens"] == 1024
    answered = lines_of(folder / "output.jsonl")
    assert [line["custom_id"] for line in answered] == ["id 0", "id 1", "id 3", "id 4", "id 5"]
    for line in answered:
        body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert body.model == "demo" and body.choices[0].message.content
        assert body.usage is not None and body.usage.total_tokens == 18
    (error,) = lines_of(folder / "error.jsonl")
    assert error["custom_id"] == "id 2" and "top_k" in error["error"]["message"]


@pytest.mark.parametrize("limits", [{}, {"max_failed_fraction": 1.0}, {"max_failed_rows": 5}])
def test_all_rows_of_a_retry_of_a_batch_file_may_fail(
    without_ray: None, tmp_path: Path, limits: dict[str, float]
) -> None:
    """The plan may hold the limit that the format implies; a retry's input is no batch file."""
    lines = [json.dumps(request(f"id {i}")) for i in range(3)] + ["{"]
    folder = run_of(job_of(tmp_path, lines, limits=limits), engine=FakeEngine)
    retry = plan_retry(str(folder), None, None, job_of(tmp_path, lines))
    assert isinstance(retry, Retry)
    assert retry.job.effective_limits.allowed(1) == 1


def refused_without(body: dict[str, Any], name: str) -> Any:
    return None if name in body else failing(400, f"{name} is missing")


def test_what_a_server_refuses_is_an_error_line_with_status_400(
    without_ray: None, tmp_path: Path
) -> None:
    with openai_server() as server:
        server.fault = lambda number, _: failing(413, "too large")
        endpoint = {"url": server.url, "model": "large"}
        lines = [json.dumps(request("a"))]
        folder = run_of(job_of(tmp_path, lines, engine={"endpoint": endpoint}))
    (error,) = lines_of(folder / "error.jsonl")
    assert lines_of(folder / "output.jsonl") == []
    assert error["response"]["status_code"] == 400 and "413" in error["error"]["message"]


def test_an_answer_without_max_tokens_may_fill_the_context(tmp_path: Path) -> None:
    job = job_of(tmp_path, [json.dumps(request("a"))])
    assert job.sampling.max_tokens is None and job.sampling.for_vllm()["max_tokens"] > 1_000_000
    assert job_of(tmp_path, [], sampling={"max_tokens": 5}).sampling.max_tokens == 5
    again = BatchJob.from_dict(job.to_dict())
    assert again == job and again.prompt.function == TEXT_REQUEST
    cold = job_of(tmp_path, [], sampling={"temperature": 0.0})
    assert BatchJob.from_dict(cold.to_dict()).sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        ({}, 20),
        ({"stall_seconds": 900.0}, 20),
        ({"max_failed_rows": 9}, 9),
        ({"max_failed_fraction": 0.5}, 10),
        ({"max_failed_fraction": 1.0}, 20),
    ],
)
def test_another_source_has_no_limits_of_a_batch_file(
    tmp_path: Path, limits: dict[str, float], allowed: int
) -> None:
    job = job_of(tmp_path, [], limits=limits)
    assert job.effective_limits.allowed(20) == allowed
    assert edited(job, {"source.limit": 5}, "job").limits == job.limits
    change = {"source.uri": "in.parquet", "source.format": "parquet", "prompt.template": "{a}"}
    assert edited(job, change, "job").to_dict().get("limits", {}) == limits


class Noting(Numbered):
    """Notes the tokens of the prompts."""

    tokens: ClassVar[list[list[int]]] = []

    def __call__(self, table: Any) -> Any:
        self.tokens.extend(table[TOKENS].to_pylist())
        return super().__call__(table)


def test_a_local_model_gets_the_text_of_a_completion_as_it_is(
    without_ray: None, tmp_path: Path
) -> None:
    text = "<|im_start|>user\nSmith Law<|im_end|>"
    lines = [
        json.dumps(request("chat")),
        json.dumps(request("raw", "/v1/completions", messages=None, prompt=text, max_tokens=4)),
        json.dumps(request("none", "/v1/completions", messages=None)),
        json.dumps(request("echo", "/v1/completions", messages=None, prompt="a", echo=True)),
    ]
    Noting.tokens.clear()
    folder = run_of(job_of(tmp_path, lines), engine=Noting)
    tokenizer = load_tokenizer(demo_model_path(), None)
    chat = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
    expected = [tokenizer(chat, add_special_tokens=False), tokenizer(text)]
    assert Noting.tokens[:2] == [one["input_ids"] for one in expected]
    first, second = lines_of(folder / "output.jsonl")
    ChatCompletion.model_validate(first["response"]["body"], strict=True)
    completion = Completion.model_validate(second["response"]["body"], strict=True)
    assert completion.choices[0].text == "answer 1" and second["custom_id"] == "raw"
    missing, echo = lines_of(folder / "error.jsonl")
    assert "body.prompt" in missing["error"]["message"] and "echo" in echo["error"]["message"]


@pytest.mark.parametrize("length", [256, "auto"])
def test_lines_of_which_none_can_be_asked_are_a_fault_of_the_file(
    tmp_path: Path, length: int | str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(request(f"id {i}")).replace('"demo"', '"dmo"') for i in range(2)]
    source = tmp_path / "requests.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    fields = {
        "name": "asked",
        "source": {"uri": str(source), "format": "openai_batch", "served_as": ["demo"]},
        "prompt": {},
        "output": {"uri": str(tmp_path / "runs")},
        "engine": {"model": "demo", "max_model_len": length},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    _, out, err = called(capsys, "plan", path)
    said = " ".join((out + err).split())
    assert re.search(r"source\.uri: none of \d sampled rows? made a prompt", said), said
    assert "line 1: model 'dmo' is not served, only demo" in said
    assert "Correct the lines of the file" in said and "prompt.function" not in said


def test_a_hosted_chat_gets_no_completion(without_ray: None, tmp_path: Path) -> None:
    """Also not where the job names the function of local models."""
    lines = [json.dumps(request("raw", "/v1/completions", messages=None, prompt="a"))]
    with openai_server() as server:
        engine = {"endpoint": {"url": server.url, "model": "large"}}
        own = {"prompt": {"function": TEXT_REQUEST}, "limits": {"max_failed_rows": 1}}
        output = {"extras": ["finish_reason", "prompt_tokens", "output_tokens"]}
        folder = run_of(job_of(tmp_path, lines, engine=engine, output=output, **own))
        assert not server.bodies
    (error,) = lines_of(folder / "error.jsonl")
    assert "engine.endpoint.api: completions" in error["error"]["message"]


def test_the_key_of_a_run_is_that_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request("a")), encoding="utf-8")

    def key() -> str:
        fields = batch_fields(str(source), str(tmp_path / "out.jsonl"), ["demo"], {}, dict)
        return resolve(BatchJob.from_dict(fields)).identity.fingerprint

    before = key()
    monkeypatch.setattr("prefect_raybatch.installed.code_version", lambda: "another")
    monkeypatch.setattr("inspect.getsourcefile", lambda _: str(Path(__file__)))
    assert key() == before
    source.write_text(json.dumps(request("b")), encoding="utf-8")
    assert key() != before


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ({"prompt": {"template": "{body}"}}, "prompt"),
        ({"output": {"postprocess": "helpers.functions:shout"}}, "output.postprocess"),
        ({"output": {"compact": False}}, "output.compact"),
        ({"output": {"columns": ["body"]}}, "custom_id"),
        ({"source": {"columns": ["custom_id", "body"]}}, "'line'"),
        (
            {"source": {"format": "jsonl", "served_as": ["x"]}, "prompt": {"template": "x"}},
            "served_as",
        ),
        ({"sampling": {"n": 2}}, "sampling.n"),
        ({"engine": {"task": "classify"}}, "engine.task"),
    ],
)
def test_fields_that_do_not_go_with_a_batch_file_are_refused(
    tmp_path: Path, groups: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        job_of(tmp_path, [], **groups)
    assert field in str(refused.value) and "remove" in str(refused.value)


def embedding(custom_id: str, **body: Any) -> str:
    return json.dumps(request(custom_id, "/v1/embeddings", messages=None, **body))


def test_lines_for_another_url_than_that_of_the_run_are_wrong() -> None:
    (values,) = rows_of_requests([(7, embedding("a", input="x").encode())], None, set())
    wrong = dict(zip(REQUEST_SCHEMA.names, values, strict=True))
    with pytest.raises(ValueError, match="line 7: url /v1/embeddings"):
        chat_request(wrong)
    with pytest.raises(ValueError, match="line 7: url /v1/chat"):
        embedding_request(row())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": ["a", "b"]}, "body.input"),
        ({"input": ""}, "body.input"),
        ({"input": [1, 2]}, "body.input"),
        ({"input": "a", "dimensions": 8}, "body.dimensions"),
        ({"input": "a", "encoding_format": "base64"}, "body.encoding_format"),
    ],
)
def test_what_an_embedding_cannot_have_is_refused(body: dict[str, Any], field: str) -> None:
    (values,) = rows_of_requests([(7, embedding("a", **body).encode())], None, set())
    with pytest.raises(ValueError, match=f"line 7: {field}"):
        embedding_request(dict(zip(REQUEST_SCHEMA.names, values, strict=True)))
