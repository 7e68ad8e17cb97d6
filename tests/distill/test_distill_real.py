"""`raybatch distill` with real engines: the bundled model embeds rows that it labelled before, and
the classifier becomes the first answer of a cascade."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import yaml
from helpers.command_line import Raybatch
from helpers.environ import clean
from helpers.processes import below, running_but_agents, until

from prefect_raybatch.distill.classifier import Classifier
from prefect_raybatch.imports.start import SWITCH
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1200)]
ROWS, SURE = 300, 0.9
FIELDS = {
    "source.limit": ROWS,
    "source.rows_per_shard": 50,
    "cluster.prepare.concurrency": 1,  # each process of Ray imports for itself
}
LIMITS = ("--no-prefect", *(f"--set={name}={value}" for name, value in FIELDS.items()))


def test_a_distilled_run_becomes_a_cascade_that_resumes_after_a_kill(
    kept_engines: None, example: Raybatch, tmp_path: Path
) -> None:
    code, _, err = example("run", "companies.yaml", "--run-key", "n1", *LIMITS)
    assert code == 0, err[-3000:]
    distil = ("distill", "out/n1", "--encoder", "demo", "--agreement", "0.8")
    code, out, err = example(*distil, "--json")
    assert code == 0, err[-3000:]
    found = json.loads(out)
    assert found["tested"] > ROWS / 4 and found["same"] > found["tested"] / 2
    assert 0 < found["least_share"] < found["share"] <= 1
    made = Classifier.from_bytes((tmp_path / "classifier.json").read_bytes(), "classifier.json")
    assert list(made.labels) == found["labels"] and made.size == 256
    assert json.loads(example(*distil, "--json")[1]) == found
    _, out, _ = example(*distil)
    shown = (tmp_path / "classifier.job.yaml").read_text("utf-8")
    assert shown.partition("\n")[2].strip() in out

    write_cascade(yaml.safe_load(shown))
    command = ("run", "cascade.yaml", "--run-key", "n2", *LIMITS)
    first = tmp_path / "out/n2/_raybatch/asks/_SUCCESS"
    kill_after(first, *command)
    assert not (tmp_path / "out/n2/_SUCCESS").exists(), "killed before the larger model was done"
    before = first.stat().st_mtime_ns
    code, _, err = example(*command)
    assert code == 0, err[-3000:]
    assert first.stat().st_mtime_ns == before, "the classifier does not answer again"
    check_cascade(tmp_path / "out")


def write_cascade(fields: dict[str, Any]) -> None:
    """Write the example's job with the fields of a cascade that asks the larger model too."""
    assert fields["output"]["escalate"]["when"]["probability_below"] < SURE
    job = yaml.safe_load(Path("companies.yaml").read_text("utf-8"))
    escalate = fields["output"]["escalate"] | {
        "when": {"probability_below": SURE},  # the one shown lets the classifier answer all rows
        "check": ROWS,
    }
    job |= {"engine": fields["engine"], "output": {**job["output"], "escalate": escalate}}
    Path("cascade.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")


def kill_after(written: Path, *words: str) -> None:
    """Run a command in a process of its own, with a cluster of its own, and kill it as soon as the
    file is there."""
    with subprocess.Popen(
        [sys.executable, "-m", "prefect_raybatch.cli", *words],
        env={**clean(), SWITCH: "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    ) as driver:
        try:
            until(lambda: driver.poll() is not None or written.exists(), 600, "its answers")
            assert written.exists(), "the classifier answered all rows"
        finally:
            everything = below(driver.pid)
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    # What is left may still commit.
    until(lambda: not running_but_agents(everything), 120, "the end of its processes")


def check_cascade(out: Path) -> None:
    folder = out / "n2"
    assert verify(open_store(str(folder))).faults == []
    rows = ds.dataset(folder / "data").to_table().to_pylist()
    assert [row["_row"] for row in rows] == list(range(ROWS))
    usual = ds.dataset(out / "n1/data").to_table().sort_by("_row").to_pylist()
    counts = Counter(row["answered_by"] for row in rows)
    assert set(counts) == {"classifier on demo", "demo"} and counts.total() == ROWS
    column = yaml.safe_load(Path("cascade.yaml").read_text("utf-8"))["output"]["column"]
    kept = [a["answered_by"] == "classifier on demo" for a in rows]
    same = [a[column] == b[column] for a, b in zip(rows, usual, strict=True)]
    assert sum(same) >= 0.8 * ROWS, "the agreement that was asked for"
    agreed = sum(k and s for k, s in zip(kept, same, strict=True))
    report = (folder / "_raybatch/report.md").read_text("utf-8")
    assert f"checked: demo gave {agreed} of {sum(kept)} rows the answer of classifier" in report
