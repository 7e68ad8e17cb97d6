"""A form of answers that the plan refuses is one that vLLM refuses of every row."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.small import job_dict

from prefect_raybatch import demo
from prefect_raybatch.job.structured_outputs import (
    FORM_KINDS,
    FORM_OPTIONS,
    check_form_parses,
    check_form_shape,
)
from prefect_raybatch.job.vllm_fields import form_fields

TAKEN: list[dict[str, Any]] = [
    {"regex": "[0-9]{4}-[0-9]{2}"},
    {"choice": ["yes", "no", "a\nb"]},
    {"choice": ("yes", "no"), "regex": None},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": '{"type": "string", "maxLength": 9}', "disable_any_whitespace": True},
    {"json": {}},
    {"json_object": True, "whitespace_pattern": " "},
    {"grammar": 'root ::= "a" root | "b"'},
    {"grammar": 'start: "a"'},
    {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})},
]
OF_ONE_BACKEND: list[tuple[dict[str, Any], str]] = [  # and which one refuses it
    ({"regex": r"\p{L}+"}, "xgrammar"),
    ({"json": {"type": "array", "uniqueItems": True}}, "guidance"),
    ({"json": {"type": "string", "format": "nope"}}, "guidance"),
]
UNPARSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "parenthesis|group"),
    ({"regex": "(?=a)b"}, "(?i)look-?ahead"),
    ({"regex": r"(\w+)\1"}, "(?i)backreference"),
    ({"regex": "[z-a]"}, "(?i)character"),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"type": 5}}, "must be a string|should be a string"),
    ({"json": {"type": "object", "properties": {"a": {"$ref": "#/x"}}}}, "x"),
    ({"json": {"type": "string", "pattern": "("}}, "parenthesis|group"),
    ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
    ({"json": {"enum": []}}, "empty"),
    ({"grammar": 'x ::= "a"'}, "root"),
    ({"grammar": "root ::= nope"}, "nope"),
]
MISSHAPEN: list[tuple[Any, str]] = [
    ("choice", "must be a mapping"),
    (["a"], "must be a mapping"),
    ({}, "has none of them"),
    ({"choice": None}, "has none of them"),
    ({"json": {"type": "object"}, "regex": "a"}, "has json and regex"),
    ({"regex": 5}, "regex must be a text, and is '5'"),
    ({"regex": "a\0"}, "NUL"),
    ({"choice": []}, "must be a list of labels"),
    ({"choice": "abc"}, "must be a list of labels"),
    ({"choice": [True, False]}, "quote what YAML takes"),
    ({"json": ""}, "json is empty"),
    ({"json": "{"}, "json is no JSON: "),
    ({"json": "5"}, "must be the JSON of an object"),
    ({"json": [1]}, "json must be a text or a mapping"),
    ({"json_object": False}, "json_object must be true"),
    ({"grammar": " "}, "grammar is empty"),
    ({"structural_tag": "x"}, "structural_tag is no JSON"),
    ({"structural_tag": {"a": 1}}, "structural_tag must be a text"),
    ({"json_object": True, "whitespace_pattern": 5}, "whitespace_pattern must be a text"),
    ({"json_object": True, "disable_any_whitespace": "x"}, "must be true or false"),
]
BACKENDS = ("auto", "xgrammar", "guidance")


def taken_by_vllm(form: Any, backend: str) -> bool:
    from transformers import AutoTokenizer
    from vllm.config import StructuredOutputsConfig
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    tokenizer = AutoTokenizer.from_pretrained(demo.demo_model_path())
    try:
        made: Any = StructuredOutputsParams(**copy.deepcopy(form))
        params: Any = SamplingParams(structured_outputs=made)
        params._validate_structured_outputs(
            SimpleNamespace(is_diffusion=False), StructuredOutputsConfig(backend=backend), tokenizer
        )
    except Exception:
        return False
    return True


def refusal(form: Any, backend: str) -> str:
    try:
        check_form_shape(form)
        check_form_parses(form, {"backend": backend})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("form", TAKEN, ids=str)
def test_what_vllm_takes_is_taken(form: dict[str, Any]) -> None:
    assert not refusal(form, "auto") and taken_by_vllm(form, "auto")
    check_form_parses(form, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("form", "said"), UNPARSED, ids=lambda value: str(value)[:40])
def test_what_no_grammar_can_be_made_of(form: dict[str, Any], said: str, backend: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check_form_parses(form, {"backend": backend})
    (kind,) = form
    begin = f"structured_outputs.{kind}: vLLM cannot make a grammar of it: "
    assert str(caught.value).startswith(begin) and "\n" not in str(caught.value)
    assert not taken_by_vllm(form, backend)


@pytest.mark.parametrize(("form", "refusing"), OF_ONE_BACKEND, ids=str)
def test_what_one_parser_takes_depends_on_the_backend(form: dict[str, Any], refusing: str) -> None:
    for backend in BACKENDS:
        assert bool(refusal(form, backend)) == (backend == refusing)
    assert not taken_by_vllm(form, refusing)


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer"])
def test_other_parsers_are_not_asked(backend: str) -> None:
    check_form_parses({"regex": "("}, {"backend": backend})


@pytest.mark.parametrize(("form", "said"), MISSHAPEN, ids=lambda value: str(value)[:40])
def test_a_form_of_another_shape(form: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^structured_outputs.*{said}"):
        check_form_shape(form)
    if not isinstance(form, (str, list)):  # of which vLLM makes what it is
        assert not taken_by_vllm(form, "auto")


def test_a_misspelt_field_which_vllm_would_pass_over() -> None:
    form = {"regex": "a", "disable_any_whitespaces": True}
    assert taken_by_vllm(form, "auto")
    with pytest.raises(ValueError, match=r"did you mean 'disable_any_whitespace'"):
        check_form_shape(form)


def test_the_fields_are_vllms() -> None:
    assert form_fields() == {*FORM_KINDS, *FORM_OPTIONS}
    check_form_shape(None)
    check_form_parses(None, None)


def test_a_job_with_such_a_form_is_refused_by_its_plan() -> None:
    import pyarrow as pa

    from prefect_raybatch.errors import ConfigError
    from prefect_raybatch.job.batch_job import BatchJob
    from prefect_raybatch.plan.plan import check_against_schema

    schema = pa.schema([("Company", pa.string())])
    for form, said in (({"regex": "("}, "cannot make a grammar"), ({"regex": 5}, "be a text")):
        job = BatchJob.from_dict(job_dict(sampling={"structured_outputs": form}))
        with pytest.raises(ConfigError, match=rf"^sampling\.structured_outputs\.regex.*{said}"):
            check_against_schema(job, schema)
    form, engine = {"regex": r"\p{L}+"}, {"structured_outputs_config": {"backend": "xgrammar"}}
    check_against_schema(
        BatchJob.from_dict(job_dict(sampling={"structured_outputs": form})), schema
    )
    job = BatchJob.from_dict(job_dict(sampling={"structured_outputs": form}, engine=engine))
    with pytest.raises(ConfigError, match="Unicode"):
        check_against_schema(job, schema)
