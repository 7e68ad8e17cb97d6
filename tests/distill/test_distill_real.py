"""`raybatch distill` with a real engine: the bundled model embeds rows that it labelled before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.command_line import raybatch_in

from prefect_raybatch.distill.classifier import Classifier

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]
ROWS = 300


def test_the_labels_of_a_run_are_learned_from_its_embeddings(tmp_path: Path) -> None:
    assert raybatch_in(tmp_path, "init", "--example").returncode == 0
    done = raybatch_in(
        *(tmp_path, "run", "companies.yaml", "--run-key", "n1", "--no-prefect"),
        *("--set", f"source.limit={ROWS}"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    command = ("distill", "out/n1", "--encoder", "demo", "--agreement", "0.8", "--json")
    done = raybatch_in(tmp_path, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["tested"] > ROWS / 4 and found["same"] > found["tested"] / 2
    assert 0 < found["least_share"] < found["share"] <= 1
    made = Classifier.from_bytes((tmp_path / "classifier.json").read_bytes(), "classifier.json")
    assert list(made.labels) == found["labels"] and made.size == 256
    again = raybatch_in(tmp_path, *command)
    assert json.loads(again.stdout) == found
