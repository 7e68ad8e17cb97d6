"""The command line: arguments, words and colours."""

from __future__ import annotations

from prefect_raybatch.cli.commands import main

__all__ = ["main"]
