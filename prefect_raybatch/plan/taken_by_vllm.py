"""What a job asks of vLLM that it would refuse: of an engine as it starts, or of each row in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job import tasks
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.early_stop import choice_of
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.engine_values import wrong_values
from prefect_raybatch.job.precision import with_precision
from prefect_raybatch.job.structured_outputs import (
    check_backend,
    check_form_parses,
    check_form_shape,
    check_labels_held,
)


def check_taken_by_vllm(job: BatchJob) -> None:
    """`ConfigError` for what would end each engine as it starts, or fail each row in it."""
    engine = with_precision(job, {}).engine.model_extra or {}
    if (wrong := wrong_values(engine)) is not None:
        raise ConfigError(wrong)
    if not tasks.pools(job.engine.task):
        _check_step(job.engine)
    sampling, forms = job.sampling.model_extra or {}, engine.get("structured_outputs_config")
    if sampling.get("thinking_token_budget") is not None:
        _check_thinking(job, engine)
    form = sampling.get("structured_outputs")
    try:
        check_backend(forms)
    except ValueError as error:
        raise ConfigError(f"engine.{error}") from None
    try:
        check_form_shape(form)
        check_form_parses(form, forms)
        where = "choice" if job.sampling.choice else "structured_outputs.choice"
        check_labels_held(choice_of(job.sampling.given()) or (), where, forms)
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from None


def _check_step(engine: Engine) -> None:
    sequences, step = engine.max_num_seqs, engine.max_num_batched_tokens
    if step is not None and sequences != "auto" and sequences > step:
        raise ConfigError(
            f"engine.max_num_batched_tokens: a step of {step:,} tokens has none for some of "
            f"{sequences:,} sequences (engine.max_num_seqs); raise it, or lower that"
        )


def _check_thinking(job: BatchJob, engine: Mapping[str, Any]) -> None:
    parsers = [job.output.reasoning_parser]
    for told in (engine, engine.get("reasoning_config"), engine.get("structured_outputs_config")):
        if isinstance(told, Mapping):
            parsers += [told.get("reasoning_parser"), told.get("reasoning_start_str")]
    if not any(parsers):
        raise ConfigError(
            "sampling.thinking_token_budget: vLLM must be told how the model thinks; name its "
            "parser in output.reasoning_parser, or leave it out"
        )
