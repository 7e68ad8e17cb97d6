"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="Job file in YAML")]
RunDir = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="Run directory, a local folder or s3:// URI")
]
OutputFolder = Annotated[
    str, typer.Argument(metavar="OUTPUT", help="Folder of the runs, the job's output.uri")
]
JobName = Annotated[
    str | None, typer.Option("--job", metavar="NAME", help="Show only runs of this job")
]
RunKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Name of the run; resumes it if it exists")
]
RunDate = Annotated[
    str | None, typer.Option(metavar="YYYY-MM-DD", help="Date that replaces {run_date} in the job")
]
FieldChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override a field, e.g. source.limit=100; repeatable"
    ),
]
TargetsFromPlan = Annotated[
    bool, typer.Option("--targets-from-plan", help="Publish to the targets in the run's own plan")
]
UsePrefect = Annotated[bool, typer.Option(help="Run as a Prefect flow")]
DryRunOnly = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done, and change nothing")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else")]
