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
from prefect_raybatch.cli.drive import job_of_fields, run_job
from prefect_raybatch.cli.terminal import out

batch_files = typer.Typer()


@batch_files.command(**in_catalog("batch"))
def batch(
    input_file: Annotated[
        str,
        typer.Option(
            "-i", "--input-file", metavar="FILE", help="Batch file: local, s3://, http(s)"
        ),
    ],
    output_file: Annotated[
        str,
        typer.Option("-o", "--output-file", metavar="FILE", help="File to write: local or s3://"),
    ],
    model: Annotated[str, typer.Option(metavar="MODEL", help="Model that answers")],
    served_as: Annotated[
        list[str] | None,
        typer.Option(
            "--served-as", metavar="NAME", help="Other name of the model in requests; repeatable"
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Longest answer to requests without max_tokens")
    ] = 1024,
    set_: FieldChanges = None,
    keep_engines: KeepEngines = None,
) -> None:
    """Answer an OpenAI batch file; the same command resumes.

    The output has a line for each request, in input order. A wrong line gets an error.
    """
    from prefect_raybatch.batches.files import batch_fields, batch_key, write_output
    from prefect_raybatch.compile.resolved import resolve

    changes = field_changes(set_)
    fields = batch_fields(input_file, output_file, model, served_as or (), max_tokens)
    job = job_of_fields(fields, changes, "the job of the batch file")
    key = batch_key(resolve(job).identity.fingerprint)
    report, _ = run_job(job, key, False, False, keep_seconds=kept_seconds(keep_engines))
    write_output(output_file, report, job.engine.model, job.output.row_number)
    out.print(
        f"wrote {output_file}: {report.good:,} answers, {report.failed:,} errors", markup=False
    )
