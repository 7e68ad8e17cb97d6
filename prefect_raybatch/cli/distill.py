"""The command `distill`: a classifier trained on the answers of a finished run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from prefect_raybatch.cli.arguments import FieldChanges, Json, RunDir, field_changes, in_catalog
from prefect_raybatch.cli.drive import with_keys
from prefect_raybatch.cli.show import TerminalProgress, print_json
from prefect_raybatch.cli.terminal import err, out
from prefect_raybatch.errors import ConfigError

distilling = typer.Typer()


@distilling.command(**in_catalog("distill"))
def distill_command(
    run_dir: RunDir,
    encoder: Annotated[str, typer.Option(metavar="MODEL", help="Model that embeds the rows")],
    agreement: Annotated[
        float, typer.Option(metavar="SHARE", help="Answers equal to those of the run")
    ] = 0.95,
    sample: Annotated[int, typer.Option(metavar="N", min=1, help="Number of rows to embed")] = 4000,
    write: Annotated[
        Path, typer.Option(metavar="FILE", help="File to write the classifier to")
    ] = Path("classifier.json"),
    set_: FieldChanges = None,
    as_json: Json = False,
) -> None:
    """Train a classifier on a run, and show what it could answer.

    Exits with status 1 if it could answer none. The same command takes the same rows, embeds none
    twice and resumes after a failure.
    """
    from prefect_raybatch.api.distill import begin_distill, finish_distill, prepare_distill
    from prefect_raybatch.api.submission import infer_in_place

    prepared = prepare_distill(run_dir, encoder, agreement, sample, field_changes(set_))
    err.print(prepared.line, markup=False)
    job = prepared.asked.job
    run = begin_distill(prepared)
    with closing(TerminalProgress(as_json)) as show:
        infer_in_place(job, with_keys(job), run, show)
    found = finish_distill(prepared, run)
    try:
        write.write_bytes(found.classifier.to_bytes())
    except OSError as error:
        raise ConfigError(f"--write {write}: {error.strerror}. Choose another file") from None
    if as_json:
        print_json({**found.to_dict(), "written": str(write), "lines": found.lines()})
    else:
        for line in found.lines():
            out.print(line, markup=False)
        out.print(f"wrote {write}", markup=False)
    if not found.answered:
        raise typer.Exit(1)
