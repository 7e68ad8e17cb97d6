"""Tokens per engine step that vLLM refuses are found when a run is planned."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_models
from helpers.retries import first_run
from helpers.small import make_job

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.api.retry import plan_retry
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ({}, r"\(10\) must be at least the context length \(2,048\)"),  # the model's own
        ({"max_model_len": "auto"}, r"\(10\) must be at least the context length"),
        ({"max_model_len": 64}, r"\(10\) must be at least the context length \(64\)"),
    ],
)
def test_a_step_too_small_for_a_whole_prompt(
    tmp_path: Path, engine: dict[str, Any], fault: str
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("Company\n" + "Acme\n" * 60)

    step = {"model": "demo", "enable_chunked_prefill": False, "max_num_batched_tokens": 10}
    job = make_job(
        source={"uri": str(path)},
        engine={**step, **engine},
        output={"uri": str(tmp_path / "out")},
    )
    for plan in (dry_run, partial(plan_run, run_key="night")):
        with pytest.raises(ConfigError, match=rf"^engine\.max_num_batched_tokens {fault}"):
            plan(job)
    assert not list((tmp_path / "out").rglob("plan.json"))


STEP = {"model": "demo", "enable_chunked_prefill": False, "max_num_batched_tokens": 64}


@pytest.mark.parametrize(
    "engine",
    [
        {"hf_overrides": {"max_position_embeddings": 64}},
        {"disable_sliding_window": True},
        {"task": "embed"},  # the tokenizer or sentence-transformers may shorten it
    ],
)
def test_a_step_is_not_refused_if_vllm_may_choose_a_shorter_context(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("Company\n" + "Acme\n" * 60)
    output = {"uri": str(tmp_path / "out")}
    sampling = {} if "task" in engine else {"max_tokens": 8}
    engine = {**STEP, **engine}
    job = make_job(source={"uri": str(path)}, engine=engine, sampling=sampling, output=output)
    assert plan_run(job, "night").rows == 60


def test_more_active_sequences_than_sequences(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("Company\n" + "Acme\n" * 60)
    output = {"uri": str(tmp_path / "out")}
    engine = {"model": "demo", "device": "cpu", "max_num_active_seqs": 2000}

    def job(**changes: int) -> BatchJob:
        return make_job(source={"uri": str(path)}, engine={**engine, **changes}, output=output)

    for plan in (dry_run, partial(plan_run, run_key="night")):
        fault = r"^engine\.max_num_active_seqs \(2,000\) must be at most engine\.max_num_seqs \(8\)"
        with pytest.raises(ConfigError, match=fault):
            plan(job(max_num_seqs=8))
        with pytest.raises(ConfigError, match=r"at least engine\.max_num_active_seqs \(2,000\)"):
            plan(job(max_num_batched_tokens=64))
    assert not list((tmp_path / "out").rglob("plan.json"))
    arguments = dry_run(job()).sizing.arguments
    assert (arguments.max_num_seqs, arguments.max_num_batched_tokens >= 2000) == (2000, True)


@pytest.mark.parametrize(
    ("engine", "is_refused"),
    [
        ({"max_model_len": 100}, True),
        ({"max_model_len": 64}, False),
        ({"max_model_len": 100, "enable_chunked_prefill": True}, False),
        ({}, False),  # the tokenizer or sentence-transformers may shorten the context
    ],
)
def test_a_step_too_small_for_a_whole_prompt_of_an_encoder(
    tmp_path: Path, engine: dict[str, Any], is_refused: bool
) -> None:
    tiny_models.bert(tmp_path / "bert")
    path = tmp_path / "in.csv"
    path.write_text("Company\n" + "Acme\n" * 60)
    step = {"model": str(tmp_path / "bert"), "task": "embed", "max_num_batched_tokens": 64}
    job = make_job(
        source={"uri": str(path)},
        engine={**step, "max_num_seqs": 8, **engine},
        output={"uri": str(tmp_path / "out")},
    )
    for plan in (dry_run, partial(plan_run, run_key="night")):
        if is_refused:
            with pytest.raises(ConfigError, match=r"^engine\.max_num_batched_tokens \(64\) must"):
                plan(job)
        else:
            plan(job)


@pytest.mark.parametrize("length", [None, "auto"])
def test_a_retry_with_a_step_too_small_for_a_whole_prompt_is_refused(
    tmp_path: Path, length: str | None
) -> None:
    run = first_run(tmp_path)
    changes = {"engine.enable_chunked_prefill": False, "engine.max_num_batched_tokens": 10}
    with pytest.raises(ConfigError, match=r"^engine\.max_num_batched_tokens \(10\) must be"):
        plan_retry(run.store.uri, None, {**changes, "engine.max_model_len": length})
    assert not list((tmp_path / "key.r1").rglob("plan.json"))
