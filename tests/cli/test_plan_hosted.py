"""What `raybatch plan` says of jobs with a hosted model, and of OpenAI batch files."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.command_line import called

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.openai_batch import HOSTED_TOKENS
from prefect_raybatch.runs import dry_run
from prefect_raybatch.runs.estimate import CostEstimate

KEY = "sk-very-secret-0123456789"
ENDPOINT: dict[str, Any] = {
    "url": "https://api.example.com/v1",
    "model": "large",
    "requests_per_minute": 500,
    "tokens_per_minute": 5000,
    "price_in": 0.5,
    "price_out": 2.0,
}


@pytest.fixture
def plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs `raybatch plan` of a hosted job about three names, away from any cluster."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    (tmp_path / "in.csv").write_text("Company\nSmith Law\nAcme Health\nAcme\n", encoding="utf-8")

    def run(*words: str, endpoint: dict[str, Any] | None = None, **groups: Any) -> Any:
        fields = {
            "name": "hosted",
            "source": {"uri": str(tmp_path / "in.csv")},
            "prompt": {"template": "What does {Company} do?"},
            "output": {"uri": str(tmp_path / "out")},
            "sampling": {"max_tokens": 64},
            "engine": {"endpoint": {**ENDPOINT, **(endpoint or {})}},
            "cluster": {"currency": "EUR"},
            **groups,
        }
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(fields), encoding="utf-8")
        return called(capsys, "plan", path, *words)

    return partial(run)


def test_a_key_whose_variable_is_not_set_is_named_with_file_and_line(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYBATCH_SECRET_LARGE", raising=False)
    code, out, err = plan(endpoint={"key": "${RAYBATCH_SECRET_LARGE}"})
    lines = (tmp_path / "job.yaml").read_text(encoding="utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if "key:" in line]
    assert code == 2 and out == ""
    assert f"{tmp_path}/job.yaml: line {number}: engine.endpoint.key: environment" in err
    # The value is not that of the file.
    code, _, err = plan("--set", "engine.endpoint.key=${RAYBATCH_SECRET_LARGE}")
    assert code == 2 and "ConfigError: engine.endpoint.key: environment" in err


@pytest.mark.parametrize("group", ["engine", "output.escalate.to"])
def test_a_model_beside_an_endpoint_is_refused_even_if_it_is_the_default(
    plan: Any, group: str
) -> None:
    both = {"model": "demo", "endpoint": ENDPOINT}
    larger = {"output": {"uri": "out", "escalate": {"to": both, "when": {"logprob_below": -1.0}}}}
    groups = {"engine": both} if group == "engine" else {"engine": {"model": "demo"}, **larger}
    code, _, err = plan(**groups)
    assert code == 2 and f"{group}.model: does not apply to {group}.endpoint" in err, err


def test_limits_prices_and_sizes_of_a_hosted_model_are_shown(plan: Any) -> None:
    code, out, err = plan()
    assert code == 0, err
    assert re.search(r"requests per minute +500 ", out)
    assert re.search(r"tokens per minute +5,000 ", out)
    assert re.search(r"prices +0\.5 EUR and 2\.00 EUR +per million", out)
    assert re.search(r"tokens per row +about 7\d reserved: prompt 1\d, answer up to 64", out)
    assert re.search(r"cost +about 0\.000\d+ EUR for 3 rows", out)


def cascade(at_most: float) -> dict[str, Any]:
    """Groups of a job whose hosted larger model may be asked about so many of the rows."""
    escalate = {
        "to": {"endpoint": ENDPOINT},
        "when": {"probability_below": 0.8},
        "at_most": at_most,
    }
    return {
        "engine": {"model": "demo"},
        "sampling": {"choice": ["bank", "farm"]},
        "output": {"uri": "out", "escalate": escalate},
    }


def test_a_cascade_that_may_ask_its_larger_model_about_no_row_is_told(plan: Any) -> None:
    code, out, err = plan(**cascade(0.3))
    assert code == 0, err
    told = " ".join(out.split())
    assert "output.escalate.at_most 0.3 of 3 rows is less than one" in told
    assert "Raise output.escalate.at_most to at least 0.33334" in told


def test_a_cascade_costs_what_its_larger_model_may_be_asked_about(plan: Any) -> None:
    code, out, err = plan(**cascade(0.34))
    assert code == 0, err
    assert "Larger model, which answers at most 1 row:" in out
    first, larger = " ".join(out.split()).split("Larger model")
    assert "shards 1 of 3 rows, including those that the first model answers" in larger
    assert "including" not in first
    assert re.search(r"cost of larger +about [0-9.e-]+ EUR for 1 row,", out)


def test_a_cost_over_the_limit_is_told_beforehand(plan: Any) -> None:
    code, out, _ = plan(endpoint={"price_out": 5e6}, limits={"max_cost": 1})
    assert code == 0 and "limits.max_cost 1.00 EUR may stop the run" in " ".join(out.split())


def hosted_cascade(**price: float) -> dict[str, Any]:
    """Groups of a job whose two hosted models answer 3 rows and at most 1 row."""
    asked = {"endpoint": {**ENDPOINT, "model": "larger"}}
    escalate = {"to": asked, "when": {"fails_schema": True}, "at_most": 0.34}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    return {
        "endpoint": price,
        "output": {"uri": "out", "schema_model": schema, "escalate": escalate},
    }


def test_a_cascade_over_its_cost_limit_is_told_beforehand_if_only_both_models_exceed_it(
    plan: Any,
) -> None:
    for most, is_told in ((250.0, True), (500.0, False)):
        code, out, err = plan(**hosted_cascade(price_out=2e6), limits={"max_cost": most})
        assert code == 0, err
        first, larger = " ".join(out.split()).split("Larger model, which")
        assert re.search(r"cost +about 384\.\d+ EUR for 3 rows", first)
        assert re.search(r"cost of larger +about 0\.000\d+ EUR for 1 row", larger)
        warning = rf"limits.max_cost {most:g}.00 EUR may stop the run .*First model: about 384"
        assert bool(re.search(warning, larger)) == is_told and "may stop" not in first


def test_a_first_model_on_gpus_counts_beside_a_hosted_larger_one(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_earlier_run(*_: Any) -> CostEstimate:
        return CostEstimate(3, 30.0, 15.0, "night", currency="EUR")

    monkeypatch.setattr(dry_run, "estimate", by_earlier_run)
    prices = {"currency": "EUR", "price_per_gpu_hour": 2.0}
    code, out, err = plan(**cascade(0.34), limits={"max_cost": 20.0}, cluster=prices)
    assert code == 0, err
    first, larger = " ".join(out.split()).split("Larger model, which")
    assert "about 30.00 EUR: 15.00 GPU-hours for 3 rows, as in night" in first
    assert "limits.max_cost 20.00 EUR may stop the run" in larger


@pytest.mark.parametrize("limit", [64, 75])
def test_a_token_limit_that_no_row_fits_is_refused_with_the_size_of_a_row(
    plan: Any, limit: int
) -> None:
    code, out, err = plan(endpoint={"tokens_per_minute": limit})
    text = " ".join(f"{out} {err}".split())
    assert code and f"engine.endpoint.tokens_per_minute {limit}" in text
    assert "64" in text and "lower" in text and "max_tokens" in text
    assert limit == 64 or re.search(r"about 1\d tokens of prompt and up to 64", text)


def test_batches_have_no_limit_of_tokens_per_minute(plan: Any) -> None:
    code, out, err = plan(endpoint={"tokens_per_minute": 10, "batch": True})
    assert code == 0, err
    assert "tokens per minute" not in out


def test_a_function_that_makes_no_request_is_told(plan: Any) -> None:
    code, out, _ = plan(prompt={"function": "helpers.functions:raises_surrogate"})
    assert code == 1 and "none of 3 sampled rows makes a request" in " ".join(out.split())


@pytest.mark.parametrize(
    ("batch", "words"),
    [(False, "in the journal"), (True, "takes their batches over"), (None, "lost if the run")],
)
def test_the_fate_of_uncommitted_shards_is_told_as_it_is(
    plan: Any, batch: bool | None, words: str, tmp_path: Path
) -> None:
    rows = "\n".join(f"Company {n}" for n in range(2000))
    (tmp_path / "in.csv").write_text(f"Company\n{rows}\n", encoding="utf-8")
    source = {"uri": str(tmp_path / "in.csv"), "rows_per_shard": 1}
    engine: dict[str, Any] = {"engine": {}} if batch is None else {"endpoint": {"batch": batch}}
    _, out, _ = plan("--json", source=source, **engine)
    (figure,) = [one for one in json.loads(out)["figures"] if one["name"] == "uncommitted shards"]
    assert words in figure["why"]


def test_a_cost_limit_of_a_hosted_model_needs_its_prices(plan: Any) -> None:
    prices = {"price_in": None, "price_out": None}
    code, _, err = plan(endpoint=prices, limits={"max_cost": 1})
    assert code == 2 and "engine.endpoint.price_in" in err and "engine.endpoint.price_out" in err


def test_the_next_command_is_there_without_its_secrets(plan: Any) -> None:
    code, out, _ = plan("--set", f"engine.endpoint.key={KEY}", "--set", "source.limit=2")
    text = " ".join(out.split())
    assert code == 0 and KEY not in out
    assert "raybatch run" in text and "--set source.limit=2" in text
    assert "write your own engine.endpoint.key" in text


def test_a_variable_that_holds_a_secret_is_no_secret(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYBATCH_SECRET_LARGE", KEY)
    _, out, _ = plan("--set", "engine.endpoint.key=${RAYBATCH_SECRET_LARGE}")
    assert "engine.endpoint.key=${RAYBATCH_SECRET_LARGE}'" in out and "write your own" not in out


def batch_job(folder: Path, **source: Any) -> dict[str, Any]:
    url, body = "/v1/embeddings", {"input": "Smith Law"}
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(line), encoding="utf-8")
    source = {"uri": str(folder / "requests.jsonl"), **source}
    output = {"uri": str(folder / "out")}
    return {"name": "batch", "source": source, "prompt": {}, "output": output}


def test_a_changed_task_decides_the_requests_of_a_batch_file(plan: Any, tmp_path: Path) -> None:
    groups = {**batch_job(tmp_path, format="openai_batch"), "sampling": {}}
    code, out, err = plan("--set", "engine.task=embed", **groups)
    assert code == 0, err
    assert "prompt_tokens" in out and "finish_reason" not in out


def test_a_change_of_a_batch_job_keeps_what_the_job_sets(tmp_path: Path) -> None:
    own = {"sampling": {"max_tokens": 7}, "limits": {"max_failed_rows": 3}}
    job = BatchJob.from_dict({**batch_job(tmp_path, format="openai_batch"), **own})
    same = edited(job, {"source.limit": 5}, "job")
    assert same.to_dict() == {**job.to_dict(), "source": {**job.to_dict()["source"], "limit": 5}}
    fields = {f"engine.endpoint.{name}": ENDPOINT[name] for name in ("url", "model")}
    plain = BatchJob.from_dict(batch_job(tmp_path, format="openai_batch"))
    assert edited(plain, fields, "job").sampling.max_tokens == HOSTED_TOKENS
    assert edited(job, fields, "job").sampling.max_tokens == 7
    with pytest.raises(ConfigError, match=r"source\.format|prompt"):
        edited(job, {"source.format": "jsonl"}, "job")


def test_a_batch_file_that_is_read_as_a_table_is_recognized(plan: Any, tmp_path: Path) -> None:
    groups = {**batch_job(tmp_path), "prompt": {"template": "{prompt}"}}
    code, _, err = plan(**groups)
    assert code == 2 and "set source.format: openai_batch" in err
