"""Use the tasks in a pipeline of your own, between an extract and a load step.

    python flows/extract_infer_load.py

Extract writes a Parquet file, inference asks the model about each row, load counts the answers.
After a crash, run it again to resume: the run key is derived from the date.
"""

from __future__ import annotations

from collections import Counter
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from prefect import flow, get_run_logger, task

from prefect_raybatch import BatchJob, RunReport, finalize_run, infer_shards, plan_shards
from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import companies


@task
def extract(folder: str, rows: int) -> str:
    """Write the day's companies to a Parquet file; return its path."""
    path = Path(folder) / "companies.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in companies(rows, 11, "heldout")]
    pq.write_table(pa.table({"id": pa.array(range(rows)), "Company": names}), path)
    return str(path)


@task
def load(report: RunReport) -> dict[str, int]:
    """Count companies by industry; a real pipeline would write to its warehouse here."""
    answers = pq.read_table(f"{report.run}/data", columns=["industry"])["industry"]
    counts = dict(Counter(answers.to_pylist()))
    get_run_logger().info("companies by industry: %s", counts)
    return counts


@flow
def extract_infer_load(folder: str = "pipeline", rows: int = 300, day: date | None = None) -> dict:
    """Count companies by industry."""
    path = extract(folder, rows)
    job = BatchJob(
        name="companies",
        source={"uri": path},
        prompt={"system": SYSTEM, "template": TEMPLATE},
        sampling={"max_tokens": 16, "choice": list(LABELS)},
        engine={"model": "demo", "max_model_len": 256},
        output={"uri": f"{folder}/out", "column": "industry"},
    )
    run = plan_shards(job, f"companies-{day or date.today():%Y%m%d}")
    progress = infer_shards(job, run)
    return load(finalize_run(job, run, progress))


if __name__ == "__main__":
    extract_infer_load()
