"""The examples run, and print what docs and their own texts say."""

from __future__ import annotations

import subprocess
import sys

from helpers import environ
from helpers.pages import ROOT

STAGES = ["PLAN", "READ", "PREPARE", "ENGINE", "FINISH", "COMMIT", "FINALIZE", "VERIFY"]


def test_a_row_is_followed_from_the_file_to_the_result():
    path = ROOT / "examples/follow_a_row.py"
    assert "helpers" not in path.read_text(), "the example stands without the tests"
    command = [sys.executable, str(path)]
    done = subprocess.run(
        command, env=environ.clean() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("\n\n")
    assert [part.partition(" ")[0] for part in parts[1:]] == STAGES
    said = dict(zip(STAGES, parts[1:], strict=True))
    assert all("  gets   " in part and "  gives  " in part for part in parts[1:])
    assert parts[0] == "We follow row 4 of customers.csv: company='Summit Ski Lifts'."
    assert "6 rows in 2 shards of 3 rows" in said["PLAN"]
    assert "position 1 of shard 1" in said["PLAN"]
    assert "Our row: company='Summit Ski Lifts'" in said["READ"]
    assert "In which industry is Summit Ski Lifts?" in said["PREPARE"]
    assert "which reads 'Tourism'" in said["ENGINE"]
    assert "company='Summit Ski Lifts', response='Tourism'" in said["FINISH"]
    assert "_raybatch/commits/00000001.json" in said["COMMIT"] and "returns None" in said["COMMIT"]
    assert "response='Tourism', _row=4" in said["FINALIZE"]
    assert "ok=True" in said["VERIFY"] and "6 input rows" in said["VERIFY"]
    assert done.stderr == ""
