"""Tasks that pool, from row to column, over engines that are planned: texts, vectors, results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import Stepped
from helpers.small import make_job, receipts
from helpers.specs import finish_stage
from helpers.tiny_models import write_tokenizer

from prefect_raybatch.compile.job import compile_job, model_request
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.stages.block import tag
from prefect_raybatch.stages.columns import (
    CACHED_TOKENS,
    ERROR,
    MERGED,
    PARAMS,
    SECOND,
    TOKENS,
    TRUNCATED,
)
from prefect_raybatch.stages.engine import EngineLaunch, EngineStage
from prefect_raybatch.stages.pooling import Pooling
from prefect_raybatch.stages.texts import prepare_of
from prefect_raybatch.stages.vllm.stepper import Completion, Request
from prefect_raybatch.storage import open_store

ONE = {"template": "{a}"}
TWO = {"template": "{a}", "second": "{b}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


class Stages:
    """Prepare, engine and finish of a job, over an engine that answers by a function."""

    def __init__(self, folder: Path, config: dict[str, Any], **groups: Any):
        config = {"max_position_embeddings": 16, **config}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        groups["engine"] = {"model": str(folder), **groups["engine"]}
        groups.setdefault("output", {"uri": "out", "column": "answer", "columns": ["a"]})
        self.job = make_job(**groups)
        self.model = models.pin(model_request(self.job.engine))
        self.task = Pooling.of(compile_job(self.job), self.model)
        self.store = open_store(str(folder.parent / "run"))
        self.root = folder.parent / "run"

    def prepare(self, **columns: list[Any]) -> pa.Table:
        table = pa.table(columns)
        spec = compile_job(self.job)
        context = spec.engine.model.context
        stage = prepare_of(self.task, spec.prompt, spec.sampling, self.model, context)
        return stage(tag(table, Unit(0, 0, table.num_rows)))

    def answer(self, table: pa.Table, vector: Any) -> tuple[pa.Table, list[Request]]:
        def answers(requests: Sequence[Request]) -> list[Completion]:
            return [
                Completion([], prompt_tokens=len(r.prompt_token_ids), vector=vector(r))
                for r in requests
            ]

        assert self.task is not None
        engine = Stepped(answers)
        made = _Stage(engine, EngineLaunch({}, dict(self.task.fields), {}))(table)
        return made, engine.seen[0]

    def finish(self, table: pa.Table) -> tuple[pa.Table | None, pa.Table | None]:
        stage = finish_stage(self.job.output, self.model, self.store, "attempt", task=self.task)
        (receipt,) = receipts(stage(table))
        assert receipt.lost is None, receipt.lost
        found = {
            piece.kind: pq.read_table(self.root / "_raybatch/pieces" / piece.path)
            for piece in receipt.pieces
        }
        return found.get("data"), found.get("quarantine")


class _Stage(EngineStage):
    def __init__(self, engine: Stepped, launch: EngineLaunch):
        self.launch, self.planned = launch, engine

    def ready(self) -> Any:
        return self.planned


BERT = {"architectures": ["BertModel"]}
LABELS = {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "bad", "1": "fine", "2": "good"},
}
CROSS = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def test_a_text_is_plain_with_the_tokenizers_special_tokens(folder):
    table = Stages(folder, BERT, prompt=ONE, engine={"task": "embed"}).prepare(a=["the fox", None])
    assert table[TOKENS].to_pylist() == [[2, 5, 8, 3], []]
    assert "column a is null" in table[ERROR].to_pylist()[1]["message"]


def test_a_prompt_may_fill_the_context_and_no_more(folder):
    texts = ["fox " * 14, "fox " * 15]
    table = Stages(folder, BERT, prompt=ONE, engine={"task": "embed"}).prepare(a=texts)
    assert [len(ids) for ids in table[TOKENS].to_pylist()] == [16, 0]
    assert table[ERROR].to_pylist()[1]["kind"] == "PromptTooLong"


@pytest.mark.parametrize(("side", "kept"), [("left", 8), ("right", 5)])
def test_a_text_that_is_cut_keeps_its_special_tokens(folder, side, kept):
    prompt = {**ONE, "on_too_long": f"truncate_{side}"}
    stages = Stages(folder, BERT, prompt=prompt, engine={"task": "embed"})
    table = stages.prepare(a=["the " * 20 + "fox " * 20, "fox"])
    assert table[TOKENS].to_pylist() == [[2, *[kept] * 14, 3], [2, 8, 3]]
    assert table[TRUNCATED].to_pylist() == [True, False]


def test_a_pair_in_one_prompt_has_types_from_its_second_text(folder):
    stages = Stages(folder, CROSS, prompt=TWO, engine={"task": "score"})
    table = stages.prepare(a=["the fox", "fox"], b=["dog", "dog"])
    assert table[TOKENS].to_pylist()[0] == [2, 5, 8, 3, 13, 3]
    assert [json.loads(p)["extra_kwargs"] for p in table[PARAMS].to_pylist()] == [
        {"compressed_token_type_ids": 4},
        {"compressed_token_type_ids": 3},
    ]
    made, asked = stages.answer(table, lambda r: np.array([len(r.prompt_token_ids)], np.float32))
    assert [r.params["task"] for r in asked] == ["classify"] * 2
    data, _ = stages.finish(made)
    assert data is not None
    assert data["answer"].to_pylist() == [6.0, 5.0]
    assert data["answer"].type == pa.float32()


def test_two_vectors_are_compared_and_a_text_of_several_rows_is_asked_once(folder):
    output = {"uri": "out", "column": "answer", "columns": ["a"], "extras": ["prompt_tokens"]}
    stages = Stages(folder, BERT, prompt=TWO, engine={"task": "score"}, output=output)
    table = stages.prepare(a=["the fox", "the fox", "dog"], b=["fox", "dog", "dog"])
    assert table[SECOND].to_pylist()[0] == [2, 8, 3]
    vectors = {4: [1.0, 0.0], 8: [1.0, 1.0], 13: [0.0, 2.0]}  # by length, else by word

    def vector(request: Request) -> np.ndarray:
        ids = request.prompt_token_ids
        return np.array(vectors[len(ids) if len(ids) == 4 else ids[1]], np.float32)

    made, asked = stages.answer(table, vector)
    assert len(asked) == 3
    data, _ = stages.finish(made)
    assert data is not None
    assert data["answer"].to_pylist() == pytest.approx([0.5**0.5, 0.0, 1.0])
    # of both texts with their special tokens, whoever's they were computed as
    assert data["prompt_tokens"].to_pylist() == [7, 7, 6]
    assert made[CACHED_TOKENS].to_pylist() == [0, 7, 3]


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_vector_is_a_column_of_fixed_size(folder, kind):
    output = {"uri": "out", "column": "answer", "columns": ["a"], "vector_type": kind}
    stages = Stages(folder, BERT, prompt=ONE, engine={"task": "embed"}, output=output)
    table = stages.prepare(a=["fox", "the", "fox", None])
    made, asked = stages.answer(table, lambda r: np.array([r.prompt_token_ids[1], 0.5], "f4"))
    assert len(asked) == 2
    assert made[MERGED].to_pylist() == [False, False, True, None]
    data, failed = stages.finish(made)
    assert data is not None
    assert failed is not None
    assert str(data["answer"].type).startswith(f"fixed_size_list<element: {kind}") or (
        data["answer"].type.value_type == (pa.float32() if kind == "float32" else pa.float16())
    )
    assert data["answer"].type.list_size == 2
    assert data["answer"].to_pylist() == [[8.0, 0.5], [5.0, 0.5], [8.0, 0.5]]
    assert failed["input"].to_pylist() == [{"a": None}]


def test_a_vector_with_nan_fails_its_row_and_its_copies_alone(folder):
    stages = Stages(folder, BERT, prompt=ONE, engine={"task": "embed"})
    table = stages.prepare(a=["fox", "the", "fox"])
    made, _ = stages.answer(
        table, lambda r: np.array([np.nan if r.prompt_token_ids[1] == 8 else 1, 0], np.float32)
    )
    data, failed = stages.finish(made)
    assert data is not None
    assert failed is not None
    assert data["a"].to_pylist() == ["the"]
    assert failed["error"].to_pylist() == ["NotFinite"] * 2
    assert "1 of 2 numbers are NaN or infinite" in failed["message"].to_pylist()[0]


def test_a_block_of_failed_rows_alone(folder):
    stages = Stages(folder, BERT, prompt=ONE, engine={"task": "embed"})
    made, _ = stages.answer(stages.prepare(a=["fox"]), lambda r: np.array([np.inf], np.float32))
    assert stages.finish(made)[0] is None


def test_what_float16_cannot_hold_fails_its_row(folder):
    output = {"uri": "out", "column": "answer", "columns": ["a"], "vector_type": "float16"}
    stages = Stages(folder, BERT, prompt=ONE, engine={"task": "embed"}, output=output)
    made, _ = stages.answer(stages.prepare(a=["fox"]), lambda r: np.array([1e6], np.float32))
    failed = stages.finish(made)[1]
    assert failed is not None
    assert "1e+06) is too large for output.vector_type float16" in failed["message"][0].as_py()


def test_a_label_and_the_probability_of_each(folder):
    stages = Stages(folder, LABELS, prompt=ONE, engine={"task": "classify"})
    made, asked = stages.answer(
        stages.prepare(a=["fox"]), lambda r: np.array([0.25, 0.5, 0.25], np.float32)
    )
    assert asked[0].params == {"task": "classify"}
    data, _ = stages.finish(made)
    assert data is not None
    assert data["answer"].to_pylist() == ["fine"]
    shares = {"bad": 0.25, "fine": 0.5, "good": 0.25}
    assert data["answer_probabilities"].to_pylist() == [shares]


def test_postprocess_gets_plain_values(folder):
    most = "helpers.functions:most"
    output = {"uri": "out", "column": "answer", "columns": [], "postprocess": most}
    stages = Stages(folder, BERT, prompt=ONE, engine={"task": "embed"}, output=output)
    made, _ = stages.answer(stages.prepare(a=["fox"]), lambda r: np.array([1, 3], np.float32))
    data, _ = stages.finish(made)
    assert data is not None
    assert data["most"].to_pylist() == [3.0]


def test_a_function_gives_the_texts(folder):
    prompt = {"function": "helpers.functions:as_pair"}
    table = Stages(folder, CROSS, prompt=prompt, engine={"task": "score"}).prepare(a=["fox", ""])
    assert table[TOKENS].to_pylist() == [[2, 8, 3, 13, 3], []]
    assert "must return two texts" in table[ERROR].to_pylist()[1]["message"]


def test_an_encoder_takes_a_prompt_in_one_step_and_caches_nothing(folder):
    stages = Stages(folder, BERT, prompt=ONE, engine={"task": "embed"})
    assert stages.task is not None
    sized = {"max_num_batched_tokens": 4, "enable_prefix_caching": True}
    assert stages.task.engine_arguments(sized, ()) == {
        "max_num_batched_tokens": 16,
        "runner": "pooling",
    }
    for name in ("LlamaForCausalLM", "LlamaModel", "Qwen3ForSequenceClassification"):
        decoder = Stages(folder, {"architectures": [name]}, prompt=ONE, engine={"task": "score"})
        assert decoder.task is not None
        assert decoder.task.engine_arguments(sized, ()) == {**sized, "runner": "pooling"}
    engine = {"task": "score", "max_model_len": 32, "enable_chunked_prefill": False}
    whole = Stages(folder, {"architectures": ["LlamaModel"]}, prompt=ONE, engine=engine)
    assert whole.task is not None
    assert whole.task.engine_arguments(sized, ())["max_num_batched_tokens"] == 32
