"""Proves a run's coverage from the files that are there, not from the records' word."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.checkpoints import Listing
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.finalize import FOLDERS, check_commit, read_pieces
from prefect_raybatch.ledger import Ledger
from prefect_raybatch.plan import Shards
from prefect_raybatch.records import Part, Plan
from prefect_raybatch.storage import Store

MOST_NAMED = 20  # faults listed one by one


@dataclass
class Verdict:
    """What was found. `ok` is True only for a finished run whose every row is there once."""

    run: str
    finished: bool
    rows: int
    data: int = 0
    quarantined: int = 0
    skipped: int = 0
    committed_shards: int = 0
    shards: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.finished and not self.faults

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "ok": self.ok}


def verify(store: Store) -> Verdict:
    """Checks a run directory; raises `CorruptRun` only when it holds no readable plan."""
    ledger = Ledger(store)
    plan = ledger.load_plan()
    if plan is None:
        raise CorruptRun(f"{store.uri} holds no _raybatch/plan.json, so it is no run directory")
    shards = ledger.shards(plan)
    summary = ledger.finished()
    found = Verdict(store.uri, summary is not None, plan.rows, shards=plan.shards)
    listing = ledger.listing(plan)
    found.committed_shards = int(listing.done.sum())
    compact = bool(summary and summary.get("compact", True))
    held = _skipped(ledger, plan, shards, listing, found, pieces=not compact)
    if summary is None:
        missing = plan.shards - found.committed_shards
        found.faults.append(f"not finished: {missing} of {plan.shards} shards are not committed")
        return found
    if found.committed_shards < plan.shards:
        missing = plan.shards - found.committed_shards
        _fault(found, f"commits of {missing} of {plan.shards} shards are missing")
    if compact:
        row_number = str(summary.get("row_number", "_row"))
        for kind in FOLDERS:
            held += _files(store, kind, _recorded(summary), row_number, found)
        _prove(held, plan.rows, found)
    return found


def _recorded(summary: dict[str, Any]) -> dict[str, Part]:
    try:
        return {p["path"]: Part(**p) for p in summary["parts"]}
    except (KeyError, TypeError) as error:
        raise CorruptRun(f"_SUCCESS is malformed: {error}") from None


Span = tuple[np.ndarray, np.ndarray, str]  # starts, stops (int64), the file that holds them


def _skipped(
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    listing: Listing,
    found: Verdict,
    pieces: bool,
) -> list[Span]:
    """Checks each commit; rows left out on purpose are known from the commits alone."""
    starts, stops = [], []

    def fault(error: CorruptRun) -> None:
        _fault(found, str(error))

    for commit in ledger.commits(plan, listing, exact=True, on_fault=fault):
        start = shards[commit.shard].start
        try:
            check_commit(commit, shards[commit.shard].rows)
            if pieces:
                for kind, table, _ in read_pieces(ledger.store, commit):
                    _count(found, kind, table.num_rows)
        except CorruptRun as error:
            fault(error)
            continue
        for first, stop in commit.skipped:
            starts.append(start + first)
            stops.append(start + stop)
            found.skipped += stop - first
    return [(np.array(starts, np.int64), np.array(stops, np.int64), "the commits")]


def _files(
    store: Store, kind: str, recorded: dict[str, Part], row_number: str, found: Verdict
) -> list[Span]:
    folder = FOLDERS[kind]
    there = {info.path: info for info in store.list(folder)}
    named = {path: part for path, part in recorded.items() if path.startswith(f"{folder}/")}
    for path in sorted(set(named) - set(there)):
        _fault(found, f"{path}: the file is missing ({named[path].rows:,} rows)")
    for path in sorted(set(there) - set(named)):
        _fault(found, f"{path}: _SUCCESS does not name this file")
    spans = []
    for path in sorted(set(there) & set(named)):
        rows = _rows_of(store, path, named[path], row_number, found)
        if rows is None:
            continue
        _count(found, kind, len(rows))
        ordered = np.sort(rows)
        repeated = ordered[1:][np.diff(ordered) == 0]
        if len(repeated):
            _fault(found, f"{path}: row {repeated[0]} stands there more than once")
        elif (ordered != rows).any():
            _fault(found, f"{path}: rows are out of order near row {_first_disorder(rows)}")
        spans.append((*_to_spans(np.unique(rows)), path))
    return spans


def _rows_of(
    store: Store, path: str, part: Part, row_number: str, found: Verdict
) -> np.ndarray | None:
    with store.open(path) as stream:
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        if checksum != part.sha256:
            _fault(found, f"{path}: its contents are not what finalize wrote")
        stream.seek(0)
        try:
            table = pq.read_table(stream, columns=[row_number])
        except (pa.ArrowException, OSError, KeyError) as error:
            _fault(found, f"{path}: is not readable Parquet: {error}")
            return None
    if (
        table.num_columns != 1
        or table[row_number].null_count
        or not pa.types.is_integer(table.schema.field(row_number).type)
    ):
        _fault(found, f"{path}: has no whole column {row_number}")
        return None
    return table[row_number].to_numpy().astype(np.int64)


def _prove(spans: Iterable[Span], rows: int, found: Verdict) -> None:
    """Whether the spans are a partition of [0, rows); names the first rows that are not."""
    spans = [s for s in spans if len(s[0])]
    starts = np.concatenate([s[0] for s in spans] or [np.zeros(0, np.int64)])
    stops = np.concatenate([s[1] for s in spans] or [np.zeros(0, np.int64)])
    names = [s[2] for s in spans for _ in range(len(s[0]))]
    order = np.argsort(starts, kind="stable")
    reached, last = 0, ""
    for i in order.tolist():
        start, stop = int(starts[i]), int(stops[i])
        if start > reached:
            _fault(found, f"rows {reached} to {start - 1} are missing")
        elif start < reached:
            _fault(found, f"row {start} is in both {last} and {names[i]}")
        if stop > reached:
            reached, last = stop, names[i]
    if reached < rows:
        _fault(found, f"rows {reached} to {rows - 1} are missing")
    elif reached > rows:
        _fault(found, f"{last}: row {reached - 1} is beyond the planned {rows} rows")


def _to_spans(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(rows):
        return rows, rows
    breaks = np.flatnonzero(np.diff(rows) != 1)
    starts = rows[np.concatenate([[0], breaks + 1])]
    stops = rows[np.concatenate([breaks, [len(rows) - 1]])] + 1
    return starts, stops


def _first_disorder(rows: np.ndarray) -> int:
    return int(rows[1:][np.diff(rows) < 0][0])


def _count(found: Verdict, kind: str, rows: int) -> None:
    if kind == "data":
        found.data += rows
    else:
        found.quarantined += rows


def _fault(found: Verdict, text: str) -> None:
    if len(found.faults) < MOST_NAMED:
        found.faults.append(text)
    elif len(found.faults) == MOST_NAMED:
        found.faults.append("... and more")
