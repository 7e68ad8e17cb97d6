"""Two nights of a table that changes a little: the second asks only what is new.

    python flows/nightly_increment.py FOLDER

The first night asks about each distinct company once. Before the second, rows are moved, edited,
deleted and doubled; it takes over the answers that are there, and the report says what was saved.
Here both nights are in one process, and the second one finds the first one's engine up.
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
    """Deleted, edited, doubled and new rows; all of them at other places than before."""
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
def two_nights(folder: str, rows: int = 200) -> list[RunReport]:
    """The reports of both nights."""
    table = Path(folder) / "companies.parquet"
    tonight = datetime.now(UTC).replace(microsecond=0)
    names = [name for name, _ in companies(rows, 11, "heldout")]
    reports = []
    with warm_engines():
        for night in range(2):
            write_table(table, names)
            scheduled = tonight + timedelta(days=night)
            report = batch_inference(nightly(folder), scheduled_for=scheduled)
            get_run_logger().info("night %d: %s", night + 1, report.reuse)
            reports.append(report)
            names = a_day_later(names)
    return reports


if __name__ == "__main__":
    two_nights(sys.argv[1] if len(sys.argv) > 1 else "nightly")
