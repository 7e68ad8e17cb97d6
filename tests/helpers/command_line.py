"""The command line, run in the tests' own process or in one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.environ import clean
from prefect_raybatch.cli import commands as cli

Raybatch = Callable[..., tuple[int, str, str]]
"""`called` with all but the command's arguments."""


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `raybatch` with these arguments; never a stack trace."""
    capsys.readouterr()
    code = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err, (out + err)[-3000:]
    return code, out, err


def raybatch_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`raybatch` with these words, as a process in a folder, in an environment without settings."""
    return subprocess.run(
        [sys.executable, "-m", "prefect_raybatch.cli", *words],
        env=clean(), cwd=folder, timeout=600, capture_output=True, text=True,
    )  # fmt: skip
