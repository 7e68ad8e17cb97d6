"""How the model generates answers: `sampling` of a job file."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, ModelWrapValidatorHandler, field_validator, model_validator

from prefect_raybatch.job.checks import refuse_unknown, with_unknown_fields
from prefect_raybatch.job.group import Group, field
from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.job.vllm import sampling_ranges
from prefect_raybatch.job.vllm.structured_outputs import check_label_texts, with_schema_text

# Fields of vLLM that affect only output that a result does not hold; rejected.
NOT_WRITTEN = ("output_kind", "detokenize", "prompt_logprobs", "stream_interval")

# More such fields, rejected only by planning, so that runs planned with them can continue.
UNWRITTEN = ("logprob_token_ids", "flat_logprobs", "routed_experts_prompt_start")


WHOLE_CONTEXT = 1 << 22  # tokens, more than any context: the answer may fill it
ASSUMED_TOKENS = 1024  # length of an answer with WHOLE_CONTEXT that sizes assume


class Sampling(Group):
    """How the model generates an answer. You can add any field of vLLM's SamplingParams."""

    model_config = ConfigDict(extra="allow", validate_default=True)

    temperature: float = field(
        0.0,
        title="Temperature",
        text="Randomness of the answers, from 0 to 2; 0 always takes the most probable token.",
        ge=0,
        allow_inf_nan=False,
    )
    max_tokens: int | None = field(
        16,
        title="Maximum output tokens",
        text="Maximum length of an answer, in tokens. null: as many as the context leaves.",
        gt=0,
    )
    choice: list[str] | None = field(
        None,
        title="Labels",
        text="Labels to choose from: each answer is exactly one of them. Example: "
        "[Retail, Finance, Other].",
    )

    @property
    def expected_tokens(self) -> int:
        """Maximum tokens of an answer; ASSUMED_TOKENS if only the model's context limits it."""
        return ASSUMED_TOKENS if self.max_tokens is None else self.max_tokens

    def for_vllm(self) -> dict[str, Any]:
        """Return the sampling fields that are not None, as plain values for vLLM.

        If `max_tokens` is None, it becomes a number that is larger than any context.
        """
        fields = self.model_dump(mode="json")
        if self.max_tokens is None:
            fields["max_tokens"] = WHOLE_CONTEXT
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def extra(self) -> dict[str, Any]:
        """vLLM's sampling fields that the job sets beyond those of this class, {name: value}."""
        return dict(self.model_extra or {})

    @field_validator("choice")
    @classmethod
    def _choice(cls, value: list[str] | None) -> list[str] | None:
        if value is None:
            return None
        if not value:
            raise ValueError("is an empty list; name the labels, or remove it")
        check_label_texts(value)
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _unknown_too(cls, value: object, handler: ModelWrapValidatorHandler[Sampling]) -> Sampling:
        with with_unknown_fields(cls, value, vllm_fields.sampling_fields):
            return handler(value)

    @model_validator(mode="after")
    def _known(self) -> Sampling:
        extra = self.model_extra or {}
        refuse_unknown(extra, vllm_fields.sampling_fields(), set(type(self).model_fields))
        for name in NOT_WRITTEN:
            if extra.get(name) is not None:
                raise ValueError(
                    f"{name} is not supported: the result contains only the text of an answer; "
                    "remove it"
                )
        wrong = sampling_ranges.wrong(dict(self))
        if wrong is not None:
            raise ValueError(wrong)
        if self.choice and extra.get("structured_outputs"):
            raise ValueError("choice and structured_outputs exclude each other; remove one of them")
        extra.update(with_schema_text(extra))
        return self
