"""Reads, infers and commits the pending shards of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.runs.attempt import Attempt, JoinedCluster
from prefect_raybatch.runs.phases import Phase, begin_phases
from prefect_raybatch.runs.run import Run
from prefect_raybatch.spec.run import RunSpec

if TYPE_CHECKING:
    from prefect_raybatch.driver.driver import OtherLedger, Progress

log = logging.getLogger(__name__)


def infer_spec(
    spec: RunSpec,
    run: Run,
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    observe: Callable[[Progress], None],
    engine: type | None = None,
) -> Progress:
    """Read, infer and commit every pending shard of a planned run; return the progress at the end.

    Starts no engine if nothing is pending. `engine` replaces the engine stage in tests.
    """
    requests, rows = begin_phases(spec, run, ledger, plan, shards)
    if requests is None:
        return infer_phase(rows, observe, engine)
    return _infer_both(requests, rows, observe, engine)


def _infer_both(
    requests: Phase, rows: Phase, observe: Callable[[Progress], None], engine: type | None
) -> Progress:
    """Infer and finalize the requests of a run, then give each row its answer.

    The cluster is held over both phases, so that one that starts for this run starts once.
    """
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.sharing import User
    from prefect_raybatch.runs.finalize_run import finalize_spec

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


def infer_phase(
    phase: Phase,
    observe: Callable[[Progress], None],
    engine: type | None = None,
    joined: JoinedCluster | None = None,
    before: OtherLedger | None = None,
    later: OtherLedger | None = None,
) -> Progress:
    """Make one attempt at the pending shards of a phase; return the progress at the end.

    The cluster is joined here unless it is `joined` already. `before` and `later` are the run's
    other phase, which its progress counts.
    """
    attempt = Attempt(phase, observe, engine)
    if not attempt.resume(before, later):  # before Ray is imported, which takes seconds
        return attempt.driver.progress
    attempt.check()
    with ExitStack() as stack:
        joined = attempt.join(stack, joined)
        attempt.decide(joined)
        pipeline = attempt.pipeline(stack, joined)
        return attempt.run(pipeline, joined.user)
