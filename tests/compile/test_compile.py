"""What a job is compiled into."""

from __future__ import annotations

import pickle

import pytest
from helpers.small import make_job

from prefect_raybatch.compile.job import cluster_spec, compile_job, size_spec
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.edits import edited, with_access, with_store_options

FUNCTION = {"function": "helpers.functions:shout"}


def test_a_task_that_pools_draws_no_tokens_whoever_makes_its_text() -> None:
    for prompt in ({"template": "{Company}"}, FUNCTION):
        row = size_spec(make_job(engine={"task": "embed"}, prompt=prompt)).row
        assert row.out == 1


def test_several_answers_to_a_row_take_as_many_tokens_more() -> None:
    drawn = {"max_tokens": 100, "n": 3, "temperature": 1.0}
    assert size_spec(make_job(sampling=drawn)).row.out == 300
    row = size_spec(make_job(sampling=drawn, prompt=FUNCTION)).row
    assert row.out == 300


def test_what_is_open_is_decided_in_every_part_of_the_spec() -> None:
    job = make_job(
        engine={"max_model_len": "auto", "quantization": "try-fp8", "enforce_eager": True},
        limits={"min_agreement": 0.9},
    )
    spec = compile_job(job)
    assert spec.engine.model.context_auto and spec.engine.tries == ({"quantization": "fp8"},)
    assert spec.engine.model.vllm_arguments == spec.sizes.vllm_arguments == {"enforce_eager": True}
    settled = spec.decide(context=512).decide(precision={"quantization": "fp8"})
    assert settled.engine.model.context == settled.sizes.context == 512
    assert not settled.engine.model.context_auto and settled.engine.tries == ()
    given = {"enforce_eager": True, "quantization": "fp8"}
    assert settled.engine.model.vllm_arguments == settled.sizes.vllm_arguments == given
    assert spec.engine.model.context is None  # a spec is never changed


def test_keys_of_stores_show_in_no_text_and_reach_a_library() -> None:
    source = {"uri": "s3://b/in", "options": {"secret": "PLANTED"}}
    spec = compile_job(make_job(source=source))
    assert "PLANTED" not in f"{spec} {spec.read!r}" and dict(spec.read.options) == source["options"]
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_an_edited_job_is_checked_and_keeps_its_loaded_block() -> None:
    job = make_job(cluster={"block": "ray-cluster/one"})
    with pytest.raises(ConfigError, match="is not loaded"):
        _ = cluster_spec(job).access
    access = ClusterAccess("head:6379", token="a-token", block="ray-cluster/one")
    loaded = with_access(job, access)
    assert cluster_spec(edited(loaded, {"source.limit": 5}, "j")).access == access
    other = edited(loaded, {"cluster.block": "ray-cluster/two"}, "j")
    with pytest.raises(ConfigError, match="is not loaded"):
        _ = cluster_spec(other).access
    with pytest.raises(ConfigError, match=r"source\.limit"):
        edited(job, {"source.limit": -1}, "j")


def test_the_options_of_a_job_come_before_those_of_its_blocks() -> None:
    job = make_job(output={"uri": "s3://b/out", "options": {"key": "own"}})
    made = with_store_options(job, {"anon": True}, {"key": "block's", "region": "eu"})
    assert made.source.options == {"anon": True}
    assert made.output.options == {"key": "own", "region": "eu"}
