"""Finish compares each answer with the form that it had to have, whatever the engine promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import with_answers
from helpers.small import MODEL, input_rows, receipts
from helpers.specs import finish_stage

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages.answer_forms import form_of, own_form
from prefect_raybatch.stages.block import load_tokenizer, tag
from prefect_raybatch.stages.columns import ANSWERS, ENDS, FINISH, OWN_FORM, TEXTS
from prefect_raybatch.storage import open_store

LABELS = ("Law Firm", "Retail", "a\tb", " padded ", "e\u0301")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "multipleOf": 5}},
    "required": ["a"],
}


def shout(row: dict[str, Any]) -> dict[str, Any]:
    return {"response": row["response"].upper()}


def set_column(table: pa.Table, name: str, values: Any, kind: pa.DataType) -> pa.Table:
    if name in table.column_names:
        table = table.drop_columns([name])
    return table.append_column(name, pa.array(values, kind))


def block(texts: list[Any], ends: Any = "stop", own: Any = None, ids: Any = None) -> pa.Table:
    """A block of answers. `ends`: why they ended; `own`: each row's own sampling fields; `ids`: the
    tokens of each answer, where texts are made of these."""
    rows = len(texts)
    table = tag(input_rows(0, rows), Unit(0, 0, rows))
    table = with_answers(table, [None] * rows, [""] * rows)
    lists = [text if isinstance(text, list) else [text] for text in texts]
    tokens = [[one] for one in ids] if ids else [[[5]] * len(one) for one in lists]
    table = set_column(table, TEXTS, [None] * rows if ids else lists, pa.list_(pa.string()))
    table = set_column(table, ANSWERS, tokens, pa.list_(pa.list_(pa.int32())))
    ends = ends if isinstance(ends, list) else [ends] * rows
    several = [one if isinstance(one, list) else None for one in ends]
    first = [one if isinstance(one, str) else max(one, key="stop".__ne__) for one in ends]
    table = set_column(table, FINISH, first, pa.string())
    table = set_column(table, ENDS, several, pa.list_(pa.string()))
    if own is not None:
        table = set_column(table, OWN_FORM, [own_form(one) for one in own], pa.string())
    return table


def finished(
    root: Path, table: pa.Table, answers: int = 1, **more: Any
) -> tuple[list[Any], list[str]]:
    """The answers of the good rows, and the errors of the others with their messages."""
    output = {"uri": "out", **more.pop("output", {})}
    made = Output.model_validate(output)
    model = dict(MODEL)
    stage = finish_stage(made, model, open_store(str(root)), "a", answers=answers, **more)
    (receipt,) = receipts(stage(table))
    assert receipt.lost is None, receipt.lost
    good: list[Any] = []
    bad: list[str] = []
    for found in receipt.pieces:
        rows = pq.read_table(root / "_raybatch/pieces" / found.path).to_pylist()
        if found.kind == "data":
            good += [row["response"] for row in rows]
        else:
            bad += [f"{row['error']}: {row['message']}" for row in rows]
    return good, bad


@pytest.mark.parametrize("where", ["choices", "form"])
def test_an_answer_that_is_none_of_the_labels_is_not_good(tmp_path, where):
    job = {"choices": LABELS} if where == "choices" else {"form": {"choice": list(LABELS)}}
    wrong = ["", "law firm", "Law", "Law Firm ", "a b", "padded", "\u00e9", "Law Firm\n", "a\nb"]
    good, bad = finished(tmp_path, block([*LABELS, *wrong]), **job)
    assert good == list(LABELS)
    assert len(bad) == len(wrong)
    for text, failure in zip(wrong, bad, strict=True):
        assert failure.startswith("AnswerNotValid: the answer does not fit sampling.choice: ")
        assert "not one of the 5 labels" in failure and failure.endswith(f"Answer: {text}")


def test_without_a_form_every_answer_is_good(tmp_path):
    assert finished(tmp_path, block(["", "x"])) == (["", "x"], [])
    assert finished(tmp_path, block(["", "x"], own=[None, {"temperature": 1}])) == (["", "x"], [])


def test_a_row_is_compared_with_its_own_form(tmp_path):
    own = [
        {"choice": ["x"]},
        {"choice": ["y\nz"]},
        None,
        {"choice": None},
        {"choice": None, "structured_outputs": {"regex": "[0-9]+"}},
        {"choice": None, "structured_outputs": {"json": SCHEMA}},
        {"choice": None, "structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"choice": None, "structured_outputs": {"json_object": True}},
    ]
    fitting = ["x", "y\nz", "Retail", "anything", "12", '{"a": 5}', '{"a": 10}', "{}"]
    odd = ["Retail", "", "x", "anything", "", '{"a": 7}', "", "[]"]
    assert finished(tmp_path, block(fitting, own=own), choices=LABELS) == (fitting, [])
    good, bad = finished(tmp_path, block(odd, own=own), choices=LABELS)
    assert good == ["anything"]
    fields = ["choice", "choice", "choice", "regex", "json", "json", "json_object"]
    for failure, field in zip(bad, fields, strict=True):
        assert failure.startswith("AnswerNotValid: the answer does not fit sampling.")
        assert f"{field}: " in failure.split("Answer: ")[0]


@pytest.mark.parametrize(
    ("form", "fits", "misfits"),
    [
        ({"regex": r"\d{4}|a.b"}, ["2024", "a b"], ["202", "20245", ""]),
        ({"regex": r"(a+)+b"}, ["aab"], ["a" * 5000]),  # which re would never end
        ({"grammar": 'root ::= "a" root | "b"'}, ["aab", "b"], ["a", "", "bb"]),
        ({"grammar": 'start: "a" /[0-9]+/'}, ["a12"], ["a", ""]),
        ({"json": SCHEMA}, ['{"a":5}', ' {"a": 10}\n'], ["", "{}", '{"a":"5"}', '{"a":5', "5"]),
        ({"json": {"type": "string", "maxLength": 2}}, ['"ab"'], ['"abc"', "ab"]),
        (
            {"json": {"multipleOf": 0.5}},
            ["1.5"],
            ["NaN", "1e999", "1" * 400],
        ),  # errors in jsonschema
        ({"json_object": True}, ["{}", '{"a": [1]}'], ["", "[]", '{"a"', "[" * 100_000]),
        ({"choice": ["x", "y"], "regex": None}, ["x"], ["z"]),
    ],
)
def test_each_kind_of_form_is_compared(form, fits, misfits):
    pytest.importorskip("llguidance")
    made = form_of(json.dumps({"structured_outputs": form}), None)
    assert made is not None
    assert [text for text in fits if made.misfit(text)] == []
    assert [text for text in misfits if not made.misfit(text)] == []


def test_what_no_library_can_parse_is_left_to_the_engine():
    made = form_of(json.dumps({"structured_outputs": {"grammar": "start: <|nope|>"}}), None)
    assert made is not None and made.misfit("anything") is None


def test_of_several_answers_one_that_does_not_fit_fails_the_row(tmp_path):
    table = block([["Retail", "Law Firm"], ["Retail", ""]], ends=[["stop"] * 2] * 2)
    good, bad = finished(tmp_path, table, answers=2, choices=LABELS)
    assert good == [["Retail", "Law Firm"]] and bad[0].endswith("Answer: ")


def test_an_answer_cut_off_in_its_form_fails_unless_the_job_keeps_such(tmp_path):
    table = block(["Law", "Retail", "Re"], ends=["length", "length", "stop"])
    good, bad = finished(tmp_path, table, choices=LABELS)
    assert good == ["Retail"]  # whole, whatever it ended of
    assert bad[0].startswith("AnswerCutOff: ") and "on_cut_off: keep" in bad[0]
    assert bad[1].startswith("AnswerNotValid: ")
    kept = {"output": {"on_cut_off": "keep"}}
    assert finished(tmp_path, table, choices=LABELS, **kept)[0] == ["Law", "Retail"]
    several = block([["Retail", "Law"]], ends=[["stop", "length"]])
    assert "AnswerCutOff" in finished(tmp_path, several, answers=2, choices=LABELS)[1][0]


def test_postprocess_never_sees_an_answer_that_does_not_fit(tmp_path):
    output = {"postprocess": "stages.test_answer_forms:shout"}
    good, bad = finished(tmp_path, block(["Retail", ""]), choices=LABELS, output=output)
    assert good == ["RETAIL"] and len(bad) == 1


def test_labels_are_compared_by_what_their_tokens_spell(tmp_path):
    path = str(demo_model_path())
    tokenizer: Any = load_tokenizer(path, None)
    model_texts = ["Retail", " padded ", "a\tb"]
    ids = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for text in model_texts
    ]
    for skip in (True, False):
        good, bad = finished(
            tmp_path / str(skip),
            block(model_texts, ids=ids),
            choices=LABELS,
            skip_special_tokens=skip,
        )
        shown = [text + ("" if skip else tokenizer.eos_token) for text in model_texts]
        assert (good, bad) == (shown, [])
