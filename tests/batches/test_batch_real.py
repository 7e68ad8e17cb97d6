"""The page about batch files, run as it stands by a real engine and read by vLLM's own model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.environ import clean
from helpers.pages import ROOT, blocks

pytestmark = pytest.mark.whole


def test_the_page_about_batch_files(tmp_path: Path) -> None:
    run_batch = importlib.import_module("vllm.entrypoints.launchers.run_batch")
    page = (ROOT / "docs/how-to/batch-files.md").read_text(encoding="utf-8")
    (lines,) = (block.text for block in blocks(page) if block.language == "json")
    (tmp_path / "requests.jsonl").write_text(lines, encoding="utf-8")
    words = ["batch", "-i", "requests.jsonl", "-o", "answers.jsonl", "--model", "demo"]
    found = []
    for _ in range(2):  # the second call finds the run complete
        done = subprocess.run(
            [sys.executable, "-m", "prefect_raybatch.cli", *words], env=clean(), cwd=tmp_path,
            timeout=600, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found.append((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines())
    assert found[0] == found[1]
    outputs = [run_batch.BatchRequestOutput.model_validate_json(line) for line in found[0]]
    asked = [json.loads(line)["custom_id"] for line in lines.splitlines()]
    assert [one.custom_id for one in outputs] == asked
    assert all(one.response.body.choices[0].message.content for one in outputs)
