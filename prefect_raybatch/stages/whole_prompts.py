"""Makes an engine process a whole prompt in one step, if the job or a seed on a CPU needs it.

vLLM processes a prompt in parts if it does not fit into a step. It samples after each part, drops
the sample, and resets the row's random number generator. On a CPU, PyTorch's generators cannot be
reset: "CPU Generator does not use offset" ends the engine (seen with vLLM 0.29.0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.spec.engine import EngineFields
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.order import is_greedy

IN_PARTS, TOKENS_A_STEP = "enable_chunked_prefill", "max_num_batched_tokens"


def _seeded(sampling: SamplingFields) -> bool:
    """Return whether requests with these fields are sampled (not greedy) and have a seed."""
    return not is_greedy(sampling) and sampling.get("seed") is not None


def with_whole_prompts(
    arguments: EngineFields,
    given: EngineFields,
    sampling: SamplingFields,
    rows_may: bool,
    length: Callable[[], int | None],
) -> dict[str, Any]:
    """Return vLLM's `arguments`, changed so that seeds do not crash an engine on a CPU.

    Prompts must be processed whole if answers are sampled with a seed, or if the job switches
    chunked prefill off. Then chunked prefill is off, and a step has room for the longest prompt. Do
    not call this for a GPU unless the job switches chunked prefill off.

    `given` has the arguments that the job sets, `sampling` the job's sampling fields. `rows_may`: a
    row may set a seed itself. If only rows may set one, the step is not enlarged: prompts are
    processed whole only if the longest one fits into a step.

    `length` returns the most tokens that the model takes. It is called only if prompts may have to
    be whole. If it returns None (unknown), nothing is changed.

    Raises `ConfigError` if the job sets an argument with which the engine would crash.
    """
    made = dict(arguments)
    certain = _seeded(sampling) or given.get(IN_PARTS) in (False, 0)
    context = length() if certain or rows_may else None
    if context is None:
        return made
    why = (
        "on a CPU, vLLM crashes if sampling.seed is used with a prompt that is processed in chunks"
    )
    if given.get(IN_PARTS):
        if certain:
            raise ConfigError(f"engine.{IN_PARTS}: {why}. Remove it, or sampling.seed")
        return made
    if made[TOKENS_A_STEP] < context:
        if not certain:
            return made
        if given.get(TOKENS_A_STEP):
            if given.get(IN_PARTS) in (False, 0):  # vLLM checks the step itself
                return made
            raise ConfigError(
                f"engine.{TOKENS_A_STEP} {given[TOKENS_A_STEP]} is less than the longest prompt "
                f"({context} tokens): {why}. Set it to {context}, or remove it or sampling.seed"
            )
        made[TOKENS_A_STEP] = context
    return {**made, IN_PARTS: False}
