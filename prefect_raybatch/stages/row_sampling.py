"""Checks the sampling fields that a row sets itself.

A prompt function can set sampling fields for a row. Without this check, only vLLM would check them.
A row fails here if its fields are invalid, if the result cannot hold its answer, or if vLLM would
silently ignore or change a field.
"""

from __future__ import annotations

from prefect_raybatch.job.checks import refuse_unknown
from prefect_raybatch.job.sampling import NOT_WRITTEN, UNWRITTEN, Sampling
from prefect_raybatch.job.vllm import fields as vllm_fields
from prefect_raybatch.job.vllm import sampling_ranges
from prefect_raybatch.job.vllm.structured_outputs import check_form_shape, check_label_texts
from prefect_raybatch.spec.request import SamplingFields

FOR_ALL = ("skip_special_tokens", "spaces_between_special_tokens")  # finish has no value per row
NUMBERS = (  # for null, vLLM uses its own default and not the job's value
    "n",
    "temperature",
    "max_tokens",
    "min_tokens",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "logprobs",
)


def check_own(own: SamplingFields, job: SamplingFields, fixed_form: str | None = None) -> None:
    """Raise ValueError if a row's `own` sampling fields are invalid or would have no effect.

    The error names the field and the remedy. `job` holds the job's sampling fields that are set.
    `fixed_form` is the name of the job field, if any, that fixes the format of all answers; the row
    must not set `choice` or `structured_outputs` then.
    """
    known = vllm_fields.sampling_fields()
    refuse_unknown(own, known, set(Sampling.model_fields), "sampling: ", between="; ")
    for name in (*NOT_WRITTEN, *UNWRITTEN):
        value = own.get(name)
        if value is not None and (value is not False or name not in UNWRITTEN):
            raise ValueError(
                f"sampling.{name} is not supported, because only the answer's text is written. "
                "Leave it out of what prompt.function returns"
            )
    if own.get("logprobs") is not None:
        raise ValueError(
            "sampling.logprobs is set for all rows, because it adds a column. Set it in the job, "
            "and leave it out of what prompt.function returns"
        )
    for name in NUMBERS:
        if name in own and own[name] is None and job.get(name) is not None:
            raise ValueError(
                f"sampling.{name} is null, which vLLM replaces with its own default. Leave it out "
                f"to use the job's {job[name]}, or return a number"
            )
    _check_answers(own, job)
    for name in ("choice", "structured_outputs"):
        if fixed_form and name in own:
            raise ValueError(
                f"sampling.{name}: {fixed_form} sets one form for all answers of this job. Leave "
                f"{name} out of what prompt.function returns"
            )
    _check_form(own, job)
    if (wrong := sampling_ranges.wrong(own, job)) is not None:
        raise ValueError(f"sampling: {wrong}")


def has_form(job: SamplingFields, own: SamplingFields | None = None) -> bool:
    """Return whether a row's answer must have a form: a choice, JSON, a pattern or the like."""
    both = {**job, **(own or {})}
    return bool(both.get("choice") or both.get("structured_outputs"))


def _check_answers(own: SamplingFields, job: SamplingFields) -> None:
    """Raise ValueError if a row's `n`, `max_tokens` or decoding options cannot be used."""
    usual = job.get("n") or 1
    number = own.get("n", usual)
    number = 1 if number is None else number
    if type(number) is not int or number < 1:
        raise ValueError(f"sampling.n must be a whole number from 1 on, not {number!r}")
    if number > 1 and usual == 1:
        raise ValueError(
            f"sampling.n is {number} for this row but 1 in the job, whose answer column holds one "
            "answer a row. Set sampling.n above 1 in the job for a column of lists"
        )
    if number > 1 and not {**job, **own}.get("temperature", 1.0):
        raise ValueError(
            f"sampling.n: {number} answers are identical at temperature 0. Raise temperature, or "
            "leave n out"
        )
    most = own.get("max_tokens", 1)
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"sampling.max_tokens must be a whole number from 1 on, not {most!r}")
    for name in FOR_ALL:
        usual = _or_true(job.get(name))
        if _or_true(own.get(name, usual)) != usual:
            raise ValueError(
                f"sampling.{name} is {own[name]!r} for this row but {usual} in the job, and all "
                "rows must have the same. Set it in the job, and leave it out of what "
                "prompt.function returns"
            )


def _check_form(own: SamplingFields, job: SamplingFields) -> None:
    choice = own.get("choice")
    labels = choice if isinstance(choice, list) else []
    if choice is not None and not (labels and all(isinstance(x, str) and x for x in labels)):
        raise ValueError("sampling.choice must be a list of labels, each a non-empty text")
    check_label_texts(labels, "sampling.choice: ")
    both = {**job, **own}
    if both.get("choice") and both.get("structured_outputs"):
        raise ValueError(
            "sampling: choice and structured_outputs exclude each other. If the job sets one and "
            "the row the other, return choice: null (or structured_outputs: null) as well"
        )
    try:
        check_form_shape(own.get("structured_outputs"))
    except ValueError as error:
        raise ValueError(f"sampling.{error}") from None


def _or_true(value: object) -> object:
    return True if value is None else value
