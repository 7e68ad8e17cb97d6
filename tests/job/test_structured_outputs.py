"""A form of answers that the plan refuses is one that vLLM refuses of every row."""

from __future__ import annotations

import copy
import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.small import job_dict, make_job

from prefect_raybatch import demo
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.answer_schema import schema_text
from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.vllm.fields import form_fields
from prefect_raybatch.job.vllm.structured_outputs import (
    FORM_KINDS,
    FORM_OPTIONS,
    check_form_parses,
    check_form_shape,
    check_labels_enforced,
    label_form,
)
from prefect_raybatch.plan.plan import check_accepted_by_vllm
from prefect_raybatch.stages.answer_forms import by_llguidance, by_xgrammar
from prefect_raybatch.stages.row_sampling import check_own
from prefect_raybatch.stages.vllm.stepper import plain_fields

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
    ({"regex": 5}, "regex must be text, and is '5'"),
    ({"regex": "a\0"}, "NUL"),
    ({"choice": []}, "must be a list of text labels"),
    ({"choice": "abc"}, "must be a list of text labels"),
    ({"choice": [True, False]}, "quote text that YAML reads"),
    ({"json": ""}, "json is empty"),
    ({"json": "{"}, "json is not valid JSON: "),
    ({"json": "5"}, "must be a JSON object"),
    ({"json": [1]}, "json must be text or a mapping"),
    ({"json_object": False}, "json_object must be true"),
    ({"grammar": " "}, "grammar is empty"),
    ({"structural_tag": "x"}, "structural_tag is not valid JSON"),
    ({"structural_tag": {"a": 1}}, "structural_tag must be text"),
    ({"json_object": True, "whitespace_pattern": 5}, "whitespace_pattern must be text"),
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
    begin = f"structured_outputs.{kind}: vLLM cannot compile it to a grammar: "
    assert str(caught.value).startswith(begin) and "\n" not in str(caught.value)
    assert not taken_by_vllm(form, backend)


@pytest.mark.parametrize(("form", "refusing"), OF_ONE_BACKEND, ids=str)
def test_what_one_parser_takes_depends_on_the_backend(form: dict[str, Any], refusing: str) -> None:
    for backend in BACKENDS:
        assert bool(refusal(form, backend)) == (backend == refusing)
    assert not taken_by_vllm(form, refusing)


def test_other_parsers_are_not_asked() -> None:
    check_form_parses({"regex": "("}, {"backend": "outlines"})


def test_a_backend_that_vllm_cannot_load_is_refused_before_an_engine_starts() -> None:
    config = {"structured_outputs_config": {"backend": "lm-format-enforcer"}}
    with pytest.raises(ConfigError, match=r"engine\.structured_outputs_config: .*remove backend"):
        check_accepted_by_vllm(compile_job(make_job(engine=config)))
    with pytest.raises(ImportError):  # else the refusal can go
        importlib.import_module("lmformatenforcer.integrations.vllm")


ODD_LABELS = [
    ["a\nb", "a"],
    ["a\tb", "a\rb", "\x7f"],
    ["a\x01", "\x1b[0m"],
    ["\u00a0x", "\u2028", "\ufeffy", "\u0085"],
    ["\U0001f600", "e\u0301", "\u00e9"],
    ['a"\n', "c\\d\n", "[x]\t(b|c)*{2}.^$/-"],
    ["", "x\n"],  # the rest of a label, and the end of another
]


@pytest.mark.parametrize("labels", ODD_LABELS, ids=ascii)
def test_labels_of_any_characters_are_a_form_that_each_backend_takes(labels: list[str]) -> None:
    form = label_form(labels)
    (pattern,) = form.values()
    for matches in (by_llguidance("regex", pattern), by_xgrammar("regex", pattern)):
        assert all(matches(label) for label in labels)
        others = ["a\n", "a b", "x", " ", "\n", "a\nbb", "e"]
        assert not any(matches(text) for text in others if text not in labels)
    for backend in (*BACKENDS, "outlines"):
        assert taken_by_vllm(form, backend)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["a", " \n"], "label 2 of 2 is empty"),
        (["a", "b", "a"], "duplicate label 'a'"),
        (["a", "\ud800"], "half a surrogate pair"),
    ],
)
def test_labels_that_no_answer_can_be_are_refused_in_each_place(labels: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^structured_outputs\.choice: .*{said}"):
        check_form_shape({"choice": labels})
    with pytest.raises(ConfigError, match=f"sampling.choice: .*{said}"):
        BatchJob.from_dict(job_dict(sampling={"choice": labels}))
    with pytest.raises(ValueError, match=f"sampling.choice: .*{said}"):
        check_own({"choice": labels}, {})


def test_plain_labels_stay_a_choice() -> None:
    labels = ["Law Firm", 'a "quoted" one', "back\\slash", "é", " padded "]
    assert label_form(labels) == {"choice": labels}
    form = {"choice": ["a\nb"], "disable_any_whitespace": True}
    fields = plain_fields({"structured_outputs": form})["structured_outputs"]
    assert fields == {"regex": "(a\\u000ab)", "disable_any_whitespace": True}


def test_outlines_cannot_hold_a_label_that_another_one_begins_with() -> None:
    labels = ["Retail trade", "Law", "Retail"]
    for backend in ("auto", "xgrammar", "guidance"):
        check_labels_enforced(labels, "choice", {"backend": backend})
    with pytest.raises(ValueError, match="'Retail trade' begins with label 'Retail'"):
        check_labels_enforced(labels, "choice", {"backend": "outlines"})
    sampling = {"structured_outputs": {"choice": labels}}
    job = job_dict(sampling=sampling, engine={"structured_outputs_config": {"backend": "outlines"}})
    with pytest.raises(ConfigError, match=r"sampling.structured_outputs.choice: label"):
        check_accepted_by_vllm(compile_job(BatchJob.from_dict(job)))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": 2**53 + 1}, r"\.x: const 9007199254740993 is beyond 2\^53"),
        ({"enum": [1, {"a": [-(2**60)]}]}, "enum -1152921504606846976 is beyond"),
        ({"type": "integer", "maximum": 2**70}, "maximum 1180591620717411303424 is beyond"),
        ({"type": "number", "exclusiveMinimum": -1e300}, "exclusiveMinimum -1e\\+300 is beyond"),
        ({"type": "array", "items": {"minimum": 10**400}}, "minimum .of 1,329 bits. is beyond"),
        ({"type": "array", "maxItems": 100_000_000}, "maxItems 100000000 exceeds 10,000"),
        ({"type": "array", "minItems": 1e8}, "minItems 100000000.0 exceeds 10,000"),
        ({"type": "string", "maxLength": 10**9}, "maxLength 1000000000 exceeds 1,000,000"),
        ({"type": "object", "maxProperties": 10**8}, "maxProperties .* exceeds 10,000"),
        ({"$ref": "#/properties/x"}, "leads back to itself"),
        ({"anyOf": [{"allOf": [{"$ref": "#/properties/x"}]}]}, "leads back to itself"),
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "bounded time"),
        ({"properties": {f"p{i}": {} for i in range(3000)}}, "over 2,000 schemas"),
    ],
)
def test_what_a_schema_may_not_hold_is_refused_in_each_place(schema: Any, said: str) -> None:
    whole = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(ConfigError, match=said):
        schema_text(whole)
    with pytest.raises(ValueError, match=rf"^structured_outputs.json: .*{said}"):
        check_form_shape({"json": whole})
    with pytest.raises(ValueError, match=said):
        check_own({"structured_outputs": {"json": whole}}, {})
    for tag in (
        {
            "format": {
                "type": "sequence",
                "elements": [{"type": "json_schema", "json_schema": whole}],
            }
        },
        {"structures": [{"begin": "<a>", "schema": whole, "end": "</a>"}], "triggers": ["<a>"]},
    ):
        text = json.dumps({"type": "structural_tag", **tag})
        with pytest.raises(ValueError, match=rf"^structured_outputs.structural_tag: .*{said}"):
            check_form_shape({"structural_tag": text})


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(150):
        schema = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(ConfigError, match="nested too deeply"):
        schema_text(schema)
    deep = '{"type": "object", "properties": {"x": ' * 20_000
    with pytest.raises(ValueError, match=r"structured_outputs\.json"):
        check_form_shape({"json": deep})


def test_numbers_up_to_two_to_the_53_and_schemas_that_end_are_taken() -> None:
    tree = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 10_000}
    number = {"type": "integer", "minimum": -(2**53), "maximum": 2**53}
    schema = {"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}, "n": number}}
    check_form_shape({"json": {**schema, "$defs": {"tree": tree}}})
    # Names of properties and values are no keywords.
    check_form_shape({"json": {"properties": {"maxItems": {}}, "default": {"maxItems": 10**9}}})


def test_a_schema_of_few_references_and_many_columns_is_refused() -> None:
    def level(number: int) -> dict[str, Any]:
        target = {"$ref": f"#/$defs/a{number + 1}"}
        return {"type": "object", "properties": {"p": target, "q": target}}

    parts = {f"a{number}": level(number) for number in range(30)}
    parts["a30"] = {"type": "string"}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": parts}
    with pytest.raises(ConfigError, match="over 10,000 columns"):
        columns_of(json.dumps(schema))


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
    from helpers.specs import check_columns

    from prefect_raybatch.errors import ConfigError
    from prefect_raybatch.job.batch_job import BatchJob

    schema = pa.schema([("Company", pa.string())])
    for form, said in (
        ({"regex": "("}, "cannot compile it to a grammar"),
        ({"regex": 5}, "must be text"),
    ):
        job = BatchJob.from_dict(job_dict(sampling={"structured_outputs": form}))
        with pytest.raises(ConfigError, match=rf"^sampling\.structured_outputs\.regex.*{said}"):
            check_columns(job, schema)
    form, engine = {"regex": r"\p{L}+"}, {"structured_outputs_config": {"backend": "xgrammar"}}
    check_columns(
        BatchJob.from_dict(job_dict(sampling={"structured_outputs": form})),
        schema,
    )
    job = BatchJob.from_dict(job_dict(sampling={"structured_outputs": form}, engine=engine))
    with pytest.raises(ConfigError, match="Unicode"):
        check_columns(job, schema)
