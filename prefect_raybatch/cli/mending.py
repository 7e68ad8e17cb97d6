"""Commands for nights that did not go as planned: end a run, whole or as it is; run many dates."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_raybatch.cli.arguments import Json, RunDir
from prefect_raybatch.cli.drive import run_job, with_keys
from prefect_raybatch.cli.show import (
    print_json,
    show_partial,
    show_report,
    show_rows,
)
from prefect_raybatch.cli.terminal import err, out
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.run_words import date_of

if TYPE_CHECKING:
    from prefect_raybatch.runs.backfill import NightRun

mending = typer.Typer()
PARTIAL_STATUS, DRAINED_STATUS = 3, 4  # neither done nor failed


@mending.command("finalize")
def finalize_command(
    run_dir: RunDir,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Write what is committed beside it, to partial/_UUID/data."),
    ] = False,
    job: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help="Job file whose keys count.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the result of a run whose shards are all committed; of another one with --partial.

    A partial result ends nothing: the run stays unfinished, and the exit status is 3.
    """
    from prefect_raybatch.runs import partial_run

    given = with_keys(BatchJob.from_yaml(job)) if job else None
    if partial:
        options = given.output.options if given else None
        report = partial_run.finalize_partial(run_dir, options, given)
    else:
        report = partial_run.finalize_whole(run_dir, given)
    if as_json:
        print_json(report.to_dict())
    elif partial:
        show_partial(report)
    else:
        show_report(report, True)
    if partial:
        raise typer.Exit(PARTIAL_STATUS)


@mending.command("backfill")
def backfill_command(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job file in YAML.")],
    first: Annotated[str, typer.Option("--from", metavar="YYYY-MM-DD", help="First night.")],
    last: Annotated[str, typer.Option("--to", metavar="YYYY-MM-DD", help="Last night.")],
    at_most: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    stop_on_failure: Annotated[
        bool, typer.Option("--stop-on-failure", help="Begin nothing more once a night failed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what there is.")] = False,
    as_json: Json = False,
) -> None:
    """Run a job with {run_date} for each date of a range; what is done is left alone.

    Each date has a run of its own, without Prefect. Exit status 0 only if all are complete.
    """
    from prefect_raybatch.runs import backfill

    loaded = BatchJob.from_yaml(job)
    known = with_keys(loaded)
    nights = backfill.planned_nights(known, date_of(first), date_of(last))
    found = {night.date: night for night in nights}

    def told(night: NightRun) -> None:
        found[night.date] = night
        if not as_json:
            err.print(f"{night.date} {night.state} {night.trouble}".rstrip(), markup=False)

    try:
        if not dry_run:
            backfill.backfill(
                known,
                nights,
                lambda night: run_job(loaded, night.run_key, False, True, night.date)[0],
                at_most,
                stop_on_failure,
                told,
            )
    finally:  # also of one that was stopped
        _show_nights(list(found.values()), as_json)
    wrong = [night for night in found.values() if not night.complete]
    if wrong and not dry_run:
        raise typer.Exit(75 if all(night.transient for night in wrong) else 1)


def _show_nights(nights: list[NightRun], as_json: bool) -> None:
    from prefect_raybatch.runs import backfill

    if as_json:
        print_json({"nights": [{**asdict(one), "date": f"{one.date}"} for one in nights]})
        return
    show_rows(backfill.nights_table(nights))
    for night in nights:
        if night.trouble:
            out.print(f"{night.date}: {night.trouble}", markup=False)
    out.print(backfill.summary(nights), markup=False)


@mending.command("drain")
def drain_command(run_dir: RunDir, as_json: Json = False) -> None:
    """Let those who work on a run commit what is in flight and end; the rest is for a later call.

    Returns at once. A driver that is drained ends with exit status 4, its flow run as Drained.
    """
    from prefect_raybatch.runs.drain import drain_run

    found = drain_run(run_dir)
    if as_json:
        print_json(asdict(found))
        return
    for beat in found.live:
        out.print(f"told {beat.get('host')}, process {beat.get('pid')}, to end", markup=False)
    if not found.live:
        out.print("no driver was heard of within a minute; one that is there ends", markup=False)
    out.print(
        f"{found.done:,} of {found.rows:,} rows are committed; what is in flight will be, and the "
        "same command as ever goes on with the rest",
        markup=False,
    )
