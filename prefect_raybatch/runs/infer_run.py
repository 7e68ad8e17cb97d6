"""Reads, infers and commits what is pending."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.driver.stops import Stop
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.plan import plan as planning
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
    """Reads, infers and commits every pending shard; returns the progress at the end.

    Starts no engine when nothing is pending. An observer that is a `heartbeat.Listener` is told of
    beats as well. `engine` replaces the engine stage in tests.
    """
    from prefect_raybatch.cluster.sharing import User
    from prefect_raybatch.driver.driver import Driver
    from prefect_raybatch.driver.monitor import Monitor
    from prefect_raybatch.driver.stall import interruptible

    check_trust(job)
    store = open_store(run.uri, job.output.options or None)
    ledger = Ledger(store)
    plan, shards = load_run(ledger, run)
    job = planning.settled(job, plan.context)
    attempt = uuid.uuid4().hex
    lazy = _LazyPipeline()
    monitor = Monitor(attempt, plan, store, job.limits, observe, lazy.engines)
    user = User(job.name, monitor.held)
    run_pass: Any = lazy
    # A signal is raised in the main thread; a run in another one must be told.
    in_thread = threading.current_thread() is not threading.main_thread()
    if job.limits.fail_on_stall or in_thread:
        run_pass = interruptible(lazy, lambda: monitor.failure, lazy.stop, user.halted)
    driver = Driver(plan, shards, ledger, job.limits, run_pass, lazy.quarantine, monitor)
    progress = driver.resume()
    if driver.done.all():
        return progress
    monitor(progress)
    # Also where the plan is an earlier attempt's: what it found may since have changed.
    store.probe()
    from prefect_raybatch.cluster import connect as cluster
    from prefect_raybatch.cluster.pipeline import Pipeline

    whoami = _whoami(plan)
    driver.on_stop = partial(_note_stop, ledger, attempt, whoami)
    ledger.note_attempt(attempt, whoami)
    with ExitStack() as stack:
        stack.enter_context(monitor)
        capacity = stack.enter_context(cluster.connected(job, user))
        monitor.dashboard = cluster.dashboard()
        if monitor.dashboard:
            log.info("Ray's dashboard: %s", monitor.dashboard)
        size = sized.for_attempt(job, plan, ledger, capacity)
        cluster.check_fit(job, capacity, size.pool)
        for warning in size.warnings:
            log.warning(warning)
        stack.enter_context(cluster.admitted(job, capacity, size.pool, user))
        lazy.pipeline = Pipeline(
            job,
            plan,
            shards,
            store,
            attempt,
            size,
            dict(job.source.options),
            # Another attempt may be alive. Ours is noted before we look, so that of two that start
            # at the same moment one at least sees the other.
            shuffle=attempt if len(ledger.attempts()) > 1 else None,
            **({"engine": engine} if engine else {}),
        )
        driver.suspects = size.pool.engines * (1 + size.concurrent)
        return driver.run()


def _note_stop(ledger: Ledger, attempt: str, whoami: dict[str, Any], stop: Stop) -> None:
    try:
        ledger.note_attempt(attempt, {**whoami, "stopped": stop.to_dict()})
    except RayBatchError as error:  # the run ends with what it ends with
        log.warning("the failed rows are not noted in the run directory: %s", error)


class _LazyPipeline:
    """Stands for the pipeline until the ledger has said that there is something to do: importing
    Ray and starting a cluster take seconds that a finished run need not wait."""

    pipeline: Any = None

    def __call__(self, units: Any, isolated: bool) -> Any:
        return self.pipeline(units, isolated)

    def quarantine(self, unit: Any, reason: str) -> Any:
        return self.pipeline.quarantine(unit, reason)

    def engines(self) -> dict[str, int]:
        return self.pipeline.engines() if self.pipeline is not None else {}

    def stop(self) -> None:
        if self.pipeline is not None:
            self.pipeline.stop()


def _whoami(plan: Plan) -> dict[str, Any]:
    import getpass

    user = "unknown"
    with suppress(OSError, KeyError):  # containers run under numbers without a name
        user = getpass.getuser()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": user,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": plan.hash,
    }
