"""The run that nothing disturbs: what the real model answers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from . import inputs
from .cluster import base_env
from .drivers import Driver


def real_answers(world: Any, folder: Path) -> dict[str, str]:
    """Text to answer for every text of `inputs`, by the real engine and the real pipeline."""
    folder.mkdir(exist_ok=True)
    rows = inputs.rows(inputs.MOST, "vllm")
    pq.write_table(pa.Table.from_pylist(rows, inputs.SCHEMA), folder / "in.parquet")
    out = folder / "out"
    job = inputs.job(
        "vllm",
        source={"uri": str(folder / "in.parquet"), "rows_per_shard": 100},
        engine={"env": {"CHAOS_DIR": str(folder)}},
        output={"uri": str(out)},
        cluster={"address": world.address},
    )
    spec = {"job": job, "run_key": "truth", "engine": "vllm", "hooks": [], "folder": str(folder)}
    status = Driver(folder, "undisturbed", spec, base_env()).wait(600)
    if "error" in status:
        raise RuntimeError(f"the undisturbed run failed: {status['error']}: {status['text']}")
    answers: dict[str, str] = {}
    for path in sorted((out / "truth" / "data").glob("*.parquet")):
        for row in pq.read_table(io.BytesIO(path.read_bytes())).to_pylist():
            answers[row["text"]] = row["response"]
    return answers
