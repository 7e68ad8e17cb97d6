"""Removes leftovers of killed attempts from a run directory, and nothing that may still be needed.

Nobody can tell from outside whether a driver is dead or only suspended, so age alone is no reason
to remove a piece. A piece is removed once its shard's commit names others, or once the run is
finished: then no driver, however late it resumes, can make it part of the result. Snapshots and
tables are removed once plan.json exists and names others, because a process that is still making
them will find that plan and use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from prefect_raybatch.ledger.increments import (
    increment_of,
    read_answers,
    read_answers_by_row,
    requests_ledger,
)
from prefect_raybatch.ledger.layout import (
    ANSWERS_RECORD,
    BY_ROW,
    INPUT,
    PART_NOTE_NAME,
    PART_NOTES,
    PARTIAL_FOLDER,
    PARTIAL_NAME,
    PIECE_NAME,
    PIECES,
    REUSED_FOLDER,
    TABLES,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.manifest import pieces_named
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.part_layout import read_layout
from prefect_raybatch.ledger.partials import partial_names
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import check_parts
from prefect_raybatch.storage import FileInfo, Store

REAPED_KINDS = {
    "pieces": "pieces that no commit names",
    "snapshots": "copies of the input that the plan does not name",
    "tables": "tables that the plan does not name",
    "probes": "probes of the store",
    "unfinished": "interrupted writes",
    "partials": "interrupted partial results",
    "notes": "notes about files of a result that is complete",
    "answers": "raw answers past their retention (output.keep_answers)",
}
_TABLE = re.compile(
    r"(shards|files|numbers|uris|classifier|places|weights|layout|parts|manifest)-[0-9a-f]{16}\.parquet\Z"
)
_PROBE = re.compile(r"_probe-[^/]+/")


@dataclass
class Reaped:
    """The numbers of files and bytes that were removed, by kind (`REAPED_KINDS`).

    With `dry_run`, nothing was removed: these are the numbers that would be. The bytes of
    incomplete multipart uploads are unknown and count as 0. `kept` counts the pieces of uncommitted
    shards, which stay.
    """

    run: str
    dry_run: bool
    files: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    kept: int = 0  # pieces of shards that are not committed: a live driver may commit them

    def note(self, kind: str, info: FileInfo) -> None:
        self.files[kind] = self.files.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + info.size


def reap(store: Store, older_than: float = 3600.0, dry_run: bool = False) -> Reaped:
    """Remove leftovers older than `older_than` seconds from a run directory; return their counts.

    The age is by the store's clock. With `dry_run`, only count them. Raises `NoSuchRun` if `store`
    is no run directory, and the store's errors.
    """
    ledger = Ledger(store)
    plan = need_plan(ledger)
    before = store.now() - older_than
    found = Reaped(store.uri, dry_run)

    def take(kind: str, infos: Iterator[FileInfo], where: Store = store) -> None:
        names = []
        for info in infos:
            if info.modified is None or info.modified < before:
                found.note(kind, info)
                names.append(info.path)
        if not dry_run:
            where.delete(names)

    take("pieces", orphans(ledger, plan, on_kept=lambda info: _count(found)))
    take("snapshots", _snapshots(ledger, plan))
    take("tables", _tables(ledger, plan))
    take("partials", _cut_off_partials(store))
    take("notes", obsolete_notes(ledger, plan))
    take("answers", _answers(ledger, plan))
    take("pieces", obsolete_answers(ledger, plan))
    asks = requests_ledger(store)
    if plan.increment is not None and (theirs := asks.load_plan()) is not None:
        pieces = orphans(asks, theirs, on_kept=lambda info: _count(found))
        take("pieces", pieces, asks.store)
        take("snapshots", _snapshots(asks, theirs), asks.store)
        take("tables", _tables(asks, theirs), asks.store)
    take("probes", (info for info in store.list() if _PROBE.match(info.path)))
    for info in store.unfinished(before, remove=not dry_run):
        found.note("unfinished", info)
    return found


def orphans(
    ledger: Ledger,
    plan: Plan,
    on_kept: Callable[[FileInfo], None] = lambda info: None,
) -> Iterator[FileInfo]:
    """Yield pieces that can be deleted; call `on_kept` for pieces of uncommitted shards.

    If a finished run has a result in data/, all pieces can be deleted. Before yielding the first,
    raises `CorruptRun` if a file of that result is missing or changed.
    """
    pieces: Iterable[FileInfo]
    pieces = (info for info in ledger.store.list(PIECES) if PIECE_NAME.match(info.path))
    success = ledger.finished(plan)
    if success is None or not success.compact:
        # Pieces first: later ones are not looked at, and commits only ever grow.
        pieces = list(pieces)
        success = ledger.finished(plan)
        if not pieces:
            return
    if success is not None and success.compact:
        for number, info in enumerate(pieces):  # the result has all their rows
            if not number:
                check_parts(ledger.store, success.parts)
            yield info
        return
    if success is not None:
        done, named = np.ones(plan.shards, bool), pieces_named(ledger.store, success)
    else:
        listing = ledger.listing(plan)
        done, commits = listing.done, ledger.commits(plan, listing)
        named = {p.path for commit in commits for p in commit.pieces}
    for info in pieces:
        match = PIECE_NAME.match(info.path)
        if match is None or info.path.rpartition("/")[2] in named:
            continue
        shard = int(match[1])
        if success is not None or (shard < plan.shards and done[shard]):
            yield info
        else:
            on_kept(info)


def obsolete_notes(ledger: Ledger, plan: Plan) -> Iterator[FileInfo]:
    """Yield a finished run's notes about written result files, which nothing reads any more."""
    if ledger.finished(plan) is not None:
        yield from (i for i in ledger.store.list(PART_NOTES) if PART_NOTE_NAME.match(i.path))


def obsolete_answers(ledger: Ledger, plan: Plan) -> Iterator[FileInfo]:
    """Yield the files of answers in row order that nothing reads any more.

    These are copies of raw answers, which an unfinished run reads. For a finished run, yields all
    of them; else those that the record `by_row.json` does not name. Yields nothing for an
    unfinished run without this record, or if the plan has no `increment` (the run looks up no
    answers).
    """
    if plan.increment is None:
        return
    ended = ledger.finished(plan) is not None
    found = None if ended else read_answers_by_row(ledger.store, plan)
    if ended or found is not None:
        named = {file.path for file in found.files} if found is not None else set()
        yield from (info for info in ledger.store.list(BY_ROW) if info.path not in named)


def _cut_off_partials(store: Store) -> Iterator[FileInfo]:
    """Yield the files of partial results that were never completed: these have no record."""
    found = list(store.list(PARTIAL_FOLDER))
    whole = set(
        partial_names(store)
    )  # listed after the files, since one may be completed meanwhile
    for info in found:
        name = info.path.split("/")[1]
        if PARTIAL_NAME.match(name) and name not in whole:
            yield info


def _snapshots(ledger: Ledger, plan: Plan) -> Iterator[FileInfo]:
    named = {file.uri for file in ledger.files(plan)} if plan.snapshot else set()
    increment = increment_of(plan)
    named |= {part.path for part in increment.reused} if increment is not None else set()
    for folder in (INPUT, REUSED_FOLDER):
        yield from (info for info in ledger.store.list(folder) if info.path not in named)


def _answers(ledger: Ledger, plan: Plan) -> Iterator[FileInfo]:
    """Yield the files of raw answers whose retention has ended, then their record."""
    if plan.increment is None or ledger.finished(plan) is None:
        return
    found = read_answers(ledger.store)
    if found is None or not found.expired:
        return
    for path in (*(part.path for part in found.files), ANSWERS_RECORD):
        with suppress(FileNotFoundError):
            yield ledger.store.stat(path)


def _tables(ledger: Ledger, plan: Plan) -> Iterator[FileInfo]:
    increment = increment_of(plan)
    named = plan.tables
    named |= set(increment.tables) if increment is not None else set()
    layout, success = read_layout(ledger, plan), ledger.finished(plan)
    # Tables whose record does not exist yet may be about to be named.
    pending = ("layout-",) * (layout is None) + ("parts-", "manifest-") * (success is None)
    named |= {layout[0].table} if layout is not None else set()
    tables = (success.manifest, success.parts_table) if success is not None else ()
    named |= {name for name in tables if name is not None}
    for info in ledger.store.list(TABLES, recursive=False):
        name = info.path.rpartition("/")[2]
        if _TABLE.match(name) and name not in named and not name.startswith(pending):
            yield info


def _count(reaped: Reaped) -> None:
    reaped.kept += 1
