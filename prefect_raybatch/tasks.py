"""The Prefect tasks: thin covers of `runs` with retries by error class, artifacts and logs."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.logging.handlers import APILogHandler
from prefect.tasks import exponential_backoff

from prefect_raybatch import flow_runs, jobs, retry, runs
from prefect_raybatch import report as reports
from prefect_raybatch.blocks.store import options_of
from prefect_raybatch.driver import Progress
from prefect_raybatch.errors import is_transient
from prefect_raybatch.job import BatchJob
from prefect_raybatch.records import RunReport
from prefect_raybatch.runs import Run

UPDATE_EVERY = 2.0  # seconds between updates of the progress artifact: a page needs no more
LOG_EVERY = 15.0
OURS = logging.getLogger("prefect_raybatch")
OBSERVERS: list[Callable[[Progress], None]] = []  # the command line shows progress through these


def retry_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's retry condition: only what a retry can help is tried again."""
    error = None
    with suppress(Exception):  # a state without a result says nothing against a retry
        error = state.result(raise_on_failure=False)
    return is_transient(error) if isinstance(error, BaseException) else True


RETRY: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(backoff_factor=10),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": retry_transient,
    "cache_policy": NO_CACHE,  # the run directory is the cache, and the only truth
    "persist_result": False,
}


@task(name="plan_shards", task_run_name="plan-shards-{run_key}", **RETRY)
def plan_shards(job: BatchJob, run_key: str, dataset: Any = None) -> Run:
    """Makes or adopts the run's plan. `dataset` (a `ray.data.Dataset`) replaces the job's source.

    Raises `ConfigError`, `SourceError`, `PlanMismatch`, `UnsafeStore` (never retried) or
    `StoreUnavailable` (retried).
    """
    with logs_in_page():
        job = with_blocks(job)
        run = runs.plan_run(job, run_key, dataset)
        get_run_logger().info(
            "run %s: %s rows in %s shards at %s", run_key, f"{run.rows:,}", run.shards, run.uri
        )
        return run


@task(name="plan_retry", **RETRY)
def plan_retry(
    run_dir: str,
    errors: list[str] | None = None,
    overrides: dict[str, Any] | None = None,
    job: BatchJob | None = None,
) -> retry.Retry | retry.Nothing:
    """Makes or adopts the run that retries failed rows of the finished run at `run_dir`.

    Raises `ConfigError`, `CorruptRun`, `PlanMismatch` (never retried) or `StoreUnavailable`.
    """
    with logs_in_page():
        made = retry.plan_retry(run_dir, errors, overrides, job, with_blocks)
        log = get_run_logger()
        if isinstance(made, retry.Nothing):
            log.info("%s", made.message)
        else:
            rows, uri = f"{made.run.rows:,}", made.run.uri
            log.info("run %s: %s failed rows of %s at %s", made.run.run_key, rows, made.parent, uri)
        return made


@task(name="infer_shards", **RETRY)
def infer_shards(job: BatchJob, run: Run) -> Progress:
    """Reads, infers and commits all pending shards; a live progress artifact counts commits.

    Raises `ErrorBudgetExceeded`, `EngineStartError`, `InsufficientResources`, `SourceError`
    (never retried), `EngineFailure` or `StoreUnavailable` (retried; what is committed is kept).
    With `cluster.job_server` the work is a Ray job that outlives this process: see `jobs`.
    """
    with logs_in_page():
        observe = _Page(run)
        return jobs.infer(job, with_blocks(job), run, observe, flow_runs.owner())


@task(name="finalize_run", **RETRY)
def finalize_run(job: BatchJob, run: Run, progress: Progress | None = None) -> RunReport:
    """Writes the result, proves coverage, writes the report and `_SUCCESS`.

    Raises `IncompleteRun` while shards are missing and `CorruptRun` when coverage does not hold.
    """
    with logs_in_page():
        report = runs.finalize_run(with_blocks(job), run, progress)
        key = artifact_key(report.run_key)
        create_table_artifact(
            table=reports.stage_table(report),
            key=f"{key}-stages",
            description="Time, rows and rows a second of each stage.",
        )
        if report.failures:
            create_table_artifact(
                table=reports.failure_table(report.failures),
                key=f"{key}-failures",
                description="Commonest failures of rows in quarantine.",
            )
        create_markdown_artifact(
            markdown=reports.markdown(report), key=f"{key}-report", description="Run report."
        )
        return report


class _Page:
    """Shows progress in the Prefect page and its logs; never lets a page problem stop a run."""

    def __init__(self, run: Run):
        self.run, self.log = run, get_run_logger()
        self.artifact: UUID | None = None
        self.updated = self.logged = 0.0

    def __call__(self, progress: Progress) -> None:
        for observer in OBSERVERS:
            observer(progress)
        now, whole = time.time(), progress.done == progress.rows
        if whole or now - self.updated >= UPDATE_EVERY:
            self.updated = now
            self._update(100.0 * progress.done / progress.rows)
        if whole or now - self.logged >= LOG_EVERY:
            self.logged = now
            self.log.info(line(progress))

    def _update(self, percent: float) -> None:
        try:
            if self.artifact is None:
                made = create_progress_artifact(
                    progress=percent,
                    key=f"{artifact_key(self.run.run_key)}-progress",
                    description=f"Committed rows of {self.run.run_key}.",
                )
                self.artifact = cast(UUID, made)  # a coroutine only in async code
            else:
                update_progress_artifact(self.artifact, progress=percent)
        except Exception as error:  # the API may be away for a moment; the work goes on
            self.log.warning("the progress artifact was not updated: %s", error)


def line(progress: Progress) -> str:
    """Progress in a line: rows, share, rate, time left, failed."""
    share = progress.done / progress.rows if progress.rows else 1.0
    return (
        f"{progress.done:,} of {progress.rows:,} rows ({share:.0%}), "
        f"{progress.rate:,.0f} rows/s, {reports.duration(progress.seconds_left)} left, "
        f"{progress.tally.failed:,} failed"
    )


def artifact_key(run_key: str) -> str:
    """A run key as Prefect wants artifact keys: lower-case letters, digits and dashes."""
    return "raybatch-" + re.sub(r"[^a-z0-9]+", "-", run_key.lower()).strip("-")


@contextmanager
def logs_in_page() -> Iterator[None]:
    """Sends this package's own log lines to the Prefect page for the block."""
    if any(isinstance(handler, APILogHandler) for handler in OURS.handlers):
        yield
        return
    handler = APILogHandler()
    level = OURS.level
    OURS.addHandler(handler)
    OURS.setLevel(level or logging.INFO)  # else the root's, which is WARNING
    try:
        yield
    finally:
        OURS.setLevel(level)
        OURS.removeHandler(handler)


def with_blocks(job: BatchJob) -> BatchJob:
    """The job with keys from its credentials blocks put into the store options."""
    source, output = job.source, job.output
    if source.credentials_block:
        options = {**options_of(source.credentials_block), **source.options}
        source = source.model_copy(update={"options": options})
    if output.credentials_block:
        options = {**options_of(output.credentials_block), **output.options}
        output = output.model_copy(update={"options": options})
    return job.model_copy(update={"source": source, "output": output})
