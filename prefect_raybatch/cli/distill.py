"""The command `distill`: a classifier trained on the answers of a finished run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_raybatch.cli.arguments import FieldChanges, Json, RunDir, field_changes, in_catalog
from prefect_raybatch.cli.drive import with_keys
from prefect_raybatch.cli.show import TerminalProgress, print_json
from prefect_raybatch.cli.terminal import err, out
from prefect_raybatch.errors import ConfigError

if TYPE_CHECKING:
    from prefect_raybatch.api.distill import Embedding
    from prefect_raybatch.distill.measure import Distilled

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

    Writes the fields of a job that uses it beside the classifier. Writes nothing and exits with
    status 1 if it could answer none. The same command takes the same rows, embeds none twice and
    resumes after a failure.
    """
    from prefect_raybatch.api.distill import begin_distill, finish_distill, prepare_distill
    from prefect_raybatch.api.submission import infer_in_place

    if write.is_dir():
        raise ConfigError(f"--write {write} is a folder. Name a file")
    prepared = prepare_distill(run_dir, encoder, agreement, sample, field_changes(set_))
    err.print(prepared.line, markup=False)
    if prepared.problem:
        err.print(prepared.problem, markup=False)
    job = prepared.asked.job
    run = begin_distill(prepared)
    with closing(TerminalProgress(as_json)) as show:
        infer_in_place(job, with_keys(job), run, show)
    found = finish_distill(prepared, run)
    fields: dict[str, Any] = {}
    lines, written = found.lines(), None
    if found.answered:
        _write_classifier(found, write)
        written = str(write)
        fields, note = _write_job(prepared, found, write)
        lines = [*lines, f"wrote {write}", note]
    if as_json:
        value = {**found.to_dict(), "written": written, "lines": found.lines()}
        print_json({**value, "job": fields, "problem": prepared.problem})
    else:
        for line in lines:
            out.print(line, markup=False)
    if not found.answered:
        raise typer.Exit(1)


def _write_classifier(found: Distilled, file: Path) -> None:
    """Write the classifier unless the file exists with other content, which jobs may use."""
    from prefect_raybatch.storage import open_store

    folder = file.resolve().parent
    if not open_store(str(folder)).put_if_absent(file.name, found.classifier.to_bytes()):
        raise ConfigError(
            f"--write {file} exists with other content, and runs that use it can be resumed only "
            "while it is unchanged. Name another file; no row is embedded again"
        )


def _write_job(
    prepared: Embedding, found: Distilled, classifier: Path
) -> tuple[dict[str, Any], str]:
    """Write the fields of a job that uses the classifier; return them with what to tell.

    No fields if no job can use it.
    """
    import yaml

    from prefect_raybatch.api.distill import cascade_fields
    from prefect_raybatch.storage import open_store

    try:
        fields = cascade_fields(prepared, found, str(classifier.resolve()))
    except ConfigError as error:
        return {}, str(error)
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    title = f"Fields for the job of {prepared.member.key}, to use {classifier}. Keys are left out."
    file = classifier.with_name(f"{classifier.name.removesuffix('.json')}.job.yaml")
    open_store(str(file.resolve().parent)).put(file.name, f"# {title}\n{text}".encode())
    return fields, f"wrote {file}, the fields of a job that uses it:\n\n{text}"
