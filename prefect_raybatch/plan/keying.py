"""What of a job is the context of its requests' keys: under another one no answer is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_raybatch.job import tasks
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.secrets import hide_argument
from prefect_raybatch.model import adapters
from prefect_raybatch.plan.fingerprint import FREE_ENGINE_ARGUMENTS
from prefect_raybatch.stages.request_key import Keying, context_of

KEY_VERSION = 1  # of what a key is made of


def keying_of(job: BatchJob, model: Mapping[str, Any]) -> tuple[Keying, dict[str, Any]]:
    """(what makes the keys of a job's requests, what its context holds, without secrets). `model`
    is the pinned one; the job's chat template and schema are texts (`Resolved`)."""
    parts = _context(job, model)
    engine = job.engine.model_extra or {}
    keying = Keying.under(
        context_of(parts),
        model.get("adapters") or {},
        job.prompt.adapter_column,
        sampling=parts["sampling"],
        # A logits processor of the user's may keep a state, or count.
        merge=job.engine.deduplicate and not engine.get("logits_processors"),
    )
    return keying, {**parts, "engine": hide_argument(parts["engine"], "engine")}


def _context(job: BatchJob, model: Mapping[str, Any]) -> dict[str, Any]:
    prompt, output = job.prompt, job.output
    sampling, engine = job.asked(), job.engine.model_extra or {}
    if tasks.pools(job.engine.task):  # nothing is drawn
        sampling = {**tasks.pooling_fields(job), "task": job.engine.task}
    parts: dict[str, Any] = {
        "version": KEY_VERSION,
        "engine.model": model["identity"],
        "engine.max_model_len": job.engine.context,
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
    if prompt.images.used:  # limits on bytes and pixels are looked at when keys are made
        parts["prompt.images.resize"] = prompt.images.resize
    if output.probabilities:  # asked for with the answer
        parts["output.probabilities"] = True
    if output.reasoning_parser:  # tells where a form begins, and whether a prompt left it open
        parts["output.reasoning_parser"] = output.reasoning_parser
    if output.parsed_columns and (sampling.get("stop") or prompt.function):
        parts["special_tokens"] = True  # vLLM made the texts, with the marks that parsers look for
    if adapters.named(job.engine):
        parts["adapters"] = True  # an engine with adapters computes otherwise also without one
    return parts
