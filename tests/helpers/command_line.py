"""The command line, run in the tests' own process."""

from __future__ import annotations

import pytest

from prefect_raybatch.cli import commands as cli


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `raybatch` with these arguments; never a stack trace."""
    capsys.readouterr()
    code = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err
