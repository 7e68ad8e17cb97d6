"""Ask a small local model about all rows, and a hosted one about those of which it is unsure.

    python flows/cascade.py FOLDER URL MODEL [JUDGE]

URL is a server with the OpenAI API, such as https://api.openai.com/v1. Its key is taken from
RAYBATCH_SECRET_HOSTED if that is set. Every tenth company is a planted error: its name says nothing
about its industry. Golden rows with the right answers show what that costs: the report has the
accuracy of the whole, and the rows, tokens and cost of each model. If JUDGE names another model of
the server, it judges a sample of the answers. Run it again to resume.
"""

from __future__ import annotations

import os
import sys
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from prefect import flow

from prefect_raybatch import BatchJob, RunReport, batch_inference
from prefect_raybatch.demo import LABELS, SYSTEM, TEMPLATE
from prefect_raybatch.demo.customers import companies

KEY = "RAYBATCH_SECRET_HOSTED"
PLANTED = 10  # every tenth row
ASK_JUDGE = "The industry of the company {Company} was given as {industry}. Is that right or wrong?"


def planted(rows: int) -> list[tuple[str, str]]:
    """Return companies with their right industries; some names say nothing about theirs."""
    known = dict(companies(rows, 11, "heldout"))
    return [
        (f"{name.split()[0]} {number}" if number % PLANTED == 0 else name, label)
        for number, (name, label) in enumerate(known.items())
    ]


def cascade_job(folder: str, url: str, model: str, judge: str = "") -> BatchJob:
    key = f"${{{KEY}}}" if KEY in os.environ else None
    judged_by = {"url": url, "model": judge, "key": key}
    asked = {"endpoint": judged_by, "prompt": ASK_JUDGE, "sample": 100}
    quality = {"judge": asked} if judge else {}
    return BatchJob(
        name="industries",
        source={"uri": f"{folder}/companies.parquet"},
        prompt={"system": SYSTEM, "template": TEMPLATE},
        sampling={"max_tokens": 16, "choice": list(LABELS)},
        engine={"model": "demo", "max_model_len": 256},
        output={
            "uri": f"{folder}/out",
            "column": "industry",
            "escalate": {
                "to": {"endpoint": {"url": url, "model": model, "key": key}},
                "when": {"probability_below": 0.9},
                "at_most": 0.3,
            },
        },
        quality={"golden": f"{folder}/golden.parquet", **quality},
    )


@flow
def cascade(
    folder: str,
    url: str,
    model: str,
    judge: str = "",
    rows: int = 200,
    day: date | None = None,
) -> RunReport:
    """Answer all rows with two models in one run; return its report."""
    names, labels = zip(*planted(rows), strict=True)
    table = pa.table({"Company": names, "industry": labels})
    Path(folder).mkdir(parents=True, exist_ok=True)
    source = Path(folder) / "companies.parquet"
    if not source.exists():
        pq.write_table(table, Path(folder) / "golden.parquet")
        pq.write_table(table.select(["Company"]), source)
    job = cascade_job(folder, url, model, judge)
    return batch_inference(job, f"industries-{day or date.today():%Y%m%d}")


if __name__ == "__main__":
    report = cascade(*sys.argv[1:5])
    print(report.cascade, report.judgement and report.judgement.text())
