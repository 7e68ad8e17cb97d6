"""Log probabilities of answers: from what the engine tells to the column of the result."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engine_stage import block
from helpers.small import MODEL, make_job, receipts
from helpers.specs import finish_stage

from prefect_raybatch.demo import demo_model_path
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.stages.answer_logprobs import logprobs_type
from prefect_raybatch.stages.block import load_tokenizer, timed
from prefect_raybatch.stages.engine import answered
from prefect_raybatch.stages.vllm.stepper import Completion
from prefect_raybatch.storage import open_store

END = 2


def written(root: Any, completions: list[Completion], most: int, **more: Any) -> pa.Table:
    """The good rows of a block that was answered so."""
    rows = len(completions)
    table = timed(block(Unit(0, 0, rows)), "prepare", 0.0)
    answers = [(i, [i], one) for i, one in enumerate(completions)]
    table = timed(answered(table, answers, 0.0), "engine", 0.0)
    output = Output.model_validate({"uri": "o", "columns": [], **more.pop("output", {})})
    stage = finish_stage(output, dict(MODEL), open_store(str(root)), "a", logprobs=most, **more)
    (receipt,) = receipts(stage(table))
    assert receipt.lost is None, receipt.lost
    (path,) = [piece.path for piece in receipt.pieces if piece.kind == "data"]
    return pq.read_table(root / "_raybatch/pieces" / path)


def words(*texts: str) -> list[int]:
    tokenizer = load_tokenizer(str(demo_model_path()), None)
    return [tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in texts]


def test_each_token_has_its_logarithm_and_the_most_probable_beside_it(tmp_path):
    retail, law = words("Retail", "Law")
    steps = [[{law: -2.0, retail: -0.5, 7: -1.0}, {END: -0.25, retail: -3.0}]]
    completion = Completion([[law, END]], ["Law"], "stop", 2, 0, steps=steps)
    failed = Completion([], error=("ValueError", "no"))
    made = written(tmp_path, [completion, failed], most=2)
    assert made.schema.field("logprobs").type == logprobs_type(2, 1)
    (told,) = made["logprobs"].to_pylist()
    assert [(one["token"], one["id"], one["logprob"]) for one in told] == [
        ("Law", law, -2.0),
        ("<|im_end|>", END, -0.25),
    ]
    # the most probable two, whether they were chosen or not
    assert [(one["id"], one["logprob"]) for one in told[0]["top"]] == [(retail, -0.5), (7, -1.0)]
    assert [one["token"] for one in told[1]["top"]] == ["<|im_end|>", "Retail"]


def test_several_answers_have_a_list_each_and_without_top_there_is_none(tmp_path):
    retail, law = words("Retail", "Law")
    steps = [[{law: -2.0}], [{retail: -0.5}]]
    completion = Completion([[law], [retail]], ["Law", "Retail"], "length", 2, 0, steps=steps)
    made = written(tmp_path, [completion], most=0, answers=2)
    (told,) = made["logprobs"].to_pylist()
    assert told == [
        [{"token": "Law", "id": law, "logprob": -2.0}],
        [{"token": "Retail", "id": retail, "logprob": -0.5}],
    ]


def test_postprocess_finds_them_under_their_name(tmp_path):
    (law,) = words("Law")
    completion = Completion([[law]], ["Law"], "stop", 2, 0, steps=[[{law: -2.0}]])
    output = {"postprocess": "helpers.functions:least_sure"}
    made = written(tmp_path, [completion], most=0, output=output)
    assert made["least"].to_pylist() == [-2.0]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"sampling": {"logprobs": 1, "choice": ["a"]}, "output": {"probabilities": True}},
            "cannot be combined; remove one",
        ),
        (
            {"sampling": {"logprobs": 30}, "engine": {"max_logprobs": 25}},
            "exceeds engine.max_logprobs (25)",
        ),
        ({"engine": {"task": "embed"}}, "sampling.logprobs: engine.task embed generates no tokens"),
    ],
)
def test_what_they_exclude(groups, said):
    output = {"uri": "o", **groups.get("output", {})}
    with pytest.raises(ConfigError) as caught:
        make_job(**{"sampling": {"logprobs": 1}, **groups, "output": output})
    assert said in str(caught.value)
    make_job(sampling={"logprobs": 30}, engine={"max_logprobs": 30})
