"""The command `diff`: which answers of a finished run another job would change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_raybatch.cli.arguments import DryRunOnly, FieldChanges, JobFile, Json, in_catalog
from prefect_raybatch.cli.drive import job_of_file, sender_of, with_keys
from prefect_raybatch.cli.ending import print_next
from prefect_raybatch.cli.places import check_writable
from prefect_raybatch.cli.show import TerminalProgress, print_json, show_rows, write_page
from prefect_raybatch.cli.terminal import err, out
from prefect_raybatch.job.edits import render_for_today

if TYPE_CHECKING:
    from prefect_raybatch.compare.changes import Diff
    from prefect_raybatch.compare.threshold import TunedCascade

comparing = typer.Typer()
CHANGES_SHOWN = 20
LONGEST_SHOWN = 120  # characters of a value in the terminal


@comparing.command(**in_catalog("diff"))
def diff_command(
    job: JobFile,
    against: Annotated[str, typer.Option(metavar="RUN_DIR", help="Finished run to compare with")],
    sample: Annotated[int, typer.Option(metavar="N", min=1, help="Number of rows to ask")] = 400,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the changes as a page")
    ] = None,
    max_changed: Annotated[
        float | None,
        typer.Option(metavar="SHARE", min=0, max=1, help="Exit with 1 if more rows changed"),
    ] = None,
    set_: FieldChanges = None,
    dry_run: DryRunOnly = False,
    as_json: Json = False,
) -> None:
    """Answer a sample of a run's rows anew, and show which change.

    The new answers are this job's. First prints the number of rows, and the time and cost of a run
    of this job over all rows. The same command draws the same rows, and resumes after a failure.
    """
    from prefect_raybatch.api.diff import begin_diff, finish_diff, infer_diff, prepare_diff
    from prefect_raybatch.compile.resolved import resolve
    from prefect_raybatch.report.html import diff_html

    if html is not None:
        check_writable(f"--html {html}", html)
    plain = render_for_today(job_of_file(job, set_))
    loaded = with_keys(plain)
    prepared = prepare_diff(resolve(loaded), against, sample)
    if dry_run and as_json:
        print_json(prepared.to_dict())
    for line in [] if as_json else prepared.lines():
        (out if dry_run else err).print(line, markup=False)
    if dry_run:
        return
    run = begin_diff(prepared)
    with closing(TerminalProgress(as_json)) as show:
        infer_diff(prepared, run, sender_of(plain, loaded, show))
    found = finish_diff(prepared, run)
    if html is not None:
        write_page(html, diff_html(found.page()))
    if as_json:
        print_json(found.to_dict())
    else:
        _show(found)
    if max_changed is not None and found.share > max_changed:
        err.print(f"more than --max-changed {max_changed:g} of the sampled rows changed")
        raise typer.Exit(1)


def threshold_of(find: Callable[[TerminalProgress], TunedCascade], as_json: bool) -> TunedCascade:
    """Return the result of `find`, which tunes a cascade; show its progress in the terminal."""
    with closing(TerminalProgress(as_json)) as show:
        return find(show)


def show_threshold(tuned: TunedCascade, path: Path, as_json: bool) -> None:
    """Print the result of tuning a cascade, and that the job file `path` was written.

    Exits with status 1 if no threshold saves a row; then no job file was written.
    """
    if as_json:
        print_json({**asdict(tuned), "settings": tuned.changes, "lines": tuned.lines()})
    else:
        for line in tuned.lines():
            out.print(line, markup=False)
    if not tuned.changes:
        raise typer.Exit(1)
    if not as_json:
        out.print(f"wrote {path}", markup=False)
        print_next("raybatch", "plan", str(path))


def _show(diff: Diff) -> None:
    """Print how many answers changed, and the first changed ones."""
    out.print(diff.line(), markup=False)
    for name, value in diff.facts():
        out.print(f"  {name}: {value}", markup=False)
    rows = diff.table()
    if rows:
        show_rows(
            [{name: _short(value) for name, value in row.items()} for row in rows[:CHANGES_SHOWN]]
        )
    if len(rows) > CHANGES_SHOWN:
        out.print(f"... and {len(rows) - CHANGES_SHOWN:,} more: see --html or --json")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
