"""Finds a job's earlier runs whose accuracy or agreement was measured, as a series.

Each run counts once. A repaired run takes the place of the original. Each measured run records the
series up to itself. If a run is measured only after runs that were planned later, their series lack
it; the next run to be measured adds it at the end of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.ledger.forks import forks_of, original_key
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.quality.accuracy import Accuracy, read_accuracy
from prefect_raybatch.quality.alarm import ShareSeries, continued, new_series_after
from prefect_raybatch.quality.judgement import Judgement, read_judgement
from prefect_raybatch.runs.listing import COMPLETED, RunLine, recency_key
from prefect_raybatch.runs.run import STORE_AWAY
from prefect_raybatch.runs.run_history import matching_runs
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, open_store

log = logging.getLogger(__name__)

RUNS_LOOKED_AT = 14  # runs before the newest series, searched for runs that it lacks
OTHERS_LOOKED_AT = 60  # newest runs of another key that the search for the series skips


@dataclass(frozen=True)
class MeasuredRun:
    """The measured accuracy of a run, or the agreement of its two models.

    Of `rows` measured rows, `right` had the right answer, or the same answer of both models. `key`
    and `measure` are explained in `ShareSeries`. `series` is the recorded series that ends with
    this run, None if none is recorded.
    """

    key: str
    right: int
    rows: int
    measure: str
    series: ShareSeries | None = None


def accuracy_in(store: Store) -> MeasuredRun | None:
    """Return the recorded accuracy of a run on golden rows.

    Returns None if the run was not measured, or if its record names no series.
    """
    return _counted(read_accuracy(store))


def judgement_in(store: Store) -> MeasuredRun | None:
    """Return the recorded accuracy of a run by its judge.

    Returns None if the run was not judged, or if its record names no series.
    """
    return _counted(read_judgement(store))


def _counted(record: Accuracy | Judgement | None) -> MeasuredRun | None:
    if record is None or record.series is None:
        return None
    series = record.series
    return MeasuredRun(series.key, record.right, record.rows, series.measure, series)


def series_before(
    output: str,
    options: StoreOptions | None,
    plan: Plan,
    read: Callable[[Store], MeasuredRun | None],
    key: str,
) -> ShareSeries | None:
    """Return the series of a job's runs measured by `key` before the run with this `plan`.

    It is the newest series of `key` that an earlier run recorded, continued with measured runs that
    it lacks. The search for it starts at the newest run. It gives up after OTHERS_LOOKED_AT runs
    with other keys. It also gives up at a run that has left the series of `key` because it was
    measured again under another key: older series still count that run. If no series is found,
    returns a new one, which names the last run of another key. Returns None if no earlier run was
    measured.

    `read` returns what was measured in a run, None if nothing was. Runs are looked for below
    `output`, which may contain {run_date} or {run_key}. Unreadable runs are skipped. If the store
    cannot be reached, its error is raised.
    """
    this, series, looked, others = original_key(plan), None, 0, 0
    before: ShareSeries | None = None
    missing: list[tuple[str, MeasuredRun]] = []
    for name, run in _measured_before(output, options, plan, read):
        if run.series is not None and this in run.series.runs:
            continue  # planned in the same second, and counted this run already
        taken_from = run.series.taken_from if run.series is not None else ()
        if run.key != key:
            before, others = before or run.series, others + 1
            if key in taken_from:
                break
        elif series is None and run.series is not None:
            series = run.series
        elif series is None or (name not in series.runs and not taken_from):
            missing.append((name, run))
        looked += series is not None
        if looked > RUNS_LOOKED_AT or (series is None and others > OTHERS_LOOKED_AT):
            break
    if series is None and before is not None:
        series = new_series_after(before, key)
    for name, run in reversed(missing):
        if series is None or name not in series.runs:
            counts = (run.key, run.right, run.rows)
            series = continued(series, *counts, run=name, measure=run.measure)
    return series


def series_with(
    own: ShareSeries | None,
    output: str,
    options: StoreOptions | None,
    plan: Plan,
    read: Callable[[Store], MeasuredRun | None],
    run: MeasuredRun,
) -> ShareSeries:
    """Return the series of a job's runs up to the run with this `plan`, which is measured as `run`.

    `own` is the series that this run recorded when it was measured before, None if it was not. The
    other parameters are those of `series_before`. The series gets `taken_from` (see `ShareSeries`)
    if the run was measured before under another key.
    """
    earlier = series_before(output, options, plan, read, run.key)
    leaves = own is not None and own.key != run.key
    if own is not None and leaves and (earlier is None or not earlier.baseline):
        earlier = new_series_after(own, run.key)
    series = continued(earlier, run.key, run.right, run.rows, run=original_key(plan))
    if own is None:
        return series
    taken_from = dict.fromkeys((*own.taken_from, own.key) if leaves else own.taken_from)
    return replace(series, taken_from=tuple(taken_from))


def _measured_before(
    output: str,
    options: StoreOptions | None,
    plan: Plan,
    read: Callable[[Store], MeasuredRun | None],
) -> Iterator[tuple[str, MeasuredRun]]:
    """Yield (run key, measurement) of the job's measured runs before `plan`, newest first.

    A run and the repaired runs that continue it count as one run. Its key is that of the original.
    Its measurement is that of the latest of them that was measured.
    """
    began, seen = _planned_at(plan), {original_key(plan)}
    lines = [
        line
        for line in matching_runs(output, options)
        if line.state == COMPLETED and line.job == plan.job_name and line.parent is None
    ]
    runs = [_placed(line, options) for line in lines]
    for planned, line, name in sorted(runs, key=_order, reverse=True):
        if planned > began or name in seen:
            continue
        try:
            found = read(_store(line, options))
        except STORE_AWAY:
            raise
        except RayBatchError as error:
            log.warning("run %s is left out of the series of earlier runs: %s", line.run, error)
            continue
        if found is not None:
            seen.add(name)
            yield name, found


def _order(run: tuple[float, RunLine, str]) -> tuple[object, ...]:
    planned, line, _ = run
    return planned, forks_of(line.run_key), *recency_key(line)


def _placed(line: RunLine, options: StoreOptions | None) -> tuple[float, RunLine, str]:
    """Return (time of planning, `line`, run key).

    For a repaired run, time and key are those of the original.
    """
    if forks_of(line.run_key):
        try:
            plan = Ledger(_store(line, options)).load_plan()
        except STORE_AWAY:
            raise
        except RayBatchError:  # reading its record fails as well, and is reported
            plan = None
        if plan is not None:
            return _planned_at(plan), line, original_key(plan)
    return line.created or 0.0, line, line.run_key


def _planned_at(plan: Plan) -> float:
    """Return the time at which a run was planned, in seconds since 1970.

    For a repaired run, it is that of the original.
    """
    when = datetime.fromisoformat(plan.first_created)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _store(line: RunLine, options: StoreOptions | None) -> Store:
    return open_store(line.run, dict(options) if options else None)
