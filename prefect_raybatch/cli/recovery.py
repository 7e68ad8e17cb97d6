"""Commands for runs that did not go as planned: finalize, backfill and drain."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_raybatch.cli.arguments import DryRunOnly, JobFile, Json, RunDir, in_catalog
from prefect_raybatch.cli.drive import (
    is_readable,
    job_of_file,
    retry_options,
    run_job,
    sender_of,
    with_keys,
)
from prefect_raybatch.cli.ending import print_next, show_ending, show_partial_ending
from prefect_raybatch.cli.show import TerminalProgress, print_json, show_rows
from prefect_raybatch.cli.terminal import err, out
from prefect_raybatch.job.placeholders import date_of
from prefect_raybatch.words import some_are

if TYPE_CHECKING:
    from prefect_raybatch.runs.backfill import DatedRun

recovery = typer.Typer()
PARTIAL_STATUS, DRAINED_STATUS = 3, 4  # exit statuses that are neither success nor failure


@recovery.command(**in_catalog("finalize"))
def finalize_command(
    run_dir: RunDir,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Write what is committed to partial/_UUID/data"),
    ] = False,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Job file with the credentials of the store"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the result of a run whose shards are all committed.

    With --partial, write what a run has committed so far. The run stays unfinished, and the exit
    status is 3.
    """
    from prefect_raybatch.api import finalize_partial, finalize_whole
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.ledger.missing import need_plan
    from prefect_raybatch.runs.retry import options_of_retry
    from prefect_raybatch.storage import open_store

    plain = job_of_file(job) if job else None
    loaded = with_keys(plain) if plain else None
    if partial:
        options = loaded.output.options if loaded else None
        report = finalize_partial(run_dir, options, loaded)
    else:
        with closing(TerminalProgress(quiet=as_json)) as show:
            sender = sender_of(plain, loaded, show) if plain and loaded else None
            report = finalize_whole(run_dir, loaded, sender)
    if as_json:
        print_json(report.to_dict())
    elif partial:
        show_partial_ending(report)
    elif loaded is not None and job is not None:
        show_ending(report, True, retry_options(loaded, job, None), is_readable(loaded.output))
    else:
        plan = need_plan(Ledger(open_store(report.run)))
        show_ending(report, retry=options_of_retry(plan))
    if partial:
        raise typer.Exit(PARTIAL_STATUS)


@recovery.command(**in_catalog("backfill"))
def backfill_command(
    job: JobFile,
    first: Annotated[str, typer.Option("--from", metavar="YYYY-MM-DD", help="First date")],
    last: Annotated[str, typer.Option("--to", metavar="YYYY-MM-DD", help="Last date, included")],
    at_most: Annotated[int, typer.Option(metavar="N", min=1, help="Number of concurrent runs")] = 1,
    stop_on_failure: Annotated[
        bool, typer.Option("--stop-on-failure", help="Start no run after a failure")
    ] = False,
    dry_run: DryRunOnly = False,
    as_json: Json = False,
) -> None:
    """Run a job for each date of a range; complete dates are skipped.

    The job has {run_date} in its source or output. Each date has its own run, without Prefect. The
    exit status is 0 only if all dates are complete.
    """
    from prefect_raybatch.api import backfill, planned_runs

    loaded = job_of_file(job)
    known = with_keys(loaded)
    runs = planned_runs(known, date_of(first), date_of(last))
    found = {run.date: run for run in runs}

    def show(run: DatedRun) -> None:
        found[run.date] = run
        if not as_json:
            err.print(f"{run.date} {run.state} {run.trouble}".rstrip(), markup=False)

    try:
        if not dry_run:
            backfill(
                known,
                runs,
                lambda run: run_job(loaded, run.run_key, False, True, run.date)[0],
                at_most,
                stop_on_failure,
                show,
            )
    finally:  # also if it was interrupted
        _show_dates(list(found.values()), as_json)
    incomplete = [run for run in found.values() if not run.complete]
    if not as_json:
        again = ["raybatch", "backfill", job, "--from", first, "--to", last]
        print_next(*again if incomplete else ["raybatch", "history", loaded.output.uri])
    if incomplete and not dry_run:
        raise typer.Exit(75 if all(run.transient for run in incomplete) else 1)


def _show_dates(runs: list[DatedRun], as_json: bool) -> None:
    """Print the state of each date, why it is not complete, and the number of complete dates."""
    from prefect_raybatch.runs import backfill

    if as_json:
        print_json({"runs": [{**asdict(one), "date": f"{one.date}"} for one in runs]})
        return
    show_rows(backfill.dates_table(runs))
    for run in runs:
        if run.trouble:
            out.print(f"{run.date}: {run.trouble}", markup=False)
    out.print(backfill.summary(runs), markup=False)


@recovery.command(**in_catalog("drain"))
def drain_command(run_dir: RunDir, as_json: Json = False) -> None:
    """Finish in-flight shards and stop; resume later.

    The command returns at once. A drained driver ends with exit status 4, and its flow run as
    Drained.
    """
    from prefect_raybatch.runs.drain import drain_run

    drained = drain_run(run_dir)
    if as_json:
        print_json(asdict(drained))
        return
    for beat in drained.live:
        place = f"{beat.get('host')}, process {beat.get('pid')}"
        out.print(f"asked {place} to finish in-flight shards and stop", markup=False)
    if not drained.live:
        out.print("No active driver in the last minute. Any that is still running will stop.")
    what = "judgement" if drained.judging else "row"
    out.print(
        f"{some_are(drained.done, drained.rows, what)} committed. Run the same command again to "
        "finish the remaining shards.",
        markup=False,
    )
    print_next("raybatch", "status", run_dir)
