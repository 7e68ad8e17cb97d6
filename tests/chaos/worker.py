"""A driver process: one attempt at a run, through the package's own functions. Made to be killed.

    python -m chaos.worker SPEC.json STATUS.json

Exit status 0 when the run is complete, 1 with the error's class and text in STATUS.json.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main(spec_path: str, status_path: str) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    spec: dict[str, Any] = json.loads(Path(spec_path).read_text())
    status: dict[str, Any] = {"began": time.time()}
    code = 1
    try:
        status.update(attempt(spec))
        code = 0
    except Exception as error:
        import traceback

        traceback.print_exc()
        status.update(error=type(error).__name__, text=str(error))
    status["ended"] = time.time()
    Path(status_path).write_text(json.dumps(status))
    return code


def attempt(spec: dict[str, Any]) -> dict[str, Any]:
    """plan, infer, finalize; what the report says."""
    from prefect_raybatch.api import finalize_run, infer_run, plan_run
    from prefect_raybatch.job.batch_job import BatchJob

    from . import hooks
    from .engine import ENGINES

    hooks.install(spec["hooks"], Path(spec["folder"]))
    job = BatchJob.from_dict(spec["job"])
    run = plan_run(job, spec["run_key"])
    progress = infer_run(job, run, engine=ENGINES[spec["engine"]])
    report = finalize_run(job, run, progress)
    return {
        "good": report.good,
        "failed": report.failed,
        "skipped": report.skipped,
        "resumed": progress.resumed_shards,
        "deaths": progress.engine_deaths,
        "passes": progress.passes,
        "report": {k: v for k, v in asdict(report).items() if isinstance(v, (int, str))},
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
