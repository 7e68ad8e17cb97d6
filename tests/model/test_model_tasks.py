"""Whether a model can do a job's task, told from its config.json."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.small import make_job

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.model import tasks

BERT = {"architectures": ["BertModel"]}
CLASSIFIER = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
CROSS = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
LLAMA = {"architectures": ["LlamaForCausalLM"]}


def engine(task: str, **more: Any) -> Engine:
    return make_job(engine={"task": task, **more}).engine


@pytest.mark.parametrize(
    ("task", "config"),
    [
        ("generate", LLAMA),
        ("embed", BERT),
        ("embed", LLAMA),  # legal: its last token's hidden state
        ("embed", {"architectures": ["NobodyKnowsThis"]}),
        ("classify", CLASSIFIER),
        ("score", BERT),
        ("score", CROSS),
    ],
)
def test_a_model_that_can(task, config):
    tasks.check_can(model_request(engine(task)), "m", config)


@pytest.mark.parametrize(
    ("task", "config", "said"),
    [
        ("generate", BERT, "m is BertModel, which embeds or classifies and generates no text"),
        ("generate", CLASSIFIER, "Set engine.task to what it does"),
        ("embed", CLASSIFIER, "which classifies. Set engine.task to classify"),
        ("embed", {"architectures": ["HF_ColBERT"]}, "a vector for each token"),
        ("embed", {"architectures": ["Qwen2ForRewardModel"]}, "a value for each token"),
        ("classify", {"architectures": ["BertForTokenClassification"]}, "a value for each token"),
        ("classify", LLAMA, "which does not classify. Name a model"),
        ("classify", BERT, "which does not classify. Name a model"),
        ("classify", {**CLASSIFIER, "id2label": {"0": "a", "1": "a"}}, "has 'a' for several"),
        ("score", CLASSIFIER, "has 2 labels, but a score needs exactly one"),
    ],
)
def test_a_model_that_cannot_is_told(task, config, said):
    with pytest.raises(ConfigError) as refused:
        tasks.check_can(model_request(engine(task)), "m", config)
    assert said in str(refused.value)


def test_a_score_by_two_vectors_needs_two_texts():
    with pytest.raises(ConfigError, match=r"prompt\.second"):
        tasks.check_can(model_request(engine("score")), "m", BERT, paired=False)
    tasks.check_can(
        model_request(engine("score")), "m", CROSS, paired=False
    )  # its template holds both


def test_what_is_asked_of_a_model_follows_from_task_and_classes():
    assert tasks.vllm_task(model_request(engine("embed")), BERT) == "embed"
    assert tasks.vllm_task(model_request(engine("classify")), CLASSIFIER) == "classify"
    assert tasks.vllm_task(model_request(engine("score")), BERT) == "embed"
    assert tasks.vllm_task(model_request(engine("score")), CROSS) == "classify"
    overrides = {"architectures": ["Qwen3ForSequenceClassification"]}
    assert (
        tasks.vllm_task(model_request(engine("score", hf_overrides=overrides)), LLAMA) == "classify"
    )


def test_labels_are_in_the_order_of_their_numbers():
    ten = {"id2label": {str(i): f"l{i}" for i in reversed(range(11))}}
    assert tasks.labels(model_request(engine("classify")), ten) == [f"l{i}" for i in range(11)]
    assert tasks.labels(model_request(engine("classify")), {"num_labels": 3}) == [
        "LABEL_0",
        "LABEL_1",
        "LABEL_2",
    ]
    assert tasks.labels(model_request(engine("classify")), {}) == ["LABEL_0", "LABEL_1"]


RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


def test_a_model_that_generates_scores_by_the_tokens_that_it_would_answer():
    own = {"architectures": ["Qwen3ForCausalLM"]}
    tasks.check_can(model_request(engine("score", hf_overrides=RERANKER)), "m", own, paired=False)
    assert tasks.labels(model_request(engine("score", hf_overrides=RERANKER)), own) == ["LABEL_0"]
    three = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": ["bad", "fine", "good"],
        "method": "no_post_processing",
    }
    tasks.check_can(model_request(engine("classify", hf_overrides=three)), "m", own)
    assert tasks.labels(model_request(engine("classify", hf_overrides=three)), own) == [
        "bad",
        "fine",
        "good",
    ]
    with pytest.raises(ConfigError, match="has 3 labels, but a score needs exactly one"):
        tasks.check_can(model_request(engine("score", hf_overrides=three)), "m", own)
