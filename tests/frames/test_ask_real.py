"""The page about DataFrames, run as it stands by a real engine, which then serves another call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.environ import clean
from helpers.pages import ROOT, blocks

pytestmark = pytest.mark.whole

SECOND = """
from prefect_raybatch.cluster.connect import CLUSTER_SESSION

def host():
    (kept,) = CLUSTER_SESSION.warm._idle
    return kept.host._actor_id.hex()

before = host()
more = ask(["Green Health", "Stone Law", "Data Tech"], "What industry is this company in: {text}",
           model="demo", choice=labels)
assert [row["answer"] for row in more] == ["Healthcare", "Law Firm", "Technology"], more
assert host() == before, "another engine was started"
print("the same engine")
"""


def test_the_page_about_dataframes(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/dataframe.md").read_text(encoding="utf-8")
    (code,) = (block.text for block in blocks(page) if block.language == "python")
    env = {**clean(), "RAYBATCH_ANSWERS": str(tmp_path / "answers"), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code + SECOND], env=env, cwd=tmp_path, timeout=600,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "the same engine"
    for name, label in {"Smith & Sons Law": "Law Firm", "Acme Health": "Healthcare"}.items():
        assert any(name in line and label in line for line in lines), done.stdout
    assert len(os.listdir(tmp_path / "answers" / "runs")) == 2  # one folder for each prompt
