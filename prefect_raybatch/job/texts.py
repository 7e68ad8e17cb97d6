"""Replaces the names of files and classes in a job by the texts that they stand for now."""

from __future__ import annotations

from prefect_raybatch.job import answer_schema
from prefect_raybatch.job.batch_job import BatchJob


def with_answer_schema(job: BatchJob, text: str | None = None) -> BatchJob:
    """Return the job with the text of its answers' schema, by default what it stands for now.

    Raises `ConfigError` for one that cannot be loaded, or that no engine accepts.
    """
    if job.output.schema_model is None:
        return job
    if text is None:
        text = answer_schema.schema_text(job.output.schema_model)
    return job.model_copy(update={"output": job.output.model_copy(update={"schema_model": text})})


def with_template_text(job: BatchJob, text: str) -> BatchJob:
    """Return the job with the text of its chat template."""
    return job.model_copy(update={"prompt": job.prompt.model_copy(update={"chat_template": text})})
