"""The program that Ray's job server starts: `python -m prefect_raybatch.remote RUN_URI NUMBER`.

Reads the job from record NUMBER in the run directory and works on the run, as a flow's driver does.
Exit status: 0 complete, 1 an error, 3 superseded by a newer job, 4 drained, 143 stopped.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import Any

from prefect_raybatch.api import infer_run
from prefect_raybatch.api.sending import OUTPUT_ENV, field_of_block
from prefect_raybatch.api.submission import job_of_output, recorded_job
from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.errors import CorruptRun, RayBatchError, RunDrained
from prefect_raybatch.job.edits import edited, with_endpoint_of
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.layout import job_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.policy.in_force import limit_process, operator_policy, policy_applied
from prefect_raybatch.remote.follower import DIGEST_ENV
from prefect_raybatch.remote.logs import MarkedLines
from prefect_raybatch.remote.records import (
    JobRecords,
    Outcome,
    Record,
)
from prefect_raybatch.runs.run import run_of
from prefect_raybatch.storage import open_store
from prefect_raybatch.words import are, counted

log = logging.getLogger("prefect_raybatch.remote")

NEWER_JOB_LOOK = 5.0  # seconds between looks for a newer job
DASHBOARD_LINE_EVERY = 30.0  # seconds between progress lines in Ray's dashboard
SUPERSEDED, DRAINED = 3, 4
# This process runs on the cluster: Ray has set the cluster's address in the environment.
HERE = {"cluster.address": "auto", "cluster.job_server": None, "cluster.block": None}


def work(uri: str, number: int) -> int:
    """Work on the run at `uri`, as Ray job `number`, until it is complete; return the exit status.

    The operator's policy applies, because anybody who can write to the run directory can change the
    job.
    """
    with policy_applied(operator_policy()):
        return _work(uri, number)


def _work(uri: str, number: int) -> int:
    check_run_place(uri)
    ledger = Ledger(open_store(uri, _output_options(uri) or None))
    plan = need_plan(ledger)
    records = JobRecords(ledger.store, plan.run_key, plan.hash)
    record = records.read(number)
    try:
        accepted = record.accepted_fields
        _check_submitted(record)
        job = edited(recorded_job(record, plan), HERE, f"job {number}")
        if field_of_block(job):
            from prefect_raybatch.flow.tasks import with_blocks

            # Only the keys: limits of a hosted model in its block may have changed since.
            job = with_endpoint_of(with_blocks(job), job)
    except RayBatchError as error:
        records.end(number, Outcome(type(error).__name__, str(error)))
        raise
    run = replace(
        run_of(ledger.store, plan, ledger),
        accepted=accepted,
        model=record.model if accepted else None,
    )
    if _superseded(records, number):
        return SUPERSEDED
    over = threading.Event()
    threading.Thread(target=guard, args=(records, number, over), daemon=True).start()
    try:
        progress = infer_run(job, run, _Lines())
    except Exception as error:
        message = str(error) or type(error).__name__
        records.end(number, Outcome(type(error).__name__, message))
        log.error("%s: %s", type(error).__name__, message)
        if isinstance(error, RunDrained):
            return DRAINED
        if not isinstance(error, RayBatchError):
            raise  # so that its traceback is in Ray's log
        return 1
    finally:
        over.set()
    records.end(number, Outcome(None, "", progress.engine_deaths, progress.passes))
    log.info("all %s %s committed", counted(plan.shards, "shard"), are(plan.shards))
    return 0


def _output_options(uri: str) -> dict[str, Any]:
    """Return the store options for the run directory at `uri`, where the job itself is stored.

    They come from an environment variable of this Ray job.
    """
    job = job_of_output(uri, json.loads(os.environ.get(OUTPUT_ENV, "{}")))
    if job.output.credentials_block:
        from prefect_raybatch.flow.tasks import with_blocks

        job = with_blocks(job)
    return job.output.options


def _check_submitted(record: Record) -> None:
    """Raise `CorruptRun` if the job record differs from the job that was submitted.

    Anybody who may write to the run directory can replace the record.
    """
    submitted = os.environ.get(DIGEST_ENV)
    if submitted is not None and record.digest != submitted:
        raise CorruptRun(
            f"{job_path(record.number)} differs from the job that was submitted, so it was not "
            "started. Check who can write to the run directory, then run the same command again "
            "to submit a new job"
        )


def _superseded(records: JobRecords, number: int) -> bool:
    newest = records.newest_number()
    if newest > number:
        log.warning("job %d supersedes job %d, which stops", newest, number)
    return newest > number


def guard(records: JobRecords, number: int, over: threading.Event) -> None:
    """Look for a newer job regularly; if one is recorded, end this process by SIGTERM.

    Returns when `over` is set. A flow records a newer job only to replace this one, e.g. because it
    considers it dead.
    """
    while not over.wait(NEWER_JOB_LOOK):
        try:
            if _superseded(records, number):
                os.kill(os.getpid(), signal.SIGTERM)
                return
        except RayBatchError as error:  # the work itself reports an unavailable store
            log.debug("could not look for a newer job: %s", error)


class _Lines:
    """Prints progress lines for Ray's dashboard, at most one every 30 seconds.

    They are only for people: a flow that follows the job computes its progress from commits.
    """

    def __init__(self) -> None:
        self.printed = 0.0

    def __call__(self, progress: Progress) -> None:
        if time.time() - self.printed >= DASHBOARD_LINE_EVERY:
            self.printed = time.time()
            rows, noun = counted(progress.whole, *progress.unit), progress.unit[1]
            print(f"{progress.whole_done:,} of {rows}, {progress.rate:,.0f} {noun}/s")


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # runs `finally` clauses; Ray kills the process 3 s later


def main() -> int:
    """Work on the run that the command's arguments name; return the exit status."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(MarkedLines("%(message)s"))
    ours = logging.getLogger("prefect_raybatch")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _stop)
    try:
        limit_process()
        return work(sys.argv[1], int(sys.argv[2]))
    except RayBatchError as error:
        # If no outcome could be recorded, the flow reads the error from this line.
        log.error("%s: %s", type(error).__name__, error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
