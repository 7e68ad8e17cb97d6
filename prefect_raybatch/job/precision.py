"""Quantization that is used only if a sample of the rows shows it to be harmless."""

from __future__ import annotations

from typing import Any

from prefect_raybatch.job.engine import Engine

TRY_FP8 = "try-fp8"
PRECISION_FIELDS = ("quantization", "kv_cache_dtype")  # of vLLM's engine: weights, KV cache


def precision_tries(engine: Engine) -> list[dict[str, str]]:
    """Return the settings to try one after the other until one passes.

    These are all that the job asks for together, then each alone; [] if there is nothing to try.
    """
    names = [name for name in PRECISION_FIELDS if engine.given.get(name) == TRY_FP8]
    if not names:
        return []
    together = dict.fromkeys(names, "fp8")
    return [together, *({name: "fp8"} for name in names if len(names) > 1)]


def without_tries(engine: Engine) -> dict[str, Any]:
    """Return the vLLM arguments of an engine, without those that are to be decided."""
    undecided = {name for tried in precision_tries(engine) for name in tried}
    return {name: value for name, value in engine.given.items() if name not in undecided}
