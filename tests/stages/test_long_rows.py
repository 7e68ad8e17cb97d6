"""Rows of millions of characters: what does not fit is told without tokenizing all of it."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from helpers.small import MODEL, make_job
from helpers.specs import prepare_stage
from helpers.tiny_models import write_tokenizer

from prefect_raybatch import demo
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.plan.prompt_lengths import measure
from prefect_raybatch.stages import prepare as stage
from prefect_raybatch.stages.block import load_tokenizer, tag
from prefect_raybatch.stages.columns import ERROR, TOKENS, TRUNCATED
from prefect_raybatch.stages.pooling import Texts
from prefect_raybatch.stages.texts import PrepareTexts
from prefect_raybatch.stages.tokens import CHARACTERS_AT_ONCE

LONG = "a long text of many words, and no end of it; " * 50_000  # 2.2 million characters


class Counting:
    """The tokenizer `real`, and how many characters it was given."""

    def __init__(self, real: Any) -> None:
        self.real, self.characters, self.most = real, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, texts: Any, *more: Any, **named: Any) -> Any:
        groups = [texts, *(m for m in more if isinstance(m, list))]
        size = sum(len(t) for g in groups for t in ([g] if isinstance(g, str) else g))
        self.characters += size
        self.most = max(self.most, size)
        return self.real(texts, *more, **named)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(load_tokenizer(demo.demo_model_path(), None))
    monkeypatch.setattr(stage, "load_tokenizer", lambda *_: counting)
    return counting


def conversation(**where: str) -> str:
    said = [
        {"role": "user", "content": where.get("first", "a")},
        {"role": "assistant", "content": where.get("second", "b")},
        {"role": "user", "content": where.get("third", "c")},
    ]
    return json.dumps(said)


DOCUMENTS = (
    "{% for d in documents %}{{ d.text }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% endfor %}"
)


@pytest.mark.parametrize("side", ["quarantine", "truncate_left", "truncate_right"])
@pytest.mark.parametrize(
    ("prompt", "row"),
    [
        ({"template": "{A}"}, {"A": LONG}),
        ({"template": "{A}"}, {"A": "<|im_end|>" + LONG}),
        ({"template": "{A} {A}"}, {"A": LONG}),
        ({"messages": "A"}, {"A": conversation(first=LONG)}),
        ({"messages": "A"}, {"A": conversation(second=LONG)}),
        ({"messages": "A"}, {"A": conversation(third=LONG)}),
        (
            {"template": "x", "documents": "A", "chat_template": DOCUMENTS},
            {"A": json.dumps([LONG])},
        ),
        ({"function": "helpers.functions:as_text"}, {"Company": LONG}),
    ],
    ids=["text", "control token", "twice", "first", "second", "third", "documents", "function"],
)
def test_a_row_that_is_far_too_long_costs_no_more_than_the_context(prompt, row, side, counted):
    columns = {name: [value] for name, value in row.items()}
    table = tag(pa.table(columns), Unit(0, 0, 1))
    (made,) = prepare_stage(Prompt(**prompt, on_too_long=side), dict(MODEL), 256, 8)(
        table
    ).to_pylist()
    assert counted.characters < 50_000
    last = "template" in prompt or "function" in prompt or made[ERROR] is None
    if side == "quarantine" or not last or "documents" in prompt:
        assert made[ERROR]["kind"] == "PromptTooLong"
        assert "256" in made[ERROR]["message"]
    else:
        assert made[TRUNCATED] and 200 < len(made[TOKENS]) <= 248


@pytest.mark.parametrize("side", ["truncate_left", "truncate_right"])
def test_a_cut_by_characters_first_leaves_what_a_cut_of_the_whole_does(side, counted, monkeypatch):
    text = " ".join(f"word{i}" for i in range(3000))
    prompt = Prompt(template="{A}", system="s", on_too_long=side)
    table = tag(pa.table({"A": [text]}), Unit(0, 0, 1))
    made = prepare_stage(prompt, dict(MODEL), 256, 8)(table)[TOKENS].to_pylist()
    monkeypatch.setattr("prefect_raybatch.stages.tokens.CHARACTERS_A_TOKEN", 1 << 20)
    assert prepare_stage(prompt, dict(MODEL), 256, 8)(table)[TOKENS].to_pylist() == made


def test_text_of_long_tokens_is_not_taken_for_too_long(counted):
    """A run of one letter takes few tokens, so that many characters fit."""
    word = max((t for t in counted.real.get_vocab() if t.isalpha()), key=len)
    text = word * (200 * 8 // len(word) + 100)
    for limit in (100, 200, 400, 800):
        table = tag(pa.table({"A": [text]}), Unit(0, 0, 1))
        (made,) = prepare_stage(Prompt(template="{A}"), dict(MODEL), limit)(table).to_pylist()
        whole = counted.real.apply_chat_template(
            [[{"role": "user", "content": text}]], tokenize=False, add_generation_prompt=True
        )
        size = len(counted.real(whole, add_special_tokens=False)["input_ids"][0])
        assert (made[ERROR] is None) is (size < limit)


def test_many_rows_go_to_the_tokenizer_in_parts(counted):
    texts = [LONG[: CHARACTERS_AT_ONCE // 4]] * 10
    table = tag(pa.table({"A": texts}), Unit(0, 0, 10))
    made = prepare_stage(Prompt(template="{A}"), dict(MODEL), 1 << 17)(table)
    assert made[ERROR].null_count == 10
    assert len(set(map(tuple, made[TOKENS].to_pylist()))) == 1
    assert counted.most <= CHARACTERS_AT_ONCE


@pytest.mark.parametrize("texts", [Texts.ONE, Texts.PAIR, Texts.SEPARATE])
@pytest.mark.parametrize("side", ["quarantine", "truncate_left", "truncate_right"])
def test_texts_that_are_embedded_or_compared_are_bounded_too(texts, side, monkeypatch, tmp_path):
    counting = Counting(write_tokenizer(tmp_path))
    monkeypatch.setattr(stage, "load_tokenizer", lambda *_: counting)
    prompt = Prompt(template="{A}", second="{B}", on_too_long=side)
    table = tag(pa.table({"A": ["the quick fox " * 100_000], "B": ["a dog"]}), Unit(0, 0, 1))
    (made,) = prepare_stage(prompt, dict(MODEL), 64, texts=texts, kind=PrepareTexts)(
        table
    ).to_pylist()
    assert counting.characters < 20_000
    if side == "quarantine":
        assert made[ERROR]["kind"] == "PromptTooLong" and "64" in made[ERROR]["message"]
    else:
        assert made[TRUNCATED] and len(made[TOKENS]) == 64


def test_a_sample_of_prompt_lengths_is_bounded(counted):
    job = make_job(prompt={"template": "{A}"})
    table = pa.table({"A": ["short", LONG]})
    told = measure(compile_job(job), dict(MODEL), [("file", 0, table)])
    assert counted.characters < 100_000
    assert told.longest == {"file": "file", "row": 1}
    size = len(counted.real(LONG)["input_ids"])
    assert 0.8 * size < told.most < 1.2 * size
