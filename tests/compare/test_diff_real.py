"""`raybatch diff` with a real engine: the bundled example job, and the same with fewer labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command_line import Raybatch

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]


def test_labels_that_the_new_job_lacks_are_what_changes(
    kept_engines: None, example: Raybatch, tmp_path: Path
) -> None:
    run = ("run", "companies.yaml", "--run-key", "n1", "--no-prefect", "--set", "source.limit=60")
    code, _, err = example(*run)
    assert code == 0, err[-3000:]
    labels = "[Law Firm, Healthcare, Consulting, Manufacturing, Finance, Real Estate, Other]"
    code, out, err = example(
        *("diff", "companies.yaml", "--against", "out/n1", "--sample", "40"),
        *("--set", f"sampling.choice={labels}", "--max-changed", "0", "--json"),
        *("--html", "diff.html"),
    )
    assert code == 1, err[-3000:]
    found = json.loads(out)
    assert found["rows"] == 40 and found["total"] == 60
    assert 0 < found["changed"] < 40 and found["low"] <= found["share"] <= found["high"]
    old = {values[0] for change in found["changes"] for values in change["values"].values()}
    assert {"Retail", "Technology"} & old
    assert (tmp_path / "diff.html").read_text(encoding="utf-8").count("<tr>") > found["changed"]
