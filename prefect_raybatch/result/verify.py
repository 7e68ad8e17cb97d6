"""Verifies a run: each row is in its files exactly once, and its records are intact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.checkpoints import Listing
from prefect_raybatch.ledger.increments import increment_of, requests_ledger
from prefect_raybatch.ledger.layout import PIECES, REQUESTS_FOLDER, RESULT_FOLDERS, piece_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Commit, Plan
from prefect_raybatch.ledger.row_numbers import RowNumbers, among
from prefect_raybatch.ledger.success import Success, read_success
from prefect_raybatch.result.pieces import check_commit, read_pieces
from prefect_raybatch.result.seen_rows import BLOCK_ROWS, SeenRows
from prefect_raybatch.result.verify_files import check_file, present
from prefect_raybatch.result.verify_records import (
    FILES_AT_ONCE,
    check_answers,
    check_by_row,
    check_reports,
    check_snapshot,
    check_tables,
    requests_success,
)
from prefect_raybatch.storage import Store, read_ahead
from prefect_raybatch.words import counted, some_are

MOST_NAMED = 20  # faults listed one by one
NOT_FINISHED = "not finished"  # first words of the finding about a run without _SUCCESS
COMMIT_RECORDS = "the commits"  # named in findings as the place of rows that were left out


@dataclass
class Verdict:
    """The findings of `verify`. `ok` is true only for a finished run without faults.

    `data`, `quarantined` and `skipped` are numbers of rows. `faults` has a sentence for each of the
    first 20. Orphans are pieces that no commit names: `orphans` is their number, `orphan_names` has
    up to 20. They are not a fault: nothing reads them, and in an unfinished run a live driver may
    still commit them. `strays` are unexpected files among the commits, which are not a fault
    either.
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

    def to_dict(self) -> dict[str, object]:
        return {**self.__dict__, "ok": self.ok}


def verify(store: Store) -> Verdict:
    """Check each row of a run, and everything that a later run depends on; return the findings.

    Raises `NoSuchRun` without a plan, and `CorruptRun` only if the plan or `_SUCCESS` is malformed
    or `_SUCCESS` is of another plan.
    """
    ledger = Ledger(store)
    plan = need_plan(ledger)
    success = read_success(store, plan)
    found = Verdict(store.uri, success is not None, plan.rows, shards=plan.shards)
    check_tables(ledger, plan, success, partial(_fault, found))
    check_reports(ledger, plan, success, partial(_fault, found))
    try:
        shards, numbers = ledger.shards(plan), ledger.numbers(plan)
    except CorruptRun as error:
        if not found.faults:
            _fault(found, str(error))
        return found  # without them rows cannot be identified
    listing = ledger.listing(plan, lambda error: _fault(found, str(error)))
    found.committed_shards, found.strays = int(listing.done.sum()), listing.strays
    compact = success is not None and success.compact
    # Listed after the commits, because a piece is written before its commit.
    pieces = {info.path: info.size for info in store.list(PIECES)}
    seen = SeenRows(plan.rows, MOST_NAMED + 1)
    checked = None if compact else pieces
    _commits(ledger, plan, shards, numbers, listing, found, checked, seen if compact else None)
    if not compact:
        _note_orphans(pieces, found)
    for text in check_answers(ledger, plan, success is not None).faults:
        _fault(found, text)
    if success is None:
        _check_unfinished(ledger, plan, found)
        # the run ended meanwhile and removed its pieces
        if found.faults and ledger.finished(plan) is not None:
            return verify(store)
        missing = plan.shards - found.committed_shards
        share = some_are(missing, plan.shards, "shard")
        found.faults.append(f"{NOT_FINISHED}: {share} not committed")
        return found
    if found.committed_shards < plan.shards:
        missing = plan.shards - found.committed_shards
        _fault(found, f"commits of {missing} of {counted(plan.shards, 'shard')} are missing")
    files = _Files(store, success, numbers)
    for kind, folder in RESULT_FOLDERS.items():  # without compaction they are empty
        files.check(kind, folder, seen, found)
    if compact:
        _prove(seen, numbers, found, partial(_places, ledger, plan, shards, listing, files))
    return found


def _check_unfinished(ledger: Ledger, plan: Plan, verdict: Verdict) -> None:
    """Check what an unfinished run will read; add faults to `verdict`.

    This is the snapshot of its input, its stored answers in row order, and the run of its requests
    phase, which answers the distinct requests.
    """
    try:
        check_snapshot(ledger, plan, partial(_fault, verdict))
        check_by_row(ledger.store, plan, partial(_fault, verdict))
        increment = increment_of(plan)
        if increment is None or increment.asks is None:
            return
        asks = requests_ledger(ledger.store)
        if asks.load_plan() is None or requests_success(ledger.store, increment) is not None:
            return
        inner = verify(asks.store)
    except CorruptRun as error:
        _fault(verdict, str(error))
        return
    for text in inner.faults:
        if not text.startswith(NOT_FINISHED):
            _fault(verdict, f"{REQUESTS_FOLDER}: {text}")


def _commits(
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    numbers: RowNumbers,
    listing: Listing,
    verdict: Verdict,
    pieces: dict[str, int] | None,
    seen: SeenRows | None,
) -> None:
    """Check each commit, and the pieces that it names; add counts and faults to `verdict`.

    `pieces` is {path: size} of the existing pieces; those that commits name are removed from it. It
    is None if the result's files have all rows, because no piece is needed then. If `seen` is
    given, the rows left out by postprocess are added to it, as only commits record them.
    """
    left_out = LeftOutRows()

    def fault(error: CorruptRun) -> None:
        _fault(verdict, str(error))

    for commit in ledger.commits(plan, listing, exact=True, on_fault=fault):
        start = shards[commit.shard].start
        try:
            check_commit(commit, shards[commit.shard].rows)
            if pieces is not None:
                _check_pieces(ledger.store, commit, start, numbers, pieces, verdict)
        except CorruptRun as error:
            fault(error)
            continue
        verdict.skipped += len(commit.skipped)
        if seen is not None and (rows := left_out.take(start, commit)) is not None:
            seen.add(rows)
    if seen is not None:
        seen.add(left_out.rest())


def _check_pieces(
    store: Store,
    commit: Commit,
    start: int,
    numbers: RowNumbers,
    pieces: dict[str, int],
    verdict: Verdict,
) -> None:
    whole = True
    for piece in commit.pieces:
        path = piece_path(piece.path)
        size = pieces.pop(path, None)
        if size != piece.bytes:
            whole = False
            what = "is missing" if size is None else f"has {size} bytes, not {piece.bytes}"
            ranges = piece.positions.ranges
            names = (numbers.name(start + a, start + b) for a, b in ranges[:5])
            spans = ", ".join(name.removeprefix("rows ") for name in names)
            _fault(
                verdict,
                f"{path}, a piece of committed shard {commit.shard}, {what}; it held rows "
                f"{spans}{' and more' if len(ranges) > 5 else ''}",
            )
    if whole:
        for kind, table, _ in read_pieces(store, commit):
            _count(verdict, kind, table.num_rows)


def _note_orphans(pieces: dict[str, int], verdict: Verdict) -> None:
    verdict.orphans, verdict.orphan_bytes = len(pieces), sum(pieces.values())
    verdict.orphan_names = sorted(pieces)[:MOST_NAMED]


class LeftOutRows:
    """Collects rows left out by postprocess from many commits, to handle many rows at a time.

    Handling each commit's rows alone would be slow.
    """

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._rows = 0

    def take(self, start: int, commit: Commit) -> np.ndarray | None:
        """Add the left-out rows of a commit whose shard begins at input row `start`.

        Returns None until many rows are collected; then returns them all (int64 positions in the
        run's input) and forgets them.
        """
        if commit.skipped:
            self._parts.append(start + commit.skipped.numbers)
            self._rows += len(commit.skipped)
        return self.rest() if self._rows >= BLOCK_ROWS else None

    def rest(self) -> np.ndarray:
        """Return all collected rows (int64 positions in the run's input) and forget them."""
        rows: np.ndarray = np.concatenate([np.zeros(0, np.int64), *self._parts])
        self._parts, self._rows = [], 0
        return rows


TakeFrom = Callable[[str, np.ndarray], None]  # a place, and the ascending positions of its rows


class _Files:
    """Reads and checks the files of a result, several at a time."""

    def __init__(self, store: Store, success: Success, numbers: RowNumbers) -> None:
        self.store, self.numbers, self.row_number = store, numbers, success.row_number
        self.parts = {part.path: part for part in success.parts}

    def check(self, kind: str, folder: str, seen: SeenRows, verdict: Verdict) -> None:
        """Check the files of `folder`, which have rows of `kind` ("data" or "quarantine").

        The positions of their rows in the run's input are added to `seen`, counts and faults to
        `verdict`.
        """
        fault = partial(_fault, verdict)
        paths = present(self.store, folder, self.parts, fault)
        read = partial(self._read, lambda path, rows: seen.add(rows))
        for rows, faults in read_ahead(read, paths, FILES_AT_ONCE, FILES_AT_ONCE):
            _count(verdict, kind, rows)
            for text in faults:
                fault(text)

    def again(self, take: TakeFrom) -> None:
        """Read all files a second time; call `take(path, positions of rows)` for each batch.

        The positions are those in the run's input. Missing files are skipped.
        """
        for path in self.parts:
            with suppress(FileNotFoundError):
                self._read(take, path)

    def _read(self, take: TakeFrom, path: str) -> tuple[int, list[str]]:
        """Read and check a file; call `take(path, positions of rows)` for each batch of its rows.

        The positions are those in the run's input. Returns (number of rows in the file, its
        faults).
        """
        faults: list[str] = []

        def fault(text: str) -> None:
            if len(faults) <= MOST_NAMED:
                faults.append(text)

        def known(rows: np.ndarray) -> None:
            positions, unknown = self.numbers.positions(rows)
            if len(unknown):
                fault(f"{path}: row {unknown[0]} is not one of the rows that this run retries")
            low, high = np.searchsorted(positions, [0, self.numbers.rows]).tolist()
            if high < len(positions):
                planned = counted(self.numbers.rows, "row")
                fault(f"{path}: row {positions[-1]} is beyond the planned {planned}")
            if low:
                fault(f"{path}: row {positions[0]} is not a row of the run")
            take(path, positions[low:high])

        part = self.parts[path]
        rows = check_file(self.store, part, self.row_number, known, fault)
        return rows, faults


def _places(
    ledger: Ledger, plan: Plan, shards: Shards, listing: Listing, files: _Files, take: TakeFrom
) -> None:
    """Read all rows a second time, and call `take(place, positions of rows)` for them.

    The place is the path of a file or, for rows left out by postprocess, COMMIT_RECORDS.
    """
    left_out = LeftOutRows()
    for commit in ledger.commits(plan, listing, on_fault=lambda error: None):
        rows = left_out.take(shards[commit.shard].start, commit)
        if rows is not None:
            take(COMMIT_RECORDS, rows)
    take(COMMIT_RECORDS, left_out.rest())
    files.again(take)


def _prove(
    seen: SeenRows, numbers: RowNumbers, verdict: Verdict, places: Callable[[TakeFrom], None]
) -> None:
    """Add faults to `verdict` for the first rows that were not seen, or seen more than once.

    `places(take)` calls `take(place, positions)` for all rows, as `_places` does. It is called only
    if there are duplicate rows, to name the places that have them.
    """
    findings = [
        (start, f"{numbers.name(start, stop)} are missing")
        for start, stop in islice(seen.gaps(), MOST_NAMED + 1)
    ]
    if seen.twice:
        twice = np.unique(np.array(seen.twice, np.int64))
        holders: dict[int, list[str]] = {row: [] for row in twice.tolist()}

        def note(place: str, rows: np.ndarray) -> None:
            for row in twice[among(rows, twice)].tolist():
                holders[row].append(place)

        places(note)
        for row, names in holders.items():
            number = numbers.of(np.array([row]))[0]
            findings.append((row, f"row {number} is in both {' and '.join(names)}"))
    for _, text in sorted(findings):
        _fault(verdict, text)


def _count(verdict: Verdict, kind: str, rows: int) -> None:
    if kind == "data":
        verdict.data += rows
    else:
        verdict.quarantined += rows


def _fault(verdict: Verdict, text: str) -> None:
    if len(verdict.faults) < MOST_NAMED:
        verdict.faults.append(text)
    elif len(verdict.faults) == MOST_NAMED:
        verdict.faults.append("... and more")
