"""A value of an engine argument that the plan refuses is one with which no engine would start."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pyarrow as pa
import pytest
from helpers.small import job_dict
from helpers.specs import check_columns
from pydantic import TypeAdapter, ValidationError

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.vllm import engine_values
from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.job.vllm.engine_values import wrong_values

PROBES: list[Any] = [
    *(True, 0, 1, 2, -1, -2, 10**6, 0.5, 1.5, "0", "0.5", "x", "auto", "true", "none"),
    *([], [1], ["a"], {}, {"a": 1}, {"a": "x"}, {"a": {"b": 1}}),
]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpu_memory_utilization": 2}, "engine.gpu_memory_utilization: must be at most 1"),
        ({"gpu_memory_utilization": 0}, "engine.gpu_memory_utilization: must be greater than 0"),
        ({"dtype": "foo"}, "engine.dtype: must be 'auto', 'half', .*value: 'foo'"),
        ({"kv_cache_dtype": "fp9"}, "engine.kv_cache_dtype: .*'fp8'"),
        ({"seed": "x"}, "engine.seed: must be a whole number"),
        ({"max_logprobs": -5}, "engine.max_logprobs: must be at least -1"),
        ({"enable_prefix_caching": "maybe"}, "engine.enable_prefix_caching: must be true or false"),
        ({"max_lora_rank": 7}, "engine.max_lora_rank: must be 1, 8, 16"),
        ({"revision": 7}, "engine.revision: must be text and is a number; quote it"),
        ({"structured_outputs_config": "x"}, "engine.structured_outputs_config: .*backend: "),
        ({"structured_outputs_config": {"backend": "x"}}, "outputs_config.backend: .*'xgrammar'"),
        ({"compilation_config": {"cudagraph_mod": 1}}, "did you mean 'cudagraph_mode'"),
        (
            {"compilation_config": {"cudagraph_capture_sizes": ["x"]}},
            "capture_sizes.0: must be a whole",
        ),
        ({"speculative_config": {"method": "nope"}}, "speculative_config.method: .*'ngram'"),
        ({"speculative_config": {"num_speculative_tokens": 0}}, "speculative_tokens: .* 0"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(given: dict[str, Any], said: str) -> None:
    assert re.search(said, wrong_values(given) or "")


def test_each_wrong_value_has_its_line() -> None:
    said = wrong_values({"dtype": "foo", "seed": "x", "block_size": 16}) or ""
    assert [line.split(":")[0] for line in said.splitlines()] == ["engine.dtype", "engine.seed"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": "bfloat16", "seed": 7, "gpu_memory_utilization": 0.95, "enforce_eager": True},
        {"compilation_config": {"mode": "NONE", "cudagraph_mode": "FULL", "pass_config": {}}},
        {"compilation_config": {"mode": 3, "cudagraph_capture_sizes": [1, 2]}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True}},
        {"limit_mm_per_prompt": {"image": 2, "video": {"count": 1, "width": 8}}},
        {"hf_overrides": {"a": 1}, "attention_backend": "FLASH_ATTN", "quantization": "fp8"},
        {"pooler_config": {"pooling_type": "MEAN"}, "no_such_argument": 1},
        {"dtype": None, "compilation_config": None, "gpu_memory_utilization": None},
    ],
    ids=str,
)
def test_what_vllm_takes_is_taken(given: dict[str, Any]) -> None:
    assert wrong_values(given) is None


@pytest.mark.whole
def test_vllms_own_defaults_are_right() -> None:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=demo_model_path())  # offline, it looks for the default one on the disk
    defaults = {f.name: getattr(made, f.name) for f in dataclasses.fields(EngineArgs)}
    plain = {name: value for name, value in defaults.items() if not dataclasses.is_dataclass(value)}
    assert len(plain) > 150
    plain.pop("prefix_cache_retention_interval")  # of a type of its own: unset
    assert wrong_values(plain) is None


@cache
def defaults_of_engine_args() -> dict[str, ast.expr | None]:
    """Return {argument: its default, as vLLM's source has it}; to parse that takes 0.1 s."""
    body = vllm_fields.annotated(vllm_fields.class_body(*engine_values.ENGINE_ARGS))
    return {item.target.id: item.value for item in body}


def bounds_of(name: str) -> list[Any]:
    """What vLLM's configuration class says beside the type of an argument."""
    match defaults_of_engine_args()[name]:
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
            pass
        case ast.Call(args=[ast.Name(id=owner), ast.Constant(attribute)]):
            pass
        case _:
            return []
    config: Any = getattr(importlib.import_module("vllm.config"), str(owner), None)
    if config is None:
        config = getattr(importlib.import_module("vllm.engine.arg_utils"), str(owner))
    field = config.__pydantic_fields__[attribute]
    return [
        bound
        for bound in field.metadata
        if any(hasattr(bound, name) for name in engine_values.BOUNDS)
    ]


def taken(kind: TypeAdapter[Any], value: Any) -> bool:
    try:
        kind.validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.whole
def test_values_are_taken_as_by_the_types_of_vllm() -> None:
    """Each argument of which something is told, with each of the probes: what vLLM's own type
    takes is taken, and what that refuses is refused."""
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.engine.arg_utils import EngineArgs

    hints = get_type_hints(EngineArgs, localns={"QuantizationConfigArgs": QuantizationConfigArgs})
    known = vllm_fields.engine_fields() or frozenset()
    told = engine_values.types_of_arguments(tuple(sorted(known)))
    assert len(told) > 0.9 * len(known)
    refused_by: dict[bool, list[str]] = {True: [], False: []}  # ours alone, theirs alone
    for name in told.keys() - engine_values.MAPPINGS.keys():
        kind: Any = Annotated[hints[name], *found] if (found := bounds_of(name)) else hints[name]
        ours, theirs = TypeAdapter(told[name]), TypeAdapter(kind)
        for value in PROBES:
            if taken(ours, value) != taken(theirs, value):
                refused_by[taken(theirs, value)].append(f"{name}: {value!r}")
    assert refused_by[True] == []
    assert refused_by[False] == ["logits_processors: [1]"]  # or a class, of which nothing is told


def test_without_vllm_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_fields, "class_body", lambda file, name: [])
    engine_values.types_of_arguments.cache_clear()
    try:
        assert wrong_values({"dtype": "foo"}) is None
    finally:
        engine_values.types_of_arguments.cache_clear()


def test_a_type_that_is_written_in_another_way_is_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = ast.parse("dtype: Literal[MODES[0], 5] = 1\nseed: 'int |' = 2\nn: int = 3").body
    monkeypatch.setattr(vllm_fields, "class_body", lambda file, name: body)
    engine_values.types_of_arguments.cache_clear()
    try:
        said = wrong_values({"dtype": "foo", "seed": "x", "n": "x"}) or ""
        assert said.startswith("engine.n: ") and "\n" not in said
        assert "engine.seed: vLLM's type of it cannot be read" in caplog.text
    finally:
        engine_values.types_of_arguments.cache_clear()


def test_what_is_yet_to_be_decided_is_no_wrong_value() -> None:
    engine = {"kv_cache_dtype": "try-fp8", "quantization": "try-fp8", "dtype": "half"}
    schema = pa.schema([("Company", pa.string())])
    check_columns(BatchJob.from_dict(job_dict(engine=engine)), schema)


def test_a_job_with_a_wrong_value_is_refused_before_anything_starts(tmp_path: Path) -> None:
    from prefect_raybatch.api import plan_run, precheck
    from prefect_raybatch.runs.run import run_store

    (tmp_path / "in.csv").write_text("Company\nAcme\n")
    value = job_dict(engine={"dtype": "foo", "gpu_memory_utilization": 2})
    value["source"], value["output"] = {"uri": f"{tmp_path}/in.csv"}, {"uri": f"{tmp_path}/out"}
    job = BatchJob.from_dict(value)
    for begin in (lambda: plan_run(job, "k"), lambda: precheck(job, run_store(job.output, "k"))):
        with pytest.raises(ConfigError, match=r"engine\.dtype: .*\nengine\.gpu_memory_utiliz"):
            begin()
    assert not (tmp_path / "out/k/_raybatch/plan.json").exists()
