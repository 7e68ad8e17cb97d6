"""Reads, infers and commits the pending shards of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_raybatch.compile.job import compile_planned
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.runs.attempts import INFERENCE, recorded_attempt
from prefect_raybatch.runs.phases import Phase, begin_phases, infer_phase
from prefect_raybatch.runs.run import Run, load_run
from prefect_raybatch.storage import open_store

if TYPE_CHECKING:
    from prefect_raybatch.driver.driver import Progress

log = logging.getLogger(__name__)


def infer_run(
    job: BatchJob,
    run: Run,
    observe: Callable[[Progress], None] = lambda progress: None,
    engine: type | None = None,
) -> Progress:
    """Read, infer and commit every pending shard; return the progress at the end.

    Starts no engine if nothing is pending. An observer that is a `heartbeat.Listener` also receives
    heartbeats. `engine` replaces the engine stage in tests.
    """
    check_trust(job)
    check_run_place(run.uri)
    store = open_store(run.uri, job.output.options or None)
    ledger = Ledger(store)
    plan, shards = load_run(ledger, run)
    begin = ledger.finished(plan) is None
    with recorded_attempt(store, job, run.run_key, INFERENCE, begin):
        requests, rows = begin_phases(compile_planned(job, plan), run, ledger, plan, shards)
        if requests is None:
            return infer_phase(rows, observe, engine)
        return _infer_both(requests, rows, observe, engine)


def _infer_both(
    requests: Phase, rows: Phase, observe: Callable[[Progress], None], engine: type | None
) -> Progress:
    """Infer and finalize the requests of a run, then give each row its answer. The cluster is held
    over both phases, so that one that starts for this run starts once."""
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.sharing import User
    from prefect_raybatch.runs.finalize_run import finalize_spec
    from prefect_raybatch.runs.phases import JoinedCluster

    before = requests.extent
    if requests.finished:
        return infer_phase(rows, observe, engine, before=before)
    user = User(rows.spec.name)
    with cluster.connected(rows.spec.cluster, user) as capacity:
        log.info("asking %d requests first, in %s", requests.plan.rows, requests.run.uri)
        joined = JoinedCluster(user, capacity)
        asked = infer_phase(requests, observe, engine, joined, later=rows.extent)
        finalize_spec(requests.spec, requests.ledger, requests.plan, requests.shards, asked)
        before = replace(before, failed=asked.failed)
        return infer_phase(rows, observe, engine, joined, before=before)
