"""A test that hangs is ended, and what is needed to find out why is shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HANGS = """
import subprocess, threading

def test_waits():
    child = subprocess.Popen(["sleep", "1234"])
    try:
        threading.Event().wait()
    finally:
        child.kill()
"""


def test_a_test_that_hangs_shows_its_stack_and_its_child_processes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "helpers.hung", "--timeout=3", "-rN"]
    done = subprocess.run([*command, "test_it.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Timeout (>3.0s)" in done.stdout and "threading.Event().wait()" in done.stdout
    assert "Child processes when the time was up" in done.stdout
    assert "sleep 1234" in done.stdout
