"""Drain requests: ask active drivers to finish in-flight shards and stop."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from prefect_raybatch.errors import ConfigError, CorruptRun, NoSuchRun
from prefect_raybatch.ledger.drains import put_drain
from prefect_raybatch.ledger.forks import runs_to_last_fork
from prefect_raybatch.ledger.increments import requests_ledger
from prefect_raybatch.ledger.layout import SUCCESS
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.records import JsonObject
from prefect_raybatch.quality.judgement import is_judging, judge_runs
from prefect_raybatch.runs.drivers import beats_at_work
from prefect_raybatch.runs.run import user_at_host
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, open_store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drained:
    """The outcome of a drain request: the run, its progress, and the attempts that are to stop.

    `live` has the heartbeats, newest first, of attempts that sent one within the last minute. If it
    is empty, perhaps no driver is there to receive the request. `done` of `rows` rows are
    committed. With `judging`, the run was complete and the judge of its answers was drained; `done`
    and `rows` then count judgements.
    """

    run: str
    run_key: str
    live: tuple[JsonObject, ...]
    done: int
    rows: int
    judging: bool = False


def drain_run(run_dir: str, options: StoreOptions | None = None) -> Drained:
    """Ask every attempt at a run to commit its in-flight shards and stop; return without waiting.

    The attempts start no further shards and end with `RunDrained`. Later attempts are not affected.
    If the run is complete and its answers are being judged, the judge is drained.

    If the run was repaired, the run that continues it is drained. If the run itself is not
    finished, it is drained, too, since a driver may still work on it.

    Raises `ConfigError` for a complete run without a judge at work, `NoSuchRun` if `run_dir` has no
    run, and the store's errors.
    """
    ledger = Ledger(open_store(run_dir, dict(options) if options else None))
    *repaired, (ledger, plan) = runs_to_last_fork(ledger, need_plan(ledger))
    by = user_at_host()
    is_open = ledger.finished(plan) is None
    live = _drain_open(ledger, by) if is_open else []
    for former, _ in repaired:
        try:
            if not former.store.holds(SUCCESS):
                live += _drain_open(former, by)
        except CorruptRun as error:
            log.warning("The drivers of %s are unknown: %s", former.store.uri, error)
    if not is_open and not live:
        return _drain_judge(ledger.store.uri, ledger.store, options)
    live.sort(key=lambda beat: float(beat["age"]))
    # From the names of the commits: a damaged one does not matter here.
    done = int(np.diff(ledger.shards(plan).starts)[ledger.committed(plan)].sum())
    return Drained(ledger.store.uri, plan.run_key, tuple(live), done, plan.rows)


def _drain_open(ledger: Ledger, by: str) -> list[JsonObject]:
    """Ask all attempts at an unfinished run to stop; return the heartbeats of drivers at work."""
    put_drain(ledger, by)
    asks = requests_ledger(ledger.store)
    if asks.load_plan() is not None:
        put_drain(asks, by)
    return beats_at_work(ledger.store)


def _drain_judge(run: str, store: Store, options: StoreOptions | None) -> Drained:
    """Drain the judge of a complete run, even one that has sent no heartbeat yet.

    With several interrupted judgements, the one that a driver works on is returned. Raises
    `ConfigError` if no judgement is in progress, or if its run has no plan yet.
    """
    drained = [one for _, own in judge_runs(store) if (one := _drained_judge(own.uri, options))]
    live = [one for one in drained if one.live]
    if live or (drained and is_judging(store)):
        return (live or drained)[0]
    if is_judging(store):
        raise ConfigError(
            f"{run} is complete, and its judge has not planned its work yet. Drain it again in a "
            "few seconds"
        )
    raise ConfigError(f"{run} is complete, so there is nothing to drain.")


def _drained_judge(run_dir: str, options: StoreOptions | None) -> Drained | None:
    """Drain the judge's run at `run_dir`; return None if it is complete or has no plan yet."""
    try:
        return replace(drain_run(run_dir, options), judging=True)
    except (ConfigError, NoSuchRun):
        return None
