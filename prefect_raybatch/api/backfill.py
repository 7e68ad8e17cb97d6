"""Plans a backfill of a job: one run per date, with the state of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, timedelta

from prefect_raybatch.api import resolve_run
from prefect_raybatch.compile.job import cluster_spec
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.run_words import places_are_dated
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.runs.backfill import DatedRun, dated_run, run_dates
from prefect_raybatch.storage import open_store

MOST_DATES = 10_000


def planned_runs(job: BatchJob, first: date, last: date) -> list[DatedRun]:
    """Return the runs from `first` to `last`, both included, with the state of each.

    `job` has its credentials. Starts nothing and reads no input. Raises `ConfigError` for a job
    with the same input and output for every date, and for invalid dates.
    """
    if not places_are_dated(job):
        raise ConfigError(
            f"{job.name} has no {{run_date}} in source (uri, query, filter) or output.uri, so each "
            "date would infer the same rows. Write {run_date} where the rows of a date are."
        )
    days = (last - first).days + 1
    if not 0 < days <= MOST_DATES:
        raise ConfigError(
            f"from {first} to {last} are {max(0, days):,} dates. Give a first date that is not "
            f"after the last, and at most {MOST_DATES:,} dates."
        )
    return [_planned(job, first + timedelta(days=number)) for number in range(days)]


def _planned(job: BatchJob, day: date) -> DatedRun:
    filled, key = resolve_run(job, None, None, day)
    check_trust(filled)
    root = open_store(filled.output.uri, filled.output.options or None)
    return dated_run(
        root,
        key,
        day,
        lambda: resolve(filled).identity,
        # The run itself finds what is not published yet; it publishes each target once.
        has_targets=bool(filled.output.publish),
    )


def backfill(
    job: BatchJob,
    runs: Sequence[DatedRun],
    run_date: Callable[[DatedRun], RunReport],
    at_most: int = 1,
    stop_on_failure: bool = False,
    observe: Callable[[DatedRun], None] = lambda run: None,
) -> list[DatedRun]:
    """Run the incomplete dates in order, at most `at_most` at once; return the state of all.

    `run_date` runs one to its end, in a thread; `observe` is called with each that has ended. A
    failed run stops the others only with `stop_on_failure`: active ones finish, and nothing new
    begins. A signal stops all; committed shards are kept. One Ray cluster serves all of them.
    Raises `ConfigError` for `at_most` under 1, and errors of starting the cluster.
    """
    if at_most < 1:
        raise ConfigError(f"at most {at_most} concurrent runs is none. Give 1 or more.")
    todo = [run for run in runs if not run.done]
    if not todo:
        return list(runs)
    cluster = cluster_spec(resolve_run(job, None, None, todo[0].date)[0])
    return run_dates(cluster, runs, run_date, at_most, stop_on_failure, observe)
