"""Partial results: the committed rows of a run that is not complete.

A partial result lies in a separate folder below the run directory, never in data/. The run stays
unfinished: checks for completeness do not look at partial results.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun, NoSuchRun
from prefect_raybatch.ledger.layout import (
    DATA_FOLDER,
    PARTIAL_FOLDER,
    PARTIAL_NAME,
    partial_path,
)
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.record_files import put_record_proved, read_record
from prefect_raybatch.ledger.records import Part, Plan, dump
from prefect_raybatch.ledger.row_numbers import RowNumbers
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)

PARTIAL_RECORD = "_PARTIAL.json"  # readers of the folder skip names with a leading _
PARTIAL_REPORT, PARTIAL_PAGE = "_report.json", "_report.md"
MAX_RANGES_LISTED = 1000  # ranges of missing rows that a record names
_PLACE = re.compile(rf"(?P<run>.+)/{PARTIAL_FOLDER}/(?P<name>_[0-9a-f]{{32}})/*\Z")


@dataclass(frozen=True)
class MissingRows(StrictRecord):
    """The rows that a partial result lacks, because they were not committed.

    `rows` is their number, `shards` the number of their shards. `ranges` are the first
    `MAX_RANGES_LISTED` ranges of their row numbers, as (first, last); `more` counts the ranges not
    listed.
    """

    rows: Count
    shards: Count
    ranges: tuple[tuple[int, int], ...]
    more: Count = 0

    @classmethod
    def of(cls, done: np.ndarray, shards: Shards, numbers: RowNumbers) -> MissingRows:
        """Return the missing rows: those of the shards that are not `done` (bool[shards])."""
        pending = np.flatnonzero(~done)
        rows = int(np.diff(shards.starts)[pending].sum())
        spans = _spans(pending, shards, numbers)
        ranges = tuple(islice(spans, MAX_RANGES_LISTED))
        return cls(rows, len(pending), ranges, sum(1 for _ in spans))

    def text(self, most: int = 5) -> str:
        """Describe the missing rows, e.g. as `1,200 rows (400 to 799, 1,600 to 2,399)`.

        Names at most `most` ranges, and the number of others.
        """
        named = [f"{first:,} to {last:,}" for first, last in self.ranges[:most]]
        left = len(self.ranges) - len(named) + self.more
        named += [f"and {left:,} more ranges"] if left else []
        return f"{counted(self.rows, 'row')} ({', '.join(named)})"


def _spans(pending: np.ndarray, shards: Shards, numbers: RowNumbers) -> Iterator[tuple[int, int]]:
    """Yield the (first, last) row numbers of each range of rows in the `pending` shards, in order.

    `pending` are ascending shard numbers. Adjacent shards make one range, unless the row numbers of
    a retry run have a gap.
    """
    cuts = np.flatnonzero(np.diff(pending) != 1) + 1
    for run in np.split(pending, cuts) if len(pending) else ():
        start, stop = int(shards.starts[run[0]]), int(shards.starts[run[-1] + 1])
        if numbers.table is None:
            yield start, stop - 1
            continue
        rows = numbers.table[start:stop]
        for some in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            yield int(some[0]), int(some[-1])


@dataclass(frozen=True)
class PartialResult(StrictRecord):
    """`partial/_UUID/_PARTIAL.json`: the record of a partial result.

    `name` is _UUID, `plan` the plan's hash. `rows` counts the run's rows; `data`, `quarantine` and
    `skipped` (rows left out) count those that are committed. `at` is when the commits were listed,
    in seconds since 1970; `by` is user@host. `row_number` is the name of the column with row
    numbers.
    """

    warning: str
    name: str
    run_key: str
    plan: str
    at: Number
    by: str
    rows: Count
    data: Count
    quarantine: Count
    skipped: Count
    missing: MissingRows
    parts: tuple[Part, ...]
    row_number: str = "_row"

    def of(self, kind: str) -> list[Part]:
        """Return the files of `kind` (data or quarantine), sorted by number."""
        inside = partial_path(self.name, f"{DATA_FOLDER}/")
        return sorted(
            (part for part in self.parts if part.path.startswith(f"{inside}/") == (kind == "data")),
            key=lambda part: part.order,
        )

    @property
    def line(self) -> str:
        """Describe the rows held and missing in one sentence, without a full stop."""
        held = self.data + self.quarantine + self.skipped
        return f"{held:,} of {counted(self.rows, 'row')}; missing: {self.missing.text()}"

    def put(self, store: Store) -> None:
        """Write the record, after everything else: a folder without it is not a partial result."""
        put_record_proved(store, partial_path(self.name, PARTIAL_RECORD), dump(asdict(self)))


_RECORD = TypeAdapter(PartialResult)


def new_partial_name() -> str:
    """Return a new name for the folder of a partial result: _UUID."""
    return f"_{uuid.uuid4().hex}"


def split_partial(uri: str) -> tuple[str, str | None]:
    """Split the URI of a partial result into (run directory, name); (URI, None) for another URI."""
    match = _PLACE.match(uri)
    return (match["run"], match["name"]) if match else (uri, None)


def read_partial(store: Store, plan: Plan, name: str) -> PartialResult:
    """Return the record of a partial result.

    Raises `NoSuchRun` if no fully written partial result has this name, and `CorruptRun` for a
    malformed record or one of another plan.
    """
    path = partial_path(name, PARTIAL_RECORD)
    try:
        if not PARTIAL_NAME.match(name):
            raise FileNotFoundError(path)
        result = read_json(_RECORD, read_record(store, path), path)
    except FileNotFoundError:
        there = ", ".join(sorted(partial_names(store))) or "none"
        raise NoSuchRun(
            f"{store.uri} has no partial result {name} (it has: {there}). Write one with raybatch "
            "finalize --partial"
        ) from None
    if result.plan != plan.hash or result.name != name:
        raise CorruptRun(f"{store.uri}/{path} was written for another plan ({result.plan[:12]})")
    return result


def partial_names(store: Store) -> list[str]:
    """Return the names of a run's partial results that are fully written."""
    split = (info.path.split("/") for info in store.list(PARTIAL_FOLDER))
    return [
        parts[1]
        for parts in split
        if len(parts) == 3 and parts[2] == PARTIAL_RECORD and PARTIAL_NAME.match(parts[1])
    ]


def all_partials(store: Store, plan: Plan) -> list[PartialResult]:
    """Return the partial results of a run, newest first; unreadable ones are left out (logged)."""
    results = []
    for name in partial_names(store):
        try:
            results.append(read_partial(store, plan, name))
        except (CorruptRun, NoSuchRun) as fault:
            log.warning("the partial result %s is left out: %s", name, fault)
    return sorted(results, key=lambda one: (one.at, one.name), reverse=True)
