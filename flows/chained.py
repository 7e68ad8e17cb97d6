"""Run two jobs, the second on the result of the first, with one Ray cluster and one engine.

    python flows/chained.py FOLDER

The first job infers each company's industry, the second asks about that answer. The second result
has the columns of both jobs: `_row` and `response` of the first, `_row_2` and `response_2` of the
second. Ray starts once, and the second job reuses the engine of the first.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from prefect import flow

from prefect_raybatch import BatchJob, RunReport, batch_inference, warm_engines
from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import companies

GROUPS = ["goods", "services"]


def write_companies(path: Path, rows: int) -> None:
    """Write the table that the first job reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in companies(rows, 11, "heldout")]
    pq.write_table(pa.table({"id": pa.array(range(rows)), "Company": names}), path)


def first_job(folder: str) -> BatchJob:
    return BatchJob(
        name="industries",
        source={"uri": f"{folder}/companies.parquet"},
        prompt={"system": SYSTEM, "template": TEMPLATE},
        sampling={"max_tokens": 16, "choice": list(LABELS)},
        engine={"model": "demo", "max_model_len": 256},
        output={"uri": f"{folder}/industries"},
    )


def second_job(folder: str, first: RunReport) -> BatchJob:
    """Return the job that asks about the answers of the first run."""
    return BatchJob(
        name="groups",
        source={"uri": f"{first.run}/data"},
        prompt={"template": "Does a company in {response} sell goods or services?"},
        sampling={"max_tokens": 8, "choice": GROUPS},
        engine={"model": "demo", "max_model_len": 256},
        output={"uri": f"{folder}/groups"},
    )


@flow
def chained(folder: str, rows: int = 200, day: date | None = None) -> RunReport:
    """Run both jobs for a day; run it again to resume."""
    suffix = f"{day or date.today():%Y%m%d}"
    table = Path(folder) / "companies.parquet"
    if not table.exists():
        write_companies(table, rows)
    with warm_engines():
        first = batch_inference(first_job(folder), f"industries-{suffix}")
        return batch_inference(second_job(folder, first), f"groups-{suffix}")


if __name__ == "__main__":
    chained(sys.argv[1] if len(sys.argv) > 1 else "chained")
