"""Columns of conversations and documents to prompts, and what of them fails its row alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.small import MODEL
from helpers.specs import prepare_stage
from helpers.thinking import TEMPLATE, WEATHER, save_tokenizer

from prefect_raybatch import demo
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages.block import load_tokenizer, losses, tag
from prefect_raybatch.stages.columns import ERROR, LOST, TOKENS

ASK = {"role": "user", "content": "How is it in Bonn?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "B"}},
        }
    ],
}
TOLD = {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"}


def prepared(prompt: dict[str, Any], columns: Any, limit: int | None = None, most: int = 1) -> Any:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    model = {**MODEL, "identity": "0" * 64}
    return prepare_stage(Prompt(**prompt), model, limit, most)(
        tag(table, Unit(0, 0, table.num_rows))
    )


def texts(prompt: dict[str, Any], columns: Any, **how: Any) -> list[Any]:
    """Prompt of each row, or why it failed."""
    made = prepared(prompt, columns, **how)
    words = load_tokenizer(demo.demo_model_path(), None)
    return [
        row[ERROR]["message"] if row[ERROR] else words.decode(row[TOKENS])
        for row in made.select([TOKENS, ERROR]).to_pylist()
    ]


def one(messages: Any, **prompt: Any) -> Any:
    text = messages if isinstance(messages, str) or messages is None else json.dumps(messages)
    column = pa.array([text], pa.string())
    return texts({"messages": "chat", **prompt}, {"chat": column})[0]


TURNS = [ASK, {"role": "assistant", "content": "Rainy."}, {"role": "user", "content": "And now?"}]
SPOKEN = (
    "<|im_start|>user\nHow is it in Bonn?<|im_end|>\n<|im_start|>assistant\nRainy.<|im_end|>\n"
    "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
)


# --- conversations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [
        pa.array([json.dumps(TURNS)]),
        pa.array([json.dumps(TURNS)]).dictionary_encode(),
        pa.array([json.dumps(TURNS)], pa.large_string()),
        pa.array([TURNS]),
        pa.array([TURNS], pa.large_list(pa.struct([("role", pa.string()), ("content", "string")]))),
        pa.array([TURNS], pa.list_(pa.map_(pa.string(), pa.string()))),
    ],
    ids=["json", "dictionary", "large text", "structs", "large list", "maps"],
)
def test_a_conversation_is_json_or_arrow(column):
    assert texts({"messages": "chat"}, {"chat": column}) == [SPOKEN]


def test_a_system_message_of_the_job_stands_in_front_of_those_without():
    own = {"role": "system", "content": "Own."}
    assert one(TURNS, system="Short.") == f"<|im_start|>system\nShort.<|im_end|>\n{SPOKEN}"
    assert one([own, *TURNS], system="Short.") == f"<|im_start|>system\nOwn.<|im_end|>\n{SPOKEN}"


@pytest.mark.parametrize("kind", ["structs", "json", "arguments as text"])
def test_calls_and_results_reach_the_template(kind):
    """Arrow fills in with null what other messages have; a template must not see that."""
    turns = [ASK, CALLED, TOLD]
    if kind == "arguments as text":
        call = {"id": "c1", "type": "function", "function": {"name": "weather"}}
        call["function"]["arguments"] = '{"city": "B"}'  # as OpenAI writes them
        turns = [ASK, {**CALLED, "tool_calls": [call]}, TOLD]
    cell = json.dumps(turns) if kind == "json" else turns
    (text,) = texts({"messages": "chat", "chat_template": TEMPLATE}, {"chat": [cell]})
    assert '<tool_call>{"name": "weather", "arguments": {"city": "B"}}</tool_call>' in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text and "None" not in text


def test_fields_that_a_struct_lacks_are_not_defined_in_the_template():
    template = "{% for m in messages %}{{ m.name is defined }};{% endfor %}"
    cell = [{"role": "user", "content": "a", "name": "ann"}, {"role": "user", "content": "b"}]
    made = texts({"messages": "chat", "chat_template": template}, {"chat": [cell]})
    assert made == ["True;False;"]


def test_parts_of_text_are_put_together():
    parts = [{"type": "text", "text": "How is it"}, {"type": "text", "text": "in Bonn?"}]
    assert "user\nHow is it\nin Bonn?<|im_end|>" in one([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (None, ["column chat is null"]),
        ("{", ["chat is text that is not JSON"]),
        ('"hi"', ["chat is str", "list of messages"]),
        ([], ["chat is an empty conversation"]),
        ([ASK, 3], ["chat[1] is int"]),
        ([ASK, None], ["chat[1] is null"]),
        ([{"content": "x"}], ["chat[0].role is missing"]),
        ([{"role": "", "content": "x"}], ["chat[0].role is missing"]),
        ([{"role": "user"}], ["chat[0].content is missing"]),
        ([{"role": "user", "content": 3}], ["chat[0].content is int, not text"]),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            ["content[0]", "'image_url'", "prompt.images.per_row"],
        ),
        ([{**ASK, "tool_calls": [{}]}], ["chat[0].tool_calls", "not user"]),
        ([ASK, {**CALLED, "tool_calls": 1}], ["chat[1].tool_calls is int"]),
        ([ASK, {**CALLED, "tool_calls": [{}]}], ["chat[1].tool_calls[0] is not of the form"]),
        ([ASK, {**CALLED, "tool_calls": [{"function": {}}]}], ["tool_calls[0].function.name"]),
        (
            [ASK, {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            ["chat[1].tool_calls[0].function.arguments is not JSON"],
        ),
        (TURNS[:2], ["the last message is the assistant's", "continue_final_message"]),
    ],
)
def test_what_is_no_conversation_fails_its_row_and_says_where(cell, said):
    message = one(cell)
    for word in said:
        assert word in message


def test_a_bad_conversation_is_alone_in_its_failure():
    column = pa.array([json.dumps(TURNS), "[", json.dumps(TURNS)])
    made = texts({"messages": "chat"}, {"chat": column})
    assert made[0] == made[2] == SPOKEN and "not JSON" in made[1]


def test_a_conversation_that_is_too_long_is_cut_in_its_last_question():
    long = [*TURNS[:2], {"role": "user", "content": "word " * 300 + "end"}]
    prompt = {"messages": "chat", "on_too_long": "truncate_left"}
    (text,) = texts(prompt, {"chat": [json.dumps(long)]}, limit=100, most=10)
    assert text.startswith("<|im_start|>user\nHow is it in Bonn?") and "end<|im_end|>" in text


# --- the beginning of an answer -----------------------------------------------------------------


def test_an_answer_goes_on_from_the_prefill():
    begun = texts({"template": "{a}", "prefill": "It is "}, {"a": ["x"]})
    assert begun == ["<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nIt is "]
    assert one(TURNS, prefill="Now: ") == f"{SPOKEN}Now: "


def test_an_answer_goes_on_from_the_last_message():
    turns = [ASK, {"role": "assistant", "content": "It is"}]
    made = one(turns, continue_final_message=True)
    assert made.endswith("<|im_start|>assistant\nIt is")
    assert "role 'user'" in one(TURNS, continue_final_message=True)


# --- the chat template --------------------------------------------------------------------------


def test_the_jobs_template_takes_the_place_of_the_models():
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tone }}"
    prompt = {"template": "{a}", "chat_template": template, "chat_template_kwargs": {"tone": "!"}}
    assert texts(prompt, {"a": ["x", "y"]}) == ["[x]!", "[y]!"]


def test_thinking_is_switched_by_an_argument_of_the_template():
    prompt = {"template": "{a}", "chat_template": TEMPLATE}
    (on,) = texts(prompt, {"a": ["x"]})
    (off,) = texts({**prompt, "chat_template_kwargs": {"enable_thinking": False}}, {"a": ["x"]})
    assert off == on + "<think>\n\n</think>\n\n"


def test_tools_are_written_in_one_order_however_the_job_was_kept():
    turned = {k: WEATHER[k] for k in reversed(list(WEATHER))}
    prompt = {"template": "{a}", "chat_template": TEMPLATE}
    first, second = (texts({**prompt, "tools": [t]}, {"a": ["x"]})[0] for t in (WEATHER, turned))
    assert first == second
    assert '{"type": "function", "function": {"name": "weather", "description": ' in first


@pytest.mark.parametrize("kind", ["structs", "texts", "json"])
def test_each_row_has_documents_of_its_own(kind):
    papers: Any = [[{"title": "A", "text": "first"}], [{"title": None, "text": "second"}], None]
    if kind == "texts":
        papers = [["first"], ["second"], None]
    if kind == "json":
        papers = [None if p is None else json.dumps(p) for p in papers]
    prompt = {"template": "{a}", "documents": "papers", "chat_template": TEMPLATE}
    made = texts(prompt, {"a": ["x", "y", "z"], "papers": papers})
    assert ("A: first" if kind != "texts" else "untitled: first") in made[0]
    assert "second" in made[1] and "first" not in made[1]
    assert made[2] == "<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n"


def test_documents_that_are_none_fail_their_row():
    prompt = {"template": "{a}", "documents": "papers", "chat_template": TEMPLATE}
    made = texts(prompt, {"a": ["x", "y"], "papers": ["[1]", '["good"]']})
    assert "papers[0] is int" in made[0] and "good" in made[1]


def test_a_template_that_raises_for_a_row_fails_it_alone():
    template = "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}good"
    made = texts({"template": "{a}", "chat_template": template}, {"a": ["a", "b", "c"]})
    assert made == ["good", "no b", "good"]


def test_a_model_without_chat_template_stops_the_run_where_there_must_be_one(tmp_path: Path):
    folder = save_tokenizer(tmp_path, template=None)
    model = {**MODEL, "tokenizer": folder}
    table = tag(pa.table({"chat": [json.dumps(TURNS)], "a": ["x"]}), Unit(0, 0, 1))
    made = prepare_stage(Prompt(messages="chat"), model, None)(table)
    assert LOST in made.column_names and losses(made)[0].fatal
    assert "prompt.chat_template" in losses(made)[0].message
    plain = prepare_stage(Prompt(template="{a}", system="Short."), model, None)(table)
    words = load_tokenizer(folder, None)
    assert words.decode(plain[TOKENS].to_pylist()[0]) == "Short.\n\nx"
