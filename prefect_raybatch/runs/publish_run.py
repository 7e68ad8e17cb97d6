"""Publishes a finished run to the targets of its job, and updates its report."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

from prefect_raybatch.compile.job import planned_job
from prefect_raybatch.errors import ConfigError, IncompleteRun
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.run_words import with_dated_targets
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.job.variables import VARIABLE
from prefect_raybatch.ledger.family import Member
from prefect_raybatch.ledger.layout import REPORT_HTML, REPORT_PAGE
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.finalize_run import html_page, load_report
from prefect_raybatch.storage import open_store


def publish_run(
    job: BatchJob | None,
    uri: str,
    observe: Callable[[str], None] = lambda step: None,
    run_date: date | None = None,
    targets_from_plan: bool = False,
) -> RunReport:
    """Publish the finished run at `uri` to the targets in `output.publish` of the job, each once;
    return the updated report.

    Targets in a run directory are not trusted, because whoever can write to it could name a place
    of their own. So `job` None is rejected, with the targets in the run's plan, unless
    `targets_from_plan` says that these were reviewed. `run_date` is the value of {run_date} in a
    target, by default the date in the run key. Raises `IncompleteRun` while the run is not
    finished, `ConfigError` for what cannot be published, `PublishFailed` (worth a retry).
    """
    from prefect_raybatch.publish.publish import publish

    check_run_place(uri)
    if job is not None:
        check_trust(job)  # its options say which host is asked for the run
    options = job.output.options if job is not None else {}
    store = open_store(uri, options or None)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    success = ledger.finished(plan)
    if success is None:
        raise IncompleteRun(
            f"{store.uri} is not finished, so it is not published: finish it with the command it "
            f"was begun with (raybatch run JOB --run-key {plan.run_key})"
        )
    if job is None:
        job = planned_job(plan)
        if job.output.publish and not targets_from_plan:
            raise ConfigError(
                f"{store.uri}: name the job whose targets are meant with --job JOB. The run "
                f"directory itself names these:\n{targets_text(job, plan.run_key)}\nTo publish to "
                "them, look at each and give --targets-from-plan"
            )
    job = with_dated_targets(job, plan.run_key, run_date)
    check_trust(job)
    if not job.output.publish:
        raise ConfigError(
            f"{store.uri}: its job names no target to publish to; set output.publish in the job "
            "file and give it with --job"
        )
    if not success.compact:
        raise ConfigError(
            f"{store.uri} was written with output.compact: false, and publishing needs data/; run "
            "the job with compact on"
        )
    member = Member(plan.run_key, ledger, plan, success)
    try:
        publish(member, job.output.publish, options, observe)
    finally:
        _tell(ledger)
    return load_report(store)


def targets_text(job: BatchJob, run_key: str) -> str:
    """Return the targets of a job, one per line: name, format, place, mode, and the environment
    variables that would be sent there."""
    lines = []
    for target in job.output.publish:
        named = [target.uri or "", *map(str, target.catalog.values())]
        sent = sorted({name for text in named for name in VARIABLE.findall(text)})
        with_variables = f", with the variables {', '.join(sent)}" if sent else ""
        lines.append(
            f"  {target.label}: {target.format} {target.place(run_key)} ({target.mode})"
            f"{with_variables}"
        )
    return "\n".join(lines)


def other_targets(job: BatchJob, uri: str, run_date: date | None = None) -> tuple[str, str] | None:
    """Return (targets of the job, targets of the plan) of the run at `uri`, as lines, if they
    differ: the user may have chosen the wrong job or the wrong run. None if they are equal."""
    plan = need_plan(Ledger(open_store(uri, job.output.options or None)))
    planned = planned_job(plan)
    mine, theirs = (
        targets_text(with_dated_targets(one, plan.run_key, run_date), plan.run_key)
        for one in (job, planned)
    )
    return None if mine == theirs else (mine, theirs)


def _tell(ledger: Ledger) -> None:
    """Update the pages for people with what is published so far."""
    made = load_report(ledger.store)
    if made.published:
        ledger.store.put(REPORT_PAGE, reports.markdown(made).encode())
        ledger.store.put(REPORT_HTML, html_page(made).encode())
