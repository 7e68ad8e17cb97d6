"""The command `raybatch batch`: the requests of an OpenAI batch file as a resumable run."""

from __future__ import annotations

from typing import Annotated

import typer

from prefect_raybatch.cli.arguments import (
    FieldChanges,
    KeepEngines,
    field_changes,
    in_catalog,
    kept_seconds,
)
from prefect_raybatch.cli.drive import options_of_block, run_job, with_keys
from prefect_raybatch.cli.terminal import out
from prefect_raybatch.job.edits import job_of_fields

batch_files = typer.Typer()


@batch_files.command(**in_catalog("batch"))
def batch(
    input_file: Annotated[
        str,
        typer.Option(
            "-i", "--input-file", metavar="FILE", help="Batch file: local, in a bucket, http(s)"
        ),
    ],
    output_file: Annotated[
        str,
        typer.Option(
            "-o", "--output-file", metavar="FILE", help="File to write: local or in a bucket"
        ),
    ],
    model: Annotated[str, typer.Option(metavar="MODEL", help="Model that answers")],
    served_as: Annotated[
        list[str] | None,
        typer.Option(
            "--served-as", metavar="NAME", help="Other name of the model in requests; repeatable"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Longest answer without max_tokens; default: the context",
        ),
    ] = None,
    set_: FieldChanges = None,
    keep_engines: KeepEngines = None,
) -> None:
    """Answer an OpenAI batch file; the same command resumes.

    The output has a line for each request, in input order. A wrong line gets an error.
    """
    from prefect_raybatch.batches.files import batch_fields, batch_key, write_output
    from prefect_raybatch.compile.resolved import resolve

    changes = field_changes(set_)
    if max_tokens is not None:
        changes["sampling.max_tokens"] = max_tokens
    names = [model, *(served_as or ())]
    fields = batch_fields(input_file, output_file, names, changes, options_of_block)
    job = job_of_fields(fields, {}, "the job of the batch file")
    key = batch_key(resolve(job).identity.fingerprint)
    report, _ = run_job(job, key, False, False, keep_seconds=kept_seconds(keep_engines))
    write_output(output_file, report.run, with_keys(job).output.options)
    out.print(
        f"wrote {output_file}: {report.good:,} answers, {report.failed:,} errors", markup=False
    )
