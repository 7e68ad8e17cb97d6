"""`raybatch run` with a judge in vLLM: the bundled model judges its own answers, after the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command_line import raybatch_in

pytestmark = pytest.mark.whole


def test_a_second_engine_judges_once_the_rows_are_answered(tmp_path: Path) -> None:
    assert raybatch_in(tmp_path, "init", "--example").returncode == 0
    judge = {"model": "demo", "engine": {"max_model_len": 256}, "sample": 20}
    judge["prompt"] = "{Company}: is {industry} right or wrong?"
    words = ("run", "companies.yaml", "--run-key", "n1", "--no-prefect", "--set", "source.limit=60")
    words += ("--set", f"quality.judge={json.dumps(judge)}")
    done = raybatch_in(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("judged")]
    assert "of 20 answers right" in line
    report = json.loads((tmp_path / "out/n1/_raybatch/judgement.json").read_bytes())
    assert report["rows"] == 20 and report["not_judged"] == 0
    again = raybatch_in(tmp_path, *words)
    assert again.returncode == 0 and line in again.stdout, again.stderr[-3000:]
