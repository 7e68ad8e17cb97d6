"""Commands for job files and output folders: preview, warm, schema, runs, history and prune."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_raybatch.cli.arguments import (
    DryRunOnly,
    FieldChanges,
    JobFile,
    JobName,
    Json,
    OutputFolder,
    in_catalog,
)
from prefect_raybatch.cli.ending import print_next
from prefect_raybatch.cli.show import print_json, print_prompt, show_rows, write_page
from prefect_raybatch.cli.terminal import out
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import job_schema
from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.job.placeholders import dated_parts
from prefect_raybatch.report.report import DASH, duration
from prefect_raybatch.runs.listing import RunLine, need_output
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.report.run_history import HistoryPage
    from prefect_raybatch.runs.preview import Preview
    from prefect_raybatch.runs.prune import Pruned

outputs = typer.Typer()
PROMPTS_SHOWN, CELL_SHOWN = 3, 60  # prompts; characters of a cell
INPUTS_SHOWN = 3  # input columns beside an answer
FAILURE_COLUMNS = ("stage", "error", "message")


@outputs.command(**in_catalog("preview"))
def preview(
    job: JobFile,
    rows: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Rows to show")] = 5,
    no_answers: Annotated[
        bool, typer.Option("--no-answers", help="Show no answers; start no engine")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show types, prompts and answers of the first rows.

    It needs neither Prefect nor Ray, and writes nothing.
    """
    from prefect_raybatch.api import preview_rows
    from prefect_raybatch.cli.drive import job_of_file, quiet_engine, with_keys
    from prefect_raybatch.job.edits import render_for_today

    quiet_engine()
    loaded = render_for_today(with_keys(job_of_file(job)))
    found = preview_rows(loaded, rows, not no_answers)
    none_made = bool(found.prompts) and all(one.trouble for one in found.prompts)
    if as_json:
        print_json(found)
        raise typer.Exit(1 if none_made else 0)
    if found.larger is not None:
        out.print("[bold]First model of the cascade[/]")
    _show_preview(found)
    if found.larger is not None:
        out.print("[bold]Larger model[/], asked about the same rows")
        _show_preview(found.larger)
    if none_made:
        out.print("[red]problem[/]: no row made a prompt; correct the job before it is planned")
        print_next("raybatch", "preview", job)
        raise typer.Exit(1)
    print_next("raybatch", "plan", job)


def _show_preview(preview: Preview) -> None:
    out.print("[bold]columns[/]")
    for name, kind in preview.columns:
        out.print(f"  {name}: {kind}", markup=False)
    for one in preview.prompts[:PROMPTS_SHOWN]:
        print_prompt(f"row {one.row:,}", one.tokens, one.trouble or one.text)
    inputs = {name for name, _ in preview.columns} - set(preview.asked[:INPUTS_SHOWN])
    answers = [{k: v for k, v in row.items() if k not in inputs} for row in preview.answers]
    failed = [{name: row[name] for name in FAILURE_COLUMNS} for row in preview.failed]
    for title, rows in (("answers", answers), ("failed rows", failed)):
        if rows:
            out.print(f"[bold]{title}[/]")
            show_rows([{name: _short(value) for name, value in row.items()} for row in rows])
    took = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in preview.seconds.items())
    out.print(f"took {took}", markup=False)


@outputs.command(**in_catalog("warm"))
def warm(job: JobFile, set_: FieldChanges = None, as_json: Json = False) -> None:
    """Start a job's engine once to fill this machine's caches.

    vLLM, Triton and FlashInfer keep the code that they compile for it. Later starts here, or on
    machines with the same cache folders, load that code, which is faster.
    """
    from prefect_raybatch.api import warm_caches
    from prefect_raybatch.cli.drive import job_of_file, quiet_engine, with_keys
    from prefect_raybatch.job.edits import render_for_today

    quiet_engine()
    warmed = warm_caches(render_for_today(with_keys(job_of_file(job, set_))))
    if as_json:
        print_json({"engines": [asdict(one) for one in warmed]})
        return
    for one in warmed:
        show_rows(
            [
                {
                    "compile cache": cache.folder.path,
                    "size": mib(cache.after),
                    "added": mib(max(0, cache.after - cache.before)),
                }
                for cache in one.caches
            ]
        )
        state = "the caches were warm" if one.were_warm else "the next start finds what was added"
        out.print(
            f"{one.model}: start {one.start_seconds:.1f} s, first answer {one.answer_seconds:.1f} "
            f"s; {state}",
            markup=False,
        )
    print_next("raybatch", "run", job)


def mib(size: int) -> str:
    """Return a number of bytes as text in MiB."""
    return f"{size / (1 << 20):,.1f} MiB"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= CELL_SHOWN else f"{text[:CELL_SHOWN]}..."


@outputs.command(**in_catalog("schema"))
def schema() -> None:
    """Print the JSON Schema of a job file.

    Editors complete and check job files with it.
    """
    print(json.dumps(job_schema(), indent=2))


@outputs.command(**in_catalog("runs"))
def runs(
    output: OutputFolder,
    job: JobName = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Print the newest complete run only")
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
        if line.command and (line.failure or line.is_attempt):
            verb = "start again" if line.is_attempt else "continue"
            verb = f"{line.first_step}, then run" if line.first_step else verb
            out.print(f"  {verb}: {line.command}", markup=False)


@outputs.command(**in_catalog("history"))
def history(
    output: OutputFolder,
    job: JobName = None,
    last: Annotated[
        int, typer.Option(metavar="N", min=1, max=400, help="Number of runs per job")
    ] = 14,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page with plots")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the latest runs of each job: rows, rate, cost, answers.

    It says in which runs the answers have shifted against earlier runs. Scheduled runs that never
    started are listed too, if Prefect answers.
    """
    from prefect_raybatch.report.run_history import history_markdown
    from prefect_raybatch.runs.run_history import history_of

    need_output(dated_parts(output)[0] or ".")
    pages = _with_scheduled(history_of(output, job=job, most=last), output, job, last)
    if as_json:
        print_json({"output": output, "jobs": [asdict(page) for page in pages]})
        return
    if html is not None:
        from prefect_raybatch.report.html import history_html

        now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        write_page(html, history_html(pages, now))
        return
    for page in pages:
        out.print(history_markdown(page, plots=False), markup=False)
    if not pages:
        out.print(f"no runs in {output}", markup=False)


def _with_scheduled(
    pages: list[HistoryPage], output: str, job: str | None, most: int
) -> list[HistoryPage]:
    """Return history pages plus the scheduled runs that have no run directory, read from Prefect.

    A page is about one job; pages are added for jobs that have only such runs. Each page has at
    most `most` runs. Without a Prefect API, `pages` are returned unchanged.
    """
    from prefect_raybatch.doctor.services import prefect_api

    if prefect_api() is None:
        return pages
    from prefect_raybatch.flow import prefect_runs

    known = prefect_runs.runs_of_all_deployments()
    pages = pages + prefect_runs.pages_of_unstarted_jobs(pages, known, output, job)
    return [prefect_runs.with_prefect_runs(page, known, output, most) for page in pages]


def _shown(line: RunLine, now: float) -> dict[str, str]:
    share = line.committed / line.shards if line.shards else 0.0
    age = now - line.created if line.created else None
    return {
        "run": line.run_key,
        "job": line.job or DASH,
        "state": line.state if line.finished or not share else f"{line.state} {share:.0%}",
        "rows": f"{line.rows:,}" if line.job and line.has_plan else DASH,
        "answered": DASH if line.good is None else f"{line.good:,}",
        "failed": DASH if line.quarantined is None else f"{line.quarantined:,}",
        "age": DASH if age is None else duration(max(0.0, age)),
    }


@outputs.command(**in_catalog("prune"))
def prune(
    output: OutputFolder,
    keep: Annotated[
        int, typer.Option(metavar="N", min=1, help="Newest complete runs to keep per job")
    ],
    job: JobName = None,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Keep younger runs; 12h or 30d")
    ] = "0s",
    dry_run: DryRunOnly = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the listed runs")] = False,
    as_json: Json = False,
) -> None:
    """Remove old complete runs and the retries of their rows.

    Without --yes it lists what it would remove, and removes nothing. Runs that are incomplete or
    not readable are never removed, and neither are published rows.
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
            f"nothing was removed. To remove {counted(len(found.removed), 'run')}, add --yes."
        )


def _show_pruned(pruned: Pruned) -> None:
    verb = "would remove" if pruned.dry_run else "removed"
    for key, size in pruned.removed.items():
        line = pruned.lines[key]
        rows = counted(line.rows, "row") if line.has_plan and line.job else line.state
        when = line.finished or line.created
        day = f", {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(when))}" if when else ""
        out.print(f"{verb} {key} ({rows}, {size / 2**20:,.1f} MiB{day})", markup=False)
    for key, why in pruned.kept.items():
        out.print(f"kept {key}: {why}", markup=False)
    if not pruned.removed:
        out.print("nothing to remove")
