"""Answers drawn with a seed on a CPU, where vLLM ends with a prompt that is computed in parts."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.needs import needs_vllm
from helpers.small import make_job

from prefect_raybatch.compile.job import compile_job, model_request, size_spec
from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model import pinned as models
from prefect_raybatch.sizing import sizes
from prefect_raybatch.stages.engine import EngineLaunch, engine_launch
from prefect_raybatch.stages.whole_prompts import with_whole_prompts

SEEDED = {"temperature": 0.7, "seed": 3}


def arguments(
    sampling: dict[str, Any], rows_may: bool = False, context: int | None = 256, **given: Any
) -> dict[str, Any]:
    step = {"max_num_batched_tokens": 4096}
    return with_whole_prompts(step, given, sampling, rows_may, lambda: context)


@pytest.mark.parametrize(
    ("sampling", "rows_may", "context", "changed"),
    [
        (SEEDED, False, 256, {"enable_chunked_prefill": False}),
        (SEEDED, True, 256, {"enable_chunked_prefill": False}),
        # A step that holds the longest prompt there may be.
        (SEEDED, False, 8192, {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}),
        ({"temperature": 0.7, "seed": 0}, False, 256, {"enable_chunked_prefill": False}),
        ({"temperature": 0.0, "seed": 3}, False, 256, {}),
        ({"temperature": 0.7}, False, 256, {}),
        ({}, False, 256, {}),
        # A function may give a row a seed; where that would cost a larger step it is not assumed.
        ({}, True, 256, {"enable_chunked_prefill": False}),
        ({}, True, 8192, {}),
        (SEEDED, False, None, {}),
    ],
)
def test_prompts_are_whole_where_a_seed_draws(sampling, rows_may, context, changed):
    assert arguments(sampling, rows_may, context) == {"max_num_batched_tokens": 4096, **changed}


def test_what_the_job_gives_is_kept_or_refused():
    assert "enable_chunked_prefill" not in arguments({}, True, enable_chunked_prefill=True)
    assert "enable_chunked_prefill" not in arguments({}, True, 8192, max_num_batched_tokens=512)
    with pytest.raises(ConfigError, match=r"enable_chunked_prefill.*sampling\.seed.*Remove"):
        arguments(SEEDED, enable_chunked_prefill=True)
    told = r"max_num_batched_tokens 4096 .*sampling\.seed.*8192"
    with pytest.raises(ConfigError, match=told):
        arguments(SEEDED, context=8192, max_num_batched_tokens=4096)


@pytest.mark.parametrize("sampling", [{}, SEEDED])
def test_a_step_that_the_job_sets_is_left_to_vllm_if_prompts_are_whole_anyway(sampling):
    """On a GPU, an error about seeds on a CPU would be wrong; vLLM names the two arguments."""
    given = {"max_num_batched_tokens": 2048, "enable_chunked_prefill": False}
    assert arguments(sampling, context=8192, **given) == {"max_num_batched_tokens": 4096}


def spec_of(**groups: Any) -> EngineLaunch:
    job = make_job(**groups)
    pinned = models.pin(model_request(job.engine))
    spec = size_spec(job)
    return engine_launch(
        compile_job(job), pinned, sizes.sizes_of(spec, 40, 50.0, sizes.assumed(spec))
    )


def test_a_job_without_a_length_has_the_models():
    """What the engine would have it from."""
    engine = {"model": "demo", "device": "cpu"}
    context = models.context_length({"source": models.DEMO})
    spec = spec_of(engine=engine, sampling=SEEDED)
    assert spec.arguments["enable_chunked_prefill"] is False
    assert context is not None and spec.arguments["max_num_batched_tokens"] >= context
    greedy = spec_of(engine=engine, sampling={"seed": 3})
    assert "enable_chunked_prefill" not in greedy.arguments


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_step_has_room_for_the_longest_prompt_if_the_job_wants_prompts_whole(monkeypatch, device):
    monkeypatch.setattr(models, "own_length", lambda model, arguments: 20_000)
    engine = {"model": "demo", "device": device, "enable_chunked_prefill": False}
    found = spec_of(engine=engine).arguments
    assert (found["enable_chunked_prefill"], found["max_num_batched_tokens"]) == (False, 20_000)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_step_follows_a_context_length_that_the_job_overrides(device):
    overrides = {"hf_overrides": {"max_position_embeddings": 20_000}}
    engine = {"model": "demo", "device": device, "enable_chunked_prefill": False, **overrides}
    assert spec_of(engine=engine).arguments["max_num_batched_tokens"] == 20_000


@needs_vllm
@pytest.mark.whole
def test_real_vllm_draws_by_seed_what_does_not_fit_a_step(monkeypatch):
    """40 prompts of 60 tokens for steps of 256: a fifth one would be cut."""
    from prefect_raybatch.stages.vllm.stepper import Request, SteppedEngine

    engine = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 64}
    spec = spec_of(sampling=SEEDED, engine={"model": "demo", "device": "cpu", **engine})
    for name, value in {**spec.env, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    prompts = [[5 + i, *range(100, 159)] for i in range(40)]
    asked = [
        Request(prompt, {**spec.sampling, "temperature": 2.0, "max_tokens": 8})
        for prompt in prompts
    ]
    with SteppedEngine({**spec.arguments, "model": demo_model_path()}) as made:
        first, again = made.run(asked), made.run(asked)
        (alone,) = made.run(asked[:1])
    assert [one.error for one in first] == [None] * 40
    drawn = [one.token_ids for one in first]
    assert drawn == [one.token_ids for one in again] and drawn[0] == alone.token_ids
    assert len(set(map(str, drawn))) > 1
