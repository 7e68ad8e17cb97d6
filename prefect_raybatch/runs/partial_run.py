"""Writes a partial result: the rows that a run has committed so far."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

from prefect_raybatch.compile.job import compile_plan
from prefect_raybatch.errors import ConfigError, CorruptRun, IncompleteRun
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.ledger.accepted import all_accepted
from prefect_raybatch.ledger.checkpoints import Listing
from prefect_raybatch.ledger.family import without_link
from prefect_raybatch.ledger.layout import partial_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.partials import (
    PARTIAL_PAGE,
    PARTIAL_RECORD,
    PARTIAL_REPORT,
    MissingRows,
    PartialResult,
    new_partial_name,
)
from prefect_raybatch.ledger.record_files import put_record
from prefect_raybatch.ledger.records import Part, Plan
from prefect_raybatch.ledger.success import check_parts
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.runs.finalize_run import retry_notes, write_parts
from prefect_raybatch.runs.run import PARTIAL_STATE, user_at_host
from prefect_raybatch.spec.cluster import ClusterSpec
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import open_store
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)


def write_partial(
    run_dir: str, options: StoreOptions | None, cluster: ClusterSpec | None
) -> RunReport:
    """Write the committed rows of an incomplete run as a partial result; return its report.

    A large result is written on `cluster` (None: on this machine). Raises `ConfigError` if the run
    is complete or all its shards are committed. Raises `IncompleteRun` if no shard is committed, or
    if `raybatch reap` removes a file of the partial result meanwhile.
    """
    from prefect_raybatch.result.finalize import finalize_committed
    from prefect_raybatch.result.survey import survey_committed

    check_run_place(run_dir)
    store = open_store(without_link(run_dir), dict(options) if options else None)
    ledger = Ledger(store)
    plan = need_plan(ledger)
    _check_open(ledger, plan)
    shards, listing, at = ledger.shards(plan), ledger.listing(plan), time.time()
    _check_incomplete(ledger, plan, listing)
    spec = compile_plan(plan)
    layout, row_number, name = spec.output.layout, spec.finish.row_number, new_partial_name()
    try:
        survey = survey_committed(ledger, plan, shards, listing)
        parts = finalize_committed(
            *(ledger, plan, shards, survey, row_number, layout.file_bytes),
            partial_path(name),
            layout.read_back,
            partial(write_parts, cluster or spec.cluster),
        )
    except CorruptRun:
        _check_open(ledger, plan)
        raise
    missing = MissingRows.of(listing.done, shards, ledger.numbers(plan))
    record = _record(plan, name, at, survey.tally, missing, tuple(parts), row_number)
    report = _put_report(ledger, plan, record, survey.tally)
    record.put(store)
    _check_kept(ledger, plan, record)
    log.warning("%s In %s", record.warning, report.run)
    return report


def _record(
    plan: Plan,
    name: str,
    at: float,
    tally: Tally,
    missing: MissingRows,
    parts: tuple[Part, ...],
    row_number: str,
) -> PartialResult:
    """Return the record of a partial result of the rows that were committed at the time `at`.

    `missing` are the other rows; `row_number` is the name of the column with row numbers.
    """
    return PartialResult(
        warning=f"PARTIAL, not the result of run {plan.run_key}: {tally.rows:,} of {plan.rows:,} "
        f"rows, without {missing.text()}. The run is not complete.",
        name=name,
        run_key=plan.run_key,
        plan=plan.hash,
        at=round(at, 3),
        by=user_at_host(),
        rows=plan.rows,
        data=tally.good,
        quarantine=tally.failed,
        skipped=tally.skipped,
        missing=missing,
        parts=parts,
        row_number=row_number,
    )


def _check_incomplete(ledger: Ledger, plan: Plan, listing: Listing) -> None:
    """Raise `ConfigError` if all shards are committed, `IncompleteRun` if none is."""
    if not listing.done.any():
        first = " (its requests are still being asked)" if plan.increment else ""
        raise IncompleteRun(
            f"{ledger.store.uri}: none of {counted(plan.shards, 'shard')} is committed{first}, so "
            "a partial result would be empty. Run the job again to continue"
        )
    if listing.done.all():
        raise ConfigError(
            f"{ledger.store.uri}: all {plan.shards} shards are committed. Write the whole result "
            "with raybatch finalize, without --partial"
        )


def _put_report(ledger: Ledger, plan: Plan, record: PartialResult, tally: Tally) -> RunReport:
    """Write the report of a partial result, as JSON and Markdown; return it.

    Paths of files in it are relative to the folder of the partial result.
    """
    folder, store = partial_path(record.name), ledger.store
    accepted = all_accepted(ledger)
    notes = (record.warning, *retry_notes(plan), *map(str, accepted))
    inside = [replace(part, path=part.path.removeprefix(f"{folder}/")) for part in record.parts]
    report = reports.build(f"{store.uri}/{folder}", plan, tally, PARTIAL_STATE, inside, notes=notes)
    report = replace(report, accepted=accepted)
    put_record(store, partial_path(record.name, PARTIAL_REPORT), report.to_bytes())
    store.put(partial_path(record.name, PARTIAL_PAGE), reports.markdown(report).encode())
    return report


def _check_kept(ledger: Ledger, plan: Plan, record: PartialResult) -> None:
    """Raise an error if a file of the partial result was removed while it was written.

    `raybatch reap` may do so. The record is then deleted, and the error is `IncompleteRun`, or
    `ConfigError` if the run has become complete.
    """
    try:
        check_parts(ledger.store, record.parts)
    except CorruptRun:
        ledger.store.delete([partial_path(record.name, PARTIAL_RECORD)])
        _check_open(ledger, plan)
        raise IncompleteRun(
            f"{ledger.store.uri}/{partial_path(record.name)} was removed by raybatch reap while it "
            "was written. Run the same command again"
        ) from None


def _check_open(ledger: Ledger, plan: Plan) -> None:
    if ledger.finished(plan) is not None:
        raise ConfigError(
            f"{ledger.store.uri} is complete. Its result is in data/; a partial result is written "
            "only for an unfinished run."
        )
