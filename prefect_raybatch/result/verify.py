"""Proves a run's coverage from the files that are there, not from the records' word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.checkpoints import Listing
from prefect_raybatch.ledger.layout import PIECES, piece_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Commit, Plan
from prefect_raybatch.ledger.row_numbers import RowNumbers
from prefect_raybatch.ledger.success import read_success
from prefect_raybatch.result.pieces import check_commit, read_pieces
from prefect_raybatch.result.verify_files import Fault, check_folder
from prefect_raybatch.storage import Store
from prefect_raybatch.words import are, counted

MOST_NAMED = 20  # faults listed one by one


@dataclass
class Verdict:
    """What was found. `ok` is True only for a finished run whose every row is there once.

    Orphans are pieces that no commit names: no fault, since nobody reads them. In a run that is
    not finished a live driver may still commit them. Strays are files among the commits that are
    none: no fault either.
    """

    run: str
    finished: bool
    rows: int
    data: int = 0
    quarantined: int = 0
    skipped: int = 0
    committed_shards: int = 0
    shards: int = 0
    faults: list[str] = field(default_factory=list)
    orphans: int = 0
    orphan_bytes: int = 0
    orphan_names: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.finished and not self.faults

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "ok": self.ok}


def verify(store: Store) -> Verdict:
    """Checks a run directory; raises `NoSuchRun` where there is no plan, and `CorruptRun` only when
    that is not readable, or for a `_SUCCESS` that is not this plan's."""
    ledger = Ledger(store)
    plan = need_plan(ledger)
    shards, numbers = ledger.shards(plan), ledger.numbers(plan)
    # Not by `finished`, which stops at the first part that does not fit.
    success = read_success(store, plan)
    found = Verdict(store.uri, success is not None, plan.rows, shards=plan.shards)
    listing = ledger.listing(plan)
    found.committed_shards, found.strays = int(listing.done.sum()), listing.strays
    compact = success is not None and success.compact
    # Listed after the commits: a piece is there before its commit is.
    pieces = {info.path: info.size for info in store.list(PIECES)}
    held = _commits(ledger, plan, shards, numbers, listing, found, None if compact else pieces)
    if not compact:
        _note_orphans(pieces, found)
    if success is None:
        # the run ended meanwhile and removed its pieces
        if found.faults and ledger.finished(plan) is not None:
            return verify(store)
        missing = plan.shards - found.committed_shards
        share = f"{missing} of {counted(plan.shards, 'shard')} {are(missing)}"
        found.faults.append(f"not finished: {share} not committed")
        return found
    if found.committed_shards < plan.shards:
        missing = plan.shards - found.committed_shards
        _fault(found, f"commits of {missing} of {counted(plan.shards, 'shard')} are missing")
    parts = {part.path: part for part in success.parts}
    for kind, folder in plan.folders.items():  # without compaction they are empty
        check = partial(check_folder, store, folder, parts, success.row_number, plan.format)
        held += _files(check, kind, numbers, found)
    if compact:
        _prove(held, numbers, found)
    return found


Span = tuple[np.ndarray, np.ndarray, str]  # starts, stops (int64), the file that holds them


def _commits(
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    numbers: RowNumbers,
    listing: Listing,
    found: Verdict,
    pieces: dict[str, int] | None,
) -> list[Span]:
    """Checks each commit; rows left out on purpose are known from the commits alone.

    `pieces` (path to bytes) are those there, which are checked as well, and taken out of it as
    commits name them; None where they have become the result.
    """
    starts, stops = [], []

    def fault(error: CorruptRun) -> None:
        _fault(found, str(error))

    for commit in ledger.commits(plan, listing, exact=True, on_fault=fault):
        start = shards[commit.shard].start
        try:
            check_commit(commit, shards[commit.shard].rows)
            if pieces is not None:
                _check_pieces(ledger.store, commit, start, numbers, pieces, found)
        except CorruptRun as error:
            fault(error)
            continue
        for first, stop in commit.skipped.ranges:
            starts.append(start + first)
            stops.append(start + stop)
            found.skipped += stop - first
    return [(np.array(starts, np.int64), np.array(stops, np.int64), "the commits")]


def _check_pieces(
    store: Store,
    commit: Commit,
    start: int,
    numbers: RowNumbers,
    pieces: dict[str, int],
    found: Verdict,
) -> None:
    whole = True
    for piece in commit.pieces:
        path = piece_path(piece.path)
        size = pieces.pop(path, None)
        if size != piece.bytes:
            whole = False
            what = "is missing" if size is None else f"has {size} bytes, not {piece.bytes}"
            held = piece.positions.ranges
            named = (numbers.name(start + a, start + b) for a, b in held[:5])
            spans = ", ".join(name.removeprefix("rows ") for name in named)
            _fault(
                found,
                f"{path}, which shard {commit.shard} is committed with, {what}; it held rows "
                f"{spans}{' and more' if len(held) > 5 else ''}",
            )
    if whole:
        for kind, table, _ in read_pieces(store, commit):
            _count(found, kind, table.num_rows)


def _note_orphans(pieces: dict[str, int], found: Verdict) -> None:
    found.orphans, found.orphan_bytes = len(pieces), sum(pieces.values())
    found.orphan_names = sorted(pieces)[:MOST_NAMED]


def _files(
    check: Callable[[Fault], dict[str, np.ndarray]],
    kind: str,
    numbers: RowNumbers,
    found: Verdict,
) -> list[Span]:
    spans = []
    for path, rows in check(partial(_fault, found)).items():
        _count(found, kind, len(rows))
        positions, unknown = numbers.positions(np.unique(rows))
        if len(unknown):
            _fault(found, f"{path}: row {unknown[0]} is none of the rows this run retries")
        spans.append((*_to_spans(positions), path))
    return spans


def _prove(spans: Iterable[Span], numbers: RowNumbers, found: Verdict) -> None:
    """Whether the spans are a partition of all positions; names the first rows that are not."""
    rows = numbers.rows
    spans = [s for s in spans if len(s[0])]
    starts = np.concatenate([s[0] for s in spans] or [np.zeros(0, np.int64)])
    stops = np.concatenate([s[1] for s in spans] or [np.zeros(0, np.int64)])
    names = [s[2] for s in spans for _ in range(len(s[0]))]
    order = np.argsort(starts, kind="stable")
    reached, last = 0, ""
    for i in order.tolist():
        start, stop = int(starts[i]), int(stops[i])
        if start > reached:
            _fault(found, f"{numbers.name(reached, start)} are missing")
        elif start < reached:
            row = numbers.of(starts[i])
            _fault(found, f"row {row} is in both {last} and {names[i]}")
        if stop > reached:
            reached, last = stop, names[i]
    if reached < rows:
        _fault(found, f"{numbers.name(reached, rows)} are missing")
    elif reached > rows:
        _fault(found, f"{last}: row {reached - 1} is beyond the planned {counted(rows, 'row')}")


def _to_spans(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not len(rows):
        return rows, rows
    breaks = np.flatnonzero(np.diff(rows) != 1)
    starts = rows[np.concatenate([[0], breaks + 1])]
    stops = rows[np.concatenate([breaks, [len(rows) - 1]])] + 1
    return starts, stops


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
