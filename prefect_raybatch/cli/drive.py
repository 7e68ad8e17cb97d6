"""Runs jobs and retries for the command line, with or without Prefect, and shows their progress."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_raybatch.api import (
    Sender,
    default_run_key,
    finalize_run,
    plan_run,
    precheck,
    record_unplanned,
    recorded_attempt,
    resolve_run,
)
from prefect_raybatch.cli.arguments import field_changes
from prefect_raybatch.cli.ending import show_quality
from prefect_raybatch.cli.show import TerminalProgress
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster.prewarm import prewarm_allowed
from prefect_raybatch.compile.job import cluster_spec, read_spec
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import QualityTooLow, RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster import LOCAL
from prefect_raybatch.job.edits import (
    edited,
    job_placeholders,
    render_placeholders,
    targets_are_dated,
)
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.placeholders import date_of_key
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import duration
from prefect_raybatch.runs.attempts import FINALIZING, INFERENCE, PLANNING
from prefect_raybatch.runs.finalize_run import load_report
from prefect_raybatch.runs.plan_run import check_places
from prefect_raybatch.runs.run import Run, run_store
from prefect_raybatch.runs.run_history import unusual_lines
from prefect_raybatch.runs.typed import name_typed_run, without_secrets
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.standby.claim import engines_outlast
from prefect_raybatch.storage import is_remote, open_store
from prefect_raybatch.uncollected import uncollected

if TYPE_CHECKING:
    from prefect_raybatch.api.retry import RetryRequest
    from prefect_raybatch.remote.follower import Owner
    from prefect_raybatch.runs.retry import NothingToRetry

log = logging.getLogger(__name__)

# Arguments of a retry: run directory, error classes, field changes, job.
RetryArguments = tuple[str, list[str] | None, dict[str, Any], BatchJob | None]


def run_job(
    job: BatchJob,
    key: str | None,
    prefect: bool | None,
    quiet: bool,
    run_date: date | None = None,
    accept: Sequence[str] = (),
    keep_seconds: float = 0.0,
) -> tuple[RunReport, bool]:
    """Run a job, or resume its run; return (report, whether this call did any of the work).

    If `key` is None, it is the key of the newest unfinished run of this job, or a new one.
    `prefect`: run it as a Prefect flow; None: only if a Prefect API is configured. For a complete
    run, no row is inferred; at most its quality is measured and its result published. `accept`
    names fields in which the job may differ from the run's plan. Without Prefect, the engines of a
    local cluster wait `keep_seconds` for the next command. `quiet`: show no progress.
    """
    from prefect_raybatch.ledger.ledger import Ledger

    loaded, plain, written = job, job, job.output.uri
    try:
        if run_date is not None or job_placeholders(job):
            key = resolve_run(with_keys(job), key, None, run_date)[1]
            run_date = run_date or date_of_key(key)
            job = render_placeholders(job, key, run_date)
        loaded = with_keys(job)
        check_places(read_spec(loaded.source), loaded.output.uri, loaded.output.options)
        resolved = resolve(loaded)
        key = key or default_run_key(resolved)
    except Exception as error:
        record_unplanned(loaded, key, error, run_date)
        raise
    name_typed_run(key)
    flow_arguments = (plain, key, None, run_date)  # it finds earlier runs below `written`
    store = run_store(loaded.output, key)
    if Ledger(store).finished() is not None:
        run = plan_run(resolved, key, accept=accept)
        if run.finished:
            return _complete_run(job, loaded, run, written, quiet), False
        key, store = run.run_key, run_store(loaded.output, run.run_key)  # a repaired run
    with recorded_attempt(store, loaded, key, PLANNING, begin=False):
        resolved = precheck(resolved, store, accept)
    with closing(TerminalProgress(quiet)) as show:
        if _as_flow(prefect):
            show.begin(store.uri)
            options = {"accept": list(accept)} if accept else {}
            with quality_shown(store.uri, loaded.output.options or None, quiet):
                return run_flow("batch_inference", flow_arguments, show, loaded, **options), True
        plan = partial(plan_run, resolved, key, accept=accept)
        return _run_here(job, loaded, plan, show, keep_seconds, written), True


def _complete_run(
    job: BatchJob, loaded: BatchJob, run: Run, written: str, quiet: bool
) -> RunReport:
    """Finish what a complete run still lacks; return its report.

    This is to measure its quality and to publish it. The arguments are those of `_run_here`;
    `quiet`: show no progress.
    """
    with closing(TerminalProgress(quiet)) as show:
        report = finalize_run(loaded, run, None, written, sender_of(job, loaded, show))
        return _published(job, loaded, report, written, show)


def _run_here(
    job: BatchJob,
    loaded: BatchJob,
    plan: Callable[[], Run],
    show: TerminalProgress,
    keep_seconds: float = 0.0,
    written: str | None = None,
) -> RunReport:
    """Plan and drive a run without Prefect, publish its result, and return its report.

    `loaded` is `job` with the credentials of its blocks. `plan` plans the run, or loads the plan
    that exists. `written` is output.uri before {run_date} was filled in. Engines of a local cluster
    wait `keep_seconds` for the next command.
    """
    from prefect_raybatch.api.submission import infer_in_place

    spec = cluster_spec(loaded)
    starts_cluster = not (spec.access.remote or cluster.address_of(spec))
    kept = keep_seconds if starts_cluster else 0.0
    with (
        engines_outlast(cluster.local_cpus(spec), kept) as outlast,
        cluster.engines_imported(spec),
        prewarm_allowed(),
    ):
        planned = plan()
        show.begin(planned.uri)
        store = open_store(planned.uri, loaded.output.options or None)
        with recorded_attempt(store, loaded, planned.run_key, INFERENCE, begin=False):
            progress = infer_in_place(job, loaded, planned, show, _owner_of(loaded))
        waiting = outlast and cluster.RAY.is_standing and bool(cluster.CLUSTER_SESSION.warm.kinds)
    show.close()
    if waiting:
        show.say(
            f"engines wait {duration(kept)} for the next command; raybatch engines stop ends them"
        )
    with recorded_attempt(store, loaded, planned.run_key, FINALIZING, begin=False):
        report = finalize_run(loaded, planned, progress, written, sender_of(job, loaded, show))
    return _published(job, loaded, report, written, show)


def sender_of(job: BatchJob, loaded: BatchJob, show: TerminalProgress) -> Sender:
    """Return the `Sender` with which a command without a flow sends a judge's job.

    `loaded` is `job` with the credentials of its blocks.
    """
    return Sender(job, _owner_of(loaded), show)


def _owner_of(loaded: BatchJob) -> Owner:
    """Return the owner of Ray jobs that a command starts without a flow.

    It has the URL of Prefect's API if the cluster may have to load blocks.
    """
    from prefect_raybatch.doctor.services import prefect_api
    from prefect_raybatch.remote.follower import Owner

    return Owner(api=(prefect_api() or "") if loaded.cluster.access.remote else "")


def _as_flow(prefect: bool | None) -> bool:
    """Return whether a command runs as a Prefect flow.

    This is `prefect`, or if that is None, whether a Prefect API is configured: without one, a flow
    would start a temporary server whose pages nobody sees.
    """
    from prefect_raybatch.doctor.services import prefect_api

    return prefect_api() is not None if prefect is None else prefect


@contextmanager
def quality_shown(uri: str, options: StoreOptions | None, quiet: bool) -> Iterator[None]:
    """Print the measured quality of the run at `uri` if the `with` block raises `QualityTooLow`.

    Prints nothing if `quiet`. The error is raised again.
    """
    try:
        yield
    except QualityTooLow:
        if not quiet:
            with suppress(RayBatchError):  # the error of the block matters more
                show_quality(load_report(open_store(uri, options)))
        raise


def unusual_of(job: BatchJob, report: RunReport) -> list[str]:
    """Return lines on what is unusual about a complete run, compared with the job's earlier runs.

    Returns [] if output.uri is not local, because reading the records of many runs there would take
    long. Returns [] also after an error, because the run itself is complete.
    """
    output, limited = job.output, job.source.most_rows is not None
    if is_remote(output.uri):
        return []
    try:
        return unusual_lines(output.uri, output.options or None, job.name, report.run_key, limited)
    except RayBatchError as error:
        log.info("the run could not be compared with earlier ones: %s", error)
        return []


def _published(
    job: BatchJob,
    loaded: BatchJob,
    report: RunReport,
    written: str | None,
    show: TerminalProgress,
) -> RunReport:
    """Publish the run to the targets of its job, if it has any; return its report.

    `loaded` is `job` with the credentials of its blocks; `written` is output.uri before {run_date}
    was filled in. If a judge is asked again, `show` receives its progress.
    """
    show.close()
    if not loaded.output.publish:
        return report
    from prefect_raybatch.api import publish_run

    sender = sender_of(job, loaded, show)
    with quality_shown(report.run, loaded.output.options or None, show.quiet), closing(show):
        return publish_run(loaded, report.run, written=written, sender=sender)


def retry_rows(
    request: RetryRequest,
    arguments: RetryArguments,
    prefect: bool | None,
    quiet: bool,
    keep_seconds: float = 0.0,
) -> RunReport | NothingToRetry:
    """Retry failed rows in a child run, as a Prefect flow or in this process; return its report.

    `request` is the checked request; `arguments` are those of the flow `retry_failed` for the same
    request. Returns `NothingToRetry` if there are no rows to retry. For `prefect`, `quiet` and
    `keep_seconds` see `run_job`.
    """
    from prefect_raybatch.api import retry
    from prefect_raybatch.runs.retry import NothingToRetry

    with closing(TerminalProgress(quiet)) as show:
        if _as_flow(prefect):
            report = run_flow("retry_failed", arguments, show, request.resolved.job)
            message = "Other runs have retried all of these rows; none is left that failed"
            return report or NothingToRetry(arguments[0], message)
        child = retry.begin(request)
        if isinstance(child, NothingToRetry):
            return child
        return _run_here(child.job, with_keys(child.job), lambda: child.run, show, keep_seconds)


def job_of_file(path: str, overrides: list[str] | None = None) -> BatchJob:
    """Return the job of a file, changed by `overrides`, the FIELD=VALUE texts of `--set`."""
    return edited(BatchJob.from_yaml(path), field_changes(overrides), f"{path} with --set")


def with_keys(job: BatchJob) -> BatchJob:
    """Return the job with the credentials of its Prefect blocks, including the cluster's block.

    Do not pass the returned job to a flow: Prefect stores flow parameters unencrypted. A flow gets
    the job without credentials and loads them itself.
    """
    stores = (job.source.credentials_block, job.output.credentials_block)
    models = (job.engine.endpoint.block, job.quality.judge.block)
    if not any((*stores, job.cluster.block, *models)):
        return job
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow.tasks import with_blocks

    check_api()
    return with_blocks(job)


def options_of_block(name: str) -> dict[str, Any]:
    """Return the store options of the Prefect block that `credentials_block` names."""
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow.blocks.store import options_of

    check_api()
    return options_of(name)


def run_flow(
    name: str, arguments: tuple[Any, ...], show: TerminalProgress, job: BatchJob, **more: Any
) -> Any:
    """Call the flow `name` with positional `arguments` and keywords `more`; return its result.

    Prefect logs only critical errors to the terminal; `show` prints progress. The local Ray cluster
    of `job` starts in parallel with the flow.
    """
    # Quiet by default: Prefect's page has the logs, the terminal has progress and errors.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
    show.say("starting Prefect")
    from prefect_raybatch.doctor.services import check_api

    check_api()
    with cluster.engines_imported(cluster_spec(job)):
        with uncollected():
            from prefect_raybatch.flow import flows as flow
            from prefect_raybatch.flow import tasks

        show.say(page_hint())
        # Ray starts after these imports: starting it beside them would not be faster.
        with tasks.observed_by(show), cluster.cluster_starting(cluster_spec(job)):
            return flow.call_flow(getattr(flow, name), *arguments, **more)


def page_hint() -> str:
    """Return a sentence with the URL of Prefect's page, or how to start a server that shows it."""
    from prefect_raybatch.doctor.services import prefect_api

    if url := prefect_api():
        return f"Prefect shows the run at {url.removesuffix('/api')}/runs"
    command = shlex.join([str(Path(sys.executable).with_name("prefect")), "server", "start"])
    return f"Prefect shows the run at http://127.0.0.1:4200/runs, once you start: {command}"


def retry_options(
    job: BatchJob,
    path: str,
    changes: Sequence[str] | None,
    run_date: date | None = None,
    run_key: str = "",
) -> list[str] | None:
    """Return the options that a user must give `raybatch retry-failed` for a run of `job`.

    A run directory does not decide where rows and credentials are sent. So options are needed if
    the job sets targets, a cluster, a hosted model, store options or a credentials block; else
    returns []. The options are

    - `--job path`,
    - each of `changes` (FIELD=VALUE of `--set`) that a retry may set, and
    - `--run-date`, if the targets contain {run_date} and the run key does not have that date.

    Returns None if the options cannot be shown: one contains a credential, or `--set output=...`
    was used, whose `uri` a retry must not set.
    """
    cluster, output = job.cluster, job.output
    engines = [job.engine, *([output.escalate.engine] if output.escalate.engine else [])]
    named = (
        output.publish or output.options or output.credentials_block or cluster.block,
        cluster.address not in (None, LOCAL, "auto"),
        cluster.job_server or cluster.kubernetes.asked,
        any(engine.endpoint.asked for engine in engines),
    )
    if not any(named):
        return []
    words = ["--job", path]
    for change in changes or ():
        field = change.partition("=")[0].strip()
        if field == "output":  # its uri must not be passed on, but other fields may matter
            return None
        # A retry reads its rows from quarantine and is written beside its run.
        if field.partition(".")[0] != "source" and field != "output.uri":
            words += ["--set", change]
    if run_date is not None and targets_are_dated(job.output) and run_date != date_of_key(run_key):
        words += ["--run-date", run_date.isoformat()]
    return None if without_secrets(words) != words else words


def is_readable(output: Output) -> bool:
    """Return whether commands can read the run directory without the job's store credentials."""
    return not (output.options or output.credentials_block)


def quiet_engine() -> None:
    """Make engines that start in this process print only errors."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
