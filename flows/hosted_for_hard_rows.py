"""Ask a small local model about all rows, and a hosted model about those that it cannot decide.

    python flows/hosted_for_hard_rows.py FOLDER URL MODEL

URL is a server with the OpenAI API, such as https://api.openai.com/v1. Its key is taken from
RAYBATCH_SECRET_HOSTED if that is set. A row that the local model answers with Other fails its run,
and a retry asks the hosted model about it. The second call resumes whatever was interrupted. The
result, FOLDER/industries.parquet, has all rows in input order.
"""

from __future__ import annotations

import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from prefect import flow

from prefect_raybatch import BatchJob, RunReport, batch_inference, open_run, retry_failed
from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import companies

KEY = "RAYBATCH_SECRET_HOSTED"


def decided(row: dict[str, Any]) -> dict[str, Any]:
    """Return the label of a row; raise ValueError for a row that needs a larger model."""
    if row["industry"] == "Other":
        raise ValueError("the local model did not decide")
    return {"industry": row["industry"]}


def local_job(folder: str) -> BatchJob:
    return BatchJob(
        name="industries",
        source={"uri": f"{folder}/companies.parquet"},
        prompt={"system": SYSTEM, "template": TEMPLATE},
        sampling={"max_tokens": 16, "choice": list(LABELS)},
        engine={"model": "demo", "max_model_len": 256},
        output={"uri": f"{folder}/runs", "column": "industry", "postprocess": decided},
        limits={"max_failed_fraction": 0.5},
    )


def hosted(url: str, model: str) -> dict[str, Any]:
    """Return the fields that differ for the hosted model, which may answer Other."""
    key = f"${{{KEY}}}" if KEY in os.environ else None
    endpoint = {"url": url, "model": model, "key": key, "requests_per_minute": 500}
    return {"engine": {"endpoint": endpoint}, "output.postprocess": None}


def answers(report: RunReport) -> pa.Table:
    return open_run(report.run).to_arrow().select(["_row", "Company", "industry"])


@flow
def hosted_for_hard_rows(
    folder: str, url: str, model: str, rows: int = 200, day: date | None = None
) -> str:
    """Answer all rows with two models; return the file with the answers."""
    table = Path(folder) / "companies.parquet"
    if not table.exists():
        table.parent.mkdir(parents=True, exist_ok=True)
        names = [name for name, _ in companies(rows, 11, "heldout")]
        pq.write_table(pa.table({"Company": names}), table)
    local = batch_inference(local_job(folder), f"industries-{day or date.today():%Y%m%d}")
    parts = [answers(local)]
    hard = retry_failed(local.run, overrides=hosted(url, model)) if local.failed else None
    if hard is not None:
        parts.append(answers(hard))
    result = Path(folder) / "industries.parquet"
    pq.write_table(pa.concat_tables(parts).sort_by("_row"), result)
    return str(result)


if __name__ == "__main__":
    print(hosted_for_hard_rows(*sys.argv[1:4]))
