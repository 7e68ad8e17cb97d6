"""Finds conflicts of a cascade or classifier with other fields of a job.

These checks run before all other checks of a job. Several of the others would also fail, but with
contradictory advice. Each conflict found here has one remedy, after which the job is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.sampling import Sampling

# Fields of a prompt that apply only to a chat.
OF_A_CHAT = (
    *("messages", "chat_template", "chat_template_kwargs", "prefill"),
    *("continue_final_message", "tools", "documents"),
)
WHEN = "output.escalate.when"


def cascade_conflict(engine: Engine, prompt: Prompt, sampling: Sampling, output: Output) -> str:
    """Return a message on the first conflict of a cascade or classifier, with a remedy, or ""."""
    if engine.classifier is not None:
        return next(_of_classifier(engine, prompt, sampling, output), "")
    if output.escalate.engine is not None:
        return next(_of_first_model(engine, sampling, output), "")
    return ""


def _of_classifier(
    engine: Engine, prompt: Prompt, sampling: Sampling, output: Output
) -> Iterator[str]:
    """Yield a message for each conflict of engine.classifier with other fields of the job."""
    cascade, when = output.escalate.engine is not None, output.escalate.when
    of_text = _fields_of_text(prompt, sampling)
    labels = "" if sampling.choice else ", and sampling.choice to the classifier's labels"
    if engine.endpoint.asked is not None:
        yield (
            "engine.classifier does not apply to engine.endpoint; set engine.model to the "
            "classifier's encoder in place of engine.endpoint"
        )
    if not cascade and engine.task != "embed":
        alone = f" and remove {', '.join(of_text)}" if of_text else ""
        yield (
            "engine.classifier needs output.escalate, which names the larger model; set "
            f"output.escalate.to and {WHEN}.probability_below{labels}. To use the classifier "
            f"alone, set engine.task: embed{alone}"
        )
    if not cascade and of_text:
        yield (
            f"{', '.join(of_text)}: a classifier alone embeds prompt.template, as in its training, "
            f"and generates no text; remove {'it' if len(of_text) == 1 else 'them'}"
        )
    if cascade and engine.task != "generate":
        yield (
            "engine.task: a classifier in a cascade needs no task; remove engine.task"
            + (" and set sampling.choice to the classifier's labels" if labels else "")
        )
    if prompt.template is None:
        other = "messages" if prompt.messages is not None else "function"
        yield (
            "engine.classifier needs prompt.template, the text to embed; set it in place of "
            f"prompt.{other}"
        )
    if output.schema_model is not None:
        yield "output.schema_model: a classifier answers with a label; remove output.schema_model"
    if cascade and (when.logprob_below is not None or when.fails_schema):
        yield f"{WHEN}: a classifier gives only probabilities; set probability_below alone"
    if cascade:
        yield from _of_probabilities(sampling, output)


def _of_first_model(engine: Engine, sampling: Sampling, output: Output) -> Iterator[str]:
    """Yield a message for each conflict of a cascade whose first model generates text."""
    when = output.escalate.when
    if engine.task != "generate":
        yield (
            f"output.escalate cannot be combined with engine.task: {engine.task}, because its "
            "models generate text; remove engine.task"
        )
    unsure = [name for name in ("probability_below", "logprob_below") if getattr(when, name)]
    if engine.endpoint.asked is not None and unsure:
        schema = "" if output.schema_model is not None else ", and output.schema_model"
        place = " in place of sampling.choice" if sampling.choice and schema else ""
        yield (
            f"{WHEN}.{unsure[0]} needs vLLM as the first engine, not engine.endpoint; set "
            f"fails_schema in its place{schema}{place}"
        )
    if when.probability_below is None:
        return
    if output.schema_model is not None and sampling.choice:
        yield (
            "sampling.choice cannot be combined with output.schema_model; remove "
            f"output.schema_model, because {WHEN}.probability_below needs sampling.choice"
        )
    if output.schema_model is not None:
        yield (
            f"{WHEN}.probability_below needs sampling.choice, not output.schema_model; set "
            "fails_schema in its place"
        )
    yield from _of_probabilities(sampling, output)


def _of_probabilities(sampling: Sampling, output: Output) -> Iterator[str]:
    """Yield a message for each conflict of output.escalate.when.probability_below."""
    if sampling.extra.get("logprobs") is not None:
        yield (
            f"{WHEN}.probability_below cannot be combined with sampling.logprobs; remove "
            "sampling.logprobs"
        )
    if output.reasoning_parser is not None:
        yield (
            f"{WHEN}.probability_below is taken from the first output token, which belongs to the "
            "reasoning; remove output.reasoning_parser"
        )


def _fields_of_text(prompt: Prompt, sampling: Sampling) -> list[str]:
    """Return the dotted names of the fields that are set and apply only to generating text."""
    changed = sampling.model_dump(exclude_defaults=True)
    fields = [f"sampling.{name}" for name, value in changed.items() if value is not None]
    names = ("system", *OF_A_CHAT)
    return fields + [f"prompt.{n}" for n in names if getattr(prompt, n) not in (None, False, {})]
