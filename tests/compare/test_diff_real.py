"""`raybatch diff` with a real engine: the bundled example job, and the same with fewer labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command_line import raybatch_in

pytestmark = pytest.mark.whole


def test_labels_that_the_new_job_lacks_are_what_changes(tmp_path: Path) -> None:
    assert raybatch_in(tmp_path, "init", "--example").returncode == 0
    done = raybatch_in(
        *(tmp_path, "run", "companies.yaml", "--run-key", "n1", "--no-prefect"),
        *("--set", "source.limit=60"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    labels = "[Law Firm, Healthcare, Consulting, Manufacturing, Finance, Real Estate, Other]"
    done = raybatch_in(
        *(tmp_path, "diff", "companies.yaml", "--against", "out/n1", "--sample", "40"),
        *("--set", f"sampling.choice={labels}", "--max-changed", "0", "--json"),
        *("--html", "diff.html"),
    )
    assert done.returncode == 1, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["rows"] == 40 and found["total"] == 60
    assert 0 < found["changed"] < 40 and found["low"] <= found["share"] <= found["high"]
    old = {values[0] for change in found["changes"] for values in change["values"].values()}
    assert {"Retail", "Technology"} & old
    assert (tmp_path / "diff.html").read_text(encoding="utf-8").count("<tr>") > found["changed"]
