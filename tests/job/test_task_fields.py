"""engine.task: what of a job has no meaning with it is refused, and what it adds counts."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.small import MODEL, make_job

from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.stages.result_columns import answer_columns

EMBED: dict[str, Any] = {"engine": {"task": "embed"}}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {**EMBED, "sampling": {"max_tokens": 5}},
            "sampling.max_tokens: engine.task embed generates",
        ),
        (
            {**EMBED, "sampling": {"choice": ["a"]}},
            "sampling.choice: engine.task embed generates no",
        ),
        ({**EMBED, "sampling": {"top_p": 0.5}}, "sampling.top_p: engine.task embed generates no"),
        ({**EMBED, "prompt": {"template": "a", "system": "b"}}, "prompt.system: engine.task embed"),
        (
            {**EMBED, "prompt": {"template": "a", "second": "b"}},
            "prompt.second applies only to engine.task score",
        ),
        ({"prompt": {"template": "a", "second": "b"}}, "engine.task score, not to generate"),
        ({**EMBED, "output": {"uri": "o", "on_cut_off": "fail"}}, "output.on_cut_off: engine.task"),
        (
            {**EMBED, "prompt": {"template": "a", "prefill": "b"}},
            "prompt.prefill: engine.task embed",
        ),
        ({**EMBED, "prompt": {"messages": "Chat"}}, "prompt.messages: engine.task embed uses the"),
        (
            {**EMBED, "output": {"uri": "o", "tool_parser": "hermes"}},
            "output.tool_parser: engine.t",
        ),
        (
            {**EMBED, "output": {"uri": "o", "extras": ["prompt_tokens", "finish_reason"]}},
            "output.extras: finish_reason: engine.task embed generates no text",
        ),
        (
            {"output": {"uri": "o", "normalize": False}},
            "output.normalize applies only to engine.task emb",
        ),
        (
            {"output": {"uri": "o", "vector_type": "float16"}},
            "output.vector_type applies only to engine.",
        ),
        ({"engine": {"task": "classify", "runner": "pooling"}}, "engine.runner is set from"),
    ],
)
def test_what_a_task_has_no_use_for_is_refused(groups, said):
    with pytest.raises(ConfigError) as refused:
        make_job(**groups)
    assert said in str(refused.value)


def test_defaults_written_out_are_not_refused():
    sampling = {"temperature": 0.0, "max_tokens": 16}
    assert make_job(**EMBED, sampling=sampling).drawn.max_tokens == 1


def test_the_task_counts_and_how_it_answers():
    jobs = [
        make_job(),
        make_job(**EMBED),
        make_job(**EMBED, output={"uri": "out", "normalize": False}),
        make_job(**EMBED, output={"uri": "out", "vector_type": "float16"}),
        make_job(engine={"task": "classify"}),
        make_job(engine={"task": "score"}, prompt={"template": "{Company}", "second": "a"}),
        make_job(engine={"task": "score"}, prompt={"template": "{Company}", "second": "b"}),
    ]
    assert len({fingerprint(job, MODEL).fingerprint for job in jobs}) == len(jobs)


def test_columns_of_a_task():
    assert answer_columns("response", "embed") == ["response"]
    assert answer_columns("response", "classify") == ["response", "response_probabilities"]
