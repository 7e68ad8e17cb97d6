"""Several answers to a row, and the log probabilities of their tokens, by a hosted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from helpers.hosted import finished_run, hosted_job
from helpers.openai_server import OpenAIServer, completion, failing, openai_server

from prefect_raybatch.api import dry_run
from prefect_raybatch.errors import ConfigError, EndpointRefused
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.stages.answer_logprobs import logprobs_type
from prefect_raybatch.stages.endpoint.body import LABEL_JSON_TOKENS

pytestmark = pytest.mark.usefixtures("without_ray")
TEXTS = ["a", "bb", "ccc"]
DRAWN = {"n": 3, "temperature": 1.0}


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as made:
        yield made


def job_of(server: OpenAIServer, folder: Path, **groups: Any) -> BatchJob:
    return hosted_job(server.url, folder, {"Text": TEXTS}, **groups)


def result(folder: Path) -> dict[str, list[Any]]:
    return ds.dataset(folder / "data").to_table().to_pydict()


def quarantined(folder: Path) -> list[dict[str, Any]]:
    return ds.dataset(folder / "_quarantine").to_table().to_pylist()


def test_several_answers_are_a_list_and_cost_what_the_server_bills(
    server: OpenAIServer, tmp_path: Path
) -> None:
    server.fault = lambda number, body: (
        (200, {}, completion("about bb", "length", body))
        if body["messages"][-1]["content"] == "bb"
        else None
    )
    prices = {"price_in": 1e6, "price_out": 2e6}
    output = {"extras": ["finish_reason", "prompt_tokens"]}
    report, folder = finished_run(
        job_of(server, tmp_path, sampling=DRAWN, endpoint=prices, output=output)
    )
    rows = result(folder)
    assert rows["response"] == [[f"about {t}", f"about {t}1", f"about {t}2"] for t in TEXTS]
    assert rows["finish_reason"] == [["stop"] * 3, ["length"] * 3, ["stop"] * 3]
    assert all(body["n"] == 3 for body in server.bodies)
    assert report.tokens["prompt_tokens"] == 3 * 11
    assert report.tokens["output_tokens"] == 3 * 3 * 7
    assert report.cost["total"] == pytest.approx(3 * 11 + 2 * 3 * 3 * 7)


@pytest.mark.parametrize("reason", ["content_filter", "error", "abort", "new_reason", ["stop"]])
def test_an_answer_that_the_server_cut_off_is_an_error_of_the_row(
    server: OpenAIServer, tmp_path: Path, reason: Any
) -> None:
    server.fault = lambda number, body: (
        (200, {}, completion("The answer is", reason, body))
        if body["messages"][-1]["content"] == "bb"
        else None
    )
    prices = {"price_in": 1e6, "price_out": 2e6}
    report, folder = finished_run(job_of(server, tmp_path, endpoint=prices))
    (row,) = quarantined(folder)
    assert row["error"] == "AnswerCut" and repr(reason) in row["message"]
    assert report.good == 2 and len(server.bodies) == 3
    assert report.cost["total"] == pytest.approx(3 * (11 + 2 * 7))


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        *((reason, "stop") for reason in (None, "", "end_turn", "STOP", "eos", "tool_calls")),
        *((reason, "length") for reason in ("max_tokens", "model_length")),
    ],
)
def test_other_names_of_a_complete_answer_and_of_a_full_one_are_known(
    server: OpenAIServer, tmp_path: Path, reason: Any, finish: str
) -> None:
    server.fault = lambda number, body: (200, {}, completion("yes", reason, body))
    output = {"extras": ["finish_reason"]}
    _, folder = finished_run(job_of(server, tmp_path, output=output))
    assert result(folder)["finish_reason"] == [finish] * 3


def test_each_answer_reserves_its_tokens(server: OpenAIServer, tmp_path: Path) -> None:
    sampling = {**DRAWN, "max_tokens": 100}
    with pytest.raises(ConfigError, match=r"max_tokens 100, 3 times.*lower max_tokens or n"):
        job_of(server, tmp_path, sampling=sampling, endpoint={"tokens_per_minute": 300})
    job = job_of(server, tmp_path, sampling=sampling, endpoint={"tokens_per_minute": 302})
    (problem,) = dry_run(job).problems
    assert "300 of answer" in problem
    _, folder = finished_run(job)
    assert [row["error"] for row in quarantined(folder)] == ["PromptTooLong"] * 3
    assert not server.bodies


def test_a_server_that_gives_fewer_answers_is_an_error_of_the_row(
    server: OpenAIServer, tmp_path: Path
) -> None:
    server.fault = lambda number, body: (
        (200, {}, completion("one")) if body["messages"][-1]["content"] == "bb" else None
    )
    report, folder = finished_run(job_of(server, tmp_path, sampling=DRAWN))
    (row,) = quarantined(folder)
    assert row["error"] == "AnswersMissing" and row["input"]["Text"] == "bb"
    assert "returned 1 answer, and sampling.n asks for 3" in row["message"]
    assert report.good == 2 and len(server.bodies) == 3


def test_several_labels_are_read_from_their_json(server: OpenAIServer, tmp_path: Path) -> None:
    def fault(number: int, body: dict[str, Any]) -> Any:
        made = json.loads(completion("", body=body))
        for choice, label in zip(made["choices"], ("x", "y", "x"), strict=True):
            choice["message"]["content"] = json.dumps({"label": label})
        return 200, {}, json.dumps(made).encode()

    server.fault = fault
    sampling = {**DRAWN, "choice": ["x", "y"], "max_tokens": 5}
    _, folder = finished_run(job_of(server, tmp_path, sampling=sampling))
    assert result(folder)["response"] == [["x", "y", "x"]] * 3
    assert server.bodies[0]["max_tokens"] == 5 + LABEL_JSON_TOKENS


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("number", [1, 2])
def test_log_probabilities_are_in_the_column_of_the_local_engine(
    server: OpenAIServer, tmp_path: Path, api: str, number: int
) -> None:
    sampling = {"n": number, "temperature": 1.0, "logprobs": 2}
    job = job_of(server, tmp_path, sampling=sampling, endpoint={"api": api})
    _, folder = finished_run(job)
    table = ds.dataset(folder / "data").to_table()
    assert table.schema.field("logprobs").type == logprobs_type(2, number)
    half = "\ufffd" if api == "chat" else "\\xc3"
    top = [{"token": "so", "id": None, "logprob": -0.5}, {"token": "no", "id": None, "logprob": -1}]
    steps = [
        {"token": "so", "id": None, "logprob": -0.5, "top": top},
        {"token": half, "id": None, "logprob": -1.5, "top": top},
    ]
    assert table["logprobs"].to_pylist() == [steps if number == 1 else [steps, steps]] * 3
    asked = {"logprobs": True, "top_logprobs": 2} if api == "chat" else {"logprobs": 2}
    assert asked.items() <= server.bodies[0].items()


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_without_the_most_probable_tokens_only_those_of_the_answer_are_told(
    server: OpenAIServer, tmp_path: Path, api: str
) -> None:
    job = job_of(server, tmp_path, sampling={"logprobs": 0}, endpoint={"api": api})
    table = ds.dataset(finished_run(job)[1] / "data").to_table()
    assert table.schema.field("logprobs").type == logprobs_type(0, 1)
    assert [one["logprob"] for one in table["logprobs"][0].as_py()] == [-0.5, -1.5]
    assert "top_logprobs" not in server.bodies[0]


@pytest.mark.parametrize("damaged", [None, {"content": [{"token": "so"}]}, {"content": None}, 3])
def test_a_server_without_log_probabilities_is_an_error_of_the_row(
    server: OpenAIServer, tmp_path: Path, damaged: Any
) -> None:
    def fault(number: int, body: dict[str, Any]) -> Any:
        if body["messages"][-1]["content"] != "bb":
            return None
        made = json.loads(completion("b"))
        made["choices"][0]["logprobs"] = damaged
        return 200, {}, json.dumps(made).encode()

    server.fault = fault
    _, folder = finished_run(job_of(server, tmp_path, sampling={"logprobs": 1}))
    (row,) = quarantined(folder)
    assert row["error"] == "LogprobsMissing" and "remove sampling.logprobs" in row["message"]
    assert len(server.bodies) == 3  # the answer was paid: it is not asked for again


def test_answers_of_a_run_that_ended_are_not_paid_again(
    server: OpenAIServer, tmp_path: Path
) -> None:
    sampling = {**DRAWN, "logprobs": 1}
    job = job_of(server, tmp_path, sampling=sampling, endpoint={"max_in_flight": 1})
    server.fault = lambda number, body: failing(401, "bad key") if number == 2 else None
    with pytest.raises(EndpointRefused):
        finished_run(job)
    server.fault = lambda number, body: None
    rows = result(finished_run(job)[1])
    assert rows["response"] == [[f"about {t}", f"about {t}1", f"about {t}2"] for t in TEXTS]
    assert all(len(told) == 3 and told[0][0]["top"] for told in rows["logprobs"])
    assert len(server.answered) == len(set(server.answered)) == 3


def test_a_run_that_reuses_answers_has_the_same_columns(
    server: OpenAIServer, tmp_path: Path
) -> None:
    sampling = {**DRAWN, "seed": 3, "logprobs": 1}
    job = job_of(server, tmp_path, sampling=sampling, reuse="latest")
    first = result(finished_run(job, "monday")[1])
    asked = len(server.bodies)
    assert result(finished_run(job, "tuesday")[1]) == first
    assert len(server.bodies) == asked and len(first["logprobs"][0]) == 3


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"sampling": {"choice": ["x"]}, "output": {"probabilities": True}},
            r"output\.probabilities needs the model's tokenizer.*use sampling\.logprobs",
        ),
        ({"sampling": {"logprobs": 21}}, r"sampling\.logprobs \(21\) exceeds 20.*hosted model"),
        (
            {"sampling": DRAWN, "output": {"extras": ["output_tokens"]}},
            r"output_tokens is unknown with sampling\.n.*one sum for all answers",
        ),
    ],
)
def test_what_a_hosted_model_cannot_tell_is_refused(
    server: OpenAIServer, tmp_path: Path, groups: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        job_of(server, tmp_path, **groups)
