"""Quantization that is used only if a sample of the rows shows it to be harmless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefect_raybatch.job import tasks
from prefect_raybatch.job.engine import Engine

if TYPE_CHECKING:
    from prefect_raybatch.job.batch_job import BatchJob

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


def with_precision(job: BatchJob, decided: Mapping[str, str]) -> BatchJob:
    """Return the job with its trials replaced by the decision; {}: the model as it is stored."""
    if not precision_tries(job.engine):
        return job
    engine = job.engine.model_copy()
    extra = engine.model_extra
    for name in PRECISION_FIELDS:
        if extra is not None and extra.get(name) == TRY_FP8:
            del extra[name]
    if extra is not None:
        extra.update(decided)
    return job.model_copy(update={"engine": engine})


def check_precision(job: BatchJob) -> None:
    """Raise ValueError for a job for which a trial is impossible or useless."""
    tries = precision_tries(job.engine)
    if not tries:
        return
    field = f"engine.{next(iter(tries[0]))}: {TRY_FP8}"
    if tasks.pools(job.engine.task) and "kv_cache_dtype" in tries[0]:
        raise ValueError(
            f"engine.kv_cache_dtype: {TRY_FP8} applies only to engine.task generate, not to "
            f"{job.engine.task}; remove it"
        )
    if job.engine.spans_nodes:
        raise ValueError(
            f"{field} needs an engine on one node; remove distributed_executor_backend: ray, or "
            "write fp8"
        )
