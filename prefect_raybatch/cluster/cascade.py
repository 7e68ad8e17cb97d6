"""Creates the stages by which the larger model of a cascade answers what the first one left."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from prefect_raybatch.cluster.lookups import finished_asks, numbered_parts
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.increments import Increment
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.source.row_sample import RowSample
from prefect_raybatch.spec.cascade import CascadeSpec, most_rows
from prefect_raybatch.stages.cascade import (
    EscalateFinish,
    EscalatePrepare,
    FirstAnswers,
    sureness_of,
)
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.lookup import WHY
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.raw_answers import NUMBER, AnswerFiles
from prefect_raybatch.storage import Store

KEEPS = math.inf  # sureness of an answer that is kept
SURENESS_ROWS = 1 << 20  # rows whose answers are looked at together


def escalated(
    cascade: CascadeSpec | None,
    plan: Plan,
    increment: Increment,
    store: Store,
    prepare: Prepare,
    finish: Finish,
    hosted: bool,
) -> tuple[EscalatePrepare, EscalateFinish]:
    """Return prepare and finish of the larger model, which may be `hosted`, from its usual ones."""
    if cascade is None:
        raise CorruptRun(f"{store.uri} is a cascade by its plan, but not by its job")
    first = first_answers(store, increment, cascade, plan)
    rows = plan.rows_per_shard
    given = {item.name: getattr(finish, item.name) for item in fields(finish)}
    return (
        EscalatePrepare(prepare, first, rows, hosted),
        EscalateFinish(**given, first=first, rows_per_shard=rows),
    )


def first_answers(
    store: Store, increment: Increment, cascade: CascadeSpec, plan: Plan
) -> FirstAnswers:
    """Return the answers of the first model, with which of them go to the larger one.

    The choice follows from the first model's result alone, so every attempt chooses the same rows:
    the unsure ones, and of too many the least sure, then the first in input order; and the rows to
    check, by a hash of row number and run key, so that runs differ. `store` is that of the run.
    Raises `CorruptRun` if the first model has not answered all rows.
    """
    success = finished_asks(store, increment)
    if success is None:
        raise CorruptRun(f"{store.uri}/_raybatch/plan.json names no plan of the first model")
    data = AnswerFiles(store, numbered_parts(store, success, "data"), _columns(store, success))
    failed = AnswerFiles(store, numbered_parts(store, success, "quarantine"), WHY)
    answers = FirstAnswers(data, failed, cascade)
    answers = answers.choosing(*_cut(answers, success.rows))
    return replace(answers, checked=_checked(answers, success.rows, plan.run_key))


def _checked(answers: FirstAnswers, rows: int, run_key: str) -> np.ndarray:
    """Return the numbers of the rows to check: a random sample of those the first model answered.

    Of these, too, that `at_most` left to it.
    """
    if not answers.cascade.check:
        return np.empty(0, np.int64)

    data = replace(answers.data, columns=answers.data.columns[:1])

    def kept() -> Iterator[np.ndarray]:
        for start in range(0, rows, SURENESS_ROWS):
            numbers = np.arange(start, min(rows, start + SURENESS_ROWS))
            there, _ = data.take(numbers)
            yield numbers[there & ~answers.chosen(numbers)]

    seed = int(hashlib.sha256(f"check {run_key}".encode()).hexdigest()[:15], 16)
    return RowSample(answers.cascade.check, seed).among(kept())


def _columns(store: Store, success: Success) -> tuple[str, ...]:
    """Return the columns of the first model's result, without the row number."""
    import pyarrow.parquet as pq

    from prefect_raybatch.ledger.layout import ASKS

    for part in success.of("data"):
        with store.open(f"{ASKS}/{part.path}") as stream:
            names = pq.read_schema(stream).names
        return tuple(name for name in names if name != NUMBER)
    return ()


def _cut(answers: FirstAnswers, rows: int) -> tuple[int, int, tuple[float, int] | None]:
    """Return the numbers of unsure and of chosen rows, and the last chosen one if some are cut.

    The last one is (sureness, number).
    """
    most = most_rows(answers.cascade.at_most, rows)
    sureness = [np.empty(0)]
    numbers = [np.empty(0, np.int64)]
    for start in range(0, rows, SURENESS_ROWS):
        wanted = np.arange(start, min(rows, start + SURENESS_ROWS))
        found = sureness_of(answers, wanted)
        unsure = found < KEEPS
        sureness.append(found[unsure])
        numbers.append(wanted[unsure])
    every, at = np.concatenate(sureness), np.concatenate(numbers)
    if len(every) <= most:
        return len(every), len(every), None
    if most == 0:
        return len(every), 0, (-math.inf, -1)
    order = np.lexsort((at, every))
    last = order[most - 1]
    return len(every), most, (float(every[last]), int(at[last]))
