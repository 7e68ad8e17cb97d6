"""Creates the prepare and finish stages of the larger model of a cascade."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from prefect_raybatch.cluster.lookups import numbered_parts, requests_phase_success
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.forks import original_key
from prefect_raybatch.ledger.increments import Increment
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.row_numbers import read_numbers
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
    """Return the prepare and finish stages with which a cascade's larger model runs.

    They wrap `prepare` and `finish`, the stages for the larger model's prompts and answers. For
    rows that keep the first model's answer, they pass on that answer. `hosted` says whether the
    larger model is behind an HTTP API. Raises `CorruptRun` if `cascade` is None, i.e. the job has
    no cascade but the plan has.
    """
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
    """Return the first model's answers, and the choice of rows that the larger model answers too.

    These are rows of two kinds:

    - Rows with an unsure first answer: the least sure ones first, at most the share `at_most` of
      all rows. In a retry, rows that an earlier run sent to the larger model are chosen again and
      do not count against `at_most`.
    - Other rows, chosen at random, to check how often the models agree. The seed is the run key, so
      each run checks other rows. A repaired run takes the run key of the original run.

    The choice depends only on the plan and the first model's result, so each attempt chooses the
    same rows. `store` is rooted at the run directory. Raises `CorruptRun` if the first model has
    not answered all rows.
    """
    success = requests_phase_success(store, increment)
    if success is None:
        raise CorruptRun(f"{store.uri}/_raybatch/plan.json names no plan of the first model")
    data = AnswerFiles(store, numbered_parts(store, success, "data"), _columns(store, success))
    failed = AnswerFiles(store, numbered_parts(store, success, "quarantine"), WHY)
    answers, most = FirstAnswers(data, failed, cascade), most_rows(cascade.at_most, success.rows)
    if (share := increment.share) is not None:
        table = Ledger(store).table(share.table)
        answers = replace(answers, again=read_numbers(table, share.sent).all())
        most = share.more
    answers = answers.choosing(*_cut(answers, success.rows, most))
    return replace(answers, checked=_checked(answers, success.rows, original_key(plan)))


def _checked(answers: FirstAnswers, rows: int, run_key: str) -> np.ndarray:
    """Return the numbers of the rows to check: a random sample of rows that keep the first answer.

    The larger model answers them only for comparison. They may include unsure rows that were not
    sent to it because of `at_most`. Empty if the cascade checks no rows.
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
    """Return the column names of the first model's result, except the row number; () if empty."""
    import pyarrow.parquet as pq

    from prefect_raybatch.ledger.layout import REQUESTS_FOLDER

    for part in success.of("data"):
        with store.open(f"{REQUESTS_FOLDER}/{part.path}") as stream:
            names = pq.read_schema(stream).names
        return tuple(name for name in names if name != NUMBER)
    return ()


def _cut(answers: FirstAnswers, rows: int, most: int) -> tuple[int, int, tuple[float, int] | None]:
    """Count the unsure rows, and find which of them are sent to the larger model.

    `rows` is the number of rows of the run. Unsure rows in `answers.again` are all sent, because an
    earlier run sent them. Of the other unsure rows, the `most` least sure ones are sent.

    Returns (number of unsure rows, number of rows sent, cut). The cut is the surest of the other
    rows that is sent, as (sureness, row number). It is (-inf, -1) if `most` is 0, and None if all
    unsure rows are sent.
    """
    sureness = [np.empty(0)]
    numbers = [np.empty(0, np.int64)]
    for start in range(0, rows, SURENESS_ROWS):
        wanted = np.arange(start, min(rows, start + SURENESS_ROWS))
        found = sureness_of(answers, wanted)
        unsure = found < KEEPS
        sureness.append(found[unsure])
        numbers.append(wanted[unsure])
    every, at = np.concatenate(sureness), np.concatenate(numbers)
    unsure_rows, counted = len(every), ~np.isin(at, answers.again)
    again = unsure_rows - int(counted.sum())
    every, at = every[counted], at[counted]
    if len(every) <= most:
        return unsure_rows, unsure_rows, None
    if most == 0:
        return unsure_rows, again, (-math.inf, -1)
    order = np.lexsort((at, every))
    last = order[most - 1]
    return unsure_rows, again + most, (float(every[last]), int(at[last]))
