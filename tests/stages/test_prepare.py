"""Rows to prompts: what a template or a function makes of them, and that one bad row stays one."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from helpers.small import MODEL
from helpers.specs import prepare_stage

from prefect_raybatch import demo
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages import prepare as stage
from prefect_raybatch.stages.block import is_lost, load_tokenizer, losses, lost_block, tag
from prefect_raybatch.stages.columns import (
    ERROR,
    FORMED,
    PARAMS,
    POSITION,
    PREPARE_SPENT,
    SHARD,
    TOKENS,
    TRUNCATED,
)


def run(prompt: dict[str, Any], columns: Any, limit: int | None = None) -> list[dict[str, Any]]:
    """The block's rows after the stage."""
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    made = prepare_stage(Prompt(**prompt), dict(MODEL), limit)(
        tag(table, Unit(0, 0, table.num_rows))
    )
    assert made.num_rows == table.num_rows
    assert made[POSITION].to_pylist() == list(range(table.num_rows))
    assert made[PREPARE_SPENT].null_count == 0
    names = [TOKENS, PARAMS, ERROR]
    return made.select(names).to_pylist()


def text(row: dict[str, Any]) -> str:
    assert row[ERROR] is None, row
    return load_tokenizer(demo.demo_model_path(), None).decode(row[TOKENS])


def failed(row: dict[str, Any], kind: str, *said: str) -> None:
    assert row[TOKENS] == [] and row[PARAMS] is None
    assert row[ERROR]["stage"] == "prepare" and row[ERROR]["kind"] == kind
    for word in said:
        assert word in row[ERROR]["message"]


# --- templates ----------------------------------------------------------------------------------


def test_a_template_is_filled_and_put_into_the_chat_template():
    prompt = {"template": "{{{A}}} is {B}, {A}", "system": "Be {short}."}
    rows = run(prompt, {"A": ["x", "{B}"], "B": [1, 2]})
    assert text(rows[0]) == (
        "<|im_start|>system\nBe {short}.<|im_end|>\n"
        "<|im_start|>user\n{x} is 1, x<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "{{B}} is 2, {B}" in text(rows[1])  # values are not templates
    assert rows[0][PARAMS] is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.5, -0.0], ["1.5", "-0.0"]),
        ([True, False], ["True", "False"]),
        ([["a", "b"], []], ['["a", "b"]', "[]"]),
        (pa.array([19.99], pa.float32()), ["what: 19.99<"]),
        ([b"caf\xc3\xa9"], ["what: café"]),
        (["Straße", "日本"], ["Straße", "日本"]),
        (["", " "], ["what: ", "what:  "]),
    ],
)
def test_any_value_becomes_text(values, words):
    for row, word in zip(run({"template": "what: {A}"}, {"A": values}), words, strict=True):
        assert word in text(row)


def test_a_null_fails_its_row_or_is_empty():
    columns = {"A": ["x", None, "y"], "unused": [None, None, None]}
    rows = run({"template": "<{A}>"}, columns)
    assert "<x>" in text(rows[0]) and "<y>" in text(rows[2])
    failed(rows[1], "ValueError", "column A is null", "prompt.on_null")
    rows = run({"template": "<{A}>", "on_null": "empty"}, columns)
    assert "<>" in text(rows[1])


def test_a_nan_is_a_null():
    columns = {"A": [1.5, float("nan")]}
    failed(run({"template": "<{A}>"}, columns)[1], "ValueError", "column A is null")
    rows = run({"template": "<{A}>", "on_null": "empty"}, columns)
    assert "<1.5>" in text(rows[0]) and "<>" in text(rows[1])


def test_bytes_that_are_no_text_fail_their_row_alone():
    rows = run({"template": "{A}"}, {"A": [b"good", b"a\xff"]})
    assert "good" in text(rows[0])
    failed(rows[1], "ValueError", "column A holds bytes that are not UTF-8", "prompt.function")


def test_a_cell_that_is_not_utf8_fails_its_row_alone():
    raw = pa.array([b"good", b"bad \xff\xfe", b"fine"], pa.binary())
    table = pa.table({"A": raw.view(pa.string()), "B": ["1", "2", "3"]})
    rows = run({"template": "{A}"}, table)
    failed(rows[1], "UnicodeDecodeError")
    assert "good" in text(rows[0]) and "fine" in text(rows[2])
    rows = run({"template": "{B}"}, table)  # a broken column that is not used harms nobody
    assert [r[ERROR] for r in rows] == [None] * 3


@pytest.mark.parametrize(
    "prompt",
    [
        {"template": "{A}"},
        {"function": "helpers.functions:as_text"},
        {"messages": "A", "images": {"columns": ["A"]}},
        {"messages": "A"},
    ],
    ids=lambda prompt: next(iter(prompt.values())),
)
def test_a_time_in_an_unknown_zone_fails_its_rows(prompt):
    """It is a KeyError of Python, which would lose the block again and again."""
    times = pa.array([0, 1], pa.timestamp("us", "Mars/Phobos"))
    for row in run(prompt, {"A": times}):
        failed(row, "ValueError", "unknown time zone 'Mars/Phobos'", "source.columns")


def test_a_date_that_python_cannot_hold_fails_its_row_alone():
    dates = pa.array([0, 1 << 60, 5], pa.int64()).cast(pa.timestamp("s"))
    rows = run({"template": "{A}"}, {"A": dates})
    assert rows[1][ERROR] is not None and rows[1][ERROR]["stage"] == "prepare"
    assert "1970-01-01" in text(rows[0]) and rows[2][ERROR] is None


# --- functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["as_text", "as_messages", "as_dict"])
def test_a_function_may_return_text_messages_or_both_with_sampling(name):
    (row,) = run({"function": f"helpers.functions:{name}"}, {"Company": ["ACME"]})
    assert "ACME" in text(row)
    assert text(row).startswith("<|im_start|>user\n")
    own = json.loads(row[PARAMS]) if row[PARAMS] else None
    assert own == ({"max_tokens": 3} if name == "as_dict" else None)


def test_each_row_a_function_spoils_fails_alone_with_its_reason():
    wrong = {
        "raise": ("LookupError", "no such company"),
        "number": ("TypeError", "int"),
        "null": ("TypeError", "NoneType"),
        "empty list": ("TypeError", "list"),
        "empty dict": ("TypeError", "dict"),
        "list of text": ("TypeError", "messages"),
        "no content": ("TypeError", "messages"),
        "raw prompt": ("TypeError", "keys 'prompt'"),
        "unknown key": ("TypeError", "unknown keys temperature"),
        "sampling text": ("TypeError", "sampling"),
        "sampling object": ("TypeError", ""),
        "content object": ("TypeError", "content of type object"),
        "surrogate": ("TypeError", "TextEncodeInput"),
    }
    companies = ["first", *wrong, "last"]
    rows = run({"function": "helpers.functions:by_name"}, {"Company": companies})
    assert "about first" in text(rows[0]) and "about last" in text(rows[-1])
    for row, (kind, said) in zip(rows[1:-1], wrong.values(), strict=True):
        failed(row, kind, said)


def test_a_function_may_return_the_same_object_for_every_row():
    companies = ["a", "bb", "ccc"]
    rows = run({"function": "helpers.functions:reuses"}, {"Company": companies})
    for row, company in zip(rows, companies, strict=True):
        assert f"about {company}<" in text(row)
        own = json.loads(row[PARAMS])
        assert own == {"max_tokens": len(company), "bad_words": [company]}


def test_parts_of_messages_that_a_function_changes_later_stay_as_they_were(monkeypatch):
    plain = Touchy("", "")
    plain.chat_template = None
    monkeypatch.setattr(stage, "load_tokenizer", lambda *_: plain)
    companies = ["a", "bb", "ccc"]
    rows = run({"function": "helpers.functions:reuses_parts"}, {"Company": companies})
    for row, company in zip(rows, companies, strict=True):
        assert text(row) == f"about {company}"


def own(given: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    """A row that brings these sampling fields, in a job with those."""
    table = tag(pa.table({"Sampling": [json.dumps(given)]}), Unit(0, 0, 1))
    prompt = Prompt(function="helpers.functions:own_sampling")
    (row,) = prepare_stage(prompt, dict(MODEL), None, sampling=sampling)(table).to_pylist()
    return {name: row[name] for name in (TOKENS, PARAMS, ERROR)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": 3}, ["sampling.n is 3", "1 in the job", "Set sampling.n above 1 in the job"]),
        ({"n": 0}, ["sampling.n", "whole number from 1 on"]),
        ({"n": "2"}, ["sampling.n", "whole number from 1 on"]),
        ({"logprobs": 1}, ["sampling.logprobs", "Set it in the job"]),
        ({"logprobs": 0}, ["logprobs"]),
        ({"prompt_logprobs": 1}, ["prompt_logprobs", "only the answer's text", "Leave it out"]),
        ({"logprob_token_ids": [5]}, ["logprob_token_ids"]),
        ({"flat_logprobs": True}, ["flat_logprobs"]),
        ({"output_kind": 2}, ["output_kind"]),
        ({"detokenize": True}, ["detokenize"]),
        ({"stream_interval": 4}, ["stream_interval"]),
        ({"routed_experts_prompt_start": 4}, ["routed_experts_prompt_start"]),
        ({"best_of": 4}, ["unknown field 'best_of'"]),
        ({"temprature": 1}, ["unknown field 'temprature'", "did you mean 'temperature'"]),
        ({"skip_special_tokens": False}, ["skip_special_tokens", "all rows"]),
        ({"spaces_between_special_tokens": False}, ["spaces_between_special_tokens"]),
        ({"temperature": None}, ["sampling.temperature is null", "the job's 0.5"]),
        ({"max_tokens": None}, ["sampling.max_tokens is null", "the job's 7"]),
        ({"max_tokens": 2.5}, ["sampling.max_tokens", "2.5", "whole number"]),
        ({"max_tokens": 0}, ["sampling.max_tokens"]),
        ({"max_tokens": True}, ["sampling.max_tokens"]),
        ({"choice": "yes"}, ["sampling.choice", "list"]),
        ({"choice": []}, ["sampling.choice"]),
        (
            {"choice": ["a"], "structured_outputs": {"regex": "a"}},
            ["choice and structured_outputs exclude each other", "null"],
        ),
        (
            {"structured_outputs": {"regex": 5}},
            ["sampling.structured_outputs.regex", "be text"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sampling_of_a_row_that_cannot_be_honoured_fails_that_row(given, said):
    failed(own(given, temperature=0.5, max_tokens=7), "ValueError", *said)


@pytest.mark.parametrize(
    ("given", "job"),
    [
        ({"n": 2}, {"n": 2}),
        ({"n": 5}, {"n": 2}),
        ({"n": 1, "temperature": 0.0}, {"n": 2}),
        ({"n": 1}, {}),
        ({"temperature": 0.7, "max_tokens": 3, "seed": 4, "stop": ["x"]}, {"temperature": 0.0}),
        ({"logprobs": None, "flat_logprobs": False}, {}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"top_p": None}, {"temperature": 0.0}),
        ({"choice": None, "structured_outputs": {"regex": "a"}}, {"choice": ["a", "b"]}),
        ({"choice": ["a"]}, {"choice": ["a", "b"]}),
        ({"stop": None, "seed": None}, {"stop": ["x"], "seed": 3}),
    ],
)
def test_sampling_of_a_row_that_is_honoured_travels_with_it(given, job):
    row = own(given, **job)
    assert row[ERROR] is None and json.loads(row[PARAMS]) == given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": None}, "sampling.n is null"),
        ({"temperature": 0}, "sampling.n: 2 answers are identical at temperature 0"),
        ({"n": 3, "temperature": 0.0}, "sampling.n: 3 answers are identical"),
    ],
)
def test_a_row_that_could_have_no_several_answers_fails(given, said):
    failed(own(given, n=2, temperature=0.5), "ValueError", said)


@pytest.mark.parametrize("name", ["choice", "structured_outputs"])
def test_a_row_may_have_no_other_form_than_the_jobs_schema(name):
    table = tag(pa.table({"Sampling": [json.dumps({name: None})]}), Unit(0, 0, 1))
    prompt = Prompt(function="helpers.functions:own_sampling")
    form = {"structured_outputs": {"json": "{}"}}
    stage = prepare_stage(
        prompt, dict(MODEL), None, sampling=form, fixed_form="output.schema_model"
    )
    (row,) = stage(table).to_pylist()
    failed(row, "ValueError", f"sampling.{name}: output.schema_model sets one form")


def formed(prompt: dict[str, Any], columns: Any, **sampling: Any) -> list[bool] | None:
    table = tag(pa.table(columns), Unit(0, 0, len(next(iter(columns.values())))))
    made = prepare_stage(Prompt(**prompt), dict(MODEL), None, sampling=sampling)(table)
    return made[FORMED].to_pylist() if FORMED in made.column_names else None


def test_answers_that_must_have_a_form_are_known():
    given = [{}, {"choice": ["a"]}, {"structured_outputs": {"json": {"type": "object"}}}]
    columns = {"Sampling": [json.dumps(own) for own in given]}
    function = {"function": "helpers.functions:own_sampling"}
    assert formed(function, columns) == [False, True, True]
    columns = {"Sampling": ["{}", '{"choice": null}']}
    assert formed(function, columns, choice=["a", "b"]) == [True, False]
    assert formed({"template": "{A}"}, {"A": ["x", None]}, choice=["a"]) == [True, True]
    assert formed({"template": "{A}"}, {"A": ["x"]}) is None


def test_the_order_of_a_rows_schema_travels_with_it():
    one, other = ({"properties": {name: {} for name in names}} for names in ("za", "az"))
    rows = [own({"structured_outputs": {"json": schema}}) for schema in (one, other)]
    texts = [json.loads(row[PARAMS])["structured_outputs"]["json"] for row in rows]
    assert texts == ['{"properties":{"z":{},"a":{}}}', '{"properties":{"a":{},"z":{}}}']


def test_a_rows_structured_outputs_need_the_jobs_choice_taken_back():
    row = own({"structured_outputs": {"regex": "a"}}, choice=["a"])
    failed(row, "ValueError", "choice: null")


@pytest.mark.parametrize("name", ["raises_surrogate", "raises_unprintable"])
def test_an_error_whose_text_cannot_be_kept_still_fails_only_its_row(name):
    rows = run({"function": f"helpers.functions:{name}"}, {"Company": ["a", "b"]})
    assert [row[ERROR]["stage"] for row in rows] == ["prepare", "prepare"]


def test_a_long_message_is_cut():
    (row,) = run({"function": "helpers.functions:by_name"}, {"Company": ["x" * 5000]}, limit=100)
    failed(row, "PromptTooLong")
    assert len(row[ERROR]["message"]) <= 500


def test_a_function_that_is_not_there_loses_the_block_and_stops_the_run():
    table = tag(pa.table({"Company": ["a", "b"]}), Unit(3, 5, 2))
    made = prepare_stage(Prompt(function="helpers.functions:nowhere"), dict(MODEL), None)(table)
    (row,) = made.to_pylist()
    assert (row[SHARD], row[POSITION]) == (3, 5)
    (why,) = losses(made)
    assert why.fatal and str(why).startswith("ConfigError: prompt.function")


# --- lengths ------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_no_room_fails_alone():
    columns = {"A": ["short", "word " * 200]}
    (size,) = {len(run({"template": "{A}"}, {"A": ["short"]})[0][TOKENS])}
    rows = run({"template": "{A}"}, columns, limit=100)
    assert rows[0][ERROR] is None
    failed(rows[1], "PromptTooLong", "engine.max_model_len 100")
    # The last room is for one token of the answer.
    assert run({"template": "{A}"}, {"A": ["short"]}, limit=size + 1)[0][ERROR] is None
    failed(run({"template": "{A}"}, {"A": ["short"]}, limit=size)[0], "PromptTooLong")


def test_without_a_limit_the_models_own_counts():
    rows = run({"template": "{A}"}, {"A": ["a", "word " * 3000]})
    failed(rows[1], "PromptTooLong", "2048")


# --- tokenizers that fail -----------------------------------------------------------------------


class Touchy:
    """The bundled tokenizer, whose chat template or encoding dislikes a word."""

    def __init__(self, dislikes: str, where: str) -> None:
        self.real = load_tokenizer(demo.demo_model_path(), None)
        self.chat_template = self.real.chat_template
        self.dislikes, self.where = dislikes, where

    def apply_chat_template(self, conversations: Any, **kwargs: Any) -> Any:
        if self.where == "chat" and self.dislikes in str(conversations):
            raise RuntimeError("the chat template says no")
        return self.real.apply_chat_template(conversations, **kwargs)

    def __call__(self, texts: list[str], **kwargs: Any) -> Any:
        if self.where == "encode" and any(self.dislikes in t for t in texts):
            raise RuntimeError("the tokenizer says no")
        return self.real(texts, **kwargs)


@pytest.mark.parametrize("where", ["chat", "encode"])
def test_one_row_that_the_tokenizer_refuses_does_not_kill_the_block(monkeypatch, where):
    monkeypatch.setattr(stage, "load_tokenizer", lambda *_: Touchy("bad", where))
    rows = run({"template": "{A}"}, {"A": ["a", "bad", None, "b", "bad"]})
    assert "a<|im_end|>" in text(rows[0]) and "b<|im_end|>" in text(rows[3])
    for row in (rows[1], rows[4]):
        failed(row, "RuntimeError", "says no")
    failed(rows[2], "ValueError", "null")


def test_without_a_chat_template_parts_that_are_not_text_fail_their_row(monkeypatch):
    plain = Touchy("", "")
    plain.chat_template = None
    monkeypatch.setattr(stage, "load_tokenizer", lambda *_: plain)
    parts = ['[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]', '[{"type": "x"}]']
    joined, other = run({"function": "helpers.functions:as_parts"}, {"Parts": parts})
    assert text(joined) == "a\nb"
    failed(other, "ValueError", "parts that are not text")


def test_a_chat_template_gets_parts_as_a_function_returns_them(monkeypatch):
    """Some templates read only the text in parts, as those of SmolVLM and LLaVA do."""
    looping = Touchy("", "")
    parts = "{% for p in m['content'] %}<{{ p['text'] }}>{% endfor %}"
    template = f"{{% for m in messages %}}{parts}{{% endfor %}}"
    monkeypatch.setattr(looping.real, "chat_template", template)
    monkeypatch.setattr(stage, "load_tokenizer", lambda *_: looping)
    content = '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'
    (row,) = run({"function": "helpers.functions:as_parts"}, {"Parts": [content]})
    assert text(row) == "<a><b>"


def test_without_a_chat_template_the_texts_are_joined(monkeypatch):
    plain = Touchy("", "")
    plain.chat_template = None
    monkeypatch.setattr(stage, "load_tokenizer", lambda *_: plain)
    (row,) = run({"template": "Q {A}", "system": "S"}, {"A": ["x"]})
    assert text(row) == "S\n\nQ x"


def test_all_rows_failed_is_a_block_too():
    rows = run({"template": "{A}"}, {"A": pa.array([None, None], pa.string())})
    for row in rows:
        failed(row, "ValueError")


# --- blocks that pass ---------------------------------------------------------------------------


def test_a_lost_block_passes_as_it_is():
    block = lost_block(Unit(3, 2, 5), Loss("SourceError", "gone", fatal=True))
    made = prepare_stage(Prompt(template="{A}"), dict(MODEL), None)(block)
    assert is_lost(made) and made.equals(block)


def test_the_stage_crosses_process_borders():
    import pickle

    stage = prepare_stage(Prompt(template="{A}"), dict(MODEL), 100)
    assert pickle.loads(pickle.dumps(stage)) == stage


# --- prompts that are cut -----------------------------------------------------------------------


def cut_run(side: str, text: str, limit: int, answer: int = 8) -> tuple[dict[str, Any], str]:
    """A row whose prompt is cut on that side, and its prompt as text."""
    prompt = Prompt(template="{A}", system="Be brief.", on_too_long=side)
    table = tag(pa.table({"A": [text]}), Unit(0, 0, 1))
    (row,) = prepare_stage(prompt, dict(MODEL), limit, answer)(table).to_pylist()
    words = load_tokenizer(demo.demo_model_path(), None)
    return row, words.decode(row[TOKENS])


@pytest.mark.parametrize("side", ["truncate_left", "truncate_right"])
def test_a_long_prompt_loses_text_of_the_user_and_nothing_else(side):
    text = " ".join(f"w{i}" for i in range(300))
    row, made = cut_run(side, text, 100)
    assert row[ERROR] is None and row[TRUNCATED] is True
    assert 80 < len(row[TOKENS]) <= 92  # room for the answer, and not cut by much more
    short, whole = cut_run(side, "short", 100)
    assert short[TRUNCATED] is False and "short" in whole
    head, tail = whole.split("short")
    assert made.startswith(head) and made.endswith(tail)
    kept = made.removeprefix(head).removesuffix(tail)
    assert kept and (text.endswith(kept) if side == "truncate_left" else text.startswith(kept))


def test_a_prompt_that_leaves_too_little_for_its_answer_is_cut_as_well():
    text = " ".join(f"w{i}" for i in range(20))
    size = len(cut_run("truncate_left", text, 500)[0][TOKENS])
    assert cut_run("truncate_left", text, size + 8)[0][TRUNCATED] is False
    row, _ = cut_run("truncate_left", text, size + 7)
    assert row[TRUNCATED] is True and len(row[TOKENS]) < size


def test_a_row_whose_message_is_not_the_long_part_fails():
    row, _ = cut_run("truncate_right", "short", 20)
    assert row[TRUNCATED] is False
    failed({**row, PARAMS: None}, "PromptTooLong")


def test_letters_of_several_bytes_are_cut_whole():
    row, made = cut_run("truncate_right", "größe 漢字 " * 100, 100)
    assert row[TRUNCATED] is True and "\ufffd" not in made


def test_a_tokenizer_without_offsets_cuts_as_well(monkeypatch):
    class Slow:
        is_fast = False

        def __init__(self) -> None:
            self.inner = load_tokenizer(demo.demo_model_path(), None)
            self.chat_template = self.inner.chat_template
            self.apply_chat_template = self.inner.apply_chat_template

        def __call__(self, text: Any, **named: Any) -> Any:
            assert "return_offsets_mapping" not in named
            return self.inner(text, **named)

    slow = Slow()
    monkeypatch.setattr(stage, "load_tokenizer", lambda *_: slow)
    table = tag(pa.table({"A": ["word " * 300]}), Unit(0, 0, 1))
    prompt = Prompt(template="{A}", on_too_long="truncate_left")
    (row,) = prepare_stage(prompt, dict(MODEL), 100, 8)(table).to_pylist()
    assert row[ERROR] is None and 50 < len(row[TOKENS]) <= 92
