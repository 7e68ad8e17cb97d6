"""The Prefect tasks: the steps of a run with retries by error class, artifacts and logs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import Artifact, ImageArtifact, MarkdownArtifact, TableArtifact
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.logging.handlers import APILogHandler
from prefect.tasks import exponential_backoff

from prefect_raybatch.api import Sender, plan_run, recorded_attempt, retry
from prefect_raybatch.api import finalize_run as finalize
from prefect_raybatch.api import publish_run as publish
from prefect_raybatch.api.retry import Retry
from prefect_raybatch.api.submission import infer_in_place
from prefect_raybatch.api.tune import tune as try_settings
from prefect_raybatch.compile.job import cluster_spec, size_spec
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import Listeners, Ticker
from prefect_raybatch.driver.stops import Sample, Stop, failed_sample, last_stop
from prefect_raybatch.errors import ConfigError, RayBatchError, StoreError, is_transient
from prefect_raybatch.flow import origin  # noqa: F401  # says which jobs the policy limits
from prefect_raybatch.flow import reconcile as flow_runs
from prefect_raybatch.flow.artifacts import (
    artifact_key,
    log_not_shown,
    put,
    put_or_log,
    tune_key,
)
from prefect_raybatch.flow.assets import materialize_result
from prefect_raybatch.flow.away import is_outage, watched
from prefect_raybatch.flow.blocks.cluster import access_of
from prefect_raybatch.flow.blocks.endpoint import endpoint_of
from prefect_raybatch.flow.blocks.store import options_of
from prefect_raybatch.flow.cancelling import CANCEL_LOOK, CancelWatch
from prefect_raybatch.flow.completion import ASSET, CompletionEvents
from prefect_raybatch.flow.failure import COMMAND, ROWS_SHOWN, crash_advice, explained, is_explained
from prefect_raybatch.flow.origin import add_pull_folder
from prefect_raybatch.flow.page import Observer, Page
from prefect_raybatch.flow.run_history import send_history_events, show_history, written_uri
from prefect_raybatch.flow.texts import STORABLE_LINES
from prefect_raybatch.harmless import markdown_text
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.job.edits import (
    render_placeholders,
    with_access,
    with_endpoint_fields,
    with_judge_fields,
    with_store_options,
)
from prefect_raybatch.job.placeholders import date_of_key, today
from prefect_raybatch.job.trust import check_blocks, check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.report import plots
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.advice import DEADLINE_MISSED
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import published_text, published_verb
from prefect_raybatch.runs import tune
from prefect_raybatch.runs.attempts import FINALIZING, INFERENCE, record_command
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.retry import NothingToRetry
from prefect_raybatch.runs.run import Run, run_store
from prefect_raybatch.storage import open_store
from prefect_raybatch.words import counted

__all__ = ["finalize_run", "infer_shards", "plan_shards", "publish_run", "with_blocks"]

OUR_LOGGER = logging.getLogger("prefect_raybatch")

_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let `observer` also receive the progress of flow runs that start in the `with` block.

    An observer cannot be a parameter of a flow, because Prefect stores the parameters.
    """
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def retry_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Return whether Prefect retries the task: only if its error is transient.

    Also returns True if the state holds no error.
    """
    error = None
    with suppress(Exception):  # a state without a result: retry
        error = state.result(raise_on_failure=False)
    return is_transient(error) if isinstance(error, BaseException) else True


RETRY: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(backoff_factor=10),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": retry_transient,
    "cache_policy": NO_CACHE,  # the run directory is the cache and the source of truth
    "persist_result": False,
}


@task(name="plan_shards", task_run_name="plan-shards-{run_key}", **RETRY)
def plan_shards(
    job: BatchJob, run_key: str, dataset: Any = None, accept: Sequence[str] = ()
) -> Run:
    """Plan a new run, or load the plan of an existing one.

    `dataset` (a `ray.data.Dataset`) replaces the job's source. `accept` names fields in which the
    job may differ from the plan.

    Raises `ConfigError`, `SourceError`, `PlanMismatch`, `UnsafeStore` (never retried) or
    `StoreUnavailable` (retried).
    """
    with (
        logs_in_page(),
        failed_run_shown(job, run_key),
        explained("plan_shards", job.name, run_key, RETRY["retries"]),
    ):
        add_pull_folder()
        job = with_blocks(render_placeholders(job, run_key))
        run = plan_run(job, run_key, dataset, accept)
        get_run_logger().info(
            "run %s: %s in %s at %s",
            *(run_key, counted(run.rows, "row"), counted(run.shards, "shard"), run.uri),
        )
        _log_crash_advice()
        return run


@task(name="plan_retry", task_run_name="plan-retry", **RETRY)
def plan_retry(
    run_dir: str,
    errors: list[str] | None = None,
    overrides: dict[str, Any] | None = None,
    job: BatchJob | None = None,
) -> Retry | NothingToRetry:
    """Plan the retry of failed rows of the finished run at `run_dir`, or load its existing plan.

    `errors` are the error classes to retry, None for all. `overrides` are changed fields of the
    job; `job` replaces the run's job. Returns `NothingToRetry` if there are no rows to retry.
    Raises `ConfigError`, `CorruptRun`, `PlanMismatch` (never retried) or `StoreUnavailable`.
    """
    check_run_place(run_dir)
    key = run_dir.rstrip("/").rpartition("/")[2]
    with (
        logs_in_page(),
        explained(
            "plan_retry", job.name if job else _job_of(run_dir), key, RETRY["retries"], run_dir
        ),
    ):
        add_pull_folder()
        planned = retry.plan_retry(run_dir, errors, overrides, job, with_blocks)
        log = get_run_logger()
        if isinstance(planned, NothingToRetry):
            log.info("%s", planned.message)
        else:
            key, rows = planned.run.run_key, counted(planned.run.rows, "failed row")
            log.info("run %s: retrying %s of %s in %s", key, rows, planned.parent, planned.run.uri)
            _log_crash_advice()
        return planned


def _log_crash_advice() -> None:
    if text := crash_advice():
        get_run_logger().info("%s", text)


@task(name="infer_shards", task_run_name="infer-shards-{run.run_key}", **RETRY)
def infer_shards(job: BatchJob, run: Run) -> Progress:
    """Read, infer and commit all pending shards; a progress artifact shows the committed share.

    With `cluster.job_server` the work is a Ray job that survives this process. With
    `cluster.kubernetes` it runs on a cluster that is created for it (see `remote`). Raises
    `ErrorBudgetExceeded`, `EngineStartError`, `InsufficientResources`, `SourceError` (never
    retried), `EngineFailure` or `StoreUnavailable` (retried; committed shards are kept).
    """
    with (
        logs_in_page(),
        _loaded_for("infer_shards", job, run) as (filled, loaded),
        _recorded(loaded, run, INFERENCE),  # a lost Ray job records nothing itself
        Page(
            run,
            loaded.output,
            loaded.effective_limits,
            cluster_spec(loaded),
            size_spec(loaded),
            observers=_observers.get(),
            written=written_uri(filled.output.uri),
        ) as page,
    ):
        return infer_in_place(filled, loaded, run, page, flow_runs.owner(RETRY["retries"]))


@task(name="finalize_run", task_run_name="finalize-run-{run.run_key}", **RETRY)
def finalize_run(job: BatchJob, run: Run, progress: Progress | None = None) -> RunReport:
    """Write the result, verify its coverage, then write the report and `_SUCCESS`.

    `progress` is what `infer_shards` returned; it adds figures to the report. The event
    `run.completed` is sent here, or by `publish_run` if `output.publish` names targets.

    Raises `IncompleteRun` if shards are missing and `CorruptRun` if the coverage is wrong.
    """
    with logs_in_page(), _loaded_for("finalize_run", job, run) as (filled, loaded):
        with _recorded(loaded, run, FINALIZING), _ended_if_cancelled(loaded):
            written = written_uri(job.output.uri)
            report = finalize(loaded, run, progress, written, _sender(filled))
        _show_report(job.name, report)
        events = CompletionEvents(run, job.name, loaded.output.options)
        limited = loaded.source.most_rows is not None
        send_history_events(events, loaded.name, loaded.output, written, limited)
        if not events.is_sent(ASSET):  # else an earlier flow run has logged it
            get_run_logger().info(
                "run %s: %s = %s answered + %s in quarantine + %s left out, in %s",
                *(run.run_key, counted(report.rows, "row"), f"{report.good:,}"),
                *(f"{report.failed:,}", f"{report.skipped:,}", run.uri),
            )
            # Logged last, so that the page shows it first: a late run is shown in green.
            for advice in report.advice:
                if advice.about == DEADLINE_MISSED:
                    get_run_logger().warning(
                        "%s: %s. Use %s", advice.about, advice.evidence, advice.change
                    )
            if materialize_result(report, job.name, written, loaded.source):
                events.record(ASSET)
        if not job.output.publish:  # else `publish_run` completes it
            _send_completed(events, report)
        return report


def _send_completed(events: CompletionEvents, report: RunReport) -> None:
    """Send the event that a run is completed.

    It is sent once for each set of targets: after publishing to one more target, it is sent again.
    """
    published = [publication.target for publication in report.published]
    events.send(
        "run.completed",
        ", ".join(sorted(published)),
        run=report.run,
        rows=report.rows,
        answered=report.good,
        quarantined=report.failed,
        skipped=report.skipped,
        seconds=report.seconds,
        rows_per_second=report.rows_per_s,
        published=published,
        cost=dict(report.cost),
    )


@task(name="publish_run", task_run_name="publish-run-{run.run_key}", **RETRY)
def publish_run(job: BatchJob, run: Run) -> RunReport:
    """Publish a finished run to the targets in `output.publish`, each once.

    Without targets, only return the report.

    Raises `ConfigError` if the result cannot be published (never retried), `PublishFailed` or
    `StoreUnavailable` (retried; published targets are kept).
    """
    with logs_in_page(), _loaded_for("publish_run", job, run) as (filled, loaded):
        if not loaded.output.publish:
            return load_report(open_store(run.uri, loaded.output.options or None))
        began = time.time()
        with _ended_if_cancelled(loaded):
            written = written_uri(job.output.uri)
            report = publish(loaded, run.uri, written=written, sender=_sender(filled))
        for publication in report.published:
            verb, text = published_verb(publication, began), published_text(publication)
            get_run_logger().info("run %s: %s to %s", run.run_key, verb, text)
        _show({"report": _report_page(report)}, loaded.name, report.run_key)
        _send_completed(CompletionEvents(run, job.name, loaded.output.options), report)
        return report


@task(name="tune_engine", cache_policy=NO_CACHE, persist_result=False)
def tune_engine(job: BatchJob, minutes: float = 5.0, deadline: str | None = None) -> dict[str, Any]:
    """Try engine settings for about `minutes`. A table artifact shows the trials.

    Returns the fields to change, such as {"engine.max_num_seqs": 512}. Raises `ConfigError` if no
    setting worked.
    """
    with logs_in_page(), explained("tune_engine", job.name, None):
        log = get_run_logger()

        def show(trial: tune.Trial) -> None:
            log.info(tune.line(trial))

        allowed = deadline or job.limits.deadline
        limit = seconds_of(allowed) if allowed else None
        tuning = try_settings(with_blocks(job), minutes, deadline=limit, observe=show)
        about = "\n\n".join(map(markdown_text, tune.conclusion(tuning)))
        table = TableArtifact(table=tune.table(tuning), description=about)
        put_or_log(table, tune_key(job.name))
        return tune.settings(tuning)


@contextmanager
def _loaded_for(task_name: str, job: BatchJob, run: Run) -> Iterator[tuple[BatchJob, BatchJob]]:
    """Yield the job twice: with its placeholders filled in, then with its blocks loaded as well.

    First checks that the policy allows the run's directory and the job. Explains an error of the
    `with` block, with examples of failed rows, and then shows the run history.
    """
    # First, because explaining an error reads the run directory and the job's output.
    with explained(task_name, job.name, run.run_key, RETRY["retries"]):
        check_run_place(run.uri)
        filled = render_placeholders(job, run.run_key)
        loaded = with_blocks(filled)
        check_trust(loaded)
    options = loaded.output.options or None

    @cache  # the attempts are read once
    def stop() -> Stop | None:
        return last_stop(run.uri, options)

    def sample() -> Sequence[Sample]:
        return failed_sample(run.uri, options, ROWS_SHOWN, stop())

    try:
        with explained(
            *(task_name, job.name, run.run_key, RETRY["retries"], run.uri),
            *(sample, stop, job.effective_limits),
        ):
            yield filled, loaded
    except Exception as error:
        _show_failed_run(error, loaded, run.run_key, job.output.uri)
        raise


@contextmanager
def failed_run_shown(job: BatchJob, run_key: str) -> Iterator[None]:
    """Show the run history if the `with` block raises an error that `explained` has explained.

    Also records in the run directory the command that continues the run. Does nothing for errors of
    the store, and for jobs that the policy does not allow. Raises the error again in any case.
    """
    try:
        yield
    except Exception as error:
        loaded = _loaded(job, run_key)
        if _is_allowed(loaded):
            _show_failed_run(error, loaded, run_key, job.output.uri)
        raise


def _show_failed_run(error: Exception, loaded: BatchJob, run_key: str, uri: str) -> None:
    """Show the run history after an error, and record how to continue the run.

    `loaded` has the credentials of its blocks; `uri` is output.uri as written in the job. Does
    nothing for errors of the store, and for errors that `explained` has not explained.
    """
    if is_explained(error) and not isinstance(error, StoreError):
        record_command(run_store(loaded.output, run_key), getattr(error, COMMAND, ""))
        show_history(loaded.name, loaded.output, run_key, uri=written_uri(uri))


def _is_allowed(job: BatchJob) -> bool:
    """Return whether the policy in force allows the job, so that its output may be read."""
    try:
        check_trust(job)
    except ConfigError:
        return False
    return True


def _loaded(job: BatchJob, run_key: str) -> BatchJob:
    """Return the job with its placeholders filled in and its blocks loaded.

    If a step raises `RayBatchError`, returns the job as it was before that step. {run_date} is
    today if the key has no date.
    """
    with suppress(RayBatchError):
        job = render_placeholders(job, run_key, date_of_key(run_key) or today())
        job = with_blocks(job)
    return job


def _recorded(job: BatchJob, run: Run, phase: str) -> AbstractContextManager[None]:
    store = open_store(run.uri, job.output.options or None)
    return recorded_attempt(store, job, run.run_key, phase, begin=False)


def _sender(job: BatchJob) -> Sender:
    """Return the `Sender` that runs the judge's job for this flow run and reports its progress."""
    return Sender(job, flow_runs.owner(RETRY["retries"]), Listeners(_observers.get()))


def _ended_if_cancelled(job: BatchJob) -> AbstractContextManager[object]:
    """End this process if its flow run is cancelled in the `with` block and no worker ends it.

    Does so only for a job with a judge, because judging may take as long as inference.
    """
    if not job.quality.judge.asked:
        return nullcontext()
    return Ticker("cancellation", CANCEL_LOOK, CancelWatch().look)


def _job_of(run_dir: str) -> str:
    """Return the name of a run's job, for the keys of its artifacts.

    Returns the name of the directory if the plan is missing or unreadable.
    """
    with suppress(RayBatchError, OSError):
        plan = Ledger(open_store(run_dir)).load_plan()
        if plan is not None:
            return plan.job_name
    return run_dir.rstrip("/").rpartition("/")[2]


def _show_report(job_name: str, report: RunReport) -> None:
    """Show the outcome of a finished run as artifacts of its job."""
    shown: dict[str, Artifact] = {
        "stages": TableArtifact(
            table=reports.stage_table(report),
            description="Tasks, rows, seconds and balance of each stage.",
        ),
        "report": _report_page(report),
    }
    if report.failures:
        shown["failures"] = TableArtifact(
            table=reports.failure_table(report.failures),
            description="Most common errors of failed rows.",
        )
    image = plots.combined_plot(report)
    if image is not None:
        # Also a separate artifact: Prefect's newer page shows no images within Markdown.
        shown["plots"] = ImageArtifact(image_url=image, description="Plots of the run.")
    _show(shown, job_name, report.run_key)


def _show(artifacts: Mapping[str, Artifact], job_name: str, run_key: str) -> None:
    """Show artifacts, given by their kinds, of a run whose result is complete.

    An error is only logged, because a page must not fail the run. In an outage the other artifacts
    are not tried, and the error is raised if Prefect retries the task, which then shows them all.
    """
    with watched() as api:
        for kind, artifact in artifacts.items():
            key = f"{artifact_key(job_name)}-{kind}"
            try:
                with api.within():
                    put(artifact, key, run_key)
            except Exception as error:
                if is_outage(error) and _is_retried():
                    raise
                log_not_shown(key, error)
                if is_outage(error):
                    return


def _is_retried() -> bool:
    """Return whether Prefect retries the current task after a transient error."""
    context = TaskRunContext.get()
    return context is not None and context.task_run.run_count <= context.task.retries


def _report_page(report: RunReport) -> MarkdownArtifact:
    return MarkdownArtifact(
        markdown=reports.markdown(report, plots.image_lines(report)),
        description="Report of the run.",
    )


class _PageLogs:
    """Sends this package's log lines to the Prefect page during its `with` blocks.

    Each task runs in such a block. Active blocks are counted, so that no line is shown twice, and
    none is lost when one of several tasks ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = self._level = 0
        self._handler: logging.Handler | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            self._inside += 1
            for handler in OUR_LOGGER.handlers:
                if isinstance(handler, APILogHandler):  # Prefect's settings name our logger
                    handler.addFilter(STORABLE_LINES)
                    return
            self._handler, self._level = APILogHandler(), OUR_LOGGER.level
            self._handler.addFilter(STORABLE_LINES)
            OUR_LOGGER.addHandler(self._handler)
            # Without a level it would use the root logger's, WARNING.
            OUR_LOGGER.setLevel(self._level or logging.INFO)

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside or self._handler is None:
                return
            OUR_LOGGER.setLevel(self._level)
            OUR_LOGGER.removeHandler(self._handler)
            self._handler = None


logs_in_page = _PageLogs()


def with_blocks(job: BatchJob) -> BatchJob:
    """Return the job with the credentials and addresses of the Prefect blocks that it names.

    Its source, output, hosted models and cluster may name blocks. Raises `ConfigError` if a block
    cannot be loaded, and `PrefectUnavailable` if Prefect's API does not answer or fails.
    """
    check_blocks(job)
    source, output = job.source.credentials_block, job.output.credentials_block
    job = with_store_options(
        job, options_of(source) if source else {}, options_of(output) if output else {}
    )
    hosted = job.engine.endpoint.block
    if hosted is not None:
        job = with_endpoint_fields(job, endpoint_of(hosted))
    judge = job.quality.judge.block
    if judge is not None:
        job = with_judge_fields(job, endpoint_of(judge, "quality.judge.endpoint.block"))
    block = job.cluster.block
    return job if block is None else with_access(job, access_of(block))
