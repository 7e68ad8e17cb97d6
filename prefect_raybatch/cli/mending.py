"""Commands for a night that did not go as planned: end a run, whole or as it is."""

from __future__ import annotations

from typing import Annotated

import typer

from prefect_raybatch.cli.arguments import Json, RunDir
from prefect_raybatch.cli.drive import with_keys
from prefect_raybatch.cli.show import print_json, show_partial, show_report
from prefect_raybatch.job.batch_job import BatchJob

mending = typer.Typer()
PARTIAL_STATUS = 3  # neither done nor failed


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
