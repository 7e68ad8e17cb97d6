"""A job driven from the command line: as a Prefect flow or without Prefect, its progress shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect_raybatch.cli.show import TerminalProgress
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster.early import engines_early
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.run_words import date_of_key, run_words, with_run_words
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.attempts import (
    FINALIZING,
    INFERENCE,
    PLANNING,
    record_unplanned,
    recorded_attempt,
)
from prefect_raybatch.runs.finalize_run import finalize_run
from prefect_raybatch.runs.plan_run import check_places, plan_run, precheck
from prefect_raybatch.runs.run import Run, begun, default_run_key, run_store
from prefect_raybatch.runs.typed import name_typed_run
from prefect_raybatch.storage import open_store

if TYPE_CHECKING:
    from prefect_raybatch.runs.retry import Nothing, RetryRequest

RetryArguments = tuple[str, list[str] | None, dict[str, Any], BatchJob | None]  # what a retry takes


def run_job(
    job: BatchJob,
    key: str | None,
    prefect: bool,
    quiet: bool,
    run_date: date | None = None,
    accept: Sequence[str] = (),
) -> tuple[RunReport, bool]:
    """(report, whether anything was done). A finished run starts neither Prefect nor an engine."""
    from prefect_raybatch.ledger.ledger import Ledger

    known = job
    try:
        if run_date is not None or run_words(job):
            key = begun(with_keys(job), key, None, run_date)[1]
            job = with_run_words(job, key, run_date or date_of_key(key))
        known = with_keys(job)
        check_places(known.source, known.output)
        resolved = resolve(known)
        key = key or default_run_key(resolved)
    except Exception as error:
        record_unplanned(known, key, error)
        raise
    name_typed_run(key)
    store = run_store(known.output, key)
    if Ledger(store).finished() is not None:
        done = plan_run(resolved, key, accept=accept)
        return _published(known, finalize_run(known, done)), False
    with recorded_attempt(store, known, key, PLANNING, begin=False):
        resolved = precheck(resolved, store, accept)
    with _progress(quiet) as show:
        if prefect:
            show.begin(store.uri)
            given = {"accept": list(accept)} if accept else {}
            return run_flow("batch_inference", (job, key), show, known, **given), True
        plan = partial(plan_run, resolved, key, accept=accept)
        return _run_here(job, known, plan, show), True


def _run_here(
    job: BatchJob, known: BatchJob, plan: Callable[[], Run], show: TerminalProgress
) -> RunReport:
    """Plans and drives a run without Prefect; its report. `known` is the job with keys."""
    from prefect_raybatch.remote.places import infer_in_place

    with engines_early():
        planned = plan()
        show.begin(planned.uri)
        store = open_store(planned.uri, known.output.options or None)
        with recorded_attempt(store, known, planned.run_key, INFERENCE, begin=False):
            progress = infer_in_place(job, known, planned, show)
    show.close()
    with recorded_attempt(store, known, planned.run_key, FINALIZING, begin=False):
        report = finalize_run(known, planned, progress)
    return _published(known, report)


def _published(known: BatchJob, report: RunReport) -> RunReport:
    """The report once the run is published to all that its job names."""
    if not known.output.publish:
        return report
    from prefect_raybatch.runs.publish_run import publish_run

    return publish_run(known, report.run)


def retry_rows(
    asked: RetryRequest, arguments: RetryArguments, prefect: bool, quiet: bool
) -> RunReport | Nothing:
    """The report of the run that retries, or `Nothing` when no row was free."""
    from prefect_raybatch.runs import retry

    with _progress(quiet) as show:
        if prefect:
            report = run_flow("retry_failed", arguments, show, asked.known.job)
            none = "other runs have retried all rows asked for; none is left that failed"
            return report or retry.Nothing(arguments[0], none)
        made = retry.begin(asked)
        if isinstance(made, retry.Nothing):
            return made
        return _run_here(made.job, with_keys(made.job), lambda: made.run, show)


def with_keys(job: BatchJob) -> BatchJob:
    """Return the job with the keys of its blocks, its cluster's block included. The flow gets the
    job without them and loads them itself, since Prefect stores a flow's parameters unencrypted."""
    blocks = (job.source.credentials_block, job.output.credentials_block, job.cluster.block)
    if not any(blocks):
        return job
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow.tasks import with_blocks

    check_api()
    return with_blocks(job)


def run_flow(
    name: str, arguments: tuple[Any, ...], show: TerminalProgress, job: BatchJob, **more: Any
) -> Any:
    """Calls a flow; the cluster that `job` will take is started beside Prefect's server."""
    # Quiet by default: the page has the log lines, the terminal has progress and our own errors.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
    show.say("starting Prefect")
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow import flows as flow
    from prefect_raybatch.flow import tasks

    check_api()
    # After the imports, which would only take turns with Ray's.
    with tasks.observed_by(show), cluster.started_early(cluster_spec(job)):
        return flow.called(getattr(flow, name), *arguments, **more)


def quiet_engine() -> None:
    """Have engines that start in this process print nothing but errors."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def _progress(quiet: bool) -> Iterator[TerminalProgress]:
    """Progress in the terminal while a run is driven."""
    show = TerminalProgress(quiet)
    try:
        yield show
    finally:
        show.close()
