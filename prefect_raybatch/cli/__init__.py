"""The command line `raybatch`: its commands, and what they print."""

from __future__ import annotations

from prefect_raybatch.uncollected import uncollected

with uncollected():
    from prefect_raybatch.cli.commands import main

__all__ = ["main"]
