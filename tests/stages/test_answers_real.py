"""Answers in JSON, behind thinking too, and how probable they are, by real vLLM on a CPU with the
bundled model. Its engine is told of thinking: an answer has a form once that has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.needs import needs_vllm
from helpers.small import make_job, receipts
from helpers.specs import finish_stage, prepare_stage
from helpers.thinking import save_model

from prefect_raybatch.compile.job import (
    compile_job,
    model_request,
    parsing_spec,
    sampling_spec,
    size_spec,
)
from prefect_raybatch.job.answer_schema import (
    schema_engine_fields,
    schema_sampling_fields,
    schema_text,
)
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.model import pinned as models
from prefect_raybatch.sizing import sizes
from prefect_raybatch.stages.answer_logprobs import steps_of
from prefect_raybatch.stages.block import Failure, Tokenizer, load_tokenizer, tag
from prefect_raybatch.stages.columns import REASONING_OPEN
from prefect_raybatch.stages.engine import EngineStage, engine_launch
from prefect_raybatch.stages.label_probabilities import LabelTokens
from prefect_raybatch.stages.typed_answers import reader_of
from prefect_raybatch.stages.vllm.stepper import Completion, Request, SteppedEngine
from prefect_raybatch.storage import open_store

pytestmark = [needs_vllm, pytest.mark.whole]

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
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[SteppedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as on any CPU: one import of vLLM
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        fields = dict(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            seed=0,
            reasoning_parser="qwen3",
        )
        with SteppedEngine(schema_engine_fields(fields, SCHEMA)) as made:
            yield made


@pytest.fixture(scope="module")
def words(model: str) -> Tokenizer:
    return load_tokenizer(model, None)


def tokens(words: Tokenizer, text: str) -> list[int]:
    """A prompt whose thinking has ended."""
    return list(words(text + "</think>", add_special_tokens=False)["input_ids"])


def text_of(words: Tokenizer, done: Completion) -> str:
    (text,) = words.batch_decode(done.token_ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_of_an_engine_fits_the_schema_or_was_cut_off(engine, words, temperature):
    sampling = {"temperature": temperature, "max_tokens": 160, "seed": 5}
    params = schema_sampling_fields(sampling, SCHEMA)
    done = engine.run([Request(tokens(words, prompt), params) for prompt in PROMPTS])
    reader = reader_of(SCHEMA)
    for one in done:
        assert one.error is None and one.finish_reason == "stop", one
        text = text_of(words, one)
        found = reader.read(text)
        assert not isinstance(found, Failure), found
        assert text == json.dumps(found[0], separators=(",", ":"))  # no blanks, names in order
        assert list(found[0]) == ["industry", "stars", "tags", "seat"]
    (short,) = engine.run([Request(tokens(words, "x"), {**params, "max_tokens": 3})])
    assert short.finish_reason == "length"
    assert isinstance(reader.read(text_of(words, short)), Failure)


def from_transformers(
    path: str, labels: LabelTokens, prompts: list[list[int]]
) -> list[dict[str, float]]:
    """Of the same model's own logits, step by step through each label."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    made = []
    for prompt in prompts:
        found = {}
        for label, way in zip(labels.labels, labels.paths, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *way]])).logits[0]
            share = 1.0
            for at, token in enumerate(way):
                going = {p[at] for p in labels.paths if p[:at] == way[:at] and len(p) > at}
                step = logits[len(prompt) + at - 1]
                share *= float(step[token].exp() / step[list(going)].exp().sum())
            found[label] = share
        made.append(found)
    return made


ALIKE = ("Retail", "Retail trade", "Real Estate", "Law Firm")


@pytest.mark.parametrize(
    ("names", "temperature", "places"), [(LABELS, 0.0, 1), (LABELS, 0.7, 1), (ALIKE, 0.7, 2)]
)
def test_probabilities_of_labels_are_those_of_the_model(
    engine, model, words, names, temperature, places
):
    labels = LabelTokens.of(words, names)
    assert len(labels.forks) == places
    prompts = [tokens(words, prompt) for prompt in PROMPTS]
    sampling = {"temperature": temperature, "max_tokens": 12, "choice": list(names)}
    done = engine.run([Request(prompt, labels.with_logprobs(sampling)) for prompt in prompts])
    expected = from_transformers(model, labels, prompts)
    for prompt, one, right in zip(prompts, done, expected, strict=True):
        assert one.error is None and text_of(words, one) in names
        more = [Request([*prompt, *t], fields) for t, fields in labels.further_requests(sampling)]
        later = [told.logprobs or {} for told in engine.run(more)]
        found = labels.probabilities(one.logprobs or {}, later)
        assert dict(found or ()) == pytest.approx(right, abs=1e-4)
        assert sum(right.values()) == pytest.approx(1)
    plain = engine.run([Request(prompts[0], sampling)])
    assert plain[0].logprobs is None


def test_several_answers_have_a_finish_reason_each(engine, words):
    params = {"temperature": 1.0, "n": 3, "max_tokens": 4, "seed": 1, "choice": ["Retail", "No"]}
    (done,) = engine.run([Request(tokens(words, "x"), params)])
    assert len(done.token_ids) == 3 and done.finish_reasons is not None
    assert set(done.finish_reasons) <= {"stop", "length"} and len(done.finish_reasons) == 3


def test_the_logarithms_of_an_answer_are_those_of_the_model(engine, model, words):
    import torch
    from transformers import AutoModelForCausalLM

    prompt = tokens(words, PROMPTS[0])
    params = {"temperature": 1.0, "max_tokens": 5, "seed": 3, "logprobs": 2, "ignore_eos": True}
    (done,) = engine.run([Request(prompt, params)])
    assert done.steps is not None and len(done.steps[0]) == len(done.token_ids[0]) == 5
    weights: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = weights(torch.tensor([[*prompt, *done.token_ids[0]]])).logits[0]
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    (told,) = steps_of(done.steps)
    for token, step, right in zip(done.token_ids[0], told, expected, strict=True):
        assert [one["id"] for one in step[:3]] == [token, *right.topk(2).indices.tolist()]
        for one in step:
            assert one["logprob"] == pytest.approx(float(right[one["id"]]), abs=1e-3)


class _OverIt(EngineStage):
    """The stage of a job over the engine that is there."""

    def __init__(self, spec: Any, engine: SteppedEngine):
        self.launch, self.shared = spec, engine

    def ready(self) -> SteppedEngine:
        return self.shared


@pytest.mark.parametrize("thinks", [True, False], ids=["thinks", "prompt ends thinking"])
@pytest.mark.parametrize("form", ["choice", "schema"])
def test_an_answer_has_its_form_behind_the_thinking(engine, model, words, tmp_path, thinks, form):
    """From prompt to result. The model is made to end its thinking: where a prompt has ended it
    already, the mark would break the form if that were not kept to from the first token on."""
    (mark,) = words("</think>", add_special_tokens=False)["input_ids"]
    sampling: dict[str, Any] = {"max_tokens": 160, "logit_bias": {mark: 100.0}}
    output = {"uri": "o", "columns": [], "reasoning_parser": "qwen3"}
    if form == "choice":
        sampling["choice"] = list(LABELS)
    else:
        output["schema_model"] = json.loads(SCHEMA)
    job = make_job(
        prompt={"template": "{a}", "chat_template_kwargs": {"enable_thinking": thinks}},
        sampling=sampling,
        output=output,
        engine={"model": model, "device": "cpu"},
    )
    pinned, parsing = models.pin(model_request(job.engine)), parsing_spec(job)
    size = sizes.sizes_of(size_spec(job), len(PROMPTS), 50.0, sizes.assumed(size_spec(job)))
    spec = engine_launch(compile_job(job), pinned, size)
    assert spec.arguments["reasoning_parser"] == "qwen3"
    table = tag(pa.table({"a": list(PROMPTS)}), Unit(0, 0, len(PROMPTS)))
    prepared = prepare_stage(
        job.prompt, pinned, 256, 160, sampling=sampling_spec(job).fields, parsing=parsing
    )(table)
    assert prepared[REASONING_OPEN].to_pylist() == [thinks] * len(PROMPTS)
    made = _OverIt(spec, engine)(prepared)
    store = open_store(str(tmp_path))
    (receipt,) = receipts(finish_stage(job.output, pinned, store, "a", parsing=parsing)(made))
    assert receipt.lost is None and not receipt.failed, receipt
    (path,) = [tmp_path / "_raybatch/pieces" / piece.path for piece in receipt.pieces]
    data = pq.read_table(path)
    assert set(data["reasoning"].to_pylist()) <= {None, ""}
    if form == "choice":
        assert set(data["response"].to_pylist()) <= set(LABELS)
    else:
        assert set(data["industry"].to_pylist()) <= {"Retail", "Law Firm"}
        assert data["stars"].type == pa.int64()
