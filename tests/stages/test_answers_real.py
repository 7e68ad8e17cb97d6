"""Answers in JSON and the probabilities of labels, by real vLLM on a CPU with the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.job.answer_schema import (
    schema_engine_fields,
    schema_sampling_fields,
    schema_text,
)
from prefect_raybatch.stages.block import Failure, load_tokenizer
from prefect_raybatch.stages.label_probabilities import LabelTokens
from prefect_raybatch.stages.typed_answers import reader_of
from prefect_raybatch.stages.vllm.stepper import Completion, Request, SteppedEngine

MODEL = str(demo_model_path())
SCHEMA = schema_text(
    {
        "type": "object",
        "properties": {
            "industry": {"enum": ["Retail", "Law Firm"]},
            "stars": {"type": "integer", "minimum": 0, "maximum": 9, "multipleOf": 3},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
            "seat": {
                "type": "object",
                "properties": {"country": {"enum": ["DE", "FR"]}, "main": {"type": "boolean"}},
                "required": ["country", "main"],
            },
        },
        "required": ["industry", "stars", "tags", "seat"],
    }
)
LABELS = ("Retail", "Law Firm", "Healthcare")
PROMPTS = ("Smith & Partners LLP", "Corner Shop", "General Hospital", "x")


@pytest.fixture(scope="module")
def engine() -> Iterator[SteppedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        fields = dict(
            model=MODEL,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            seed=0,
        )
        with SteppedEngine(schema_engine_fields(fields, SCHEMA)) as made:
            yield made


def tokens(text: str) -> list[int]:
    found = load_tokenizer(MODEL, None)(text, add_special_tokens=False)
    return list(found["input_ids"])


def text_of(done: Completion) -> str:
    (text,) = load_tokenizer(MODEL, None).batch_decode(done.token_ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_of_an_engine_fits_the_schema_or_was_cut_off(engine, temperature):
    sampling = {"temperature": temperature, "max_tokens": 160, "seed": 5}
    params = schema_sampling_fields(sampling, SCHEMA)
    done = engine.run([Request(tokens(prompt), params) for prompt in PROMPTS])
    reader = reader_of(SCHEMA)
    for one in done:
        assert one.error is None and one.finish_reason == "stop", one
        text = text_of(one)
        found = reader.read(text)
        assert not isinstance(found, Failure), found
        assert text == json.dumps(found[0], separators=(",", ":"))  # no blanks, names in order
        assert list(found[0]) == ["industry", "stars", "tags", "seat"]
    (short,) = engine.run([Request(tokens("x"), {**params, "max_tokens": 3})])
    assert short.finish_reason == "length"
    assert isinstance(reader.read(text_of(short)), Failure)


def from_transformers(labels: LabelTokens, prompts: list[list[int]]) -> list[dict[str, float]]:
    """Of the same model's own logits, step by step through each label."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    made = []
    for prompt in prompts:
        found = {}
        for label, path in zip(labels.labels, labels.paths, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *path]])).logits[0]
            share = 1.0
            for at, token in enumerate(path):
                going = {p[at] for p in labels.paths if p[:at] == path[:at] and len(p) > at}
                step = logits[len(prompt) + at - 1]
                share *= float(step[token].exp() / step[list(going)].exp().sum())
            found[label] = share
        made.append(found)
    return made


ALIKE = ("Retail", "Retail trade", "Real Estate", "Law Firm")


@pytest.mark.parametrize(
    ("names", "temperature", "places"), [(LABELS, 0.0, 1), (LABELS, 0.7, 1), (ALIKE, 0.7, 3)]
)
def test_probabilities_of_labels_are_those_of_the_model(engine, names, temperature, places):
    labels = LabelTokens.of(load_tokenizer(MODEL, None), names)
    assert len(labels.forks) == places
    prompts = [tokens(prompt) for prompt in PROMPTS]
    sampling = {"temperature": temperature, "max_tokens": 12, "choice": list(names)}
    done = engine.run([Request(prompt, labels.asked(sampling)) for prompt in prompts])
    expected = from_transformers(labels, prompts)
    for prompt, one, right in zip(prompts, done, expected, strict=True):
        assert one.error is None and text_of(one) in names
        more = [Request([*prompt, *t], fields) for t, fields in labels.asked_later(sampling)]
        later = [told.logprobs or {} for told in engine.run(more)]
        found = labels.probabilities(one.logprobs or {}, later)
        assert dict(found or ()) == pytest.approx(right, abs=1e-4)
        assert sum(right.values()) == pytest.approx(1)
    plain = engine.run([Request(prompts[0], sampling)])
    assert plain[0].logprobs is None


def test_several_answers_have_a_finish_reason_each(engine):
    params = {"temperature": 1.0, "n": 3, "max_tokens": 4, "seed": 1, "choice": ["Retail", "No"]}
    (done,) = engine.run([Request(tokens("x"), params)])
    assert len(done.token_ids) == 3 and done.finish_reasons is not None
    assert set(done.finish_reasons) <= {"stop", "length"} and len(done.finish_reasons) == 3
