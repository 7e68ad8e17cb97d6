"""Probabilities of labels: the formula, the tokens it takes, and the way through the stages."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engine_stage import LAUNCH, block, started
from helpers.small import MODEL, make_job, receipts
from helpers.specs import finish_stage

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages.block import load_tokenizer, timed
from prefect_raybatch.stages.columns import CHANCES, ERROR
from prefect_raybatch.stages.engine import EngineLaunch
from prefect_raybatch.stages.label_probabilities import Fork, LabelTokens, check_labels
from prefect_raybatch.stages.vllm.stepper import Completion, Request
from prefect_raybatch.storage import open_store

LABELS = ("Retail", "Law Firm", "Healthcare")
__all__ = ["started"]


class Letters:
    """A tokenizer whose tokens are letters; with `blank` it puts one in front of every text."""

    def __init__(self, blank: bool = False, end: int | None = 0):
        self.blank, self.eos_token_id = blank, end

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        if self.blank:
            text = " " + text
        return {"input_ids": [ord(letter) for letter in text]}

    def batch_decode(self, sequences: Any, **_: Any) -> list[str]:
        return ["".join(map(chr, ids)) for ids in sequences]


@pytest.mark.parametrize("blank", [False, True])
def test_the_tokens_of_a_label_are_those_of_an_answer(blank):
    found = LabelTokens.of(Letters(blank), ["yes", "no"])  # type: ignore[arg-type]
    assert found.paths == (tuple(map(ord, "yes")), tuple(map(ord, "no")))
    assert found.forks == (Fork((), (ord("y"), ord("n"))),)
    assert found.later == ()


def test_labels_part_where_their_tokens_do_or_one_ends():
    labels = LabelTokens.of(Letters(), ["ab", "abc", "ad", "x"])  # type: ignore[arg-type]
    a, b, c, d, x = map(ord, "abcdx")
    assert labels.forks == (Fork((), (a, x)), Fork((a,), (b, d)), Fork((a, b), (0, c)))
    assert labels.with_logprobs({"temperature": 0.5, "n": 1})["logprob_token_ids"] == [a, x]
    usual = {"temperature": 0.5, "max_tokens": 1}
    assert labels.further_requests({"temperature": 0.5, "choice": ["ab"]}) == [
        ([a], {**usual, "logprob_token_ids": [b, d]}),
        ([a, b], {**usual, "logprob_token_ids": [0, c]}),
    ]
    half = math.log(0.5)
    found = labels.probabilities({a: half, x: half}, [{b: half, d: half}, {0: half, c: -math.inf}])
    assert dict(found or ()) == pytest.approx({"ab": 0.25, "abc": 0, "ad": 0.25, "x": 0.5})
    assert labels.probabilities({a: half, x: half}, [{b: half}, {}]) is None


def test_labels_that_all_begin_alike_ask_nothing_of_the_first_step():
    labels = LabelTokens.of(Letters(), ["ab", "ac"])  # type: ignore[arg-type]
    assert labels.with_logprobs({"n": 1}) == {"n": 1}
    assert [tokens for tokens, _ in labels.further_requests({})] == [[ord("a")]]
    assert LabelTokens.of(Letters(), ["ab"]).probabilities({}) == [("ab", 1.0)]  # type: ignore[arg-type]


def test_labels_that_cannot_be_told_apart_are_named():
    with pytest.raises(ConfigError, match=r"'a' of sampling.choice is the beginning of another"):
        LabelTokens.of(Letters(end=None), ["a", "ab"])  # type: ignore[arg-type]

    class Deaf(Letters):
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return super().__call__(text.lower())

    with pytest.raises(ConfigError, match=r"the labels 'yes' and 'Yes' of .* have the same tokens"):
        LabelTokens.of(Deaf(), ["yes", "no", "Yes"])  # type: ignore[arg-type]


def test_labels_that_begin_alike_pass_the_plan():
    fields = {"choice": ["Retail", "Retail trade"]}
    job = make_job(sampling=fields, output={"uri": "o", "probabilities": True})
    check_labels(["Retail", "Retail trade"], model_request(job.engine), MODEL)


def test_probabilities_are_a_softmax_over_the_labels():
    labels = LabelTokens(("a", "b", "c"), ((1,), (2,), (3,)))
    found = labels.probabilities({1: math.log(0.2), 2: math.log(0.1), 9: math.log(0.7)})
    assert found is not None and dict(found) == pytest.approx({"a": 2 / 3, "b": 1 / 3, "c": 0.0})
    moved = labels.probabilities({1: 1000.0, 2: 1000.0 - math.log(2), 3: -math.inf})
    assert moved is not None and dict(moved) == pytest.approx(dict(found))
    assert labels.probabilities({}) is None and labels.probabilities({1: -math.inf}) is None


def test_each_row_has_a_map_of_its_labels(started, tmp_path):
    tokenizer = load_tokenizer(str(demo_model_path()), None)
    (fork,) = LabelTokens.of(tokenizer, LABELS).forks
    first = fork.tokens
    seen: list[Request] = []

    def answer(requests: list[Request]) -> list[Completion]:
        seen.extend(requests)
        told = [{first[0]: -1.0, first[1]: -1.0, first[2]: -math.inf}, None]
        return [
            Completion([[5]], ["Retail"], "stop", 2, 0, logprobs=t)
            for t, _ in zip(told, requests, strict=True)
        ]

    spec = EngineLaunch(LAUNCH.model, LAUNCH.sampling, LAUNCH.arguments, merge=False, labels=LABELS)
    stage, _ = started(answer, launch=spec)
    table = stage(timed(block(Unit(0, 0, 2)), "prepare", 0.0))
    assert all(r.params["logprob_token_ids"] == list(first) for r in seen)
    errors = [e and e["kind"] for e in table[ERROR].to_pylist()]
    assert sorted(errors, key=str) == [None, "ProbabilitiesMissing"]
    output = Output.model_validate({"uri": "o", "probabilities": True})
    (receipt,) = receipts(finish_stage(output, dict(MODEL), open_store(str(tmp_path)), "a")(table))
    assert receipt.lost is None, receipt.lost
    (path,) = [p.path for p in receipt.pieces if p.kind == "data"]
    made = pq.read_table(tmp_path / "_raybatch/pieces" / path)
    assert made["probabilities"].to_pylist() == [list(zip(LABELS, [0.5, 0.5, 0.0], strict=True))]
    assert pa.types.is_map(made.schema.field("probabilities").type)


def test_labels_that_begin_alike_take_a_request_more_a_row(started):
    labels = ("Retail", "Retail trade")
    seen: list[Request] = []

    def answer(requests: list[Request]) -> list[Completion]:
        seen.extend(requests)
        told = [None, (0.0, -math.inf), None, (-math.log(3), -math.log(1.5)), None, None]
        failed = ("ValueError", "too long")
        made = []
        for request, some in zip(requests, told, strict=True):
            asked = request.params.get("logprob_token_ids", ())
            more = {"logprobs": dict(zip(asked, some, strict=True))} if some else {}
            error = failed if asked and not some else None
            made.append(Completion([[5]], ["Retail"], "stop", 2, 0, error, **more))
        return made

    spec = EngineLaunch(LAUNCH.model, LAUNCH.sampling, LAUNCH.arguments, merge=False, labels=labels)
    stage, _ = started(answer, launch=spec)
    table = stage(timed(block(Unit(0, 0, 3)), "prepare", 0.0))
    (fork,) = LabelTokens.of(load_tokenizer(str(demo_model_path()), None), labels).later
    for one, more in pairs(seen):
        assert more.prompt_token_ids == [*one.prompt_token_ids, *fork.before]
        assert more.params["max_tokens"] == 1 and "choice" not in more.params
    made = [dict(c) if c else None for c in table[CHANCES].to_pylist()]
    assert sorted((c and round(c["Retail"], 6) for c in made), key=str) == [0.333333, 1.0, None]
    assert [e["message"] for e in table[ERROR].to_pylist() if e] == ["too long"]


def pairs(requests: list[Request]) -> list[tuple[Request, Request]]:
    return list(zip(requests[::2], requests[1::2], strict=True))


def test_a_tokenizer_that_cannot_tell_them_apart_ends_the_run_before_an_engine_starts(
    started, monkeypatch
):
    from prefect_raybatch.stages import engine

    monkeypatch.setattr(engine, "load_tokenizer", lambda *_: Letters(end=None))
    spec = EngineLaunch(
        LAUNCH.model, LAUNCH.sampling, LAUNCH.arguments, labels=("Retail", "Retail trade")
    )
    stage, factory = started(launch=spec)
    table = stage(block(Unit(0, 0, 2)))
    (why,) = table["__rb_lost"].to_pylist()
    assert why["fatal"] and "is the beginning of another" in why["message"]
    assert not factory.arguments


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({}, "set sampling.choice"),
        ({"sampling": {"choice": ["a", "b"], "n": 2, "temperature": 1.0}}, "remove sampling.n"),
        ({"sampling": {"choice": [str(i) for i in range(129)]}}, "at most 128 labels"),
    ],
)
def test_what_probabilities_exclude(groups, said):
    with pytest.raises(ConfigError) as caught:
        make_job(output={"uri": "o", "probabilities": True}, **groups)
    assert "output.probabilities" in str(caught.value) and said in str(caught.value)
