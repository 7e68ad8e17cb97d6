"""Finds stored answers that must not be reused, because each row with such an answer failed later.

An answer is stored before it is checked and postprocessed. If all rows with it fail there, the next
run is to send the request again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prefect_raybatch.ledger.increments import (
    NO_REQUEST,
    PLACES_ROWS,
    REUSED,
    Increment,
    begin_requests_phase,
)
from prefect_raybatch.ledger.layout import REQUESTS_FOLDER
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import from_parquet
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.record_texts import SomePositions
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import read_success


def rejected_answers(ledger: Ledger, plan: Plan, increment: Increment) -> dict[str, SomePositions]:
    """Return {file path: positions in the file} of the run's rejected answers.

    An answer is rejected if every row with it failed. A row that postprocess left out did not fail.
    All shards must be committed. Memory: two bytes per answer, and one table of `increment.places`.
    """
    taken = sum(part.rows for part in increment.reused)
    answers = taken + increment.counts.asked
    failed, good = np.zeros(answers, bool), np.zeros(answers, bool)
    places, shards = _Places(ledger, increment, taken), ledger.shards(plan)
    for commit in ledger.every_commit(plan):
        shard = shards[commit.shard]
        numbers = places.of(shard.start, shard.start + shard.rows)
        is_failed = np.zeros(shard.rows, bool)
        is_failed[commit.failed.numbers] = True
        has_answer = numbers >= 0
        failed[numbers[is_failed & has_answer]] = True
        good[numbers[~is_failed & has_answer]] = True
    rejected = np.flatnonzero(failed & ~good)
    made: dict[str, SomePositions] = {}
    start = 0
    for part in increment.reused:
        _note(made, part.path, start, part.rows, rejected)
        start += part.rows
    if len(rejected) and rejected[-1] >= taken:
        at, stored = 0, _request_positions(ledger, increment, rejected[rejected >= taken] - taken)
        for path, rows in _request_files(ledger, increment):
            _note(made, path, at, rows, stored)
            at += rows
    return made


class _Places:
    """Looks up the number of each row's answer; -1 if the row has none.

    Reused answers are numbered from 0. Answers to this run's own requests are numbered from
    `taken`.
    """

    def __init__(self, ledger: Ledger, increment: Increment, taken: int) -> None:
        self._ledger, self._names, self._taken = ledger, increment.places, taken
        self._table, self._numbers = -1, np.zeros(0, np.int64)

    def of(self, start: int, stop: int) -> np.ndarray:
        """Return the answer numbers of rows [start, stop), in input order."""
        found = []
        while start < stop:
            table = start // PLACES_ROWS
            end = min(stop, (table + 1) * PLACES_ROWS)
            first = table * PLACES_ROWS
            found.append(self._of_table(table)[start - first : end - first])
            start = end
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _of_table(self, number: int) -> np.ndarray:
        if number != self._table:
            name = self._names[number]
            table = from_parquet(self._ledger.table(name), name, ["kind", "at"])
            kind, at = table["kind"].to_numpy(), table["at"].to_numpy()
            numbers = np.where(kind == REUSED, at, self._taken + at)
            self._table, self._numbers = number, np.where(kind == NO_REQUEST, -1, numbers)
        return self._numbers


def _note(
    made: dict[str, SomePositions], path: str, start: int, rows: int, rejected: np.ndarray
) -> None:
    """Add to `made` the positions of rejected answers in the file `path`, if it has any.

    The file has `rows` answers, numbered from `start`. `rejected` are the ascending numbers of all
    rejected answers.
    """
    low, high = np.searchsorted(rejected, [start, start + rows])
    if low < high:
        made[path] = Positions.of(rejected[low:high] - start).to_text()


def _request_files(ledger: Ledger, increment: Increment) -> Iterator[tuple[str, int]]:
    begun = begin_requests_phase(ledger.store, increment)
    success = read_success(begun[0].store, begun[1]) if begun is not None else None
    for part in success.of("data") if success is not None else ():
        yield f"{REQUESTS_FOLDER}/{part.path}", part.rows


def _request_positions(ledger: Ledger, increment: Increment, asks: np.ndarray) -> np.ndarray:
    """Return the numbers of the stored answers to the requests with the ascending numbers `asks`.

    Requests are numbered in the order of the requests phase's rows, stored answers in the order of
    their files. A failed request has no stored answer and is left out.
    """
    begun = begin_requests_phase(ledger.store, increment)
    if begun is None:
        return asks[:0]
    theirs, plan = begun
    shards, before, found = theirs.shards(plan), 0, [asks[:0]]
    for commit in theirs.every_commit(plan):
        start = shards[commit.shard].start
        low, high = np.searchsorted(asks, [start, start + shards[commit.shard].rows])
        if low < high:
            stored = commit.good.numbers
            wanted = asks[low:high] - start
            found.append(before + np.flatnonzero(np.isin(stored, wanted)))
        before += len(commit.good)
    return np.concatenate(found)
