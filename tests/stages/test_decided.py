"""Answers stopped when they are certain, against an engine that writes each label out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefect_raybatch.demo import LABELS
from prefect_raybatch.job.early_stop import label_cap, may_stop_early
from prefect_raybatch.stages.label_cutoff import EarlyStop, LabelCutoff, Labels
from prefect_raybatch.stages.vllm.stepper import Completion, Request

END = 0


@dataclass
class Grammar:
    """An engine whose model is a hash: of the tokens that the choice lets through it takes the one
    with the greatest hash of what stands before it and of the token's bytes."""

    token_bytes: list[bytes]
    asked: list[Request] = field(default_factory=list)

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked += requests
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Completion:
        made = []
        for number in range(request.params.get("n", 1)):
            made.append(self.one(request, number))
        reasons = [reason for _, reason in made]
        odd = next((reason for reason in reasons if reason != "stop"), "stop")
        several = reasons if len(reasons) > 1 else None
        return Completion([t for t, _ in made], None, odd, 3, 0, finish_reasons=several)

    def one(self, request: Request, number: int) -> tuple[list[int], str]:
        labels = [label.encode() for label in request.params["choice"]]
        tokens: list[int] = []
        while len(tokens) < request.params.get("max_tokens", 1 << 30):
            begun = b"".join(self.token_bytes[t] for t in tokens)
            left = [label[len(begun) :] for label in labels if label.startswith(begun)]
            may = [END] if b"" in left else []
            may += [
                i
                for i, text in enumerate(self.token_bytes)
                if text and any(rest.startswith(text) for rest in left)
            ]
            before = repr((list(request.prompt_token_ids) + tokens, number)).encode()
            tokens.append(
                max(may, key=lambda i: hashlib.sha256(before + self.token_bytes[i]).digest())
            )
            if tokens[-1] == END:
                return tokens, "stop"
        return tokens, "length"

    def text(self, completion: Completion) -> list[str]:
        return completion.texts or [
            b"".join(self.token_bytes[t] for t in tokens if t != END).decode()
            for tokens in completion.token_ids
        ]


def stopping(way: EarlyStop, engine: Grammar) -> LabelCutoff:
    return LabelCutoff(way, lambda: engine.token_bytes)


def vocabulary(labels: Sequence[str], pieces: Sequence[tuple[int, int, int]]) -> list[bytes]:
    """The end, each byte of the labels, and pieces of them that may cut a character."""
    texts = [label.encode() for label in labels]
    found = {bytes([byte]) for text in texts for byte in text}
    for which, start, length in pieces:
        text = texts[which % len(texts)]
        start %= len(text)
        found.add(text[start : start + 1 + length])
    return [b"", *sorted(found)]


label = st.text(st.sampled_from("aabRe éß日"), min_size=1, max_size=7)
piece = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 5))


@example(["R", "Re", "Retail"], [(2, 0, 2), (2, 2, 3)], "first_token", 1)
@example(["é", "è"], [], "first_token", 1)
@given(
    st.lists(label, min_size=1, max_size=6, unique=True),
    st.lists(piece, max_size=12),
    st.sampled_from(["decided", "first_token"]),
    st.integers(1, 3),
)
def test_an_answer_is_the_one_that_would_have_been_written_out(labels, pieces, way, n):
    """One request's first round decides as the whole one does: the hash is of the same tokens."""
    engine = Grammar(vocabulary(labels, pieces))
    params: dict[str, Any] = {"temperature": 0.7, "choice": labels, "max_tokens": 99}
    if n > 1:
        params["n"] = n
    requests = [Request([7, i], params) for i in range(8)]
    whole = [engine.text(c) for c in engine.run(requests)]
    engine.asked.clear()
    made = stopping(way, engine).run(engine.run, requests)
    assert [engine.text(c) for c in made] == whole
    assert {c.finish_reason for c in made} == {"stop"}
    assert {r for c in made for r in c.finish_reasons or ["stop"]} == {"stop"}
    cap = label_cap(labels)
    assert max(r.params["max_tokens"] for r in engine.asked) <= cap
    if way == "first_token" and n == 1:
        assert engine.asked[0].params["max_tokens"] == 1


@pytest.mark.parametrize(
    ("labels", "cap"),
    [
        (LABELS, 3),  # Retail, Real Estate
        (["yes"], 1),
        (["yes", "no"], 1),
        (["R", "Re", "Retail"], 3),
        (["é", "è"], 2),  # of two bytes, the first one the same
        (["a", "a"], 1),
    ],
)
def test_the_cap_is_one_byte_more_than_two_labels_share(labels, cap):
    assert label_cap(labels) == cap


def test_labels_that_a_token_decides_cost_one_step():
    engine = Grammar([b"", b"Re", b"tail", b"al", b" Estate", b"Other"])
    requests = [Request([i], {"choice": ["Retail", "Real Estate", "Other"]}) for i in range(20)]
    made = stopping("first_token", engine).run(engine.run, requests)
    again = engine.asked[20:]
    assert 0 < len(again) < 20  # the rows that began with Re
    assert {tuple(r.params["choice"]) for r in again} == {("tail", "al Estate")}
    assert all(r.prompt_token_ids[1:] == [1] for r in again)
    assert {tuple(engine.text(c)) for c in made} == {("Retail",), ("Real Estate",), ("Other",)}
    for completion, request in zip(made, requests, strict=True):
        assert completion.prompt_tokens == 3
        assert len(completion.token_ids[0]) == (1 if engine.text(completion) == ["Other"] else 2)
        assert request.params == {"choice": ["Retail", "Real Estate", "Other"]}


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["x"]},
        {"stop_token_ids": [4]},
        {"ignore_eos": True},
        {"min_tokens": 2},
        {"bad_words": ["x"]},
        {"logprobs": 2},
        {"logit_bias": {"3": 1.0}},
        {"allowed_token_ids": [1]},
        {"skip_special_tokens": False},
        {"detokenize": True},
        {"max_tokens": "4"},
        {"max_tokens": 0},
        {"choice": None},
        {"choice": "Retail"},
        {"choice": None, "structured_outputs": {"regex": "a+"}},
        {"choice": None, "structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}},
    ],
)
def test_what_looks_at_later_tokens_is_asked_whole(more):
    request = Request([1], {"choice": ["Retail", "Other"], "max_tokens": 16, **more})
    seen: list[Request] = []

    def ask(requests: Sequence[Request]) -> list[Completion]:
        seen.extend(requests)
        return [Completion([[5]], None, "length") for _ in requests]

    (made,) = LabelCutoff("decided", lambda: [b""] * 9).run(ask, [request])
    assert seen == [request] and made.finish_reason == "length"


@pytest.mark.parametrize(
    "more", [{"seed": 1}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"n": 2}]
)
def test_a_second_request_is_no_way_for_what_it_would_see_otherwise(more):
    engine = Grammar([b"", b"Re", b"tail", b"al", b"O"])
    requests = [Request([i], {"choice": ["Retail", "Real", "O"], **more}) for i in range(8)]
    whole = [engine.text(c) for c in engine.run(requests)]
    engine.asked.clear()
    made = stopping("first_token", engine).run(engine.run, requests)
    assert [engine.text(c) for c in made] == whole
    assert len(engine.asked) == 8 and {r.params["max_tokens"] for r in engine.asked} == {3}


def test_penalties_of_no_effect_do_not_count():
    engine = Grammar([b"", b"a", b"b"])
    fields = {"choice": ["a", "b"], "repetition_penalty": 1.0, "frequency_penalty": 0.0}
    stopping("first_token", engine).run(engine.run, [Request([1], fields)])
    assert [r.params["max_tokens"] for r in engine.asked] == [1]


def test_the_long_form_of_a_choice_is_one_too():
    engine = Grammar([b"", b"Re", b"tail", b"al"])
    asked: list[Request] = []

    def ask(requests: Sequence[Request]) -> list[Completion]:
        asked.extend(requests)
        short = [
            replace(r, params={"choice": ["Retail", "Real"], "max_tokens": r.params["max_tokens"]})
            for r in requests
        ]
        return engine.run(short)

    fields = {"structured_outputs": {"choice": ["Retail", "Real"]}}
    (made,) = stopping("decided", engine).run(ask, [Request([1], fields)])
    assert engine.text(made) in (["Retail"], ["Real"]) and made.finish_reason == "stop"
    assert asked[0].params == {**fields, "max_tokens": 3}


def test_a_label_longer_than_max_tokens_is_whole_where_it_is_certain_and_else_cut_off():
    engine = Grammar([b"", *(bytes([b]) for b in sorted(set(b"RetailReal Other")))])
    labels = ["Retail", "Real", "Other"]
    requests = [Request([i], {"choice": labels, "max_tokens": 2}) for i in range(12)]
    made = stopping("decided", engine).run(engine.run, requests)
    found = {(engine.text(c)[0], c.finish_reason) for c in made}
    assert found == {("Other", "stop"), ("Re", "length")}


def test_errors_and_other_requests_pass_by():
    def ask(requests: Sequence[Request]) -> list[Completion]:
        return [
            Completion([], error=("ValueError", "no")),
            Completion([[1]], None, "length"),
            Completion([[1]], None, "abort"),
        ]

    fields = {"choice": ["ab", "b"]}
    requests = [Request([1], fields), Request([2], {"max_tokens": 1}), Request([3], fields)]
    made = LabelCutoff("decided", lambda: [b"", b"a"]).run(ask, requests)
    assert made[0].error and made[0].texts is None
    assert (made[1].texts, made[1].finish_reason) == (None, "length")
    assert (made[2].texts, made[2].finish_reason) == (None, "abort")


def test_answers_are_asked_whole_where_tokens_cannot_be_read():
    engine = Grammar([b"", b"a", b"b"])
    early = LabelCutoff("decided", lambda: None)
    requests = [Request([1], {"choice": ["a", "b"], "max_tokens": 9})]
    assert early.run(engine.run, requests)[0].texts is None
    assert engine.asked == requests and not early.ready()


def test_remembered_tokens_are_of_their_own_labels():
    bytes_of = [b"", b"a", b"b"]
    one, two = Labels.of(["ab", "b"]), Labels.of(["aab", "ba"])
    assert (one.decided([1], bytes_of), two.decided([1], bytes_of)) == ("ab", "aab")
    assert one.ended([1, 2, 0], bytes_of) == "ab" and one.ended([1, 0], bytes_of) is None


@pytest.mark.parametrize(
    ("arguments", "may"),
    [
        ({}, True),
        ({"structured_outputs_config": {"backend": "auto"}}, True),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, True),
        ({"structured_outputs_config": {"backend": "guidance"}}, False),
        ({"structured_outputs_config": {"reasoning_parser": "qwen3"}}, True),
        ({"reasoning_parser": "qwen3"}, False),
        ({"logits_processors": ["a:b"]}, False),
        ({"speculative_config": {"method": "ngram"}}, False),
    ],
)
def test_another_grammar_than_xgrammars_is_asked_whole(arguments, may):
    assert may_stop_early(arguments) is may


@pytest.mark.parametrize(
    ("way", "fields", "concerned"),
    [
        ("decided", {"choice": ["a", "b"], "max_tokens": 9}, True),
        ("first_token", {"structured_outputs": {"choice": ["a", "b"]}}, True),
        ("off", {"choice": ["a", "b"]}, False),
        ("decided", {"structured_outputs": {"json": {"type": "object"}}}, False),
        ("decided", {"choice": ["a", "b"], "stop": ["."]}, False),
        ("decided", {"max_tokens": 9}, False),
    ],
)
def test_the_bytes_of_tokens_are_made_for_a_choice_alone(way, fields, concerned):
    assert LabelCutoff(way, lambda: None).concerns(fields) is concerned
