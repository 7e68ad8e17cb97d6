"""Schemas of answers: what they mean, what they become as columns, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from helpers.small import job_dict
from pydantic import BaseModel

from prefect_raybatch.compile.job import sampling_spec
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.answer_schema import schema_engine_fields, schema_text
from prefect_raybatch.job.answer_types import columns_of
from prefect_raybatch.job.batch_job import BatchJob


class Place(BaseModel):
    city: str
    postcode: str | None = None


class Company(BaseModel):
    name: str
    staff: int
    share: float
    listed: bool
    places: list[Place]
    seat: Place
    figures: dict[str, float]
    parent: Company | None = None
    kind: str | int = 1


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def types(schema: Any) -> dict[str, pa.DataType]:
    return {name: shape.type() for name, shape in columns_of(schema_text(schema)).items()}


def test_a_pydantic_class_becomes_typed_columns():
    found = columns_of(schema_text("job.test_answer_schema:Company"))
    place = pa.struct([pa.field("city", pa.string(), False), pa.field("postcode", pa.string())])
    assert {name: (shape.type(), shape.nullable) for name, shape in found.items()} == {
        "name": (pa.string(), False),
        "staff": (pa.int64(), False),
        "share": (pa.float64(), False),
        "listed": (pa.bool_(), False),
        "places": (pa.list_(pa.field("item", place, False)), False),
        "seat": (place, False),
        "figures": (pa.map_(pa.string(), pa.field("value", pa.float64(), False)), False),
        "parent": (pa.string(), True),
        "kind": (pa.string(), True),
    }
    texts = [t for name, shape in found.items() for t in shape.texts(name)]
    assert texts == [("parent", "it refers to itself"), ("kind", "it is made up by anyOf")]


@pytest.mark.parametrize(
    ("part", "kind", "nullable"),
    [
        ({"type": ["integer", "null"]}, pa.int64(), True),
        ({"type": ["integer", "string"]}, pa.string(), True),
        ({"enum": ["a", "b"]}, pa.string(), False),
        ({"enum": ["a", None]}, pa.string(), True),
        ({"enum": [1, 2.5]}, pa.float64(), False),
        ({"enum": [1, "a"]}, pa.string(), True),
        ({"const": True}, pa.bool_(), False),
        ({"allOf": [{"type": "string"}]}, pa.string(), False),
        ({"anyOf": [{"type": "number"}]}, pa.float64(), False),
        ({"oneOf": [{"type": "null"}, {"type": "boolean"}]}, pa.bool_(), True),
        ({"type": "array"}, pa.string(), True),
        ({"type": "object"}, pa.string(), True),
        ({"type": "object", "additionalProperties": True}, pa.string(), True),
        ({**thing(a={"type": "string"}), "additionalProperties": True}, pa.string(), True),
        ({}, pa.string(), True),
    ],
)
def test_the_type_of_a_property(part, kind, nullable):
    shape = columns_of(schema_text(thing(x=part)))["x"]
    assert (shape.type(), shape.nullable) == (kind, nullable)
    assert (shape.kind == "json") is (kind == pa.string() and bool(shape.why))


def test_inline_text_file_and_class_are_the_same_schema(tmp_path):
    schema = thing(b={"type": "string"}, a={"type": "integer"})
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(schema, indent=2))
    texts = {schema_text(schema), schema_text(json.dumps(schema)), schema_text(str(path))}
    assert texts == {json.dumps(schema, separators=(",", ":"))}
    assert list(types(schema)) == ["b", "a"]  # in the order in which the model writes them


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"type": "string"}, "root must be an object"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "root must be an object"),
        ({**thing(a={}), "additionalProperties": True}, "properties that are not named"),
        ({"type": "objekt"}, "is not a valid JSON Schema: .type"),
        (
            thing(a={"type": "string", "pattern": "("}),
            "is not a valid JSON Schema: .properties.a.pattern",
        ),
        (thing(a={"$ref": "https://example.org/a.json"}), "refers to another document"),
        (thing(default={"$ref": "other.json"}), "refers to another document"),
        (thing(a={"$ref": "#/$defs/A"}), "has no target"),
        ("no/such.json", "no folder"),
        ("{", "is not valid JSON"),
        ("no_such_module:A", "module 'no_such_module' cannot be imported"),
        ("job.test_answer_schema:thing", "has no pydantic class 'thing'"),
        ("os:path", "is part of Python"),
    ],
)
def test_what_is_refused_names_the_field_and_the_reason(value, said):
    with pytest.raises(ConfigError) as caught:
        columns_of(schema_text(value))
    assert str(caught.value).startswith("output.schema_model: ") and said in str(caught.value)


def test_a_schema_that_no_grammar_can_hold_is_refused_before_an_engine_starts():
    pytest.importorskip("llguidance")
    for part in ({"type": "array", "uniqueItems": True}, {"type": "string", "pattern": "(?<=a)b"}):
        with pytest.raises(ConfigError, match="vLLM cannot compile it to a grammar"):
            schema_text(thing(a=part))


SCHEMA = thing(a={"type": "string"})


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"sampling": {"choice": ["a"]}}, "sampling.choice cannot be combined with"),
        (
            {"sampling": {"structured_outputs": {"regex": "a"}}},
            "sampling.structured_outputs cannot be combined",
        ),
        ({"sampling": {"skip_special_tokens": False}}, "sampling.skip_special_tokens: "),
        ({"output": {"uri": "o", "schema_model": SCHEMA, "on_cut_off": "keep"}}, "on_cut_off: "),
        ({"output": {"uri": "o", "schema_model": "some words"}}, "is not a JSON Schema"),
    ],
)
def test_what_a_schema_excludes(groups, said):
    value = job_dict(output={"uri": "o", "schema_model": SCHEMA}) | groups
    with pytest.raises(ConfigError) as caught:
        BatchJob.from_dict(value)
    assert said in str(caught.value)


def test_the_requests_and_the_engine_of_a_job_with_a_schema():
    job = BatchJob.from_dict(job_dict(output={"uri": "o", "schema_model": SCHEMA}))
    form = sampling_spec(job).fields["structured_outputs"]
    assert json.loads(form["json"]) == SCHEMA
    assert job.output.fails_cut_off
    assert schema_engine_fields({"seed": 1}, None) == {"seed": 1}
    made = schema_engine_fields({"structured_outputs_config": {"reasoning_parser": "x"}}, "{}")
    assert made["structured_outputs_config"] == {
        "backend": "guidance",
        "disable_any_whitespace": True,
        "disable_additional_properties": True,
        "reasoning_parser": "x",
    }
    own = schema_engine_fields({"structured_outputs_config": {"backend": "outlines"}}, "{}")
    assert own["structured_outputs_config"] == {"backend": "outlines"}
    plain = BatchJob.from_dict(job_dict())
    assert (
        sampling_spec(plain).fields == plain.sampling.for_vllm() and not plain.output.fails_cut_off
    )
