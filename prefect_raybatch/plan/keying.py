"""The context of a job's request keys: an answer is never reused under another context."""

from __future__ import annotations

from typing import Any

from prefect_raybatch.job.counted_fields import FREE_ENGINE_ARGUMENTS
from prefect_raybatch.job.precision import TRY_FP8
from prefect_raybatch.job.secrets import hide_argument
from prefect_raybatch.model import adapters
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.stages.request_key import Keying, context_of

KEY_VERSION = 1  # of what a key is made of


def keying_of(spec: RunSpec, model: PinnedModel) -> tuple[Keying, dict[str, Any]]:
    """Return (keying, context) for requests to the pinned `model`.

    The context holds what all request keys depend on, without secrets.
    """
    parts = _context(spec, model)
    keying = Keying.under(
        context_of(parts),
        model.get("adapters") or {},
        spec.prompt.adapter_column,
        sampling=parts["sampling"],
        # A logits processor of the user's may keep a state, or count.
        merge=spec.engine.merge and not spec.engine.model.given.get("logits_processors"),
    )
    return keying, {**parts, "engine": hide_argument(parts["engine"], "engine")}


def _context(spec: RunSpec, model: PinnedModel) -> dict[str, Any]:
    prompt, finish, request = spec.prompt, spec.finish, spec.engine.model
    sampling = dict(spec.sampling.fields)
    if request.pools:  # nothing is drawn
        sampling = {**spec.sampling.pooling, "task": request.task}
    # As the job has them: what a trial decides is noted beside the answers.
    undecided = {name: TRY_FP8 for tried in spec.engine.tries for name in tried}
    engine = {**request.given, **undecided}
    parts: dict[str, Any] = {
        "version": KEY_VERSION,
        "engine.model": model["identity"],
        "engine.max_model_len": request.context,
        "engine": {k: v for k, v in sorted(engine.items()) if k not in FREE_ENGINE_ARGUMENTS},
        "sampling": sampling,
        "prompt.on_too_long": prompt.on_too_long,
    }
    chat = ("chat_template", "chat_template_kwargs", "prefill", "continue_final_message", "tools")
    for name in chat:
        if getattr(prompt, name):
            parts[f"prompt.{name}"] = getattr(prompt, name)
    if prompt.special_tokens_in_rows != "allow":  # the way of runs before there was the field
        parts["prompt.special_tokens_in_rows"] = prompt.special_tokens_in_rows
    if prompt.images is not None:  # limits on bytes and pixels are looked at when keys are made
        parts["prompt.images.resize"] = prompt.images.resize
    if finish.probabilities:  # asked for with the answer
        parts["output.probabilities"] = True
    if finish.parsing is not None and finish.parsing.reasoning:
        # Tells where a form begins, and whether a prompt left it open.
        parts["output.reasoning_parser"] = finish.parsing.reasoning
    if finish.parsing is not None and (sampling.get("stop") or prompt.function):
        parts["special_tokens"] = True  # vLLM made the texts, with the marks that parsers look for
    if adapters.named(request):
        parts["adapters"] = True  # an engine with adapters computes otherwise also without one
    return parts
