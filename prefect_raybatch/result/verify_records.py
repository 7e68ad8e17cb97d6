"""Checks the records of a run other than its rows: tables, raw answers, reports, snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.increments import (
    OF_LARGER,
    AnswerPart,
    Answers,
    Increment,
    increment_of,
    input_store,
    looks_up,
    read_answers,
    read_answers_by_row,
    requests_ledger,
)
from prefect_raybatch.ledger.layout import (
    ANSWERS_RECORD,
    LAYOUT,
    PLAN,
    PRECISION,
    REPORT,
    REQUESTS_FOLDER,
    SUCCESS,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.part_layout import read_layout
from prefect_raybatch.ledger.precision import read_precision
from prefect_raybatch.ledger.record_files import read_record
from prefect_raybatch.ledger.records import Plan, dump
from prefect_raybatch.ledger.success import Success, read_success
from prefect_raybatch.report.records import RunReport, read_report
from prefect_raybatch.result.verify_files import Fault
from prefect_raybatch.storage import Store, read_ahead
from prefect_raybatch.storage.proof import sha256_of
from prefect_raybatch.words import counted

FILES_AT_ONCE = 4  # read concurrently


def check_tables(ledger: Ledger, plan: Plan, success: Success | None, fault: Fault) -> None:
    """Call `fault` for each missing or changed table that the run's records name.

    Calls it also if the layout record is damaged. The record may be missing, unless `_SUCCESS`
    (`success`, None for an unfinished run) says that the result has a layout.
    """
    increment = increment_of(plan)
    names = set(plan.tables)
    names |= set(increment.tables) if increment is not None else set()
    if success is not None:
        names |= {n for n in (success.manifest, success.parts_table) if n is not None}
    for name in sorted(names):
        try:
            ledger.table(name)
        except CorruptRun as error:
            fault(str(error))
    try:
        if read_layout(ledger, plan) is None and success is not None and success.layout:
            fault(f"{LAYOUT} is missing")
    except CorruptRun as error:
        fault(str(error))


def check_reports(ledger: Ledger, plan: Plan, success: Success | None, fault: Fault) -> None:
    """Call `fault` for faults of report.json and precision.json.

    A finished run needs report.json. It must be readable, and have the same row counts as
    `_SUCCESS` (`success`, None for an unfinished run). precision.json records in which precision
    the run infers; its later attempts and its retries, and later runs, infer in the same one. It
    may be missing, unless the report says that the run decided on a precision.
    """
    report = None if success is None else _checked_report(ledger.store, success, fault)
    try:
        decided = read_precision(ledger.store)
    except CorruptRun as error:
        fault(str(error))
        return
    if decided is None and report is not None and report.precision and decides_precision(plan):
        fault(f"{PRECISION} is missing")


def decides_precision(plan: Plan) -> bool:
    """Return whether a run decides on its model's precision.

    False if the run only looks up stored answers: these have the precision in which they were
    inferred.
    """
    return not looks_up(plan)


def _checked_report(store: Store, success: Success, fault: Fault) -> RunReport | None:
    try:
        report = read_report(store)
    except FileNotFoundError:
        fault(f"{REPORT} is missing")
        return None
    except CorruptRun as error:
        fault(str(error))
        return None
    counts = (report.rows, report.good, report.failed, report.skipped)
    if counts != (success.rows, success.data, success.quarantine, success.skipped):
        fault(f"{REPORT} and {SUCCESS} have different row counts")
    return report


def check_snapshot(ledger: Ledger, plan: Plan, fault: Fault) -> None:
    """Call `fault` for each file of the run's snapshot that is missing or has another size."""
    if not plan.snapshot:
        return
    store = input_store(ledger.store, plan)
    for file in ledger.files(plan):
        try:
            size = store.stat(file.uri).size
        except FileNotFoundError:
            fault(f"{file.uri} (a file of the snapshot) is missing")
            continue
        if size != file.size:
            fault(f"{file.uri} (a file of the snapshot) has {size:,} bytes, not {file.size:,}")


@dataclass
class StoredAnswers:
    """The findings about a run's raw answers; `faults` has a sentence for each fault.

    `record` is answers.json, None if it is missing, damaged or not checked; `damaged` has the paths
    of missing or changed files. `gone`: the answers' retention has ended, so their files were not
    checked.
    """

    record: Answers | None = None
    damaged: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    gone: bool = False


def check_answers(ledger: Ledger, plan: Plan, finished: bool) -> StoredAnswers:
    """Check the raw answers of a run.

    An unfinished run looks them up; a finished run keeps them for later runs. In a cascade, they
    are the answers of its first model. Nothing is checked for a run that neither looks up answers
    nor is a cascade.
    """
    found = StoredAnswers()
    increment = increment_of(plan)
    store = ledger.store
    if increment is not None and increment.ledger == OF_LARGER:
        _check_requests_phase(store, increment, finished, found)
    if increment is None or not increment.looks_up:
        return found
    if finished:
        _check_record(store, plan, increment, found)
        if found.gone:
            return found
    named = found.record.files if found.record is not None else increment.reused
    _check_files(store, named, found)
    if increment.asks is not None:
        _check_requests_phase(store, increment, finished, found)
    return found


def requests_success(store: Store, increment: Increment) -> Success | None:
    """Return the `_SUCCESS` of a run's requests phase, which answers the distinct requests.

    In a cascade, this is the `_SUCCESS` of its first model. None if the run has neither a requests
    phase nor a cascade, or if the record does not exist.
    """
    if increment.asks is None:
        return None
    return read_success(requests_ledger(store).store, Plan.from_bytes(dump(increment.asks)))


def _check_record(store: Store, plan: Plan, increment: Increment, stored: StoredAnswers) -> None:
    try:
        record = read_answers(store)
    except CorruptRun as error:
        stored.faults.append(str(error))
        return
    if record is None:
        # `raybatch reap` removes the record after the last of the files.
        paths = [part.path for part in increment.reused]
        try:
            success = requests_success(store, increment)
            paths += (
                [f"{REQUESTS_FOLDER}/{part.path}" for part in success.of("data")] if success else []
            )
        except CorruptRun as error:
            stored.faults.append(f"{REQUESTS_FOLDER}: {error}")
        stored.gone = not stored.faults and not any(map(store.holds, paths))
        if not stored.gone:
            stored.faults.append(f"{ANSWERS_RECORD} is missing: later runs cannot reuse answers")
    elif (record.plan, record.context) != (plan.hash, increment.context):
        stored.faults.append(f"{ANSWERS_RECORD} belongs to another plan")
    else:
        stored.record, stored.gone = record, record.expired


def _check_files(store: Store, files: Iterable[AnswerPart], stored: StoredAnswers) -> None:
    def look(part: AnswerPart) -> tuple[str, str | None]:
        return part.path, _fault_of(store, part.path, part.sha256)

    for path, text in read_ahead(look, files, FILES_AT_ONCE, FILES_AT_ONCE):
        if text is not None:
            stored.damaged.add(path)
            stored.faults.append(text)


def _fault_of(store: Store, path: str, sha256: str) -> str | None:
    """Return the fault of a file of raw answers as a sentence; None if it is intact."""
    try:
        with store.open(path) as stream:
            intact = sha256_of(stream) == sha256
    except FileNotFoundError:
        return f"{path} (raw answers) is missing"
    return None if intact else f"{path} (raw answers) has changed since it was written"


def _check_requests_phase(
    store: Store, increment: Increment, finished: bool, stored: StoredAnswers
) -> None:
    """Check the records of a run's requests phase or, in a cascade, of its first model.

    Also checks the phase's result files, except those that answers.json names. Adds faults to
    `stored`. If the run is not `finished`, the phase may not have begun; this is no fault.
    """
    ledger, plan = requests_ledger(store), Plan.from_bytes(dump(increment.asks))

    def fault(text: str) -> None:
        stored.faults.append(f"{REQUESTS_FOLDER}: {text}")

    try:
        if read_record(ledger.store, PLAN) != plan.to_bytes():
            fault(f"{PLAN} differs from the copy in the run's plan")
            return
        success = read_success(ledger.store, plan)
    except FileNotFoundError:
        if finished:  # else the phase has not begun
            fault(f"{PLAN} is missing")
        return
    except CorruptRun as error:
        fault(str(error))
        return
    if success is None:
        if finished:
            fault(f"{SUCCESS} is missing")
        return
    check_tables(ledger, plan, success, fault)
    check_reports(ledger, plan, success, fault)
    try:
        listing = ledger.listing(plan)
        for _ in ledger.commits(plan, listing, exact=True, on_fault=lambda e: fault(str(e))):
            pass
        if missing := np.count_nonzero(~listing.done):
            fault(f"commits of {missing} of {counted(plan.shards, 'shard')} are missing")
    except CorruptRun as error:
        fault(str(error))
    # Later runs reuse only the files that answers.json names.
    named = success.of("quarantine") if stored.record is not None else success.parts
    parts = [AnswerPart(f"{REQUESTS_FOLDER}/{p.path}", p.rows, p.bytes, p.sha256) for p in named]
    _check_files(store, parts, stored)


def check_by_row(store: Store, plan: Plan, fault: Fault) -> None:
    """Call `fault` for each missing or changed file of answers in row order.

    The run can continue without these files, because others hold the same answers.
    """
    by_row = read_answers_by_row(store, plan)
    for file in by_row.files if by_row is not None else ():
        if (text := _fault_of(store, file.path, file.sha256)) is not None:
            fault(text)
