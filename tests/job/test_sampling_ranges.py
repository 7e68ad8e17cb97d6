"""What is refused before an engine starts is what vLLM would refuse of every row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers import fake_vllm

from prefect_raybatch.job.vllm.sampling_ranges import RANGES, wrong
from prefect_raybatch.stages.vllm import internals
from prefect_raybatch.stages.vllm.stepper import plain_fields

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
    "bad_words": [[], ["a"], ["a", ""], "abc"],
    "seed": [*WHOLE, -(2**63), 2**62, "7", 1.5, True],
    "logit_bias": [{3: 1.0}, {"3": 1}, {}, {"x": 1.0}, {3: "x"}, [3], "x"],
    "allowed_token_ids": [[1, 2], [], ["x"], [1.5], 7],
}


def taken_by_vllm(**sampling: Any) -> bool:
    from vllm.exceptions import VLLMValidationError

    try:
        made: Any = internals.sampling_params(plain_fields(sampling))
        if made.allowed_token_ids is not None:  # looked at only beside the model's vocabulary
            made._validate_allowed_token_ids(SimpleNamespace(get_vocab_size=lambda: 100))
    except (VLLMValidationError, ValueError, TypeError):
        return False
    return True


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64, -(2**63) - 1, 10**23])
def test_a_seed_over_64_bits_which_ends_the_engine_is_refused(seed: int) -> None:
    assert taken_by_vllm(seed=seed)
    assert "seed must be a signed 64-bit whole number" in str(wrong({"seed": seed}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", "abc"),
        ("seed", True),
        ("logit_bias", [3]),
        ("logit_bias", {3: "x"}),
        ("min_tokens", 1.5),
        ("ignore_eos", "no"),
        ("repetition_detection", "x"),
    ],
)
def test_a_value_of_another_type_ends_no_engine(field: str, value: Any) -> None:
    """vLLM takes it, and its engine's core would raise with all rows in it."""
    with pytest.raises(ValueError, match=rf"^sampling\.{field}: Expected "):
        internals.sampling_params({field: value})


def test_another_class_of_that_name_changes_no_later_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        fake_vllm.install_for(other)
        internals.sampling_params({"seed": "abc"})
    with pytest.raises(ValueError, match=r"^sampling\.seed: Expected "):
        internals.sampling_params({"seed": "abc"})


def test_a_field_with_fields_of_its_own_is_made_of_what_a_job_can_say() -> None:
    made: Any = internals.sampling_params(
        {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}}
    )
    assert made.repetition_detection.max_pattern_size == 8


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
