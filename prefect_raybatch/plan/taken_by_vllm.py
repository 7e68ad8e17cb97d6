"""Checks a job for what vLLM would reject, when an engine starts or for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.engine_values import wrong_values
from prefect_raybatch.job.structured_outputs import (
    check_backend,
    check_form_parses,
    check_form_shape,
    check_labels_held,
)
from prefect_raybatch.spec.finish import ParsingSpec
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec


def check_taken_by_vllm(spec: RunSpec) -> None:
    """Raise `ConfigError` for settings that fail every engine at its start, or every row."""
    engine, sampling = spec.engine.model.given, spec.sampling
    if (wrong := wrong_values(engine)) is not None:
        raise ConfigError(wrong)
    if not spec.engine.model.pools:
        _check_step(spec.sizes)
    if sampling.fields.get("thinking_token_budget") is not None:
        _check_thinking(spec.finish.parsing, engine)
    form, forms = sampling.form, engine.get("structured_outputs_config")
    try:
        check_backend(forms)
    except ValueError as error:
        raise ConfigError(f"engine.{error}") from None
    try:
        check_form_shape(form)
        check_form_parses(form, forms)
        where = "choice" if sampling.fields.get("choice") else "structured_outputs.choice"
        check_labels_held(sampling.choices, where, forms)
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from None


def _check_step(sizes: SizeSpec) -> None:
    sequences, step = sizes.max_num_seqs, sizes.max_num_batched_tokens
    if step is not None and sequences is not None and sequences > step:
        raise ConfigError(
            f"engine.max_num_batched_tokens ({step:,}) must be at least engine.max_num_seqs "
            f"({sequences:,}). Raise the one, or lower the other"
        )


def _check_thinking(parsing: ParsingSpec | None, engine: Mapping[str, Any]) -> None:
    parsers = [parsing and parsing.reasoning]
    for told in (engine, engine.get("reasoning_config"), engine.get("structured_outputs_config")):
        if isinstance(told, Mapping):
            parsers += [told.get("reasoning_parser"), told.get("reasoning_start_str")]
    if not any(parsers):
        raise ConfigError(
            "sampling.thinking_token_budget needs a reasoning parser. Name one in "
            "output.reasoning_parser, or remove thinking_token_budget"
        )
