"""`raybatch run` with a judge in vLLM: the bundled model judges its own answers, after the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command_line import Raybatch

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]


def test_a_second_engine_judges_once_the_rows_are_answered(
    kept_engines: None, example: Raybatch, tmp_path: Path
) -> None:
    judge = {"model": "demo", "engine": {"max_model_len": 256}, "sample": 20}
    judge["prompt"] = "{Company}: is {industry} right or wrong?"
    words = ("run", "companies.yaml", "--run-key", "n1", "--no-prefect", "--set", "source.limit=60")
    words += ("--set", f"quality.judge={json.dumps(judge)}")
    code, out, err = example(*words)
    assert code == 0, err[-3000:]
    (line,) = [line for line in out.splitlines() if line.startswith("judged")]
    assert "of 20 answers right" in line
    report = json.loads((tmp_path / "out/n1/_raybatch/judgement.json").read_bytes())
    assert report["rows"] == 20 and report["not_judged"] == 0
    code, out, err = example(*words)
    assert code == 0 and line in out, err[-3000:]
