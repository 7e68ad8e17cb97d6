"""Thinking, answer and tool calls in columns of their own, by vLLM's real parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import MODEL, make_job, receipts
from helpers.specs import finish_stage, prepare_stage
from helpers.thinking import WEATHER, save_tokenizer

from prefect_raybatch.compile.job import parsing_spec
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.ledger.records import Receipt, Unit
from prefect_raybatch.stages.block import load_tokenizer, losses, tag, timed
from prefect_raybatch.stages.columns import LOST, REASONING_OPEN, TOKENS
from prefect_raybatch.stages.engine import answered
from prefect_raybatch.stages.vllm.stepper import Completion
from prefect_raybatch.storage import open_store

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[False, True], ids=["plain marks", "special marks"])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("thinking"), special=request.param)


@pytest.fixture
def asked(tokenizer: str, tmp_path: Path) -> Callable[..., tuple[Rows, Rows]]:
    """Good and failed rows after prepare and finish, with these texts as the model's answers."""
    model = {**MODEL, "tokenizer": tokenizer}
    words = load_tokenizer(tokenizer, None)

    def ids(text: str, end: str) -> list[int]:
        return words([text + end], add_special_tokens=False)["input_ids"][0]

    def ask(answers: list[Any], prompt: Any = None, cut: Any = (), **output: Any) -> Any:
        job = make_job(
            prompt={"template": "{a}", **(prompt or {})}, output={"uri": "out", **output}
        )
        parsing = parsing_spec(job)
        count = len(answers)
        table = tag(pa.table({"a": [f"row {i}" for i in range(count)]}), Unit(3, 0, count))
        table = prepare_stage(job.prompt, model, None, parsing=parsing)(table)
        several = isinstance(answers[0], list)
        given = [
            Completion(
                [
                    ids(one, "" if i in cut else "<|im_end|>")
                    for one in (texts if several else [texts])
                ],
                None,
                "length" if i in cut else "stop",
                1,
            )
            for i, texts in enumerate(answers)
        ]
        done = answered(table, [(i, [i], one) for i, one in enumerate(given)], 1.0)
        many = len(answers[0]) if several else 1
        finish = finish_stage(
            job.output, model, open_store(str(tmp_path)), "a", answers=many, parsing=parsing
        )
        (receipt,) = receipts(finish(timed(done, "engine", 1.0)))
        assert receipt.lost is None, receipt.lost
        return rows(tmp_path, receipt, "data"), rows(tmp_path, receipt, "quarantine")

    return ask


def rows(root: Path, receipt: Receipt, kind: str) -> Rows:
    found = [p for p in receipt.pieces if p.kind == kind]
    data = [(root / "_raybatch/pieces" / p.path).read_bytes() for p in found]
    return [row for one in data for row in pq.read_table(pa.BufferReader(one)).to_pylist()]


# --- thinking -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_thinking_and_answer_are_two_columns(asked, parser):
    good, _ = asked(
        ["<think>\nhm, 2\n</think>\n\nfour", "so\n</think>five"], reasoning_parser=parser
    )
    assert [(r["reasoning"], r["response"]) for r in good] == [("hm, 2", "four"), ("so", "five")]


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_a_prompt_that_ends_thinking_has_answers_without(asked, parser):
    """A parser alone would take such an answer for thinking that was cut off."""
    prompt = {"chat_template_kwargs": {"enable_thinking": False}}
    good, _ = asked(["four"], prompt, reasoning_parser=parser)
    assert (good[0]["reasoning"], good[0]["response"]) == (None, "four")


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_an_answer_cut_off_in_its_thinking_is_null_or_fails(asked, parser):
    texts = ["<think>\nand so on", "<think>\nok</think>fo"]
    good, bad = asked(texts, cut=(0, 1), reasoning_parser=parser, on_cut_off="keep")
    assert [(r["reasoning"], r["response"]) for r in good] == [("and so on", None), ("ok", "fo")]
    good, bad = asked(texts, cut=(0,), reasoning_parser=parser, on_cut_off="fail")
    assert [r["response"] for r in good] == ["fo"]
    assert bad[0]["error"] == "AnswerCutOff" and "and so on" in bad[0]["message"]


def test_the_columns_have_the_names_that_the_job_gives(asked):
    good, _ = asked(
        ["<think>a</think>b"],
        reasoning_parser="deepseek_r1",
        reasoning_column="thought",
        column="said",
    )
    assert good[0] == {"__rb_pos": 0, "a": "row 0", "said": "b", "thought": "a"}


def test_several_answers_are_lists_in_each_column(asked):
    good, _ = asked(
        [["<think>a</think>b", f"<think>c</think>{CALL}"]],
        reasoning_parser="qwen3",
        tool_parser="hermes",
    )
    assert good[0]["reasoning"] == ["a", "c"] and good[0]["response"] == ["b", None]
    assert [[c["name"] for c in calls] for calls in good[0]["tool_calls"]] == [[], ["weather"]]


def test_postprocess_sees_the_columns(asked):
    good, _ = asked(
        ["<think>a</think>b"],
        reasoning_parser="qwen3",
        postprocess="helpers.functions:thought_and_said",
    )
    assert good[0]["both"] == "a/b"


def test_an_answer_after_thinking_has_typed_columns(asked):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    texts = ['<think>two</think>{"n": 2}', "<think>two", "<think>x</think>none"]
    good, bad = asked(texts, cut=(1,), reasoning_parser="qwen3", schema_model=schema)
    assert good == [{"__rb_pos": 0, "a": "row 0", "n": 2, "reasoning": "two"}]
    assert [row["error"] for row in bad] == ["AnswerCutOff", "AnswerNotValid"]


# --- tool calls ---------------------------------------------------------------------------------


def test_tool_calls_are_parsed_and_the_text_stands_beside_them(asked):
    texts = [f"Let me look.\n{CALL}", CALL + CALL, "It rains.", "<tool_call>{broken</tool_call>"]
    good, _ = asked(texts, {"tools": [WEATHER]}, tool_parser="hermes")
    calls = [r["tool_calls"] for r in good]
    assert [len(c) for c in calls] == [1, 2, 0, 0]
    assert json.loads(calls[0][0]["arguments"]) == {"city": "Bonn"}
    assert good[0]["response"].strip() == "Let me look." and good[1]["response"] is None
    assert good[2]["response"] == "It rains." and "broken" in good[3]["response"]


def test_ids_of_calls_are_the_same_each_time_and_differ_in_a_run(asked):
    texts = [CALL + CALL, CALL]
    first, second = (asked(texts, {"tools": [WEATHER]}, tool_parser="hermes")[0] for _ in range(2))
    assert first == second
    ids = [call["id"] for row in first for call in row["tool_calls"]]
    assert len(set(ids)) == 3 and all(ids)


def test_thinking_comes_before_calls(asked):
    good, _ = asked(
        [f"<think>hm</think>\n\n{CALL}"],
        {"tools": [WEATHER]},
        reasoning_parser="qwen3",
        tool_parser="hermes",
    )
    assert (good[0]["reasoning"], good[0]["response"]) == ("hm", None)
    assert good[0]["tool_calls"][0]["name"] == "weather"


def test_a_call_without_tools_in_the_job_is_parsed_too(asked):
    good, _ = asked([CALL], tool_parser="hermes")
    assert good[0]["tool_calls"][0]["name"] == "weather"


# --- the stages around --------------------------------------------------------------------------


def test_prepare_marks_the_prompts_that_leave_thinking_open(tokenizer):
    model = {**MODEL, "tokenizer": tokenizer}
    table = tag(pa.table({"a": ["x", "<think>\n\n</think> y"]}), Unit(0, 0, 2))
    job = make_job(
        prompt={"template": "{a}"}, output={"uri": "o", "reasoning_parser": "deepseek_r1"}
    )
    made = prepare_stage(job.prompt, model, None, parsing=parsing_spec(job))(table)
    assert made[REASONING_OPEN].to_pylist()[0] is True
    plain = prepare_stage(job.prompt, model, None)(table)
    assert REASONING_OPEN not in plain.column_names
    assert plain[TOKENS].to_pylist() == made[TOKENS].to_pylist()


def opened(tokenizer: str, columns: Any, **prompt: Any) -> list[bool | None]:
    """Whether the answer to each row may begin with thinking."""
    job = make_job(prompt=prompt, output={"uri": "o", "reasoning_parser": "deepseek_r1"})
    table = pa.table(columns)
    model = {**MODEL, "tokenizer": tokenizer}
    made = prepare_stage(job.prompt, model, None, parsing=parsing_spec(job))(
        tag(table, Unit(0, 0, table.num_rows))
    )
    found: list[bool | None] = made[REASONING_OPEN].to_pylist()
    return found


@pytest.mark.parametrize("rows", ["split", "allow"])
def test_no_row_says_whether_a_prompt_leaves_thinking_open(tokenizer, rows):
    texts = ["x", "</think>", "x</think>\n<think>", "<think>\n\n</think> y", None]
    how = {"template": "{a}", "special_tokens_in_rows": rows}
    columns = {"a": texts}
    assert opened(tokenizer, columns, **how) == [True] * 4 + [None]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert opened(tokenizer, columns, **how, **off) == [False] * 4 + [None]
    assert opened(tokenizer, columns, **how, prefill="<think>a</think>") == [False] * 4 + [None]
    assert opened(tokenizer, columns, **how, **off, prefill="<think>") == [True] * 4 + [None]


def test_thinking_of_earlier_turns_says_nothing_about_the_next(tokenizer):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = {"messages": "chat", "chat_template": template}
    assert opened(tokenizer, {"chat": [json.dumps(said)]}, **prompt) == [True]
    going = {**prompt, "continue_final_message": True}
    assert opened(tokenizer, {"chat": [json.dumps(said[:2])]}, **going) == [False]


def test_a_parser_whose_marks_the_model_lacks_stops_the_run():
    job = make_job(output={"uri": "o", "reasoning_parser": "deepseek_r1"})
    table = tag(pa.table({"Company": ["x"]}), Unit(0, 0, 1))
    made = prepare_stage(job.prompt, dict(MODEL), None, parsing=parsing_spec(job))(table)
    assert LOST in made.column_names
    (why,) = losses(made)
    assert why.fatal and why.kind == ConfigError.__name__
    assert "output.reasoning_parser: deepseek_r1 does not work" in why.message
