"""The Prefect tasks: they wrap the verbs in `runs` with retries by error class, artifacts and
logs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import Artifact, ImageArtifact, MarkdownArtifact, TableArtifact
from prefect.cache_policies import NO_CACHE
from prefect.logging.handlers import APILogHandler
from prefect.tasks import exponential_backoff

from prefect_raybatch.api import finalize_run as finalize
from prefect_raybatch.api import plan_run, recorded_attempt, retry
from prefect_raybatch.api import publish_run as publish
from prefect_raybatch.api.retry import Retry
from prefect_raybatch.api.tune import tune as try_settings
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.stops import Sample
from prefect_raybatch.errors import ConfigError, RayBatchError, StoreError, is_transient
from prefect_raybatch.flow import origin  # noqa: F401  # says which jobs the policy limits
from prefect_raybatch.flow import reconcile as flow_runs
from prefect_raybatch.flow.artifacts import artifact_key, put, tune_key
from prefect_raybatch.flow.assets import materialize_result
from prefect_raybatch.flow.away import watched
from prefect_raybatch.flow.blocks.cluster import access_of
from prefect_raybatch.flow.blocks.store import options_of
from prefect_raybatch.flow.events import RunEvents
from prefect_raybatch.flow.failure import COMMAND, ROWS_SHOWN, explained, said_beforehand, was_told
from prefect_raybatch.flow.page import Observer, Page
from prefect_raybatch.flow.run_history import show_history
from prefect_raybatch.flow.texts import STORABLE_LINES
from prefect_raybatch.harmless import markdown_text
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.job.edits import with_access, with_store_options
from prefect_raybatch.job.run_words import date_of_key, today, with_run_words
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import check_blocks, check_run_place
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.remote.places import infer_in_place
from prefect_raybatch.report import plots
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.advice import DEADLINE_MISSED
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import published_text
from prefect_raybatch.runs import tune
from prefect_raybatch.runs.attempts import FINALIZING, INFERENCE, record_command
from prefect_raybatch.runs.failed_sample import failed_sample
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.retry import Nothing
from prefect_raybatch.runs.run import Run, run_store
from prefect_raybatch.storage import open_store
from prefect_raybatch.words import counted

__all__ = ["finalize_run", "infer_shards", "plan_shards", "publish_run", "with_blocks"]

OUR_LOGGER = logging.getLogger("prefect_raybatch")

_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Report the progress of flows called in the block to `observer` too. Prefect stores the
    parameters of a flow, so an observer cannot be one of them."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def retry_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Retry condition for Prefect: retry only what a retry can help."""
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
        failed_night_shown(job, run_key),
        explained("plan_shards", job, run_key, RETRY["retries"]),
    ):
        job = with_blocks(with_run_words(job, run_key))
        run = plan_run(job, run_key, dataset, accept)
        get_run_logger().info(
            "run %s: %s in %s at %s",
            *(run_key, counted(run.rows, "row"), counted(run.shards, "shard"), run.uri),
        )
        _say_beforehand()
        return run


@task(name="plan_retry", task_run_name="plan-retry", **RETRY)
def plan_retry(
    run_dir: str,
    errors: list[str] | None = None,
    overrides: dict[str, Any] | None = None,
    job: BatchJob | None = None,
) -> Retry | Nothing:
    """Plan the retry of failed rows of the finished run at `run_dir`, or load its existing plan.

    Raises `ConfigError`, `CorruptRun`, `PlanMismatch` (never retried) or `StoreUnavailable`.
    """
    check_run_place(run_dir)
    key = run_dir.rstrip("/").rpartition("/")[2]
    with (
        logs_in_page(),
        explained("plan_retry", job or _job_of(run_dir), key, RETRY["retries"], run_dir),
    ):
        made = retry.plan_retry(run_dir, errors, overrides, job, with_blocks)
        log = get_run_logger()
        if isinstance(made, Nothing):
            log.info("%s", made.message)
        else:
            rows, uri = counted(made.run.rows, "failed row"), made.run.uri
            log.info("run %s: %s of %s at %s", made.run.run_key, rows, made.parent, uri)
            _say_beforehand()
        return made


def _say_beforehand() -> None:
    if text := said_beforehand():
        get_run_logger().info("%s", text)


@task(name="infer_shards", task_run_name="infer-shards-{run.run_key}", **RETRY)
def infer_shards(job: BatchJob, run: Run) -> Progress:
    """Read, infer and commit all pending shards. A progress artifact shows the committed ones.

    With `cluster.job_server` the work is a Ray job that survives this process. With
    `cluster.kubernetes` it runs on a cluster that is created for it (see `remote`). Raises
    `ErrorBudgetExceeded`, `EngineStartError`, `InsufficientResources`, `SourceError` (never
    retried), `EngineFailure` or `StoreUnavailable` (retried; committed shards are kept).
    """
    with logs_in_page(), _told("infer_shards", job, run):
        job = with_run_words(job, run.run_key)
        loaded = with_blocks(job)
        with (
            _recorded(loaded, run, INFERENCE),  # a Ray job that is lost records nothing itself
            Page(loaded, run, observers=_observers.get()) as page,
        ):
            owner = flow_runs.owner(RETRY["retries"])
            return infer_in_place(job, loaded, run, page, owner)


@task(name="finalize_run", task_run_name="finalize-run-{run.run_key}", **RETRY)
def finalize_run(job: BatchJob, run: Run, progress: Progress | None = None) -> RunReport:
    """Write the result, verify its coverage, and write the report and `_SUCCESS`. This completes
    the run, unless `output.publish` names targets: then `publish_run` completes it.

    Raises `IncompleteRun` if shards are missing and `CorruptRun` if the coverage is wrong.
    """
    with logs_in_page(), _told("finalize_run", job, run):
        loaded = with_blocks(with_run_words(job, run.run_key))
        with _recorded(loaded, run, FINALIZING):
            report = finalize(loaded, run, progress)
        with watched() as api, api.within():
            _show_report(job, report)
        show_history(loaded, run.run_key, tell=not run.finished, output=job.output.uri)
        if not run.finished:  # a run that was complete before has logged it already
            get_run_logger().info(
                "run %s: %s = %s answered + %s in quarantine + %s left out, in %s",
                *(run.run_key, counted(report.rows, "row"), f"{report.good:,}"),
                *(f"{report.failed:,}", f"{report.skipped:,}", run.uri),
            )
            # Last, so that it is what the page shows first: such a run is completed and green.
            for one in report.advice:
                if one.about == DEADLINE_MISSED:
                    get_run_logger().warning("%s: %s; take %s", one.about, one.evidence, one.change)
            materialize_result(report, job, loaded.source)
            if not job.output.publish:  # else it is completed by `publish_run`
                RunEvents(run.run_key, job.name).completed(report)
        return report


@task(name="publish_run", task_run_name="publish-run-{run.run_key}", **RETRY)
def publish_run(job: BatchJob, run: Run) -> RunReport:
    """Publish a finished run to the targets in `output.publish`, each once. Without targets, only
    return the report.

    Raises `ConfigError` if the result cannot be published (never retried), `PublishFailed` or
    `StoreUnavailable` (retried; published targets are kept).
    """
    with logs_in_page(), _told("publish_run", job, run):
        loaded = with_blocks(with_run_words(job, run.run_key))
        if not loaded.output.publish:
            return load_report(open_store(run.uri, loaded.output.options or None))
        steps: list[str] = []
        report = publish(loaded, run.uri, steps.append)
        for one in report.published:
            get_run_logger().info("run %s: published to %s", run.run_key, published_text(one))
        put(_report_page(report), f"{artifact_key(loaded.name)}-report", report.run_key)
        if not run.finished or "recording" in steps:  # else it was completed before
            RunEvents(run.run_key, job.name).completed(report)
        return report


@task(name="tune_engine", cache_policy=NO_CACHE, persist_result=False)
def tune_engine(job: BatchJob, minutes: float = 5.0, deadline: str | None = None) -> dict[str, Any]:
    """Try engine settings for about `minutes`. A table artifact shows the trials.

    Returns the fields to change, such as {"engine.max_num_seqs": 512}. Raises `ConfigError` if no
    setting worked.
    """
    with logs_in_page(), explained("tune_engine", job, None):
        log = get_run_logger()

        def show(trial: tune.Trial) -> None:
            log.info(tune.line(trial))

        wanted = deadline or job.limits.deadline
        limit = seconds_of(wanted) if wanted else None
        found = try_settings(with_blocks(job), minutes, deadline=limit, observe=show)
        about = "\n\n".join(map(markdown_text, tune.conclusion(found)))
        table = TableArtifact(table=tune.table(found), description=about)
        put(table, tune_key(job.name))
        return tune.settings(found)


@contextmanager
def _told(task_name: str, job: BatchJob, run: Run) -> Iterator[None]:
    """Explain errors of a planned run, whose failed rows can be shown, and show the failed run in
    the run history."""

    def sample() -> Sequence[Sample]:
        options = with_blocks(with_run_words(job, run.run_key)).output.options
        return failed_sample(run.uri, options or None, ROWS_SHOWN)

    # First, since what is told of an error reads the run directory and the job's output.
    with explained(task_name, job, run.run_key, RETRY["retries"]):
        check_run_place(run.uri)
        check_trust(with_blocks(with_run_words(job, run.run_key)))
    with (
        failed_night_shown(job, run.run_key),
        explained(task_name, job, run.run_key, RETRY["retries"], run.uri, sample),
    ):
        yield


@contextmanager
def failed_night_shown(job: BatchJob, run_key: str) -> Iterator[None]:
    """Once an exception of the block was explained, record the command that continues the run and
    show the run history."""
    try:
        yield
    except Exception as error:
        loaded = _loaded(job, run_key)
        if was_told(error) and not isinstance(error, StoreError) and _is_allowed(loaded):
            record_command(run_store(loaded.output, run_key), getattr(error, COMMAND, ""))
            show_history(loaded, run_key, output=job.output.uri)
        raise


def _is_allowed(job: BatchJob) -> bool:
    """Return whether the policy in force allows the job, so that its output may be read."""
    try:
        check_trust(job)
    except ConfigError:
        return False
    return True


def _loaded(job: BatchJob, run_key: str) -> BatchJob:
    """Return the job with its credentials and placeholders filled in, as far as that works."""
    with suppress(RayBatchError):
        job = with_run_words(job, run_key, date_of_key(run_key) or today())
        job = with_blocks(job)
    return job


def _recorded(job: BatchJob, run: Run, phase: str) -> AbstractContextManager[None]:
    store = open_store(run.uri, job.output.options or None)
    return recorded_attempt(store, job, run.run_key, phase, begin=False)


def _job_of(run_dir: str) -> str:
    """Return the name of a run's job, which its artifacts are named by; else that of the
    directory."""
    with suppress(RayBatchError, OSError):
        plan = Ledger(open_store(run_dir)).load_plan()
        if plan is not None:
            return plan.job_name
    return run_dir.rstrip("/").rpartition("/")[2]


def _show_report(job: BatchJob, report: RunReport) -> None:
    """Show the outcome of a finished run as artifacts of its job."""
    shown: dict[str, Artifact] = {
        "stages": TableArtifact(
            table=reports.stage_table(report),
            description="Stages: tasks, rows, seconds, balance.",
        ),
        "report": _report_page(report),
    }
    if report.failures:
        shown["failures"] = TableArtifact(
            table=reports.failure_table(report.failures),
            description="Commonest failures of the rows in quarantine.",
        )
    image = plots.whole(report)
    if image is not None:
        # Also as an artifact of its own: Prefect's newer page shows no images within Markdown.
        shown["plots"] = ImageArtifact(image_url=image, description="Plots.")
    for kind, artifact in shown.items():
        put(artifact, f"{artifact_key(job.name)}-{kind}", report.run_key)


def _report_page(report: RunReport) -> MarkdownArtifact:
    return MarkdownArtifact(
        markdown=reports.markdown(report, plots.image_lines(report)), description="Report."
    )


class _PageLogs:
    """Sends this package's own log lines to the Prefect page while tasks of this process are
    active. Two concurrent tasks must neither show each line twice nor take the page from each
    other."""

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
            # without a level of its own it would take the root logger's, WARNING
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
    """Return the job with the credentials of its blocks in its store options, and with the cluster
    access that `cluster.block` names."""
    check_blocks(job)
    source, output = job.source.credentials_block, job.output.credentials_block
    job = with_store_options(
        job, options_of(source) if source else {}, options_of(output) if output else {}
    )
    block = job.cluster.block
    return job if block is None else with_access(job, access_of(block))
