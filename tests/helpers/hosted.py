"""Jobs with a hosted model about a small table, and their runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.api import finalize_run, infer_run, plan_run
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.report.records import RunReport


def hosted_job(
    url: str, folder: Path, columns: Mapping[str, Sequence[Any]], **groups: Any
) -> BatchJob:
    """A job of which each row of a table asks its first column.

    `groups` change its fields: those of `prompt` replace the template, others are added. `endpoint`
    are those of `engine.endpoint`.
    """
    uri, table = folder / "in.parquet", pa.table(dict(columns))
    if not uri.exists() or not pq.read_table(uri).equals(table):
        pq.write_table(table, uri)
    endpoint = {"url": url, "model": "large", **groups.pop("endpoint", {})}
    fields: dict[str, Any] = {
        "name": "hosted",
        "source": {"uri": str(uri), **groups.pop("source", {})},
        "prompt": groups.pop("prompt", {"template": f"{{{next(iter(columns))}}}"}),
        "output": {"uri": str(folder / "out"), **groups.pop("output", {})},
        "engine": {**groups.pop("engine", {}), "endpoint": endpoint},
        "limits": {"max_failed_rows": len(next(iter(columns.values())))},
    }
    return BatchJob.from_dict({**fields, **groups})


def finished_run(job: BatchJob, key: str = "night") -> tuple[RunReport, Path]:
    """Run a job, or resume it; return its report and the run directory."""
    run = plan_run(job, key)
    report = finalize_run(job, run, infer_run(job, run))
    return report, Path(report.run)
