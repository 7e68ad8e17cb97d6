"""Tasks that pool on real vLLM, against transformers: small models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers import tiny_models
from helpers.needs import needs_vllm
from helpers.small import make_job, receipts
from helpers.specs import finish_stage

from prefect_raybatch.compile.job import compile_job, model_request, size_spec
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.sizing import sizes
from prefect_raybatch.stages.block import is_lost, losses, tag
from prefect_raybatch.stages.columns import ERROR, MERGED, VECTOR
from prefect_raybatch.stages.engine import EngineStage, engine_launch
from prefect_raybatch.stages.pooling import Pooling
from prefect_raybatch.stages.texts import prepare_of
from prefect_raybatch.stages.vectors import vectors_of
from prefect_raybatch.stages.vllm import internals
from prefect_raybatch.storage import open_store

pytestmark = [needs_vllm, pytest.mark.whole]

FIRST = ["the quick brown fox", "dog", "lazy dog and fox sees the town", "the quick brown fox"]
SECOND = ["a dog", "law firms are great", "fox", "how great law firms are in the town"]
LABELS = ["bad", "fine", "good"]


class Real:
    """Real stages over one engine; the jobs of a model share it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.stage: EngineStage | None = None

    def vectors(self, **groups: Any) -> np.ndarray:
        return vectors_of(self.answered(**groups)[0])

    def answered(self, **groups: Any) -> tuple[pa.Table, Any, Pooling]:
        engine = {"model": str(self.folder), "device": "cpu", "dtype": "float32"}
        job = make_job(**{**groups, "engine": {**engine, **groups["engine"]}})
        model = models.pin(model_request(job.engine))
        task = Pooling.of(compile_job(job), model)
        assert task is not None
        size = sizes.sizes_of(size_spec(job), len(FIRST), 50.0, sizes.assumed(size_spec(job)))
        spec = engine_launch(compile_job(job), model, size, task=task)
        if self.stage is None:
            self.stage = EngineStage(spec)
        self.stage.launch = spec
        table = tag(pa.table({"a": FIRST, "b": SECOND}), Unit(0, 0, len(FIRST)))
        spec = compile_job(job)
        stage = prepare_of(task, spec.prompt, spec.sampling, model, spec.engine.model.context)
        prepared = stage(table)
        made = self.stage(prepared)
        assert not is_lost(made), losses(made)
        assert made[ERROR].null_count == len(FIRST), made[ERROR].to_pylist()
        return made, job, task

    def close(self) -> None:
        if self.stage is not None and self.stage.engine is not None:
            self.stage.engine.close()


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }.items():
        patch.setenv(name, value)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def made(
    environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Callable[[Path], Any]], tuple[Real, Any]]]:
    """A model written by a function, with an engine for it; one engine at a time."""
    live: dict[Any, tuple[Real, Any]] = {}

    def make(write: Callable[[Path], Any]) -> tuple[Real, Any]:
        if write not in live:
            for real, _ in live.values():
                real.close()
            live.clear()
            folder = tmp_path_factory.mktemp("model")
            weights = write(folder)
            live[write] = (Real(folder), weights)
        return live[write]

    yield make
    for real, _ in live.values():
        real.close()


def bert(folder: Path) -> Any:
    return tiny_models.bert(folder)


def classifier(folder: Path) -> Any:
    return tiny_models.bert_classifier(folder, LABELS)


def reference(folder: Path, model: Any, texts: list[Any]) -> list[np.ndarray]:
    """What transformers has: the first token's hidden state, or the probabilities."""
    import torch
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    found = []
    for text in texts:
        given = tokenizer(*([text] if isinstance(text, str) else text), return_tensors="pt")
        with torch.no_grad():
            out = model(**given)
        logits = getattr(out, "logits", None)
        row = out.last_hidden_state[0, 0] if logits is None else logits[0].softmax(-1)
        found.append(row.numpy())
    return found


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_vectors_are_those_of_transformers(made):
    real, weights = made(bert)
    expected = reference(real.folder, weights, FIRST)
    table, job, task = real.answered(prompt={"template": "{a}"}, engine={"task": "embed"})
    found = vectors_of(table)
    assert min(map(cosine, found, expected)) > 0.999
    assert np.linalg.norm(found, axis=1) == pytest.approx(1, abs=1e-5)
    assert table[MERGED].to_pylist() == [False, False, False, True]  # as the first: asked once
    as_they_are = real.vectors(
        prompt={"template": "{a}"},
        engine={"task": "embed"},
        output={"uri": "out", "normalize": False},
    )
    assert np.abs(as_they_are - np.stack(expected)).max() < 1e-3
    assert str(table[VECTOR].type).endswith("[128]")
    store = open_store(str(real.folder.parent / "run"))
    stage = finish_stage(
        job.output, models.pin(model_request(job.engine)), store, "attempt", task=task
    )
    (receipt,) = receipts(stage(table))
    assert (receipt.lost, len(receipt.good)) in [
        (None, len(FIRST)),
        (None, len(FIRST) - 1),
    ]


def test_a_score_is_the_cosine_of_two_vectors(made):
    real, weights = made(bert)
    sides = [reference(real.folder, weights, texts) for texts in (FIRST, SECOND)]
    found = real.vectors(prompt={"template": "{a}", "second": "{b}"}, engine={"task": "score"})
    assert found[:, 0] == pytest.approx(list(map(cosine, *sides)), abs=1e-4)


def test_probabilities_are_those_of_transformers(made):
    real, weights = made(classifier)
    expected = reference(real.folder, weights, FIRST)
    found = real.vectors(prompt={"template": "{a}"}, engine={"task": "classify"})
    assert np.abs(found - np.stack(expected)).max() < 1e-3


def test_a_pair_is_asked_with_its_token_types(made, monkeypatch):
    """A cross-encoder's way, on a model whose labels show more than one score would."""
    from prefect_raybatch.model import tasks

    monkeypatch.setattr(tasks, "vllm_task", lambda engine, config: "classify")
    real, weights = made(classifier)
    expected = reference(real.folder, weights, list(zip(FIRST, SECOND, strict=True)))
    found = real.vectors(prompt={"template": "{a}", "second": "{b}"}, engine={"task": "score"})
    assert np.abs(found - np.stack(expected)).max() < 1e-3
    plain = reference(real.folder, _without_types(weights), list(zip(FIRST, SECOND, strict=True)))
    assert np.abs(found - np.stack(plain)).max() > 1e-3  # the types make a difference


def _without_types(weights: Any) -> Callable[..., Any]:
    return lambda **given: weights(**{k: v for k, v in given.items() if k != "token_type_ids"})


def test_parameters_that_are_not_copied_reach_the_engine_as_vllms_own():
    from msgspec import msgpack
    from vllm.pooling_params import PoolingParams

    params = internals.pooling_params({"task": "embed", "dimensions": 8})
    assert params.clone() is params
    sent = msgpack.decode(msgpack.encode(params), type=PoolingParams)
    assert sent == PoolingParams(task="embed", dimensions=8)
