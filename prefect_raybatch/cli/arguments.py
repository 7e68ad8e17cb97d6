"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Local folder or s3:// URI.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
