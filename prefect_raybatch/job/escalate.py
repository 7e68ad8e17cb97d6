"""The second model of a cascade: `output.escalate` of a job file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError, model_validator

from prefect_raybatch.errors import ConfigError, HubUnavailable
from prefect_raybatch.job.engine import Engine, precision_tries
from prefect_raybatch.job.faults import explain
from prefect_raybatch.job.group import Group, field, field_check

ANSWERED_BY = "answered_by"  # the column with the model that answered a row
LARGER = "the larger model"
MOST_CHECKED = 100_000


class EscalateWhen(Group):
    """Which answers of the first model are too unsure."""

    probability_below: float | None = field(
        None,
        title="Probability below",
        text="The row is asked again if the most probable label of sampling.choice has a "
        "probability below this.",
        gt=0,
        le=1,
        allow_inf_nan=False,
    )
    logprob_below: float | None = field(
        None,
        title="Log probability below",
        text="The row is asked again if the mean log probability of the answer's tokens is below "
        "this. Example: -0.5.",
        le=0,
        allow_inf_nan=False,
    )
    fails_schema: bool = field(
        False,
        title="Fails the schema",
        text="The row is asked again if the answer does not match output.schema_model, or was cut "
        "off.",
    )


class Escalate(Group):
    """A larger model, and the rows that it answers in place of the model in `engine`."""

    to: dict[str, Any] = field(
        {},
        title="Larger model",
        text="Engine of the larger model, with the fields of engine. Examples: {model: "
        "Qwen/Qwen3-8B}, {endpoint: {url: ..., model: ...}}. The fields of engine do not apply to "
        "it.",
    )
    when: EscalateWhen = field(
        EscalateWhen(),
        title="When",
        text="Which rows the larger model answers: those that meet any of the conditions.",
    )
    at_most: float = field(
        1.0,
        title="At most",
        text="Largest fraction of the rows that the larger model answers. If more rows meet the "
        "conditions, the least sure go first.",
        gt=0,
        le=1,
        allow_inf_nan=False,
    )

    check: int = field(
        0,
        title="Rows to check",
        text="Number of rows, chosen at random among those that the first model answered, that the "
        "larger model is asked about too. The report says how many of these answers agree; the "
        "result keeps the first model's. A resumed run keeps the number of its plan.",
        ge=0,
        le=MOST_CHECKED,
    )

    _to = field_check("to", by=lambda value: check_second_engine(value, LARGER) if value else None)

    @model_validator(mode="after")
    def _complete(self) -> Escalate:
        when = self.when
        rules = [when.probability_below, when.logprob_below]
        if self.to and rules == [None, None] and not when.fails_schema:
            raise ValueError(
                "when is required: set probability_below, logprob_below or fails_schema"
            )
        if not self.to and self != Escalate.model_construct():
            raise ValueError("to is required: set the engine of the larger model")
        if None not in rules:
            raise ValueError(
                "when: probability_below and logprob_below exclude each other; remove one of them"
            )
        return self

    @property
    def engine(self) -> Engine | None:
        """Return the engine of the larger model; None for a job without a cascade."""
        return Engine.model_validate(self.to) if self.to else None

    def _shown(self, name: str, value: Any) -> Any:
        if name != "to" or not value:
            return value
        shown = Engine.model_validate(value).model_dump(mode="json", exclude_unset=True)
        return {key: shown[key] for key in value if key in shown}


def check_second_engine(value: Mapping[str, Any], who: str, may_name_block: bool = False) -> None:
    """Raise ValueError if `value` is not a valid engine for a second model of the job.

    `who` is what the message calls that model. With `may_name_block`, its endpoint may be a saved
    Prefect block.
    """
    try:
        engine = Engine.model_validate(value)
    except ValidationError as error:
        raise ValueError(explain(error, Engine, "")) from None
    if not (engine.endpoint.asked or "model" in engine.model_fields_set):
        raise ValueError("names no model; set model, or endpoint with url and model")
    refused = {
        "task": engine.task != "generate",
        "adapter": engine.adapter is not None,
        "adapters": bool(engine.adapters),
        "classifier": engine.classifier is not None,
        "order": engine.order == "run",
        "max_model_len": engine.max_model_len == "auto",
        "endpoint.block": engine.endpoint.block is not None and not may_name_block,
    }
    for name, is_set in refused.items():
        if is_set:
            remedy = "set url and model in its place" if name == "endpoint.block" else "remove it"
            raise ValueError(f"{name}: {_short(engine, name)} is not supported for {who}; {remedy}")
    for tried in precision_tries(engine)[:1]:
        name = next(iter(tried))
        raise ValueError(f"{name}: try-fp8 is not supported for {who}; write fp8")


def _short(engine: Engine, name: str) -> str:
    value: object = engine
    for part in name.split("."):
        value = getattr(value, part)
    return str(value)[:80]


# Fields that only the larger model uses if the first one is a classifier, which embeds the text of
# prompt.template alone. What is too long for the encoder goes to the larger model.
OF_LARGER_ALONE: dict[str, object] = {
    "sampling": {},
    **dict.fromkeys(("prompt.system", "prompt.chat_template", "prompt.prefill", "prompt.tools")),
    "prompt.chat_template_kwargs": {},
    "prompt.on_too_long": "quarantine",
}


def first_changes(job: Mapping[str, Any]) -> dict[str, object]:
    """Return {field: new value} that turns a job with a cascade into the job of its first model.

    `job` holds the job's plain values.
    """
    output, logprobs = job["output"], job.get("sampling", {}).get("logprobs")
    when, classifies = output["escalate"].get("when", {}), "classifier" in job.get("engine", {})
    changes: dict[str, object] = {
        "output.escalate": {},
        "output.publish": [],
        "output.columns": [],
        "output.row_number": "_row",
        "output.compact": True,
        "quality": {},
    }
    if when.get("probability_below") is not None:
        changes["output.probabilities"] = True
    if when.get("logprob_below") is not None and logprobs is None:
        changes["sampling.logprobs"] = 0
    if classifies:
        changes |= {"engine.task": "embed", **OF_LARGER_ALONE}
    if when.get("fails_schema") or classifies:  # the larger model may still answer these rows
        changes["limits.max_failed_fraction"], changes["limits.max_failed_rows"] = 1.0, None
    return changes


def larger_fields(error: str) -> str:
    """Return an error about the larger model, with output.escalate.to.X in place of engine.X."""
    return re.sub(r"(?<![\w.])engine\.", "output.escalate.to.", error)


@contextmanager
def larger_named(is_larger: bool) -> Iterator[None]:
    """If `is_larger`, rewrite errors of the `with` block by a call of `larger_fields`.

    `is_larger` says that the block checks the larger model of a cascade.
    """
    try:
        yield
    except (ConfigError, HubUnavailable) as error:
        if is_larger:
            error.args = (larger_fields(str(error)),)
        raise


def larger_changes(output: Mapping[str, Any]) -> dict[str, object]:
    """Return {field: new value} that turns a job with a cascade into the job of its larger model.

    `output` holds the plain values of the job's group `output`.
    """
    return {"output.escalate": {}, "engine": output["escalate"]["to"]}
