"""A job with fields changed, before it is compiled."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_raybatch.job import answer_schema
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.job_file import with_fields
from prefect_raybatch.job.precision import PRECISION_FIELDS, TRY_FP8, precision_tries


def edited(job: BatchJob, changes: Mapping[str, object], where: str) -> BatchJob:
    """Return the job with fields changed, such as {"source.limit": 5}, checked as a job file is.

    `where` says in messages which job that is. A block of the cluster that is not changed stays
    loaded. Raises `ConfigError` for a field that there is not, and for what no job may be.
    """
    if not changes:
        return job
    made = BatchJob.from_dict(with_fields(job.to_dict(), changes), where)
    access = job.cluster.access_if_loaded
    same = made.cluster.block is not None and made.cluster.block == job.cluster.block
    return with_access(made, access) if same and access is not None else made


def with_access(job: BatchJob, access: ClusterAccess) -> BatchJob:
    """Return a copy of the job that reaches its cluster through `access`."""
    return job.model_copy(update={"cluster": job.cluster.with_access(access)})


def with_store_options(
    job: BatchJob, source: Mapping[str, object], output: Mapping[str, object]
) -> BatchJob:
    """Return the job with store options added to its input and output.

    Options that the job itself sets have precedence.
    """
    read, written = job.source, job.output
    return job.model_copy(
        update={
            "source": read.model_copy(update={"options": {**source, **read.options}}),
            "output": written.model_copy(update={"options": {**output, **written.options}}),
        }
    )


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
