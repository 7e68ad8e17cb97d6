"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prefect_raybatch.cli.terminal import err
from prefect_raybatch.cluster.warm import IDLE_SECONDS
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
    """Return for how long engines wait for the next command.

    Only for a person at a terminal by default: a job of a batch system should leave nothing behind.
    """
    if text is not None:
        return seconds_of(text)
    return IDLE_SECONDS if err.is_terminal else 0.0


def field_changes(overrides: list[str] | None) -> dict[str, Any]:
    """Return the changes of `--set FIELD=VALUE` as {field: value}; values are YAML."""
    from prefect_raybatch.job.yaml_text import read_yaml

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
