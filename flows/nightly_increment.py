"""Run a job twice over a changing table: the second run infers only new and changed rows.

    python flows/nightly_increment.py FOLDER

The first run asks about each distinct company once. Then rows are moved, edited, deleted and
duplicated. The second run reuses the existing answers, and its report says how many. Both runs are
in one process here, so the second reuses the engine of the first.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from prefect import flow, get_run_logger

from prefect_raybatch import BatchJob, RunReport, batch_inference, warm_engines
from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import companies


def write_table(path: Path, names: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": pa.array(range(len(names))), "Company": names})
    fresh = path.with_suffix(".new")
    pq.write_table(table, fresh)
    fresh.replace(path)


def a_day_later(names: list[str]) -> list[str]:
    """Return the names with rows deleted, edited, duplicated, added and reordered."""
    kept = [name for number, name in enumerate(names) if number % 10]
    edited = [f"{name} Holding" if number % 25 == 0 else name for number, name in enumerate(kept)]
    new = [name for name, _ in companies(len(names) // 20, 12, "heldout")]
    return [*reversed(edited), *edited[:5], *new]


def nightly(folder: str) -> BatchJob:
    return BatchJob(
        name="companies",
        source={"uri": f"{folder}/companies.parquet"},
        prompt={"system": SYSTEM, "template": TEMPLATE},
        sampling={"max_tokens": 16, "choice": list(LABELS)},
        engine={"model": "demo", "max_model_len": 256},
        output={"uri": f"{folder}/out", "column": "industry", "keep_answers": 60},
        reuse="latest",
    )


@flow
def two_runs(folder: str, rows: int = 200) -> list[RunReport]:
    """Run the job for today and for tomorrow; return both reports."""
    table = Path(folder) / "companies.parquet"
    today = datetime.now(UTC).replace(microsecond=0)
    names = [name for name, _ in companies(rows, 11, "heldout")]
    reports = []
    with warm_engines():
        for day in range(2):
            write_table(table, names)
            scheduled = today + timedelta(days=day)
            report = batch_inference(nightly(folder), scheduled_for=scheduled)
            get_run_logger().info("run %d: %s", day + 1, report.reuse)
            reports.append(report)
            names = a_day_later(names)
    return reports


if __name__ == "__main__":
    two_runs(sys.argv[1] if len(sys.argv) > 1 else "nightly")
