"""Every script in benchmarks/ that needs no GPU runs once, at its smallest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 1500  # seconds of one script on a busy machine of two cores

# Arguments of each; `{tmp}` is a folder of the test.
SMALLEST = {
    "cpu.py": "--rows 64 --repeats 1 --peers no-commit",
    "driver_ceiling.py": "--engines 2 --rows-per-shard 1000 --stores local --seconds 1",
    "early_start.py": "--rows 300 --trials 1 --data {tmp}",
    "finalize.py": "--mib 1 --nodes 0 --folder {tmp}",
    "fit.py": "",
    "fp8_gate.py": "--model demo --rows 64 --only stored --out {tmp}/out.jsonl",
    "frames.py": "--runs 1",
    "head_and_tail.py": "--gpus 1",
    "images.py": "--tiny --family idefics3-2b --rows 8 --answers 4 --sizes 225 --peers ours "
    "--folder {tmp} --out {tmp}/out.jsonl --limit 1200",
    "images_memory.py": "--rows 16 --models {tmp} --out {tmp}/out.jsonl",
    "increments.py": "--rows 2000 --reckon 10000",
    "kinds.py": "--gpus 0 --only classify --rows 8 --models {tmp} --out {tmp}/out.jsonl",
    "learn_nights.py": "--seeds 1",
    "ledger.py": "--store local --shards 20 --rows 2000 --files 2 --writers 2",
    "order.py": "--rows 16 --prefixes 4 --apart 2 --out-tokens 2 --repeats 1",
    "order_at_size.py": "--rows 2000",
    "pooling.py": "--sizes tiny --gpus 0 --rows 32 --works short --peers ours --limit 1200 "
    "--models {tmp} --out {tmp}/out.jsonl",
    "s3_clients.py": "--mib 8 --commits 100 --rounds 1 --out {tmp}/out.jsonl",
    "size.py": "--rows 500 --data {tmp}",
    "snapshot.py": "--rows 2000 --files 20 --trials 1 --data {tmp}",
    "start.py": "--rows 16 --runs 1 --kinds waiting preview",
    "sweep.py": "--device cpu --seconds 1 --minutes 20 --start-seconds 600 --most-warm 60 "
    "--kinds tiny-record,tiny-mixed --arrangements 1x8 --out {tmp}/out.jsonl",
    "watching.py": "--shards 200 --seconds 1",
    "whole_time.py": "--works short:tiny:16 --gpus 0 --runs 0 --models {tmp} --out {tmp}/out.jsonl",
}
# These start an engine, most of them several, or a cluster. `order.py` does too, and shows that
# engines start.
NIGHTLY = {
    *("cpu.py", "early_start.py", "fp8_gate.py", "frames.py", "images.py", "images_memory.py"),
    *("kinds.py", "pooling.py", "start.py", "sweep.py", "whole_time.py"),
}
NEED_GPUS = {"gpu.py", "gpu_big.py", "shared_weights.py"}
# No programs, or one that another test runs.
OTHERS = {"gpu_page.py", "mps.py", "photos.py", "variants.py", "vision_models.py"}


def test_every_script_is_run_or_needs_gpus() -> None:
    names = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert names == {*SMALLEST, *NEED_GPUS, *OTHERS}


@pytest.mark.whole
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in SMALLEST],
)
def test_a_script_runs(script: str, tmp_path: Path) -> None:
    given = SMALLEST[script].format(tmp=tmp_path).split()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.strip()
