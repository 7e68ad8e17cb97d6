"""The job model: what is refused and in which words, round trips, the form it becomes."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import yaml
from helpers.small import job_dict, make_job
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import check_run_key, template_fields
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.job.vllm import fields as vllm_fields


def put(value: dict[str, Any], path: str, new: Any) -> dict[str, Any]:
    """A copy of `value` with the dotted `path` set."""
    value = copy.deepcopy(value)
    at = value
    *groups, last = path.split(".")
    for group in groups:
        at = at.setdefault(group, {})
    at[last] = new
    return value


def refused(value: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        BatchJob.from_dict(value, "job.yaml")
    text = str(caught.value)
    assert "pydantic" not in text and "Traceback" not in text
    return text


# --- what is refused ----------------------------------------------------------------------------


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        # numbers that no record could hold
        ("sampling.logit_bias", {3: float("nan")}, ["sampling", "logit_bias.3 is not a finite"]),
        ("sampling.extra_args", {"a": [1, float("inf")]}, ["extra_args.a.1 is not a finite"]),
        ("engine.gpu_memory_utilization", float("nan"), ["gpu_memory_utilization is not a finite"]),
        (
            "source.options",
            {"timeout": float("-inf")},
            ["source", "options.timeout is not a finite"],
        ),
        # unknown fields, with the nearest name
        ("sorce", {}, ["sorce", "did you mean 'source'"]),
        ("source.uris", "x", ["source.uris", "did you mean 'uri'"]),
        ("prompt.templat", "x", ["prompt.templat", "did you mean 'template'"]),
        ("output.shema", {}, ["output.shema", "did you mean 'schema'"]),
        ("limits.max_fail", 1, ["limits.max_fail", "did you mean 'max_failed_"]),
        ("cluster.prepare.num_cpu", 1, ["cluster.prepare.num_cpu", "did you mean 'num_cpus'"]),
        ("output.zzzz", 1, ["output.zzzz", "remove it"]),
        ("engine.tensor_paralel_size", 2, ["engine", "did you mean 'tensor_parallel_size'"]),
        ("engine.gpu_memory_utilisation", 0.9, ["engine", "'gpu_memory_utilization'"]),
        ("sampling.temprature", 1, ["sampling", "did you mean 'temperature'"]),
        ("sampling.top_pp", 1, ["sampling", "did you mean 'top_p'"]),
        (
            "engine",
            {"distributed_executor_backend": "ray"},
            [
                "distributed_executor_backend: ray",
                "raise tensor_parallel_size or pipeline_parallel",
            ],
        ),
        (
            "engine",
            {"distributed_executor_backend": "ray", "tensor_parallel_size": 2, "device": "cpu"},
            ["distributed_executor_backend: ray needs GPUs, and device is cpu"],
        ),
        # templates are untrusted: nothing but columns
        ("prompt.template", "{a.b}", ["prompt.template", "{a.b}", "prompt.function"]),
        ("prompt.template", "{a.__class__}", ["{a.__class__}"]),
        ("prompt.template", "{a[0]}", ["{a[0]}", "prompt.function"]),
        ("prompt.template", "{a!r}", ["{a!r}"]),
        ("prompt.template", "{a:>9}", ["{a:>9}"]),
        ("prompt.template", "{a:{b}}", ["{a:{b}}"]),
        ("prompt.template", "{}", ["{}", "prompt.function"]),
        ("prompt.template", "{", ["not a valid template", "{{"]),
        ("prompt.template", "a}", ["not a valid template", "{{"]),
        # prompt
        ("prompt", {}, ["exactly one of template, function and messages"]),
        ("prompt.function", "m:f", ["exactly one of template, function and messages"]),
        ("prompt", {"function": "mf"}, ["prompt.function", "'mf'", "package.module:function"]),
        ("prompt", {"function": "m:f()"}, ["package.module:function"]),
        ("prompt", {"function": "os.path:join;x"}, ["package.module:function"]),
        ("prompt.messages", "chat", ["exactly one of template, function and messages"]),
        ("prompt", {"messages": " "}, ["prompt.messages", "is empty"]),
        ("prompt.chat_template", "", ["prompt.chat_template", "is empty"]),
        ("prompt.chat_template_kwargs", {"tools": []}, ["'tools' is set by the run itself"]),
        ("prompt.chat_template_kwargs", {"a": float("nan")}, ["chat_template_kwargs", "finite"]),
        (
            "prompt.chat_template_kwargs",
            {"a": {1, 2}},
            ["chat_template_kwargs", "is not valid JSON"],
        ),
        ("prompt.prefill", "", ["prompt.prefill"]),
        ("prompt.continue_final_message", True, ["continue_final_message", "set prefill"]),
        (
            "prompt",
            {"messages": "c", "prefill": "x", "continue_final_message": True},
            ["prefill and continue_final_message exclude each other"],
        ),
        ("prompt.tools", [], ["prompt.tools", "empty list"]),
        ("prompt.tools", [{"name": "f"}], ["tool 1 of 1 is not a tool definition"]),
        ("prompt.tools", [{"type": "function", "function": {}}], ["tool 1 of 1 has no function."]),
        ("prompt.tools", [TOOL, TOOL], ["duplicate tool 'f'"]),
        ("output.reasoning_parser", "qwen4", ["output.reasoning_parser", "did you mean 'qwen3'"]),
        ("output.tool_parser", "hermess", ["output.tool_parser", "did you mean 'hermes'"]),
        (
            "output",
            {"uri": "o", "reasoning_parser": "qwen3", "reasoning_column": "response"},
            ["column 'response' would be written twice"],
        ),
        (
            "output",
            {"uri": "o", "tool_parser": "hermes", "schema_model": {"type": "object"}},
            ["schema_model and tool_parser exclude each other"],
        ),
        ("prompt.on_null", "skip", ["prompt.on_null", "'fail'", "'empty'", "'skip'"]),
        # places
        ("source.uri", "", ["source.uri", "is empty", "data/customers.csv"]),
        ("source.uri", "  ", ["is empty"]),
        ("source.uri", [], ["source.uri", "at least one file"]),
        ("source.uri", ["a", ""], ["is empty"]),
        ("source.uri", "a\x00b", ["source.uri"]),
        ("source.uri", "ftp://b/k", ["'ftp://b/k'", "'ftp'", "s3://", "gs://", "az://"]),
        ("source.uri", "s3:///key", ["'s3:///key'", "no bucket"]),
        ("output.uri", "https://x/y", ["output.uri", "'https'"]),
        ("output.uri", "out/*", ["output.uri", "wildcard", "one folder"]),
        ("output.uri", "", ["output.uri", "is empty"]),
        # sampling
        ("sampling.choice", [], ["sampling.choice", "empty list"]),
        ("sampling.choice", ["a", " "], ["label 2 of 2 is empty"]),
        ("sampling.choice", ["b", "a", "b"], ["'b'", "duplicate", "remove one"]),
        ("sampling.temperature", -1, ["sampling.temperature", "at least 0", "-1"]),
        ("sampling.max_tokens", 0, ["sampling.max_tokens", "greater than 0", "(value: 0)"]),
        (
            "sampling.logprobs",
            -1,
            ["sampling.logprobs must be a whole number, at least 0, and is '-1'"],
        ),
        (
            "sampling.logprobs",
            "all",
            ["sampling.logprobs must be a whole number, at least 0, and is 'all'"],
        ),
        (
            "sampling.logprobs",
            21,
            ["logprobs (21) exceeds engine.max_logprobs (20)", "max_logprobs"],
        ),
        ("sampling.prompt_logprobs", 3, ["prompt_logprobs is not supported"]),
        ("sampling.output_kind", 2, ["output_kind is not supported"]),
        # figures
        ("source.limit", 0, ["source.limit", "greater than 0"]),
        ("source.limit", "many", ["source.limit", "whole number", "'many'"]),
        ("source.rows_per_shard", 1_000_001, ["source.rows_per_shard", "1000000"]),
        ("source.columns", [], ["source.columns", "is empty"]),
        ("engine.replicas", 0, ["engine.replicas", "greater than 0"]),
        ("engine.replicas", 1.5, ["engine.replicas", "1.5"]),
        ("engine.device", "tpu", ["engine.device", "'gpu'", "'tpu'"]),
        ("limits.max_failed_fraction", -0.1, ["limits.max_failed_fraction", "-0.1"]),
        ("limits.max_failed_fraction", float("nan"), ["limits.max_failed_fraction"]),
        ("limits.warn_failed", float("inf"), ["limits.warn_failed"]),
        ("limits.max_failed_rows", -1, ["limits.max_failed_rows", "-1"]),
        ("limits.max_failed_rows", 0.5, ["limits.max_failed_rows", "0.5"]),
        ("limits.max_failed_fraction", 1.5, ["limits.max_failed_fraction", "1.5"]),
        ("limits.engine_deaths", 0, ["limits.engine_deaths", "greater than 0"]),
        ("sampling.temperature", float("inf"), ["sampling.temperature"]),
        # figures that vLLM would refuse row by row, once its engines are up
        ("sampling.temperature", 2.5, ["sampling", "temperature", "0 to 2", "2.5"]),
        ("sampling.top_p", 7, ["sampling", "top_p", "above 0, at most 1", "7"]),
        ("sampling.top_p", 0, ["sampling", "top_p"]),
        ("sampling.top_p", "high", ["sampling", "top_p", "'high'"]),
        ("sampling.top_k", -2, ["sampling", "top_k", "-2"]),
        ("sampling.top_k", 1.5, ["sampling", "top_k", "1.5"]),
        ("sampling.min_p", 1.1, ["sampling", "min_p", "1.1"]),
        ("sampling.n", 0, ["sampling", "n ", "at least 1", "0"]),
        ("sampling.n", True, ["sampling", "n ", "True"]),
        ("sampling.presence_penalty", 3, ["sampling", "presence_penalty", "-2 to 2"]),
        ("sampling.frequency_penalty", -2.1, ["sampling", "frequency_penalty", "-2.1"]),
        ("sampling.repetition_penalty", 0, ["sampling", "repetition_penalty", "above 0"]),
        ("sampling.min_tokens", -1, ["sampling", "min_tokens", "-1"]),
        ("sampling.min_tokens", 17, ["sampling", "min_tokens", "17", "max_tokens", "16"]),
        ("sampling.stop", ["a", ""], ["sampling", "stop", "empty"]),
        ("sampling.stop", "", ["sampling", "stop", "empty"]),
        ("sampling.stop_token_ids", ["x"], ["sampling", "stop_token_ids", "'x'"]),
        ("sampling.bad_words", [""], ["sampling", "bad_words", "empty"]),
        ("sampling.seed", "x", ["sampling", "seed", "'x'"]),
        ("sampling", {"n": 3}, ["sampling", "n ", "temperature", "0"]),
        # the rest
        ("output.column", "__rb_pos", ["output.column", "'__rb_pos'", "choose another"]),
        ("output.column", "", ["output.column"]),
        ("output.row_number", "", ["output.row_number"]),
        ("output.schema", {"a": "string"}, ["postprocess"]),
        ("output.postprocess", "nope", ["output.postprocess", "'nope'"]),
        ("cluster.address", "ray://head:10001", ["cluster.address", "30 s", "head"]),
        ("name", "", ["name"]),
        ("name", "../x", ["name", "'../x'", "letters, digits"]),
        ("name", "-x", ["name"]),
        ("name", "a" * 129, ["up to 128"]),
        ("name", "a\n", ["name"]),
        ("source", None, ["source"]),
        ("source", "in.csv", ["source", "'in.csv'"]),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_a_remedy(path, value, said):
    text = refused(put(job_dict(), path, value))
    for word in said:
        assert word in text


def test_choice_and_structured_outputs_exclude_each_other():
    value = job_dict(sampling={"choice": ["a"], "structured_outputs": {"json": {}}})
    assert "exclude each other" in refused(value)


def test_every_wrong_field_is_named_on_a_line_of_its_own():
    text = refused({"name": "a b", "sorce": 1, "prompt": {}, "engine": {"replicas": 0}})
    lines = text.splitlines()
    assert all(line.startswith("job.yaml: ") for line in lines)
    for field in ("name", "sorce", "prompt", "output", "engine.replicas"):
        assert sum(line.startswith(f"job.yaml: {field}: ") for line in lines) == 1
    assert "job.yaml: output: is required" in lines
    assert "job.yaml: sorce: unknown field; did you mean 'source'?" in lines
    assert not any("source: is required" in line for line in lines)


def test_a_long_value_is_cut_in_the_message():
    text = refused(put(job_dict(), "engine.device", "x" * 10_000))
    assert len(text) < 500


# --- what is taken ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        ("no field", ()),
        ("{A} and {B} and {A}", ("A", "B")),
        ("{{literal}} {A}", ("A",)),
        ('{{"json": "{A}"}}', ("A",)),
        ("{with space} {Straße}", ("with space", "Straße")),
        ("", ()),
    ],
)
def test_template_fields(template, fields):
    assert template_fields(template) == fields
    assert make_job(prompt={"template": template}).prompt.template == template


@given(st.text(max_size=60))
def test_any_template_text_is_taken_or_refused_by_name(template):
    try:
        fields = template_fields(template)
    except ValueError as error:
        assert "prompt.function" in str(error) or "{{" in str(error)
    else:
        # What is taken can be filled from columns alone.
        filled = template.format(**dict.fromkeys(fields, "x"))
        assert isinstance(filled, str)


@pytest.mark.parametrize(
    "uri", ["a.csv", "/a/b", "./x y", "file:///a", "s3://bucket", "s3://b/k/*.parquet", "S3://b/k"]
)
def test_good_places(uri):
    assert make_job(source={"uri": uri}).source.uris == [uri]
    assert make_job(source={"uri": [uri, "b"]}).source.uris == [uri, "b"]


def test_vllm_arguments_pass_through():
    job = make_job(
        engine={"gpu_memory_utilization": 0.8, "quantization": "fp8"},
        sampling={"top_p": 0.9, "seed": 1, "stop": ["x"]},
    )
    assert job.engine.model_extra == {"gpu_memory_utilization": 0.8, "quantization": "fp8"}
    assert job.sampling.model_extra == {"top_p": 0.9, "seed": 1, "stop": ["x"]}


def test_without_vllm_any_argument_is_taken(monkeypatch):
    """A laptop without vLLM cannot know; the engine refuses it later."""
    monkeypatch.setattr(vllm_fields, "engine_fields", lambda: None)
    job = make_job(engine={"some_new_argument": 1})
    assert job.engine.model_extra == {"some_new_argument": 1}


@pytest.mark.whole
def test_the_known_fields_are_those_of_the_installed_vllm():
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    arguments, sampling = [f.name for f in fields(EngineArgs)], SamplingParams.__struct_fields__
    assert vllm_fields.engine_fields() == {n for n in arguments if not n.startswith("_")}
    assert vllm_fields.sampling_fields() == {n for n in sampling if not n.startswith("_")}


@pytest.mark.parametrize(
    ("limits", "rows", "allowed"),
    [
        ({}, 20, 1),  # 1 % of 20 is less than a row: one bad row is still not the end
        ({}, 1, 0),  # though never all of them
        ({}, 2, 1),
        ({}, 1_000, 10),
        ({}, 1_000_000, 10_000),
        ({"max_failed_fraction": 0.0}, 1_000, 0),
        ({"max_failed_fraction": 0.001}, 20, 1),
        ({"max_failed_fraction": 0.01}, 1, 0),
        ({"max_failed_fraction": 0.01}, 0, 0),
        ({"max_failed_fraction": 0.01}, 199, 1),
        ({"max_failed_fraction": 0.29}, 100, 29),
        ({"max_failed_fraction": 0.07}, 100, 7),
        ({"max_failed_fraction": 1.0}, 20, 20),
        ({"max_failed_fraction": 0.99}, 20, 19),
        ({"max_failed_rows": 0}, 1_000, 0),
        ({"max_failed_rows": 3}, 20, 3),
        ({"max_failed_rows": 30}, 20, 30),
        ({"max_failed_rows": 3, "max_failed_fraction": 0.5}, 20, 3),  # both must hold
        ({"max_failed_rows": 30, "max_failed_fraction": 0.5}, 20, 10),
    ],
)
def test_allowed_failures(limits, rows, allowed):
    assert Limits(**limits).allowed(rows) == allowed


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, "limits.max_failed_fraction 0.01 (1 row) allows"),
        ({"max_failed_rows": 2}, "limits.max_failed_rows 2 (2 rows) allows"),
        ({"max_failed_fraction": 0.1}, "limits.max_failed_fraction 0.1 (2 rows) allows"),
        (
            {"max_failed_rows": 2, "max_failed_fraction": 0.5},
            "limits.max_failed_rows 2 and limits.max_failed_fraction 0.5 (2 rows) allow",
        ),
    ],
)
def test_the_limit_is_said_by_the_fields_that_set_it(limits, said):
    assert Limits(**limits).sentence_start(20) == said


# --- files --------------------------------------------------------------------------------------


def full() -> dict[str, Any]:
    return job_dict(
        source={"uri": ["a", "s3://b/c"], "format": "csv", "limit": 5, "columns": ["A"]},
        prompt={"template": "{A}", "system": "Be short.", "on_null": "empty"},
        sampling={"temperature": 0.5, "choice": ["x", "y"], "top_p": 0.5},
        engine={"model": "owner/name", "replicas": 2, "gpu_memory_utilization": 0.5},
        output={"uri": "out", "postprocess": "m:f", "schema": {"a": "string"}, "file_mb": 1},
        limits={"max_failed_rows": 3},
        cluster={"prepare": {"num_cpus": 1.0, "memory": 5}},
    )


@pytest.mark.parametrize("value", [job_dict(), full()], ids=["smallest", "full"])
def test_round_trips(tmp_path, value):
    job = BatchJob.from_dict(value)
    assert job.to_dict() == value  # nothing but what was said
    assert BatchJob.from_dict(job.to_dict()) == job
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job.to_dict()), encoding="utf-8")
    assert BatchJob.from_yaml(path) == job
    assert BatchJob.model_validate_json(job.model_dump_json(by_alias=True)) == job


def test_the_schema_of_the_output_has_a_plain_name_in_files_and_python():
    by_file = make_job(output={"uri": "o", "postprocess": "m:f", "schema": {"a": "string"}})
    by_name = make_job(output={"uri": "o", "postprocess": "m:f", "output_schema": {"a": "string"}})
    assert by_file == by_name


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such job file"),
        (b"a: [1", "is not valid YAML"),
        (b"- a\n- b\n", "is not a mapping"),
        (b"", "is not a mapping"),
        (b"just text", "is not a mapping"),
        (b"name: \xff\xfe\xfa", "cannot be read"),
        (b"name: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        (b"name: x\nname2: y\n", "unknown field"),
        (b"1: x\n", "1: "),
    ],
)
def test_a_bad_job_file_is_named(tmp_path, content, said):
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        BatchJob.from_yaml(path)
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_a_folder_is_no_job_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        BatchJob.from_yaml(tmp_path)


# --- run keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["a", "7", "nightly-20260101T000000Z", "a.r1", "A_b-c.d", "a" * 128]
)
def test_good_run_keys(key):
    assert check_run_key(key) == key


@pytest.mark.parametrize(
    "key",
    [
        *("", ".", "..", "a/b", "/a", "../a", "a..b", "a\\b", ".hidden", "-a", "_a"),
        *("a b", "a\x00", "a\n", "\u00e4", "a%2f", "a:b", "a" * 129),
    ],
)
def test_bad_run_keys_cannot_leave_the_root(key):
    with pytest.raises(ConfigError, match="run key"):
        check_run_key(key)


# --- the form -----------------------------------------------------------------------------------


def models(model: type[BaseModel], path: str = "") -> list[tuple[str, type[BaseModel], str]]:
    """(dotted path, model, field) of each field, groups first."""
    found = []
    for name, field in model.model_fields.items():
        found.append((f"{path}{name}", model, name))
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += models(kind, f"{path}{name}.")
    return found


def test_each_field_describes_itself_for_the_form():
    for path, model, name in models(BatchJob):
        field = model.model_fields[name]
        assert field.title, path
        assert field.description and field.description.endswith("."), path


def test_positions_follow_the_order_of_the_fields():
    for model in {model for _, model, _ in models(BatchJob)}:
        positions = {n: f["position"] for n, f in model.model_json_schema()["properties"].items()}
        names = [field.alias or name for name, field in model.model_fields.items()]
        assert positions == {name: at for at, name in enumerate(names, 1)}, model


def test_the_json_schema_carries_title_description_and_position():
    """This schema is the form in the Prefect page."""
    schema = BatchJob.model_json_schema()
    objects = [schema, *schema["$defs"].values()]
    assert len(objects) == 19
    for item in objects:
        assert item["description"], item["title"]
        for name, field in item["properties"].items():
            # Beside a reference pydantic leaves out what the referenced group says already.
            field = {**schema["$defs"].get(field.get("$ref", "").split("/")[-1], {}), **field}
            assert {"title", "description", "position"} <= set(field), f"{item['title']}.{name}"
    assert "schema" in schema["$defs"]["Output"]["properties"]


def test_what_is_written_out_has_a_schema_too() -> None:
    assert BatchJob.model_json_schema(mode="serialization")["type"] == "object"


def test_titles_are_words_for_people():
    """Prefect's form shows them in place of the names of the fields."""
    titles = [f.title for _, model, _ in models(BatchJob) for f in model.model_fields.values()]
    assert len(titles) > 60
    assert not [t for t in titles if not t or "_" in t or not t[0].isupper()]


def test_the_engines_reasoning_parser_is_that_of_the_output():
    job = make_job(
        engine={"reasoning_parser": "qwen3"}, output={"uri": "o", "reasoning_parser": "qwen3"}
    )
    assert job.engine.model_extra == {"reasoning_parser": "qwen3"}
    with pytest.raises(ConfigError, match=r"engine\.reasoning_parser 'olmo3' is not output"):
        make_job(
            engine={"reasoning_parser": "olmo3"}, output={"uri": "o", "reasoning_parser": "qwen3"}
        )


def test_probabilities_are_not_those_of_thinking():
    output = {"uri": "o", "probabilities": True, "reasoning_parser": "qwen3"}
    with pytest.raises(ConfigError, match="probabilities and reasoning_parser exclude"):
        make_job(sampling={"choice": ["a", "b"]}, output=output)
