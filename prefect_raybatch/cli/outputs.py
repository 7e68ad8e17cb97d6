"""Commands around runs: a first job file, its schema, the runs of an output, old ones removed."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_raybatch.cli.arguments import Json
from prefect_raybatch.cli.show import print_json, print_prompt, show_rows
from prefect_raybatch.cli.terminal import err, out
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.harmless import visible
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.job.run_words import dated_parts
from prefect_raybatch.report.report import DASH, duration
from prefect_raybatch.runs.listing import RunLine, need_output
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.runs.preview import Preview
    from prefect_raybatch.runs.prune import Pruned

outputs = typer.Typer()
PROMPTS_SHOWN, CELL_SHOWN = 3, 60  # prompts; characters of a cell
INPUTS_SHOWN = 3  # columns of the input beside an answer
WRONG_SHOWN = ("stage", "error", "message")

OutputFolder = Annotated[
    str, typer.Argument(metavar="OUTPUT", help="Folder of runs, local or s3://: output.uri.")
]
OfJob = Annotated[str | None, typer.Option("--job", metavar="NAME", help="Of this job alone.")]


@outputs.command()
def init(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="File, folder or table to read.")],
    file: Annotated[Path, typer.Option(help="The job file to write.")] = Path("job.yaml"),
    name: Annotated[str | None, typer.Option(help="Of the job; by default the table's.")] = None,
    template: Annotated[
        str | None, typer.Option(help="Prompt of a row, {Column} for its values.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face name or folder.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the runs.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented job file for a table of yours, with the columns seen in it.

    On a terminal it asks for what no option says; elsewhere it takes the defaults.
    """
    from prefect_raybatch.runs import first_job

    if file.exists() and not force:
        raise ConfigError(f"{file} is there already; give another --file, or --force")
    seen = first_job.seen_table(table)
    text = first_job.job_text(
        seen,
        name=name or first_job.name_of(table),
        uri=table,
        template=_asked("Prompt of a row", template, first_job.default_template(seen.columns)),
        model=_asked("Model", model, "demo"),
        output=_asked("Folder of the runs", output, "out"),
    )
    file.write_text(text, encoding="utf-8")
    columns = counted(len(seen.columns), "column")
    err.print(f"wrote {file}: {columns} seen in {table}", markup=False)
    if seen.guessed:
        guess = f"source.csv.encoding: {seen.csv['encoding']}"
        err.print(f"{table} is not UTF-8, so {guess} is a guess: look at the prompts", markup=False)
        err.print(f"next: raybatch preview {file} --no-answers", markup=False)
    else:
        err.print(f"next: raybatch plan {file}", markup=False)


@outputs.command()
def preview(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job file in YAML.")],
    rows: Annotated[int, typer.Option(min=1, max=1000, help="First rows of the input.")] = 5,
    no_answers: Annotated[
        bool, typer.Option("--no-answers", help="Types and prompts alone; starts no engine.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show types, prompts and answers of a job's first rows, without Prefect, Ray or a run."""
    from prefect_raybatch.cli.drive import quiet_engine, with_keys
    from prefect_raybatch.job.run_words import of_today
    from prefect_raybatch.runs import preview as previewing

    quiet_engine()
    loaded = of_today(with_keys(BatchJob.from_yaml(job)))
    found = previewing.preview_rows(loaded, rows, not no_answers)
    if as_json:
        print_json(found)
    else:
        _show_preview(found)


def _show_preview(found: Preview) -> None:
    out.print("[bold]columns[/]")
    for name, kind in found.columns:
        out.print(f"  {name}: {kind}", markup=False)
    for one in found.prompts[:PROMPTS_SHOWN]:
        print_prompt(f"row {one.row:,}", one.tokens, one.trouble or one.text)
    given = {name for name, _ in found.columns}
    asked = set(found.asked[:INPUTS_SHOWN])
    made = [{k: v for k, v in row.items() if k in asked or k not in given} for row in found.answers]
    wrong = [{name: row[name] for name in WRONG_SHOWN} for row in found.failed]
    for title, rows in (("answers", made), ("failed rows", wrong)):
        if rows:
            out.print(f"[bold]{title}[/]")
            show_rows([{name: _short(value) for name, value in row.items()} for row in rows])
    took = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in found.seconds.items())
    out.print(f"took {took}", markup=False)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= CELL_SHOWN else f"{text[:CELL_SHOWN]}..."


def _asked(question: str, given: str | None, default: str) -> str:
    if given is not None or not sys.stdin.isatty():
        return given or default
    shown = visible(f"{question} [{default}]")
    answer: str = typer.prompt(shown, default=default, show_default=False, err=True)
    return answer


@outputs.command()
def schema() -> None:
    """JSON Schema of a job file, by which editors complete and check it."""
    found = BatchJob.model_json_schema()
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    print(json.dumps({**dialect, **found}, indent=2))


@outputs.command()
def runs(
    output: OutputFolder,
    job: OfJob = None,
    latest: Annotated[
        bool,
        typer.Option("--latest", help="Print the place of the newest completed run alone."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the runs of an output folder, newest first."""
    from prefect_raybatch.runs import listing

    need_output(output)
    if latest:
        found = listing.latest_complete(output, job=job)
        if as_json:
            print_json(found)
        else:
            out.print(found.run, markup=False)
        return
    lines = listing.list_runs(output, job=job)
    if as_json:
        print_json({"output": output, "runs": [asdict(line) for line in lines]})
        return
    if not lines:
        out.print(f"no runs in {output}", markup=False)
        return
    show_rows([_shown(line, time.time()) for line in lines])
    for line in lines:
        if line.trouble:
            out.print(f"{line.run_key}: {line.trouble}", markup=False)
        if line.failure:
            out.print(f"{line.run_key} failed: {line.failure}", markup=False)
        if line.command:
            out.print(f"  {line.command}", markup=False)


@outputs.command()
def nights(
    output: OutputFolder,
    job: OfJob = None,
    last: Annotated[int, typer.Option(min=1, max=400, help="So many nights.")] = 14,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page with plots.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The last nights of each job: state, rows, rate, cost, answers, and what shifted in them."""
    from prefect_raybatch.report.run_history import history_markdown
    from prefect_raybatch.runs.run_history import history_of

    need_output(dated_parts(output)[0] or ".")
    pages = history_of(output, job=job, most=last)
    if as_json:
        print_json({"output": output, "jobs": [asdict(page) for page in pages]})
        return
    if html is not None:
        from prefect_raybatch.report.html import history_html

        made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        html.write_text(history_html(pages, made), encoding="utf-8")
        err.print(f"wrote {html}", markup=False)
        return
    for page in pages:
        out.print(history_markdown(page, plots=False), markup=False)
    if not pages:
        out.print(f"no runs in {output}", markup=False)


def _shown(line: RunLine, now: float) -> dict[str, str]:
    share = line.committed / line.shards if line.shards else 0.0
    age = now - line.created if line.created else None
    return {
        "run": line.run_key,
        "job": line.job or DASH,
        "state": line.state if line.finished or not share else f"{line.state} {share:.0%}",
        "rows": f"{line.rows:,}" if line.job and line.has_plan else DASH,
        "good": DASH if line.good is None else f"{line.good:,}",
        "in quarantine": DASH if line.quarantined is None else f"{line.quarantined:,}",
        "begun": DASH if age is None else f"{duration(max(0.0, age))} ago",
    }


@outputs.command()
def prune(
    output: OutputFolder,
    keep: Annotated[int, typer.Option(min=1, help="Newest complete runs of each job that stay.")],
    job: OfJob = None,
    older_than: Annotated[str, typer.Option(help="Leave younger ones: 12h, 30d.")] = "0s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is shown without it.")] = False,
    as_json: Json = False,
) -> None:
    """Remove old complete runs, with the runs that retried their failed rows.

    Without --yes it shows what it would remove, and removes nothing. Runs that are not complete
    or not readable are never removed, nor is what was published elsewhere.
    """
    from prefect_raybatch.runs import prune as pruning

    age = seconds_of(older_than)
    need_output(output)
    only_show = dry_run or not yes
    found = pruning.prune_runs(output, keep, job=job, older_than=age, dry_run=only_show)
    if as_json:
        print_json({**asdict(found), "bytes": found.bytes})
    else:
        _show_pruned(found)
    if found.removed and only_show and not dry_run:
        raise ConfigError(
            f"nothing was removed: add --yes to remove {counted(len(found.removed), 'run')}"
        )


def _show_pruned(found: Pruned) -> None:
    verb = "would remove" if found.dry_run else "removed"
    for key, size in found.removed.items():
        line = found.lines[key]
        rows = counted(line.rows, "row") if line.has_plan and line.job else line.state
        when = line.finished or line.created
        day = f", {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(when))}" if when else ""
        out.print(f"{verb} {key} ({rows}, {size / 2**20:,.1f} MiB{day})", markup=False)
    for key, why in found.kept.items():
        out.print(f"kept {key}: {why}", markup=False)
    if not found.removed:
        out.print("nothing to remove")
