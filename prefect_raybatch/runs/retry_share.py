"""Decides how many rows of a cascade's retry may go to the larger model.

`output.escalate.at_most` is a share of the first run's rows and counts over that run and all its
retries. A row counts once, however often it goes to the larger model.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prefect_raybatch.cluster.cascade import first_answers
from prefect_raybatch.compile.job import compile_plan
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.family import Family, Member
from prefect_raybatch.ledger.increments import OF_LARGER, Increment, RetryShare, increment_of
from prefect_raybatch.ledger.records import digest
from prefect_raybatch.ledger.row_numbers import among, numbers_table
from prefect_raybatch.spec.cascade import CascadeSpec, most_rows

POSITIONS_AT_ONCE = 1 << 20  # rows whose first answers are looked at together


def share_of_retry(
    family: Family, cascade: CascadeSpec | None, numbers: np.ndarray
) -> tuple[RetryShare, bytes] | None:
    """Return how many rows a cascade's retry may send to the larger model, and a Parquet table.

    The table has the positions, in the retry, of rows that a finished run of the family already
    sent to the larger model. The family is a run and its retries. If the run continues damaged
    runs, their retries count, too. The rows in the table may be sent again.

    Of the other rows, as many may be sent as `at_most` leaves after the rows sent so far and those
    that unfinished retries may still send. `numbers` are the ascending row numbers that the retry's
    rows have in the first run.

    Returns None for a job without a cascade or with `at_most` 1. Raises `CorruptRun` if the record
    of rows that were sent is unreadable.
    """
    if cascade is None or cascade.at_most == 1:
        return None
    rows = family.members[family.base].plan.rows
    sent, kept = np.empty(0, np.int64), 0
    for member in (*family.members.values(), *family.former.values()):
        increment = increment_of(member.plan)
        if increment is None or increment.ledger != OF_LARGER:
            continue
        if member.summary is None:
            kept += _reserved(member, increment)
        else:
            sent = np.union1d(sent, _sent(member, increment))
    again = np.flatnonzero(among(sent, numbers))
    table = numbers_table(again)
    more = max(0, most_rows(cascade.at_most, rows) - len(sent) - kept)
    name = f"sent-{digest(table)[:16]}.parquet"
    return RetryShare(rows=rows, table=name, sent=len(again), more=more), table


def _reserved(member: Member, increment: Increment) -> int:
    """Return how many rows an unfinished run may send to the larger model for the first time."""
    share = increment.share
    if share is None:
        return member.plan.rows
    return min(share.more, member.plan.rows - share.sent)


def _sent(member: Member, increment: Increment) -> np.ndarray:
    """Return the ascending numbers of the rows that a finished run sent to its larger model.

    Rows sent only to compare both models are not among them. Raises `CorruptRun` if they cannot be
    read.
    """
    ledger, plan = member.ledger, member.plan
    cascade = compile_plan(plan).cascade
    if cascade is None:
        raise CorruptRun(f"{ledger.store.uri} is a cascade by its plan, but not by its job")

    def chosen() -> Iterator[np.ndarray]:
        first = first_answers(ledger.store, increment, cascade, plan)
        for start in range(0, plan.rows, POSITIONS_AT_ONCE):
            positions = np.arange(start, min(plan.rows, start + POSITIONS_AT_ONCE))
            yield positions[first.chosen(positions)]

    try:
        positions = np.concatenate([np.empty(0, np.int64), *chosen()])
    except (CorruptRun, FileNotFoundError) as error:
        raise CorruptRun(
            f"{ledger.store.uri}: cannot read which rows went to {cascade.larger_name}, which "
            f"output.escalate.at_most counts ({error}). Restore the files, or retry without that "
            "limit: --set output.escalate.at_most=1"
        ) from None
    return ledger.numbers(plan).of(positions)
