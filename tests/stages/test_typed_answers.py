"""Answers that must fit a schema: what they become as columns, and which fail their row."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import with_answers
from helpers.small import MODEL, input_rows, receipts
from helpers.specs import finish_stage

from prefect_raybatch.job.answer_schema import schema_text
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.stages import schema_check
from prefect_raybatch.stages.block import Failure, tag
from prefect_raybatch.stages.columns import FINISH, TEXTS
from prefect_raybatch.stages.schema_check import AnswerMisfit, SchemaCheck
from prefect_raybatch.stages.typed_answers import reader_of
from prefect_raybatch.storage import open_store

WHOLE = {"type": "integer"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "staff": {"type": "integer", "minimum": 0},
        "seats": {"type": "array", "items": {"type": "string"}},
        "share": {"type": "number"},
        "of": {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]},
        "by_year": {"type": "object", "additionalProperties": WHOLE},
        "any": {},
    },
    "required": ["name", "staff"],
}
GOOD: dict[str, Any] = {"name": "A", "staff": 3}


def read(text: str) -> Any:
    return reader_of(schema_text(SCHEMA)).read(text)


def reason(text: str) -> str:
    found = read(text)
    assert isinstance(found, Failure) and found.kind == "AnswerNotValid", found
    assert found.message.endswith(f"Answer: {text}")
    return found.message.split(" Reason: ")[1].split(" Answer: ")[0]


def test_an_answer_as_columns():
    text = json.dumps(
        {
            **GOOD,
            "staff": 3.0,
            "seats": ["x", "ü"],
            "share": 2,
            "of": {"a": 1},
            "by_year": {"1999": 5.0},
            "any": [{"b": 1.0}],
        }
    )
    parsed, row = read(text)
    assert parsed == json.loads(text)
    assert row["staff"] == 3 and type(row["staff"]) is int and type(row["share"]) is float
    assert (row["of"], row["by_year"], row["any"]) == ({"a": 1}, [("1999", 5)], '[{"b":1.0}]')
    schema = reader_of(schema_text(SCHEMA)).schema
    (again,) = pa.Table.from_pylist([row], schema).to_pylist()
    assert again == row


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not JSON: Expecting value"),
        ('{"name": "A", "staff": ', "it is not JSON"),
        (json.dumps(GOOD) + " and so on", "it is not JSON: Extra data"),
        ("[]", "is not of type 'object'"),
        ('{"name": "A"}', "'staff' is a required property"),
        ('{"name": "A", "name": "B", "staff": 1}', "duplicate property 'name'"),
        ('{"name": "A", "staff": 1, "share": NaN}', "NaN is not a JSON number"),
        ('{"name": "A", "staff": 1, "share": -Infinity}', "-Infinity is not a JSON number"),
        ('{"name": "A", "staff": 1, "share": 1e999}', "the number 1e999 is too large"),
        ('{"name": "\\ud800", "staff": 1}', "a lone surrogate"),
        ('{"name": "A", "staff": 9223372036854775808}', "does not fit in 64 bits"),
        ('{"name": "A", "staff": 1e300}', "does not fit in 64 bits"),
        ('{"name": "A", "staff": 1.5}', "1.5 is not of type 'integer'"),
        ('{"name": "A", "staff": true}', "True is not of type 'integer'"),
        ('{"name": "A", "staff": -1}', "-1 is less than the minimum of 0"),
        ('{"name": null, "staff": 1}', "None is not of type 'string'"),
        ('{"name": "A", "staff": 1, "more": 1}', "property 'more' is not in the schema"),
        ('{"name": "A", "staff": 1, "of": {"a": 1, "b": 2}}', "'b' is not in the schema"),
        ('{"name": "A", "staff": 1, "any": ' + "[" * 20_000, "nested too deeply"),
        ('{"name": "A", "staff": ' + "9" * 9000 + "}", "of 9000 digits is too large"),
    ],
)
def test_what_does_not_fit(text, said):
    assert said in reason(text)


@pytest.mark.parametrize("step", [0.5, 0.01, 1e-300])
def test_an_answer_that_cannot_be_checked_fails_its_row_and_not_its_shard(tmp_path, step):
    """jsonschema divides by the step, and a float holds no number of 350 digits."""
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "share": {"multipleOf": step}}}
    texts = [json.dumps({**GOOD, "share": share}) for share in (10**350, 1.0)]
    receipt = finish(tmp_path, texts, {}, schema_model=schema)
    assert (receipt.good.ranges, receipt.failed.ranges) == (((1, 2),), ((0, 1),))
    (message,) = tables(tmp_path, receipt)["quarantine"]["message"].to_pylist()
    assert "at its root (check)" in message and "OverflowError" in message


def fits(schema: Any, value: Any) -> bool:
    try:
        SchemaCheck(json.dumps(schema))(value)
    except AnswerMisfit as misfit:
        assert misfit.rule == "uniqueItems"
        return False
    return True


def test_items_are_unique_as_json_has_it_and_many_are_compared_soon():
    unique = {"uniqueItems": True, "items": {"uniqueItems": True}}
    for items in ([1, True], [0, False], [[1], [True]], [1, "1"], [None, 0], [{"a": 1}, {"b": 1}]):
        assert fits(unique, items) and not fits(unique, [*items, items[0]])
        assert fits({"uniqueItems": False}, [*items, items[0]])
    for items in (
        [1, 1.0],
        [0, -0.0],
        [1e300, int(1e300)],
        [{"a": [1], "b": 2}, {"b": 2, "a": [1.0]}],
    ):
        assert not fits(unique, items)
    assert not fits(unique, [[1, 2], [3, 3]]) and fits(unique, "aa")
    # jsonschema compares each pair of objects, for an hour here.
    many = [{"a": number} for number in range(50_000)]
    assert fits(unique, many) and not fits(unique, [*many, many[-1]])


@pytest.mark.parametrize(("clock", "passes"), [("monotonic", True), ("thread_time", False)])
def test_the_limit_counts_the_cpu_time_of_a_check_and_not_the_time_of_a_busy_node(
    monkeypatch, clock, passes
):
    hours = itertools.count(0, 3600)
    clocks = {"monotonic": time.monotonic, "thread_time": time.thread_time}
    slow = {**clocks, clock: lambda: float(next(hours))}
    monkeypatch.setattr(schema_check, "time", SimpleNamespace(**slow))
    if passes:
        assert read(json.dumps(GOOD))[0] == GOOD
    else:
        assert "took over 10 s" in reason(json.dumps(GOOD))


def test_the_place_and_the_rule_are_what_failures_are_counted_by():
    first, second = (read(json.dumps({**GOOD, "staff": n})) for n in (-1, -2))
    assert isinstance(first, Failure) and isinstance(second, Failure)
    assert ".staff (minimum)" in first.message[:120] and first.message[:120] == second.message[:120]


def finish(root: Any, texts: list[str], reasons: dict[int, str], **output: Any) -> Receipt:
    table = with_answers(
        tag(input_rows(0, len(texts)), Unit(0, 0, len(texts))), [None] * len(texts), texts
    )
    ends = pa.array([reasons.get(i, "stop") for i in range(len(texts))])
    table = table.set_column(table.column_names.index(FINISH), FINISH, ends)
    made = Output.model_validate({"uri": "out", "schema_model": SCHEMA, **output})
    (receipt,) = receipts(finish_stage(made, dict(MODEL), open_store(str(root)), "a")(table))
    assert receipt.lost is None, receipt.lost
    return receipt


def tables(root: Any, receipt: Receipt) -> dict[str, pa.Table]:
    pieces = root / "_raybatch/pieces"
    return {p.kind: pq.read_table(pieces / p.path) for p in receipt.pieces}


def test_misfits_and_answers_that_were_cut_off_go_to_quarantine_with_their_text(tmp_path):
    texts = [json.dumps(GOOD), "no", '{"name": "A", "st', json.dumps({**GOOD, "share": 1})]
    made = tables(tmp_path, receipt := finish(tmp_path, texts, {2: "length"}, columns=["id"]))
    assert (receipt.good.ranges, receipt.failed.ranges) == (((0, 1), (3, 4)), ((1, 3),))
    data = made["data"]
    assert data.column_names == ["__rb_pos", "id", *SCHEMA["properties"]]
    assert data.schema.field("staff") == pa.field("staff", pa.int64(), nullable=False)
    assert data["share"].to_pylist() == [None, 1.0]
    bad = made["quarantine"].to_pylist()
    assert [row["error"] for row in bad] == ["AnswerNotValid", "AnswerCutOff"]
    assert bad[0]["message"].endswith("Answer: no")
    assert bad[1]["message"].endswith('token: {"name": "A", "st')
    assert "on_cut_off" not in bad[1]["message"]  # nothing to keep


def several(root: Any, texts: list[list[str]], **output: Any) -> dict[str, pa.Table]:
    """As `finish`, of rows with several answers."""
    table = with_answers(
        tag(input_rows(0, len(texts)), Unit(0, 0, len(texts))),
        [None] * len(texts),
        [""] * len(texts),
    )
    lists = pa.array(texts, pa.list_(pa.string()))
    table = table.set_column(table.column_names.index(TEXTS), TEXTS, lists)
    made = Output.model_validate({"uri": "out", "schema_model": SCHEMA, "columns": [], **output})
    stage = finish_stage(made, dict(MODEL), open_store(str(root)), "a", answers=2)
    (receipt,) = receipts(stage(table))
    assert receipt.lost is None, receipt.lost
    return tables(root, receipt)


def test_several_answers_are_a_list_of_records(tmp_path):
    one, other = json.dumps(GOOD), json.dumps({**GOOD, "staff": 4.0, "by_year": {"1999": 5}})
    made = several(tmp_path, [[one, other], [one, "no"], [other]], column="found")
    data = made["data"]
    assert data.column_names == ["__rb_pos", "found"]
    record = reader_of(schema_text(SCHEMA)).schema
    assert data.schema.field("found").type.value_type == pa.struct(list(record))
    assert [[r["staff"] for r in row] for row in data["found"].to_pylist()] == [[3, 4], [4]]
    assert data["found"].to_pylist()[1][0]["by_year"] == [("1999", 5)]
    assert made["quarantine"]["message"].to_pylist()[0].endswith("Answer: no")
    post = several(tmp_path, [[one, other]], postprocess="helpers.functions:staff", column="found")
    assert post["data"]["staff"].to_pylist() == [[3, 4.0]]


def test_postprocess_gets_the_parsed_object(tmp_path):
    texts = [json.dumps({**GOOD, "seats": ["x", "y"]}), "no"]
    made = tables(tmp_path, finish(tmp_path, texts, {}, postprocess="helpers.functions:seats"))
    assert made["data"]["first"].to_pylist() == ["x"]
    assert "name" not in made["data"].column_names
    assert made["quarantine"]["error"].to_pylist() == ["AnswerNotValid"]
