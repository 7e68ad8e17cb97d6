"""The command `distill`: a classifier trained on the answers of a finished run."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_raybatch.cli.arguments import FieldChanges, Json, RunDir, field_changes, in_catalog
from prefect_raybatch.cli.drive import with_keys
from prefect_raybatch.cli.places import check_writable
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
    status 1 if it could answer none. The same command draws the same rows, embeds none twice and
    resumes after a failure.
    """
    from prefect_raybatch.api.distill import begin_distill, finish_distill, prepare_distill
    from prefect_raybatch.api.submission import infer_in_place

    _check_place(write)
    prepared = prepare_distill(run_dir, encoder, agreement, sample, field_changes(set_))
    _check_existing(write, prepared)
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


def _check_place(file: Path) -> None:
    """Raise `ConfigError` if no classifier can be written to `file`.

    Called before rows are embedded, which takes long.
    """
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(file)):  # a Path has one slash of s3://
        raise ConfigError(
            f"--write {file}: the classifier is written to a local file. Name one, and copy it to "
            "the store"
        )
    for path in (file, _job_file(file)):
        check_writable(f"--write {file}", path, makes_folders=True)


def _check_existing(file: Path, prepared: Embedding) -> None:
    """Raise `ConfigError` if `file` exists, unless an earlier command like this one wrote it.

    That command had the same run, job fields and encoder, and tested the same number of rows;
    `prepared` has those of this command.
    """
    from prefect_raybatch.distill.classifier import Classifier

    if not file.exists():
        return
    try:
        made = Classifier.from_bytes(file.read_bytes(), str(file))
        made.training.check_fields(str(file), prepared.asked.identity.parts)
    except ConfigError:
        raise _exists(file) from None
    theirs = (made.measured.run, made.measured.tested) if made.measured is not None else None
    ours = (prepared.member.key, prepared.tested)
    if theirs != ours or made.training.encoder != prepared.asked.job.engine.model:
        raise _exists(file)


def _exists(file: Path) -> ConfigError:
    return ConfigError(
        f"--write {file} exists with other content, and runs that use it can be resumed only "
        "while it is unchanged. Name another file; no row is embedded again"
    )


def _job_file(classifier: Path) -> Path:
    """Return the path, beside the classifier, of the YAML file for a job that uses it."""
    return classifier.with_name(f"{classifier.name.removesuffix('.json')}.job.yaml")


def _write_classifier(distilled: Distilled, file: Path) -> None:
    """Write the classifier; raise `ConfigError` if the file exists with other content.

    An existing file is never replaced, because jobs may use it.
    """
    from prefect_raybatch.storage import open_store

    folder = file.resolve().parent
    if not open_store(str(folder)).put_if_absent(file.name, distilled.classifier.to_bytes()):
        raise _exists(file)


def _write_job(
    prepared: Embedding, distilled: Distilled, classifier: Path
) -> tuple[dict[str, Any], str]:
    """Write a YAML file with the fields of a job that uses the file `classifier`.

    Returns (fields, message to print). If no job can use the classifier, writes nothing; then the
    fields are {} and the message says why.
    """
    import yaml

    from prefect_raybatch.api.distill import cascade_fields
    from prefect_raybatch.storage import open_store

    try:
        fields = cascade_fields(prepared, distilled, str(classifier.resolve()))
    except ConfigError as error:
        return {}, str(error)
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    title = f"Fields for the job of {prepared.member.key}, to use {classifier}. Keys are left out."
    file = _job_file(classifier)
    open_store(str(file.resolve().parent)).put(file.name, f"# {title}\n{text}".encode())
    return fields, f"wrote {file}, the fields of a job that uses it:\n\n{text}"
