"""Drain requests: ask active drivers to finish in-flight shards and stop."""

from __future__ import annotations

from dataclasses import dataclass

from prefect_raybatch.driver.heartbeat import SILENT_AFTER
from prefect_raybatch.errors import ConfigError, NoSuchRun
from prefect_raybatch.ledger.drains import put_drain
from prefect_raybatch.ledger.increments import asks_ledger
from prefect_raybatch.ledger.records import JsonObject
from prefect_raybatch.quality.judgement import judge_runs
from prefect_raybatch.runs.run import who
from prefect_raybatch.runs.status import Status, status
from prefect_raybatch.spec.options import StoreOptions


@dataclass(frozen=True)
class Drained:
    """The attempts that were asked to stop.

    `live` are the heartbeats (newest first) of attempts heard of within the last minute. If it is
    empty, possibly no driver is there to receive the request.
    """

    run: str
    run_key: str
    live: tuple[JsonObject, ...]
    done: int
    rows: int


def drain_run(run_dir: str, options: StoreOptions | None = None) -> Drained:
    """Ask every attempt at a run to commit its in-flight shards and stop; return at once.

    The attempts start no further shards and end with `RunDrained`. Later attempts are not affected.
    Of a complete run whose answers are being judged, the judge's run is drained.

    Raises `ConfigError` for a complete run, `NoSuchRun` and the store's errors.
    """
    from prefect_raybatch.ledger.ledger import Ledger
    from prefect_raybatch.storage import open_store

    found = status(run_dir, dict(options) if options else None)
    if found.state == "completed":
        judging = judge_runs(open_store(run_dir, dict(options) if options else None))
        drained = [_drained_judge(run.uri, options) for _, run in judging]
        for one in filter(None, drained):
            return one
        raise ConfigError(f"{found.run} is complete, so there is nothing to drain.")
    store = open_store(run_dir, dict(options) if options else None)
    asks = asks_ledger(store)
    by = who()
    for ledger in (Ledger(store), asks):
        if ledger.load_plan() is not None:
            put_drain(ledger, by)
    beats = [beat for beat in _beats(found) if beat["age"] < SILENT_AFTER]
    return Drained(found.run, found.run_key, tuple(beats), found.done, found.rows)


def _drained_judge(run_dir: str, options: StoreOptions | None) -> Drained | None:
    """Drain the judge's run at `run_dir`; return None if no driver works on it."""
    try:
        drained = drain_run(run_dir, options)
    except (ConfigError, NoSuchRun):  # it is complete, or has no plan yet
        return None
    return drained if drained.live else None


def _beats(found: Status) -> list[JsonObject]:
    return [*found.beats, *(found.asks.beats if found.asks is not None else ())]
