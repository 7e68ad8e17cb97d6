"""The flows `batch_inference`, `retry_failed`, `backfill_job` and `tune_job`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date, datetime
from typing import Annotated, Any, cast

from prefect import Flow
from prefect.artifacts import TableArtifact
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed
from pydantic import AwareDatetime, Field

from prefect_raybatch.api import (
    backfill,
    default_run_key,
    planned_runs,
    record_unplanned,
    resolve_run,
)
from prefect_raybatch.cluster.connect import end_by_sigterm
from prefect_raybatch.cluster.prewarm import prewarm_allowed
from prefect_raybatch.driver.driver import DRAINED_TEXT, Progress
from prefect_raybatch.errors import (
    ConfigError,
    IncompleteRun,
    JobStopped,
    RayBatchError,
    RunDrained,
)
from prefect_raybatch.flow.artifacts import artifact_key, put_or_log
from prefect_raybatch.flow.cancelling import ENDED_BY_ITSELF, ended_by_cancellation
from prefect_raybatch.flow.continuing import command
from prefect_raybatch.flow.failure import COMMAND, explained, log_crash
from prefect_raybatch.flow.job_flow import job_flow
from prefect_raybatch.flow.run_history import FlowNotes, flow_notes, show_history
from prefect_raybatch.flow.schedule import scheduled_date, scheduled_start
from prefect_raybatch.flow.tasks import (
    finalize_run,
    infer_shards,
    plan_retry,
    plan_shards,
    publish_run,
    tune_engine,
    with_blocks,
)
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import edited, job_placeholders, render_placeholders
from prefect_raybatch.job.placeholders import start_of_key, today
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.verdict import verdict_of
from prefect_raybatch.runs.attempts import record_bad_job, record_command
from prefect_raybatch.runs.backfill import DatedRun, dates_table, summary
from prefect_raybatch.runs.retry import NothingToRetry
from prefect_raybatch.runs.run import Run, complete_before


def titled(title: str) -> Any:
    """Return the annotation that gives a flow's parameter this title in the Prefect form."""
    return Field(json_schema_extra={"title": title})


def in_form_order(flow: Flow[..., Any], last: str) -> None:
    """Show the parameter `last` last in a flow's form; the others stay in the signature's order.

    Calls of the flow are not affected.
    """
    signature = inspect.signature(flow.fn, eval_str=True)
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values()]
    named.sort(key=lambda parameter: parameter.name == last)
    vars(flow)["__signature__"] = signature.replace(parameters=named)


DRAINED_STATE = "Drained"

# The tabs of an optional parameter in the Prefect form.
Key = Annotated[str, Field(title="Value")]
Start = Annotated[AwareDatetime, Field(title="Value")]
Classes = Annotated[list[str], Field(title="Value")]
DateValue = Annotated[date, Field(title="Value")]
Differences = Annotated[list[str], Field(title="Value")]
Limit = Annotated[int, Field(title="Value", gt=0)]
Fields = Annotated[dict[str, Any], Field(title="Value")]
Job = Annotated[BatchJob, Field(title="Value")]
Unset = Annotated[None, Field(title="Default")]


def key_of(
    job: BatchJob,
    run_key: str | None,
    scheduled_for: datetime | None,
    run_date: date | None = None,
) -> str:
    """Return `run_key`, or else the key derived from the date or the scheduled start."""
    if run_key:
        return run_key
    if run_date is not None and scheduled_for is None:
        return resolve_run(with_blocks(job), None, None, run_date)[1]
    start = scheduled_for or scheduled_start()
    if start is None and job_placeholders(job):
        return resolve_run(with_blocks(job), None, None)[1]
    return default_run_key(with_blocks(job), start)


def with_changes(job: BatchJob, overrides: Mapping[str, Any] | None, limit: int | None) -> BatchJob:
    """Return the job with the fields in `overrides` changed, e.g. {"sampling.max_tokens": 99}.

    `limit`, unless None, replaces source.limit. Raises `ConfigError` for an unknown field and for
    an invalid job.
    """
    changes = {**(overrides or {}), **({} if limit is None else {"source.limit": limit})}
    return edited(job, changes, "overrides")


def named_by_run_key() -> str:
    """Return the name of the current flow run: its run key, which also names its run directory.

    For an invalid job, returns the parameter `run_key` or the job's name.
    """
    values = flow_run.get_parameters()
    key = values.get("run_key")
    try:
        job = with_changes(values["job"], values.get("overrides"), values.get("limit"))
        return key_of(job, key, values.get("scheduled_for"), values.get("run_date"))
    except RayBatchError:  # the flow itself reports it
        return key or str(values["job"].name)


@job_flow(
    name="batch_inference",
    flow_run_name=named_by_run_key,
    persist_result=False,
    on_crashed=[log_crash],
)
def batch_inference(
    job: Annotated[BatchJob, titled("Job")],
    run_key: Annotated[Key | Unset, titled("Run key")] = None,
    scheduled_for: Annotated[Start | Unset, titled("Scheduled for")] = None,
    run_date: Annotated[DateValue | Unset, titled("Run date")] = None,
    limit: Annotated[Limit | Unset, titled("Row limit")] = None,
    overrides: Annotated[Fields | Unset, titled("Field overrides")] = None,
    accept: Annotated[Differences | Unset, titled("Accepted differences")] = None,
) -> RunReport:
    """Ask a model about every row of a table and write the answers, each row exactly once.

    Args:
        job: What to read, what to ask and where to write.
        run_key: Name of the run directory under output.uri, such as industries-monday. The same
            key resumes an unfinished run, or returns the report of a finished one. Default: the
            job's name and the scheduled start of the outermost flow run.
        scheduled_for: Scheduled start of a missed run, with time zone, such as
            2026-11-01T02:00:00Z. The run gets the run key that it would have had then.
        run_date: Value of {run_date} in the job, such as 2026-11-01. Default: the date of the
            scheduled start, in the schedule's time zone. Without a run key, the key is derived from
            this date.
        limit: Read only the first N rows of the input (source.limit). Default: the job's limit.
        overrides: Fields of the job to change, such as {"sampling.max_tokens": 99}.
        accept: Fields in which the job may differ from the run's plan, such as
            ["prompt.template"]. A PlanMismatch error names them. Requires a run key.
    """
    with (
        _recorded_unplanned(job, run_key, scheduled_for, run_date),
        explained("batch_inference", job.name, run_key),
    ):
        if accept and run_key is None:
            raise ConfigError(
                "accept applies to an existing run, but run_key is not set; set run_key"
            )
        job = with_changes(job, overrides, limit)
        key = key_of(job, run_key, scheduled_for, run_date)
        written = job.output.uri
        job = _filled(job, key, scheduled_for, run_date)
    with flow_notes(written) as notes:
        return _run_to_end(job, key, accept, notes)


def _run_to_end(job: BatchJob, key: str, accept: list[str] | None, notes: FlowNotes) -> RunReport:
    try:
        with prewarm_allowed():
            run = plan_shards(job, key, **({"accept": accept} if accept else {}))
            if run.run_key != key:  # a repaired run; {run_key} is still that of the damaged one
                job = render_placeholders(job, key)
            progress = infer_shards(job, run)
        return _finalize_and_publish(job, run, progress, notes)
    except RunDrained as drained:
        return cast(RunReport, _ended_drained(drained))
    except TerminationSignal as signal:
        return cast(RunReport, _ended_cancelled(signal, key))


@contextmanager
def _recorded_unplanned(
    job: BatchJob, run_key: str | None, scheduled_for: datetime | None, run_date: date | None
) -> Iterator[None]:
    """Record an error of the `with` block in the run history, then raise it again.

    The block determines the run directory, so an error in it has no other record.
    """
    try:
        yield
    except Exception as error:
        key, when = run_key, run_date
        with suppress(Exception):  # the scheduled start is unknown while Prefect's API is away
            start = scheduled_for or scheduled_start()
            key = run_key or (default_run_key(job, start) if start is not None else None)
            when = when or (
                scheduled_date(start) if start is not None and job_placeholders(job) else None
            )
        recorded = record_unplanned(job, key, error, when)
        if recorded is not None:
            store, key = recorded
            record_command(store, getattr(error, COMMAND, ""))
            show_history(job.name, job.output, key)
        raise


def _record_invalid(parameters: Mapping[str, Any], error: Exception) -> None:
    """Record, for the run history, a flow run whose job is invalid (`error`).

    Prefect fails such a flow run before it calls the flow. Does nothing if the job is not a
    mapping.
    """
    job, key, start = (parameters.get(name) for name in ("job", "run_key", "scheduled_for"))
    if not isinstance(job, Mapping):
        return
    try:
        BatchJob.from_dict(dict(job))
    except ConfigError as fault:  # names the field and what to do
        error = fault
    with suppress(ValueError):
        start = datetime.fromisoformat(start) if isinstance(start, str) else None
    with suppress(Exception):  # the scheduled start is unknown while Prefect's API is away
        start = start or scheduled_start()
    start = start if isinstance(start, datetime) else None
    when = None
    with suppress(Exception):
        when = scheduled_date(start) if start is not None else None
    record_bad_job(job, key if isinstance(key, str) else None, error, start, when)


batch_inference.when_invalid = _record_invalid

# The form shows parameters that change from run to run first; the job is the deployment's.
in_form_order(batch_inference, last="job")


def _filled(
    job: BatchJob, key: str, scheduled_for: datetime | None, run_date: date | None
) -> BatchJob:
    """Return the job with {run_date} and {run_key} filled in.

    If both values follow from the run key, return the job unchanged instead. The tasks then fill
    them in, and Prefect sees the same output URI for all runs of the job.
    """
    if not job_placeholders(job):
        return job
    start = scheduled_for or start_of_key(key) or scheduled_start()
    if run_date is None and start is not None:
        run_date = scheduled_date(start)
    filled = resolve_run(job, key, start, run_date)[0]
    with suppress(ConfigError):  # the run key contains no date
        if render_placeholders(job, key) == filled:
            return job
    return filled


@job_flow(
    name="retry_failed",
    flow_run_name="retry {run_dir}",
    persist_result=False,
    on_crashed=[log_crash],
)
def retry_failed(
    run_dir: Annotated[str, titled("Run directory")],
    errors: Annotated[Classes | Unset, titled("Error classes")] = None,
    overrides: Annotated[Fields | Unset, titled("Field overrides")] = None,
    job: Annotated[Job | Unset, titled("Job")] = None,
) -> RunReport | None:
    """Retry the failed rows of a finished run in a child run.

    The same arguments resume an unfinished retry. If there are no rows to retry, the flow run
    completes with a message that says why, and returns None.

    Args:
        run_dir: Directory of the finished run: a local folder or s3:// URI.
        errors: Error classes to retry, such as ["EngineDied"]. Default: all failed rows.
        overrides: Fields of the job to change, such as {"engine.max_model_len": 4096}.
        job: Job that replaces the job of the run. Its input and output.uri are ignored.
    """
    planned = plan_retry(run_dir, errors, overrides, job)
    if isinstance(planned, NothingToRetry):
        state: Any = Completed(message=planned.message)
        return cast(None, state)
    try:
        progress = infer_shards(planned.job, planned.run)
        with flow_notes(planned.job.output.uri) as notes:
            return _finalize_and_publish(planned.job, planned.run, progress, notes)
    except RunDrained as drained:
        return cast(RunReport, _ended_drained(drained))
    except TerminationSignal as signal:
        return cast(RunReport, _ended_cancelled(signal, planned.run.run_key))


def _ended_drained(drained: RunDrained) -> Any:
    """Return the final state of a drained flow run: of type Cancelled, with the name Drained."""
    return Cancelled(name=DRAINED_STATE, message=drained.plain or str(drained))


def _ended_cancelled(signal: TerminationSignal, key: str) -> Any:
    """Return the state of a flow run that ended itself because its worker missed the cancellation.

    For any other termination, raises `signal`. `key` is the run key.
    """
    if not ended_by_cancellation():
        raise signal
    return Cancelled(message=f"{ENDED_BY_ITSELF} Continue with: {command(key, {}, False)}")


def call_flow(flow: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the flow and return its result.

    Raises `RunDrained` if its run was drained, and `JobStopped` if it was cancelled in Prefect.
    """
    end_by_sigterm()
    try:
        return flow(*arguments, **options)
    except CancelledRun as error:
        ended = RunDrained if str(error).startswith(DRAINED_TEXT) else JobStopped
        raise ended(str(error)) from None


def _finalize_and_publish(
    job: BatchJob, run: Run, progress: Progress, notes: FlowNotes
) -> RunReport:
    """Finalize the run, publish it to all targets of the job, and return the report.

    The report is returned inside a Completed state; Prefect hands the flow's callers the report
    itself. The state's message is the verdict on the run, or says that the run was complete before.
    """
    report = finalize_run(job, run, progress)
    if job.output.publish:
        report = publish_run(job, run)
    text = (
        complete_before(run) if run.finished else verdict_of(report, notes.remarks, notes.seconds)
    )
    return cast(RunReport, Completed(message=text, data=report))


@job_flow(name="backfill", flow_run_name="backfill {job.name} {first} {last}", persist_result=False)
def backfill_job(
    job: Annotated[BatchJob, titled("Job")],
    first: Annotated[date, titled("First date")],
    last: Annotated[date, titled("Last date")],
    at_most: Annotated[int, Field(ge=1), titled("Concurrent runs")] = 1,
    stop_on_failure: Annotated[bool, titled("Stop on failure")] = False,
    overrides: Annotated[Fields | Unset, titled("Field overrides")] = None,
) -> list[dict[str, str]]:
    """Run a job with {run_date} for each date of a range, skipping completed dates.

    Each remaining date is a `batch_inference` flow run under this one. Returns the table of all
    dates, which is also the artifact `raybatch-JOB-backfill`. The flow run fails if any date is
    incomplete. Run it again with the same dates to resume.

    Args:
        job: Job to run, with {run_date} in its source or output.
        first: First date of the range, such as 2026-11-01.
        last: Last date of the range, inclusive.
        at_most: Maximum number of concurrent runs. They share one Ray cluster.
        stop_on_failure: Start no further runs once one has failed.
        overrides: Fields of the job to change, such as {"limits.max_failed_rows": 99}.
    """
    with explained("backfill_job", job.name, None):
        job = with_changes(job, overrides, None)
        loaded = with_blocks(job)
        by_date = {run.date: run for run in planned_runs(loaded, first, last)}

        def show(run: DatedRun) -> None:
            by_date[run.date] = run
            text = "Runs of the backfill, one per date."
            table = TableArtifact(table=dates_table([*by_date.values()]), description=text)
            put_or_log(table, f"{artifact_key(job.name)}-backfill")

        def run_date(run: DatedRun) -> RunReport:
            return batch_inference(job, run.run_key, run_date=run.date)

        runs = backfill(loaded, [*by_date.values()], run_date, at_most, stop_on_failure, show)
        for run in runs[:1]:  # so that the table exists even if nothing had to run
            show(run)
        incomplete = [f"{run.date}: {run.state} {run.trouble}" for run in runs if not run.complete]
        if incomplete:
            raise IncompleteRun("\n".join([summary(runs), *incomplete]))
        return dates_table(runs)


@job_flow(name="tune_job", flow_run_name="tune {job.name}", persist_result=False)
def tune_job(
    job: Annotated[BatchJob, titled("Job")],
    minutes: Annotated[float, titled("Minutes")] = 5.0,
    deadline: Annotated[str | None, titled("Deadline")] = None,
) -> dict[str, Any]:
    """Try engine settings on a sample of the job's rows and return the fields to change.

    The artifact `raybatch-tune-JOB` of the flow run lists the trials.

    Args:
        job: Job to tune, as for `batch_inference`.
        minutes: Approximate duration of the trials, in minutes.
        deadline: Time that the whole input may take, such as 6h. Default: limits.deadline.
    """
    return tune_engine(render_placeholders(job, job.name, today()), minutes, deadline)
