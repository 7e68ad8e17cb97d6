"""What belongs to the context of a request's key, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.small import MODEL, make_job

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.plan.row_keys import keying_of


def context(job: BatchJob, **model: Any) -> str:
    return keying_of(compile_job(job), {**MODEL, **model})[0].context


@pytest.mark.parametrize(
    "groups",
    [
        {"sampling": {"max_tokens": 9}},
        {"sampling": {"choice": ["a", "b"]}},
        {"engine": {"max_model_len": 64}},
        {"engine": {"dtype": "float16"}},
        {"engine": {"quantization": "fp8"}},
        {"engine": {"env": {"VLLM_BATCH_INVARIANT": "1"}}},
        {"prompt": {"template": "What is {Company}?", "on_too_long": "truncate_left"}},
        {"prompt": {"template": "What is {Company}?", "prefill": "It is"}},
        {"prompt": {"template": "What is {Company}?", "special_tokens_in_rows": "allow"}},
        {"prompt": {"template": "What is {Company}?", "special_tokens_in_rows": "refuse"}},
        {"output": {"uri": "out", "reasoning_parser": "qwen3"}},
        {"prompt": {"template": "What is {Company}?", "chat_template_kwargs": {"x": 1}}},
        {"output": {"uri": "out", "schema_model": {"type": "object", "properties": {}}}},
    ],
)
def test_what_changes_an_answer_is_in_it(groups: dict[str, Any]) -> None:
    assert context(make_job(**groups)) != context(make_job())


@pytest.mark.parametrize(
    "groups",
    [
        {"name": "another"},
        {"source": {"uri": "elsewhere.parquet"}},
        {"prompt": {"template": "Who is {Company}?"}},  # in the key itself
        {"prompt": {"template": "What is {Company}?", "system": "Be short."}},  # so is this
        {"engine": {"gpu_memory_utilization": 0.5, "max_num_seqs": 8, "batch_size": 9}},
        {"engine": {"order": "input", "device": "cpu", "replicas": 2}},
        {"engine": {"env": {"VLLM_BATCH_INVARIANT": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}}},
        {"output": {"uri": "out", "column": "said", "extras": ["prompt_tokens"]}},
        {"output": {"uri": "out", "on_cut_off": "fail", "columns": []}},
        {"output": {"uri": "out", "tool_parser": "hermes"}},
        {"limits": {"max_failed_rows": 7}},
    ],
)
def test_what_changes_none_is_not(groups: dict[str, Any]) -> None:
    assert context(make_job(**groups)) == context(make_job())


def test_the_model_counts_by_its_content() -> None:
    assert context(make_job(), identity="1" * 64) != context(make_job())
    assert context(make_job(), source="/elsewhere") == context(make_job())


def test_what_is_told_of_it_holds_no_keys() -> None:
    given = {"hf_overrides": {"token": "hunter2secret"}}
    _, told = keying_of(compile_job(make_job(engine=given)), MODEL)
    assert "hunter2secret" not in str(told)
