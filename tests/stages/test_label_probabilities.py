"""Probabilities of labels: the formula, the tokens it takes, and the way through the stages."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engine_stage import SPEC, block, started
from helpers.small import MODEL, make_job, receipts

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import Output
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages.block import ERROR, load_tokenizer, timed
from prefect_raybatch.stages.engine import EngineSpec
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.label_probabilities import LabelTokens, check_labels
from prefect_raybatch.stages.vllm.stepper import Completion, Request
from prefect_raybatch.storage import open_store

LABELS = ("Retail", "Law Firm", "Healthcare")
__all__ = ["started"]


class Letters:
    """A tokenizer whose tokens are letters; with `blank` it puts one in front of every text."""

    def __init__(self, blank: bool = False):
        self.blank = blank

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        if self.blank:
            text = " " + text
        return {"input_ids": [ord(letter) for letter in text]}

    def batch_decode(self, sequences: Any, **_: Any) -> list[str]:
        return ["".join(map(chr, ids)) for ids in sequences]


@pytest.mark.parametrize("blank", [False, True])
def test_the_first_token_of_a_label_is_that_of_an_answer(blank):
    assert LabelTokens.of(Letters(blank), ["yes", "no"]).tokens == (ord("y"), ord("n"))  # type: ignore[arg-type]


def test_labels_that_one_step_cannot_tell_apart_are_named():
    with pytest.raises(ConfigError) as caught:
        LabelTokens.of(Letters(), ["yes", "no", "yonder"])  # type: ignore[arg-type]
    assert "output.probabilities: the labels 'yes' and 'yonder'" in str(caught.value)


def test_the_demo_model_tells_labels_apart_at_plan():
    fields = {"choice": list(LABELS)}
    job = make_job(sampling=fields, output={"uri": "o", "probabilities": True})
    check_labels(job, MODEL)
    fields = {"choice": ["Retail", "Retail trade"]}
    job = make_job(sampling=fields, output={"uri": "o", "probabilities": True})
    with pytest.raises(ConfigError, match="'Retail' and 'Retail trade'"):
        check_labels(job, MODEL)


def test_probabilities_are_a_softmax_over_the_labels():
    labels = LabelTokens(("a", "b", "c"), (1, 2, 3))
    found = labels.probabilities({1: math.log(0.2), 2: math.log(0.1), 9: math.log(0.7)})
    assert found is not None and dict(found) == pytest.approx({"a": 2 / 3, "b": 1 / 3, "c": 0.0})
    moved = labels.probabilities({1: 1000.0, 2: 1000.0 - math.log(2), 3: -math.inf})
    assert moved is not None and dict(moved) == pytest.approx(dict(found))
    assert labels.probabilities({}) is None and labels.probabilities({1: -math.inf}) is None


def test_each_row_has_a_map_of_its_labels(started, tmp_path):
    tokenizer = load_tokenizer(str(demo_model_path()), None)
    first = LabelTokens.of(tokenizer, LABELS).tokens
    seen: list[Request] = []

    def answer(requests: list[Request]) -> list[Completion]:
        seen.extend(requests)
        told = [{first[0]: -1.0, first[1]: -1.0, first[2]: -math.inf}, None]
        return [
            Completion([[5]], ["Retail"], "stop", 2, 0, logprobs=t)
            for t, _ in zip(told, requests, strict=True)
        ]

    spec = EngineSpec(SPEC.model, SPEC.sampling, SPEC.arguments, merge=False, labels=LABELS)
    stage, _ = started(answer, spec=spec)
    table = stage(timed(block(Unit(0, 0, 2)), "prepare", 0.0))
    assert all(r.params["logprob_token_ids"] == list(first) for r in seen)
    errors = [e and e["kind"] for e in table[ERROR].to_pylist()]
    assert sorted(errors, key=str) == [None, "ProbabilitiesMissing"]
    output = Output.model_validate({"uri": "o", "probabilities": True})
    (receipt,) = receipts(Finish(output, dict(MODEL), open_store(str(tmp_path)), "a")(table))
    assert receipt.lost is None, receipt.lost
    (path,) = [p.path for p in receipt.pieces if p.kind == "data"]
    made = pq.read_table(tmp_path / "_raybatch/pieces" / path)
    assert made["probabilities"].to_pylist() == [list(zip(LABELS, [0.5, 0.5, 0.0], strict=True))]
    assert pa.types.is_map(made.schema.field("probabilities").type)


def test_a_tokenizer_that_cannot_tell_them_apart_ends_the_run_before_an_engine_starts(started):
    spec = EngineSpec(SPEC.model, SPEC.sampling, SPEC.arguments, labels=("Retail", "Retail trade"))
    stage, factory = started(spec=spec)
    table = stage(block(Unit(0, 0, 2)))
    (why,) = table["__rb_lost"].to_pylist()
    assert why["fatal"] and "begin with the same token" in why["message"]
    assert not factory.arguments


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({}, "set sampling.choice"),
        ({"sampling": {"choice": ["a", "b"], "n": 2, "temperature": 1.0}}, "leave sampling.n out"),
        ({"sampling": {"choice": [str(i) for i in range(129)]}}, "at most 128 labels"),
        ({"sampling": {"choice": ["a"]}, "engine": {"stage": "ray.data.llm"}}, "engine.stage"),
    ],
)
def test_what_probabilities_exclude(groups, said):
    with pytest.raises(ConfigError) as caught:
        make_job(output={"uri": "o", "probabilities": True}, **groups)
    assert "output.probabilities: " in str(caught.value) and said in str(caught.value)
