"""Committed pieces to the result in input order, proving coverage on the way.

What goes into which part follows from plan and commits alone, both of which never change once
every shard is committed: two finalizers make parts of the same rows, so it does not matter whose
is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.errors import CorruptRun, IncompleteRun
from prefect_raybatch.job.trust import check_types
from prefect_raybatch.ledger.checkpoints import Listing
from prefect_raybatch.ledger.layout import MANIFEST, POSITION
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Commit, Part, Plan, dump
from prefect_raybatch.ledger.success import check_no_strays, check_parts
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.result.parts import ResultParts
from prefect_raybatch.result.pieces import check_commit, read_pieces
from prefect_raybatch.storage import Store, put_proved, read_ahead
from prefect_raybatch.words import are, counted

SHARDS_AHEAD = 4  # shards whose pieces are read while one is being written


@dataclass(frozen=True)
class Result:
    """What finalize wrote, and the tally of all commits."""

    tally: Tally
    parts: list[Part]


def finalize(
    ledger: Ledger,
    plan: Plan,
    shards: Shards,
    row_number: str,
    file_bytes: int,
    compact: bool = True,
) -> Result:
    """Writes data/ and the quarantine, or the manifest; proves each planned row exactly once.

    `file_bytes` is the aim for a part, in bytes of its pieces. Raises `IncompleteRun` when shards
    are missing and `CorruptRun` naming the piece when coverage does not hold, a stray file of
    the result, or that another finalizer has ended the run. Writes no _SUCCESS: the caller does,
    after its report.
    """
    listing = ledger.listing(plan)
    if not listing.done.all():
        missing = np.flatnonzero(~listing.done)
        raise IncompleteRun(
            f"{len(missing)} of {counted(plan.shards, 'shard')} {are(len(missing))} not "
            f"committed (first: {missing[0]}); run the same command again"
        )
    tally = Tally()

    def guard() -> None:
        if ledger.finished(plan) is not None:
            raise CorruptRun(f"{ledger.store.uri} is finished; nothing is written any more")

    writers = {
        kind: ResultParts(ledger.store, folder, row_number, file_bytes, guard)
        for kind, folder in plan.folders.items()
    }
    numbers = ledger.numbers(plan)
    manifest: list[dict[str, Any]] = []
    for commit, tables in _tables(ledger, plan, shards, listing, compact):
        tally.add(commit)
        start = shards[commit.shard].start
        for piece in commit.pieces:
            manifest.append({"shard": commit.shard, "start": start, "piece": piece.path})
        for kind, table, size in tables:
            positions = table[POSITION].to_numpy().astype(np.int64) + start
            table = table.drop_columns([POSITION])
            writers[kind].write(table, numbers.of(positions), size)
    if tally.rows != plan.rows:
        raise CorruptRun(f"commits hold {tally.rows} rows, the plan {plan.rows}")
    if not compact:
        named = {"numbers": plan.numbers_table} if plan.numbers_table else {}
        guard()
        put_proved(ledger.store, MANIFEST, dump({"pieces": manifest, **named}))
    parts = [part for writer in writers.values() for part in writer.close()]
    check_no_strays(ledger.store, plan, parts)
    check_parts(ledger.store, parts)
    return Result(tally, parts)


def _tables(
    ledger: Ledger, plan: Plan, shards: Shards, listing: Listing, compact: bool
) -> Iterator[tuple[Commit, list[tuple[str, pa.Table, int]]]]:
    """Commits in shard order with their checked tables, pieces read a few shards ahead."""

    def load(commit: Commit) -> tuple[Commit, list[tuple[str, pa.Table, int]]]:
        check_commit(commit, shards[commit.shard].rows)
        if not compact:
            return commit, []
        return commit, list(read_pieces(ledger.store, commit))

    return read_ahead(load, ledger.commits(plan, listing), SHARDS_AHEAD, SHARDS_AHEAD)


def first_rows(store: Store, files: Iterable[str], rows: int) -> pa.Table | None:
    """The first rows of a result, for people; None when there is none."""
    for name in files:
        with store.open(name) as stream:
            parquet = pq.ParquetFile(stream, pre_buffer=False)
            check_types(parquet.schema_arrow, name)
            batch = next(parquet.iter_batches(batch_size=rows, use_threads=False), None)
        if batch is not None:
            return pa.Table.from_batches([batch])
    return None
