"""The last lines of a command that drives a run: rows, failures, time, result, next command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from prefect_raybatch.cli.terminal import out
from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.layout import DATA_FOLDER
from prefect_raybatch.ledger.partials import split_partial
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import cascade_text, duration, failure_table
from prefect_raybatch.runs.run import complete_before
from prefect_raybatch.words import counted, money

_TOO_LONG = "PromptTooLong"


def print_next(*words: str) -> None:
    """Print the command that the user can run next, quoted for a shell."""
    out.print(f"next    {shlex.join(words)}", markup=False)


def show_ending(
    report: RunReport,
    fresh: bool = True,
    retry: Sequence[str] | None = (),
    is_readable: bool = True,
    unusual: Sequence[str] = (),
) -> None:
    """Print at most ten lines about a complete run, and the lines in `unusual`.

    `fresh`: this call did some of the run's work. `retry` has the options that `raybatch
    retry-failed` needs for this run. It is None if they contain credentials, which are not printed.
    `is_readable`: `raybatch verify` can read the run without credentials from the job file.
    """
    if not fresh:
        out.print(complete_before(report), markup=False)
    lines = {"rows": _rows(report)}
    if report.failed:
        lines["failed"] = _main_failure(report.failures, report.failed)
    if report.cascade:
        lines["models"] = cascade_text(report)
    if report.classifier:
        lines["labels"] = report.classifier.text()
    lines |= _quality(report)
    if unusual:
        lines["unusual"] = f"\n{'':<8}".join(unusual)
    if fresh:
        lines["time"] = _time(report)
    lines["result"] = _result(report)
    _print_lines(lines)
    words = _next_command(report, fresh, retry, is_readable)
    if words:
        print_next(*words)


def show_quality(report: RunReport) -> None:
    """Print a complete run's accuracy on golden rows and by the judge, and alarms, if measured."""
    _print_lines(_quality(report))


def _print_lines(lines: Mapping[str, str]) -> None:
    for name, text in lines.items():
        out.print(f"{name:<8}{text}", markup=False)


def _quality(report: RunReport) -> dict[str, str]:
    """Return {name: text} of the lines on golden rows, judge and alarms; empty without these."""
    lines = {}
    if report.accuracy:
        lines["right"] = report.accuracy.text()
    if report.judgement:
        lines["judged"] = report.judgement.text()
    series = report.series.items()
    fell = [f"{name}: {one.text()}" for name, one in series if one.rings or one.lost_alarm]
    if fell:
        lines["alarm"] = "; ".join(fell)
    return lines


def show_partial_ending(report: RunReport) -> None:
    """Print at most five lines about a partial result, and say that its run is unfinished."""
    title = f"PARTIAL result of {report.job} {report.run_key}; the run itself is unfinished"
    quarantined = f" + {report.failed:,} in quarantine" if report.failed else ""
    out.print(title, markup=False)
    out.print("; ".join(report.notes), markup=False)
    out.print(f"rows    {report.good:,} answered{quarantined}", markup=False)
    out.print(f"result  {_result(report)}", markup=False)
    print_next("raybatch", "status", split_partial(report.run)[0])


def _rows(report: RunReport) -> str:
    text = (
        f"{report.rows:,} = {report.good:,} answered + {report.failed:,} in quarantine + "
        f"{report.skipped:,} left out"
    )
    reused = reused_text(report.reuse)
    return f"{text} ({reused})" if reused else text


def reused_text(reuse: Mapping[str, float]) -> str:
    """Return how many answers were reused, copied from equal rows, or inferred; "" if all inferred.

    `reuse` has the numbers of rows under "reused", "merged" and "asked".
    """
    sources = (("reused", "from an earlier run"), ("merged", "from another row"))
    texts = [f"{reuse[name]:,.0f} {what}" for name, what in sources if reuse.get(name)]
    return ", ".join([*texts, f"{reuse.get('asked', 0):,.0f} inferred"]) if texts else ""


def _main_failure(failures: Mapping[str, int], failed: int) -> str:
    """Return the most common failure, e.g. `12 rows, 9 of them: ERROR in STAGE: message`."""
    table = failure_table(failures)
    if not table:
        return counted(failed, "row")
    first = table[0]
    share = "" if first["rows"] == f"{failed:,}" else f", {first['rows']} of them"
    reason = f"{first['error']} in {first['stage']}: {first['message']}"
    return f"{counted(failed, 'row')}{share}: {' '.join(reason.split())}"


def _time(report: RunReport) -> str:
    whole = max(report.elapsed, report.seconds)
    idle = duration(whole - report.seconds)
    text = (
        f"{duration(whole)}: start-up and waits {idle}, work {duration(report.seconds)} "
        f"({report.rows_per_s:,.0f} rows/s)"
    )
    if "total" in report.cost:
        text = f"{text}; cost {money(report.cost['total'], report.currency)}"
        if "gpu_hours" in report.cost:
            text = f"{text} for {money(report.cost['gpu_hours'])} GPU-hours"
    return text


def _result(report: RunReport) -> str:
    text = f"{report.run}/{DATA_FOLDER}/"
    if folder := report.quarantine_folder:
        text = f"{text}, failed rows in {folder}/"
    if report.published:
        text = f"{text}, published to {', '.join(one.target for one in report.published)}"
    return text


def _next_command(
    report: RunReport, fresh: bool, retry: Sequence[str] | None, is_readable: bool
) -> list[str] | None:
    if report.failed and not fresh:  # failed rows may have been retried, which `status` shows
        return ["raybatch", "status", report.run] if is_readable else None
    if not report.failed or retry is None:
        alarms = any(one.rings or one.lost_alarm for one in report.series.values())
        command = "report" if alarms else "verify"
        return ["raybatch", command, report.run] if is_readable else None
    if not report.good and not is_readable:
        return None
    return failed_rows_command(report.run, report.good, report.failures, retry)


def failed_rows_command(
    run: str, answered: int, failures: Mapping[str, int], options: Sequence[str] = ()
) -> list[str]:
    """Return the words of the command to run next for the failed rows of a run.

    If no row was answered (`answered` is 0), this is `raybatch report`, because a retry would most
    likely fail as well. Otherwise it is `raybatch retry-failed` with `options`. If all rows failed
    because their prompts were too long, `--set engine.max_model_len=auto` is added, unless
    `options` set that field. `failures` maps failure keys (see `FailureKey`) to numbers of rows.
    """
    if not answered:
        return ["raybatch", "report", run]
    words = ["raybatch", "retry-failed", run, *options]
    classes = {FailureKey.parse(text).error for text in failures}
    if classes == {_TOO_LONG} and not any(
        word.startswith("engine.max_model_len") for word in options
    ):
        words += ["--set", "engine.max_model_len=auto"]
    return words
