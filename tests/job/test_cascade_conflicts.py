"""Each conflict of a cascade or classifier has one remedy, after which the job is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.job_file import with_fields

FORM = {
    "type": "object",
    "properties": {"label": {"type": "string"}},
    "required": ["label"],
    "additionalProperties": False,
}
LARGER = {"to": {"model": "demo"}, "when": {"probability_below": 0.9}}
CHOICE = {"sampling.choice": ["a", "b"]}
CLASSIFIER = {"engine.classifier": "/jobs/classifier.json"}
SYSTEM = {"prompt.system": "You sort texts."}
CASCADE = {"output.escalate": LARGER, **CHOICE}
HOSTED = {"url": "http://127.0.0.1:1/v1", "model": "m"}


def when(**rule: Any) -> dict[str, Any]:
    return {"output.escalate": {"to": {"model": "demo"}, "when": rule}}


# (changes that make a wrong job, words of the one remedy, changes that follow it)
CONFLICTS = [
    # without a larger model
    (
        {**CLASSIFIER, **SYSTEM, **CHOICE},
        ["set output.escalate.to and output.escalate.when.probability_below. To use"],
        {"output.escalate": LARGER},
    ),
    (
        {**CLASSIFIER, **SYSTEM, **CHOICE},
        ["set engine.task: embed and remove sampling.choice, prompt.system"],
        {"engine.task": "embed", "sampling": {}, "prompt.system": None},
    ),
    (
        {**CLASSIFIER, **SYSTEM},
        ["probability_below, and sampling.choice to the classifier's labels"],
        CASCADE,
    ),
    (CLASSIFIER, ["set engine.task: embed"], {"engine.task": "embed"}),
    (
        {**CLASSIFIER, **SYSTEM, **CHOICE, "engine.task": "embed"},
        ["sampling.choice, prompt.system: a classifier alone", "remove them"],
        {"sampling": {}, "prompt.system": None},
    ),
    (
        {**CLASSIFIER, "engine.task": "embed", "sampling.logprobs": 1},
        ["sampling.logprobs: a classifier alone", "remove it"],
        {"sampling": {}},
    ),
    # with one
    (
        {**CLASSIFIER, **SYSTEM, **CASCADE, "engine.task": "embed"},
        ["remove engine.task"],
        {"engine.task": "generate"},
    ),
    (
        {**CLASSIFIER, **SYSTEM, "output.escalate": LARGER, "engine.task": "embed"},
        ["remove engine.task and set sampling.choice"],
        {"engine.task": "generate", **CHOICE},
    ),
    ({**CASCADE, "engine.task": "embed"}, ["remove engine.task"], {"engine.task": "generate"}),
    (
        {**CLASSIFIER, **CHOICE, **when(fails_schema=True)},
        ["set probability_below alone"],
        when(probability_below=0.5),
    ),
    (
        {**CLASSIFIER, **CASCADE, "output.schema_model": FORM},
        ["remove output.schema_model"],
        {"output.schema_model": None},
    ),
    (
        {**CLASSIFIER, **CASCADE, "engine.endpoint": HOSTED},
        ["set engine.model to the classifier's encoder in place of engine.endpoint"],
        {"engine.endpoint": {}, "engine.model": "demo"},
    ),
    (
        {**CLASSIFIER, **CASCADE, "prompt.template": None, "prompt.messages": "chat"},
        ["needs prompt.template", "in place of prompt.messages"],
        {"prompt.template": "Say {text}", "prompt.messages": None},
    ),
    (
        {**CLASSIFIER, **CASCADE, "sampling.logprobs": 1},
        ["remove sampling.logprobs"],
        {"sampling": {"choice": ["a", "b"]}},
    ),
    # a first model in vLLM, or hosted
    (
        {**CASCADE, "output.schema_model": FORM},
        ["remove output.schema_model"],
        {"output.schema_model": None},
    ),
    (
        {"output.escalate": LARGER, "output.schema_model": FORM},
        ["set fails_schema in its place"],
        when(fails_schema=True),
    ),
    (
        {**CASCADE, "sampling.logprobs": 1},
        ["remove sampling.logprobs"],
        {"sampling": {"choice": ["a", "b"]}},
    ),
    (
        {**CASCADE, "output.reasoning_parser": "qwen3"},
        ["remove output.reasoning_parser"],
        {"output.reasoning_parser": None},
    ),
    (
        {**CASCADE, "engine.endpoint": HOSTED},
        ["set fails_schema in its place, and output.schema_model in place of sampling.choice"],
        {**when(fails_schema=True), "sampling": {}, "output.schema_model": FORM},
    ),
    (
        {**when(logprob_below=-1.0), "engine.endpoint": HOSTED, "output.schema_model": FORM},
        ["set fails_schema in its place"],
        when(fails_schema=True),
    ),
    (
        {
            **CHOICE,
            "output.escalate": {
                "to": {"endpoint": {"block": "hosted-model/large"}},
                "when": {"probability_below": 0.9},
            },
        },
        ["endpoint.block", "set url and model in its place"],
        {"output.escalate": {"to": {"endpoint": HOSTED}, "when": {"probability_below": 0.9}}},
    ),
]


def fields(*changes: dict[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": "sorted",
        "source": {"uri": "in.parquet"},
        "prompt": {"template": "Say {text}"},
        "output": {"uri": "out"},
    }
    for change in changes:
        value = with_fields(value, change)
    return value


@pytest.mark.parametrize(("wrong", "remedy", "right"), CONFLICTS)
def test_the_one_remedy_of_a_conflict_works(
    wrong: dict[str, Any], remedy: list[str], right: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchJob.from_dict(fields(wrong))
    text = str(caught.value)
    assert "\n" not in text, "one remedy, so that none contradicts another"
    for words in remedy:
        assert words in text
    assert BatchJob.from_dict(fields(wrong, right)).name == "sorted"
