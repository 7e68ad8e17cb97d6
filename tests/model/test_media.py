"""Whether a model takes a job's images, told from its config.json and vLLM's own source."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.small import make_job
from helpers.specs import images_of

from prefect_raybatch.compile.job import compile_job, model_request
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.model import check as model_check

MANY, ONE = "Qwen2_5_VLForConditionalGeneration", "PaliGemmaForConditionalGeneration"
INHERITED = "SmolVLMForConditionalGeneration"  # from the class of another module


def job(per_row: int = 1, **engine: Any) -> BatchJob:
    images = {"columns": "image", "per_row": per_row}
    return make_job(prompt={"template": "x", "images": images}, engine=engine)


def refused(name: str, asked: BatchJob) -> str:
    with pytest.raises(ConfigError) as error:
        model_check.check_images(
            model_request(asked.engine),
            images_of(asked.prompt.images),
            "m",
            {"architectures": [name]},
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "most"), [(MANY, None), (INHERITED, None), (ONE, 1), ("LlamaForCausalLM", "text")]
)
def test_vllms_own_source_tells_what_a_model_takes(name, most):
    if most == "text":
        assert name in (vllm_fields.text_models() or ()) and vllm_fields.media_limits(name) is None
        return
    assert name not in (vllm_fields.text_models() or ())
    limits = vllm_fields.media_limits(name)
    assert limits is not None and limits["image"] == most


def test_a_model_of_text_alone_is_refused():
    said = refused("LlamaForCausalLM", job())
    assert "m is LlamaForCausalLM, which accepts only text" in said and "prompt.images" in said


def test_more_images_than_a_model_takes_are_refused():
    said = refused(ONE, job(3))
    assert "accepts 1 image a request" in said and "prompt.images.per_row is 3" in said


def test_a_model_of_sounds_is_refused():
    said = refused("Qwen2AudioForConditionalGeneration", job())
    assert "accepts audio, but no images" in said


@pytest.mark.parametrize(
    ("name", "count"), [(MANY, 9), (INHERITED, 2), (ONE, 1), ("NobodyKnowsThis", 9), (None, 9)]
)
def test_models_that_take_them_pass(name, count):
    asked = job(count)
    config = {"architectures": [name]} if name else {}
    model_check.check_images(
        model_request(asked.engine), images_of(asked.prompt.images), "m", config
    )


def test_the_class_that_overrides_the_models_own_counts():
    overrides = {"architectures": [MANY]}
    asked = job(2, hf_overrides=overrides)
    config = {"architectures": ["LlamaForCausalLM"]}
    model_check.check_images(
        model_request(asked.engine), images_of(asked.prompt.images), "m", config
    )


def check_model(spec, model):
    model_check.check(spec.engine.model, spec.prompt, spec.sampling, model, files=False)


def test_it_is_told_when_the_model_is_checked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    asked = job(model=str(tmp_path))
    model = {"source": str(tmp_path), "revision": None}
    with pytest.raises(ConfigError, match="accepts only text"):
        check_model(compile_job(asked), model)
    check_model(compile_job(make_job()), model)
