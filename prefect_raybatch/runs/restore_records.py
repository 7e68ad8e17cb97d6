"""Rewrites missing or damaged records of a finished run from its intact files.

Among them is answers.json, the record of raw answers, so that later runs can reuse the intact
ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pyarrow.parquet as pq

from prefect_raybatch.compile.job import compile_plan
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.ledger.increments import (
    OF_LARGER,
    Answers,
    Increment,
    answer_files,
    increment_of,
    requests_ledger,
)
from prefect_raybatch.ledger.json_record import record_bytes
from prefect_raybatch.ledger.layout import ANSWERS_RECORD, PLAN, PRECISION, REPORT, row_sums_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.precision import PrecisionNote, read_precision
from prefect_raybatch.ledger.record_files import put_record_proved, read_record
from prefect_raybatch.ledger.records import Part, Plan, digest, dump
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.report.records import put_report, read_report
from prefect_raybatch.result.row_sums import encode, row_sums
from prefect_raybatch.result.verify_records import (
    StoredAnswers,
    decides_precision,
    requests_success,
)
from prefect_raybatch.runs.finalize_run import DAY, load_report, put_pages, report_again
from prefect_raybatch.runs.rejected_answers import rejected_answers
from prefect_raybatch.storage import Store
from prefect_raybatch.storage.proof import put_proved
from prefect_raybatch.words import counted


def restore_records(ledger: Ledger, plan: Plan, success: Success) -> tuple[str, ...]:
    """Restore damaged records of a finished run with an intact result.

    These are row checksums, precision.json and report.json of the run, and precision.json and
    report.json of its requests phase. Returns a text for each record that was restored or could not
    be.
    """
    restored = [
        text
        for part in success.parts
        for text in _restore_sums(ledger.store, part, success.row_number)
    ]
    increment = increment_of(plan)
    if increment is not None and increment.asks is not None:
        asked = requests_success(ledger.store, increment)
        if asked is not None:
            asks, asks_plan = requests_ledger(ledger.store), Plan.from_bytes(dump(increment.asks))
            restored += restore_reports(asks, asks_plan, asked)
    return (*restored, *restore_reports(ledger, plan, success))


def restore_reports(ledger: Ledger, plan: Plan, success: Success) -> tuple[str, ...]:
    """Restore precision.json from report.json, and report.json from the commits, if damaged.

    Returns a text for each record that was restored or could not be.
    """
    return (*restore_precision(ledger.store, plan), *_restore_report(ledger, plan, success))


def restore_precision(store: Store, plan: Plan) -> tuple[str, ...]:
    """Rewrite a missing or damaged precision.json from the decision in a finished run's report.

    Returns (text,), or () if nothing was rewritten: the record is intact, or the report has no
    decision.
    """
    if not decides_precision(plan):
        return ()
    try:
        found: PrecisionNote | None = read_precision(store)
    except CorruptRun:
        found = None
    try:
        told = read_report(store).precision
    except (CorruptRun, FileNotFoundError):
        return ()
    if told is None or found == told:
        return ()
    put_record_proved(store, PRECISION, record_bytes(told))
    return (f"{store.uri}/{PRECISION}, which the report holds",)


def _restore_report(ledger: Ledger, plan: Plan, success: Success) -> tuple[str, ...]:
    store = ledger.store
    try:
        read_report(store)
        return ()
    except (CorruptRun, FileNotFoundError):
        pass
    try:
        put_report(store, report_again(ledger, plan, success.parts))
        put_pages(store, load_report(store))  # includes other records, such as the accuracy
    except CorruptRun as error:
        return (f"nothing of {store.uri}/{REPORT}, as {error}",)
    return (f"{store.uri}/{REPORT} and its pages, from the commits, without the engine deaths",)


def _restore_sums(store: Store, part: Part, row_number: str) -> tuple[str, ...]:
    """Compute the row checksums of a result file again, and write them, if they are damaged.

    Returns (text,). The text says that they were written or, if their hash is not the recorded one,
    that they were not. Returns () if the checksums are intact, or if the result file itself was
    changed.
    """
    path = row_sums_path(part.path)
    if part.sums is None or _is_whole(store, path, part.sums):
        return ()
    with store.open(part.path) as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != part.sha256:  # type: ignore[arg-type]
            return ()
        stream.seek(0)
        file = pq.ParquetFile(stream, pre_buffer=False)
        check_types(file.schema_arrow, part.path)
        table = file.read(use_threads=False)
    sums = row_sums(table.drop_columns([row_number]))
    data = encode([table[row_number].to_numpy()], [sums])
    if digest(data) != part.sums:
        return (f"nothing of {store.uri}/{path}: another version of pyarrow wrote it",)
    put_proved(store, path, data)
    return (f"{store.uri}/{path}, from the rows of its file",)


def _is_whole(store: Store, path: str, sha256: str) -> bool:
    try:
        return digest(store.read(path)) == sha256
    except FileNotFoundError:
        return False


def restore_answers(
    ledger: Ledger, plan: Plan, success: Success, answers: StoredAnswers
) -> tuple[str, ...]:
    """Restore the records of a finished run's raw answers; the run's rows do not change.

    Rewrites a damaged plan of the requests phase. Lost answers cannot be restored, so answers.json
    is rewritten to name only the intact ones; later runs send the other requests again. For a
    cascade, it is not rewritten. `answers` says what is damaged. Returns a text for each record
    that was restored or could not be; () if nothing is damaged or the answers' retention has ended.
    """
    increment = increment_of(plan)
    if increment is None or answers.gone or not answers.faults:
        return ()
    restored = [*_restore_plan(ledger, increment)]
    if increment.ledger == OF_LARGER:  # no later run reuses the first model's answers
        return tuple(restored)
    if answers.record is not None and not answers.damaged:
        return tuple(restored)
    try:
        record = answers.record or _rebuilt_answers(ledger, plan, increment, success)
    except CorruptRun as error:
        return (
            *restored,
            f"nothing of {ANSWERS_RECORD}, as {error}: later runs will not reuse this run",
        )
    whole = tuple(part for part in record.files if part.path not in answers.damaged)
    rejected = {path: at for path, at in record.rejected.items() if path not in answers.damaged}
    made = replace(record, files=whole, rejected=rejected)
    put_record_proved(ledger.store, ANSWERS_RECORD, made.to_bytes())
    rows, every = (sum(part.rows for part in files) for files in (whole, record.files))
    return (
        *restored,
        f"{ANSWERS_RECORD} names the {counted(rows, 'raw answer')} that are intact, of {every:,}; "
        "the next run asks about the rows of the others",
    )


def _restore_plan(ledger: Ledger, increment: Increment) -> list[str]:
    """Rewrite the plan of the requests phase, if damaged, from the copy in the run's plan.

    Returns [message that names the rewritten file], or [] if it was intact or the run has no
    requests phase.
    """
    if increment.asks is None:
        return []
    asks, wanted = requests_ledger(ledger.store), Plan.from_bytes(dump(increment.asks)).to_bytes()
    try:
        if read_record(asks.store, PLAN) == wanted:
            return []
    except (FileNotFoundError, CorruptRun):
        pass
    put_record_proved(asks.store, PLAN, wanted)
    return [f"{asks.store.uri}/{PLAN}, which the run's plan holds"]


def _rebuilt_answers(ledger: Ledger, plan: Plan, increment: Increment, success: Success) -> Answers:
    """Return answers.json as finalize wrote it, but without the engine seconds per answer."""
    reuse = compile_plan(plan).reuse
    days = reuse.keep_days if reuse.keeps else 0.0
    return Answers(
        run_key=plan.run_key,
        plan=plan.hash,
        context=increment.context,
        parts=increment.parts,
        files=answer_files(plan, increment, ledger.store),
        until=None if days is None else success.finished + days * DAY,
        seconds=increment.seconds,
        rejected=rejected_answers(ledger, plan, increment) if success.quarantine else {},
    )
