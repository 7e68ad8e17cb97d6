"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prefect_raybatch.cli.terminal import HelpfulCommand, VisibleGroup
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import seconds_of

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="Job file in YAML")]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Run directory, local or s3://")]
OutputFolder = Annotated[
    str, typer.Argument(metavar="OUTPUT", help="Folder of the runs: the job's output.uri")
]
JobName = Annotated[str | None, typer.Option("--job", metavar="NAME", help="Only runs of this job")]
RunKeyOption = Annotated[
    str | None, typer.Option(metavar="KEY", help="Name of the run to start or resume")
]
RunDate = Annotated[
    str | None, typer.Option(metavar="YYYY-MM-DD", help="Date for {run_date} in the job")
]
FieldChanges = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a job field; repeatable"),
]
TargetsFromPlan = Annotated[
    bool, typer.Option("--targets-from-plan", help="Publish to the run's own targets")
]
UsePrefect = Annotated[
    bool | None,
    typer.Option(
        "--prefect/--no-prefect",
        help="Run as a Prefect flow; default if an API is configured",
        show_default=False,
    ),
]
KeepEngines = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        envvar="RAYBATCH_KEEP_ENGINES",
        show_envvar=False,
        help="Keep local engines that long for the next command",
    ),
]
DryRunOnly = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object only")]


def kept_seconds(text: str | None) -> float:
    """Return the seconds that engines wait for the next command, from e.g. `10m`; 0 for None.

    The default is 0 because a waiting engine holds its GPU, which other commands may need.
    """
    return seconds_of(text) if text else 0.0


def field_changes(overrides: list[str] | None) -> dict[str, Any]:
    """Return the changes of `--set FIELD=VALUE` as {field: value}; values are YAML."""
    from prefect_raybatch.yaml_text import read_yaml

    changes = {}
    for text in overrides or ():
        field, equals, new = text.partition("=")
        if not equals or not field:
            raise ConfigError(
                f"--set {text!r} is no change. Write FIELD=VALUE, e.g. source.limit=100."
            )
        try:
            changes[field] = read_yaml(new).value
        except ValueError as error:
            raise ConfigError(f"--set {text!r}: the value is no valid YAML: {error}") from None
    return changes


GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("init", "preview", "plan", "run", "batch", "demo"),
    "Watch": ("status", "report", "runs", "history"),
    "Fix": ("retry-failed", "repair", "drain", "finalize", "publish", "backfill"),
    "Check": ("verify", "doctor", "schema"),
    "Tune": ("tune", "warm", "diff", "distill"),
    "Clean up": ("engines", "prune", "reap", "reconcile"),
}

COMMAND_EXAMPLES: dict[str, tuple[str, str]] = {
    "init": (
        "raybatch init customers.csv --model Qwen/Qwen2.5-0.5B-Instruct",
        'raybatch init sqlite:///sales.db --query "SELECT * FROM notes ORDER BY id"',
    ),
    "preview": (
        "raybatch preview job.yaml --rows 3",
        "raybatch preview job.yaml --no-answers",
    ),
    "plan": (
        "raybatch plan job.yaml --tokens",
        "raybatch plan job.yaml --gpu H100 --gpus 8",
    ),
    "run": (
        "raybatch run job.yaml --run-key monday",
        "raybatch run job.yaml --set source.limit=100 --no-prefect",
    ),
    "batch": (
        "raybatch batch -i requests.jsonl -o answers.jsonl --model demo",
        "raybatch batch -i in.jsonl -o out.jsonl --model demo --served-as gpt-4o",
    ),
    "demo": (
        "raybatch demo --rows 1000",
        "raybatch demo --model Qwen/Qwen2.5-0.5B-Instruct --no-prefect",
    ),
    "status": ("raybatch status out/monday", "raybatch status s3://bucket/out/monday --json"),
    "report": (
        "raybatch report out/monday",
        "raybatch report out/monday --html report.html",
    ),
    "runs": ("raybatch runs out", "raybatch runs out --job industries --latest"),
    "history": ("raybatch history out", "raybatch history out --last 30 --html history.html"),
    "retry-failed": (
        "raybatch retry-failed out/monday",
        "raybatch retry-failed out/monday --error PromptTooLong",
    ),
    "repair": ("raybatch repair out/monday", "raybatch repair s3://bucket/out/monday --json"),
    "drain": ("raybatch drain out/monday", "raybatch drain s3://bucket/out/monday --json"),
    "finalize": (
        "raybatch finalize out/monday",
        "raybatch finalize out/monday --partial",
    ),
    "publish": (
        "raybatch publish out/monday --job job.yaml",
        "raybatch publish out/monday --targets-from-plan",
    ),
    "backfill": (
        "raybatch backfill job.yaml --from 2026-11-01 --to 2026-11-07",
        "raybatch backfill job.yaml --from 2026-11-01 --to 2026-11-30 --at-most 4",
    ),
    "verify": ("raybatch verify out/monday", "raybatch verify out/monday --chain"),
    "doctor": ("raybatch doctor job.yaml", "raybatch doctor s3://bucket/out"),
    "schema": ("raybatch schema", "raybatch schema > job.schema.json"),
    "tune": (
        "raybatch tune job.yaml --minutes 10",
        "raybatch tune job.yaml --deadline 6h --write tuned.yaml",
    ),
    "warm": ("raybatch warm job.yaml", "raybatch warm job.yaml --json"),
    "diff": (
        "raybatch diff job.yaml --against out/monday --dry-run",
        "raybatch diff job.yaml --against out/monday --html diff.html",
    ),
    "distill": (
        "raybatch distill out/monday --encoder BAAI/bge-small-en-v1.5",
        "raybatch distill out/monday --encoder ./bge --agreement 0.98 --write bge.json",
    ),
    "engines": ("raybatch engines", "raybatch engines stop"),
    "prune": (
        "raybatch prune out --keep 14 --dry-run",
        "raybatch prune out --keep 14 --older-than 30d --yes",
    ),
    "reap": ("raybatch reap out/monday --dry-run", "raybatch reap out/monday --older-than 2h"),
    "reconcile": (
        "raybatch reconcile http://head:8265 --dry-run",
        "raybatch reconcile kubernetes/batch",
    ),
}


class CommandGroups(VisibleGroup):
    """The program's commands in the order of GROUPS."""

    order = [name for names in GROUPS.values() for name in names]


def in_catalog(name: str) -> dict[str, Any]:
    """Return the options with which Typer registers a command: its name, group and examples."""
    (group,) = (title for title, names in GROUPS.items() if name in names)
    return {
        "name": name,
        "cls": HelpfulCommand,
        "rich_help_panel": group,
        "epilog": "\n".join(["Examples:", *(f"  {line}" for line in COMMAND_EXAMPLES[name])]),
    }
