"""Restores the records of a finished run's raw answers.

Later runs can then reuse the intact ones.
"""

from __future__ import annotations

from dataclasses import replace

from prefect_raybatch.compile.job import compile_plan
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.increments import (
    Answers,
    Increment,
    answer_files,
    asks_ledger,
    increment_of,
)
from prefect_raybatch.ledger.layout import ANSWERS_RECORD, PLAN
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.record_files import put_record_proved, read_record
from prefect_raybatch.ledger.records import Plan, dump
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.result.verify_records import StoredAnswers
from prefect_raybatch.runs.finalize_run import DAY
from prefect_raybatch.runs.rejected_answers import rejected_answers
from prefect_raybatch.words import counted


def restore_answers(
    ledger: Ledger, plan: Plan, success: Success, answers: StoredAnswers
) -> tuple[str, ...]:
    """Restore what can be restored of a finished run's raw answers; return a sentence for each.

    Files of answers cannot be recreated without asking. So the record is rewritten with the intact
    ones, and the next run asks for the others. The run's rows stay as they are.
    """
    increment = increment_of(plan)
    if increment is None or answers.gone or not answers.faults:
        return ()
    restored = [*_restore_plan(ledger, increment)]
    if answers.record is not None and not answers.damaged:
        return tuple(restored)
    try:
        record = answers.record or _made_again(ledger, plan, increment, success)
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
    """Rewrite the plan of the requests phase, whose bytes the run's plan holds."""
    if increment.asks is None:
        return []
    asks, wanted = asks_ledger(ledger.store), Plan.from_bytes(dump(increment.asks)).to_bytes()
    try:
        if read_record(asks.store, PLAN) == wanted:
            return []
    except (FileNotFoundError, CorruptRun):
        pass
    put_record_proved(asks.store, PLAN, wanted)
    return [f"{asks.store.uri}/{PLAN}, which the run's plan holds"]


def _made_again(ledger: Ledger, plan: Plan, increment: Increment, success: Success) -> Answers:
    """Return the record as the end of the run wrote it, except for the measured engine time."""
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
