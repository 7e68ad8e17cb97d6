"""Which jobs can reuse answers: those whose requests are known by what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect_raybatch.job.batch_job import BatchJob


def check_reuse(job: BatchJob) -> None:
    """Raises ValueError where `reuse`, `output.keep_answers` or `engine.order: run` is set beside
    what has no keys."""
    if not job.asks_apart:
        return
    field = "reuse" if job.reuse is not None else "output.keep_answers"
    if not job.keeps_answers:
        field = "engine.order: run"
    if job.engine.stage != "vllm":
        raise ValueError(
            f"{field}: ray.data.llm does not tell why answers ended; set engine.stage to vllm"
        )
