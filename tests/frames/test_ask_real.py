"""The page about DataFrames, run as it stands by a real engine, which then serves another call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
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


def test_the_page_about_dataframes(
    imported_vllm: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here `ask` finds a cluster that this process has joined; in test_notebooks.py it starts one
    in a process of its own."""
    page = (ROOT / "docs/how-to/dataframe.md").read_text(encoding="utf-8")
    (code,) = (block.text for block in blocks(page) if block.language == "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYBATCH_ANSWERS", str(tmp_path / "answers"))
    monkeypatch.setenv("COLUMNS", "200")
    exec(code + SECOND, {"__name__": "__main__"})
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[-1] == "the same engine"
    for name, label in {"Smith & Sons Law": "Law Firm", "Acme Health": "Healthcare"}.items():
        assert any(name in line and label in line for line in lines), out
    assert len(os.listdir(tmp_path / "answers" / "runs")) == 2  # one folder for each prompt
