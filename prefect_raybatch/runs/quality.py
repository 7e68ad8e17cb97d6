"""Measures the accuracy of a finished run on its golden rows, and decides whether to publish it."""

from __future__ import annotations

from dataclasses import replace

from prefect_raybatch.errors import QualityTooLow
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.quality import Quality
from prefect_raybatch.ledger.family import Member
from prefect_raybatch.quality.accuracy import Accuracy, put_accuracy, read_accuracy
from prefect_raybatch.quality.alarm import continued
from prefect_raybatch.quality.golden import Golden, accuracy_on, read_golden
from prefect_raybatch.quality.judgement import Judgement
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.finalize_run import load_report, put_pages
from prefect_raybatch.runs.run_history import series_before


def golden_of(quality: Quality, output: Output) -> Golden | None:
    """Return the golden rows of a job, None if it names none; raise like `read_golden`."""
    if quality.golden is None:
        return None
    return read_golden(quality.golden, output.options, quality.key, quality.answer or output.column)


def measured(
    report: RunReport,
    member: Member,
    quality: Quality,
    output: Output,
    written: str,
    again: bool = False,
) -> RunReport:
    """Return the report of a finished run with its accuracy on the job's golden rows.

    A run that was measured is measured `again` only if asked for. A retry of failed rows is no
    sample of the input, so it is not measured. `written` is output.uri as written in the job, which
    has the earlier runs that it is compared with.
    """
    store, plan = member.ledger.store, member.plan
    if quality.golden is None or plan.parent is not None:
        return report
    before = read_accuracy(store)
    if before is not None and before.plan == plan.hash and not again:
        return report
    golden = golden_of(quality, output)
    if golden is None:
        return report
    options = output.options or None
    failed = report.quarantine(options) if report.failed else None
    accuracy = accuracy_on(golden, report.dataset(options), failed, plan.hash)
    if accuracy.rows:
        earlier = series_before(written, options, plan, read_accuracy)
        series = continued(earlier, golden.digest, accuracy.right, accuracy.rows)
        accuracy = replace(accuracy, series=series)
    if accuracy != before:
        put_accuracy(store, accuracy)
        report = load_report(store)
        put_pages(store, report)
    return report


def check_accuracy(report: RunReport, member: Member, quality: Quality) -> None:
    """Raise `QualityTooLow` unless the run has the accuracy that publishing needs.

    The golden rows must show it or, in a job without them, the judge. A retry of failed rows is
    published with its run, so it needs none of its own.
    """
    least = quality.at_least
    accuracy = report.accuracy if quality.golden is not None else report.judgement
    if least is None or member.plan.parent is not None:
        return
    if accuracy is None:
        raise QualityTooLow(
            f"{report.run} was not published: its accuracy was not measured, and quality.at_least "
            f"is {least:g}. Run: raybatch publish {report.run} --job JOB"
        )
    if accuracy.low >= least:
        return
    raise QualityTooLow(
        f"{report.run} was not published: its accuracy is {accuracy.text()}, and quality.at_least "
        f"{least:g} needs the lower end of the interval. {_remedy(accuracy, least)}, then run: "
        f"raybatch publish {report.run} --job JOB"
    )


def _remedy(accuracy: Accuracy | Judgement, least: float) -> str:
    if isinstance(accuracy, Judgement):
        if accuracy.rows and accuracy.share >= least:
            return f"Raise quality.judge.sample: {accuracy.rows:,} are too few. Or lower at_least"
        return "Look at the answers that the judge called wrong in the report, or lower at_least"
    if accuracy.rows and accuracy.share >= least:
        return f"Add golden rows: {accuracy.rows:,} are too few to show it. Or lower at_least"
    return "Look at the wrong answers in the report. Correct the golden file, or lower at_least"
