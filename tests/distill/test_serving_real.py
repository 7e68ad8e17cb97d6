"""A distilled classifier in a cascade with real engines: the bundled model embeds and answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pyarrow.dataset as ds
import pytest
import yaml
from helpers.command_line import raybatch_in
from helpers.environ import clean
from helpers.processes import below, running_but_agents, until

from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1200)]
ROWS, SURE = 300, 0.9


def test_a_distilled_run_becomes_a_cascade_that_resumes_after_a_kill(tmp_path: Path) -> None:
    assert raybatch_in(tmp_path, "init", "--example").returncode == 0
    limits = ("--no-prefect", "--set", f"source.limit={ROWS}", "--set", "source.rows_per_shard=50")
    done = raybatch_in(tmp_path, "run", "companies.yaml", "--run-key", "n1", *limits)
    assert done.returncode == 0, done.stderr[-3000:]
    done = raybatch_in(tmp_path, "distill", "out/n1", "--encoder", "demo", "--agreement", "0.8")
    assert done.returncode == 0, done.stderr[-3000:]
    shown = (tmp_path / "classifier.job.yaml").read_text("utf-8")
    assert shown.partition("\n")[2].strip() in done.stdout

    job = yaml.safe_load((tmp_path / "companies.yaml").read_text("utf-8"))
    fields = yaml.safe_load(shown)
    assert fields["output"]["escalate"]["when"]["probability_below"] < SURE
    escalate = fields["output"]["escalate"] | {
        "when": {"probability_below": SURE},  # the one shown lets the classifier answer all rows
        "check": ROWS,
    }
    job |= {"engine": fields["engine"], "output": {**job["output"], "escalate": escalate}}
    (tmp_path / "cascade.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    command = ("run", "cascade.yaml", "--run-key", "n2", *limits)
    first = tmp_path / "out/n2/_raybatch/asks/_SUCCESS"
    with subprocess.Popen(
        [sys.executable, "-m", "prefect_raybatch.cli", *command],
        env=clean(),
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    ) as driver:
        try:
            until(lambda: driver.poll() is not None or first.exists(), 600, "its answers")
            assert first.exists(), "the classifier answered all rows"
        finally:
            everything = below(driver.pid)
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    # What is left may still commit.
    until(lambda: not running_but_agents(everything), 120, "the end of its processes")
    assert not (tmp_path / "out/n2/_SUCCESS").exists(), "killed before the larger model was done"
    before = first.stat().st_mtime_ns
    done = raybatch_in(tmp_path, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert first.stat().st_mtime_ns == before, "the classifier does not answer again"

    folder = tmp_path / "out/n2"
    assert verify(open_store(str(folder))).faults == []
    rows = ds.dataset(folder / "data").to_table().to_pylist()
    assert [row["_row"] for row in rows] == list(range(ROWS))
    usual = ds.dataset(tmp_path / "out/n1/data").to_table().sort_by("_row").to_pylist()
    counts = Counter(row["answered_by"] for row in rows)
    assert set(counts) == {"classifier on demo", "demo"} and counts.total() == ROWS
    column = job["output"].get("column", "response")
    kept = [a["answered_by"] == "classifier on demo" for a in rows]
    same = [a[column] == b[column] for a, b in zip(rows, usual, strict=True)]
    assert sum(same) >= 0.8 * ROWS, "the agreement that was asked for"
    agreed = sum(k and s for k, s in zip(kept, same, strict=True))
    report = (folder / "_raybatch/report.md").read_text("utf-8")
    assert f"checked: demo gave {agreed} of {sum(kept)} rows the answer of classifier" in report
