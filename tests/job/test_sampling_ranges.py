"""What is refused before an engine starts is what vLLM would refuse of every row."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_raybatch.job.sampling_ranges import RANGES, wrong

WHOLE: list[Any] = [-3, -2, -1, 0, 1, 2, 3, 7]
NUMBERS: list[Any] = [*WHOLE, -2.1, 0.0, 0.5, 1.0, 2.5, float("nan"), float("inf")]
VALUES: dict[str, list[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), NUMBERS),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), NUMBERS),
    "n": [*WHOLE, 1.5],
    "top_k": [*WHOLE, 1.5],
    "min_tokens": WHOLE,
    "stop": ["a", ["a", "b"], [], ["a", ""], [""]],
    "stop_token_ids": [[], [1, 2], ["x"], [1.5]],
    "bad_words": [[], ["a"], ["a", ""]],
    "seed": WHOLE,
}


def taken_by_vllm(**sampling: Any) -> bool:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    try:
        SamplingParams(**sampling)
    except (VLLMValidationError, ValueError, TypeError):
        return False
    return True


@pytest.mark.parametrize("field", sorted(RANGES))
def test_each_range_is_vllms(field: str) -> None:
    for value in VALUES[field]:
        sampling = {"temperature": 1.0, "max_tokens": 16, field: value}
        assert (wrong(sampling) is None) == taken_by_vllm(**sampling), value


def test_fields_that_must_fit_together() -> None:
    for refused in (
        {"temperature": 1.0, "min_tokens": 17, "max_tokens": 16},
        {"temperature": 0.0, "n": 2},
    ):
        assert not taken_by_vllm(**refused) and wrong(refused)
    assert taken_by_vllm(temperature=1.0, n=2) and wrong({"temperature": 1.0, "n": 2}) is None
    assert wrong({"top_p": None, "n": None}) is None
