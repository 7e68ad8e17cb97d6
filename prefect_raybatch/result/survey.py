"""The first half of finalize: checks and counts the commits, and computes the files' layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from prefect_raybatch.errors import CorruptRun, IncompleteRun
from prefect_raybatch.ledger.checkpoints import Listing
from prefect_raybatch.ledger.layout import LAYOUT, POSITION_COLUMN
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.manifest import PieceRow
from prefect_raybatch.ledger.part_layout import (
    WHOLE_SHARDS,
    PartLayout,
    PartSpan,
    ShardSums,
    check_spans,
    choose_spans,
    layout_table,
    put_layout,
    read_layout,
)
from prefect_raybatch.ledger.plan_tables import Shards, encode_schema
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.records import Commit, Plan
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.result.parts import check_unfinished
from prefect_raybatch.result.pieces import check_commit, read_pieces
from prefect_raybatch.words import some_are

_NO_POSITIONS, _NO_STATS = Positions(), ShardStats()  # shared: many commits are in memory at once


@dataclass(frozen=True)
class Survey:
    """Sums over the commits in `listing`.

    `tally` sums up all rows. `sums` has, for each shard, the rows and bytes of its pieces. `pieces`
    has all pieces in input order if they were requested, else it is [].
    """

    listing: Listing
    tally: Tally
    sums: ShardSums
    pieces: list[PieceRow]


def survey(ledger: Ledger, plan: Plan, shards: Shards, pieces: bool) -> Survey:
    """Read, check and count the commits of all shards.

    Raises `IncompleteRun` if some are missing, and `CorruptRun` if they do not hold each planned
    row once. With `pieces`, the survey has a `PieceRow` for each piece. Memory: four numbers per
    shard, and the pieces.
    """
    listing = ledger.listing(plan)
    if not listing.done.all():
        missing = np.flatnonzero(~listing.done)
        raise IncompleteRun(
            f"{some_are(len(missing), plan.shards, 'shard')} not committed (first: {missing[0]}); "
            "run the same command again"
        )
    found = survey_committed(ledger, plan, shards, listing, pieces)
    if found.tally.rows != plan.rows:
        raise CorruptRun(f"the commits have {found.tally.rows} rows, the plan has {plan.rows}")
    return found


def survey_committed(
    ledger: Ledger, plan: Plan, shards: Shards, listing: Listing, pieces: bool = False
) -> Survey:
    """Read, check and count the commits in `listing`; raise `CorruptRun` for a faulty one.

    With `pieces`, the survey has a `PieceRow` for each piece.
    """
    found = Survey(listing, Tally(), ShardSums.empty(plan.shards), [])
    for commit in ledger.commits(plan, listing):
        shard = shards[commit.shard]
        check_commit(commit, shard.rows)
        found.tally.add(commit)
        for piece in commit.pieces:
            found.sums.rows[piece.kind][shard.id] += piece.rows
            found.sums.bytes[piece.kind][shard.id] += piece.bytes
            if pieces:
                found.pieces.append(PieceRow(shard.id, shard.start, piece))
    return found


def layout_of(
    ledger: Ledger, plan: Plan, survey: Survey, row_number: str, file_bytes: int
) -> tuple[PartLayout, tuple[PartSpan, ...]]:
    """Return the recorded layout of the result, and its files; if there is none, record one.

    Parameters are those of `finalize`. Raises `CorruptRun` if the recorded layout does not fit the
    commits or `row_number`, and if there is none although the run is finished.
    """
    if (there := read_layout(ledger, plan)) is not None:
        return _checked(there, survey, row_number)
    made, spans = chosen_layout(ledger, plan, survey, row_number, file_bytes)
    check_unfinished(ledger.store)
    put_layout(ledger, made, spans)
    if (there := read_layout(ledger, plan)) is None:
        raise CorruptRun(f"{LAYOUT} was deleted after it was written; run the same command again")
    return _checked(there, survey, row_number)


def chosen_layout(
    ledger: Ledger, plan: Plan, survey: Survey, row_number: str, file_bytes: int
) -> tuple[PartLayout, tuple[PartSpan, ...]]:
    """Compute the layout of the result from the commits; return (layout, its files).

    Does not record it. Parameters are those of `finalize`.
    """
    spans = choose_spans(survey.sums, file_bytes)
    kinds = sorted(_kinds(spans))  # the order of a set differs between processes
    schemas = {kind: encode_schema(_schema(ledger, plan, survey, kind)) for kind in kinds}
    name = layout_table(spans)
    return PartLayout(plan.hash, WHOLE_SHARDS, file_bytes, row_number, schemas, name), spans


def _checked(
    there: tuple[PartLayout, tuple[PartSpan, ...]], survey: Survey, row_number: str
) -> tuple[PartLayout, tuple[PartSpan, ...]]:
    layout, spans = there
    check_spans(spans, survey.sums)
    if layout.row_number != row_number or layout.schemas.keys() != _kinds(spans):
        raise CorruptRun(f"{LAYOUT} and the plan or the commits have different columns")
    return there


def _kinds(spans: tuple[PartSpan, ...]) -> set[str]:
    return {span.kind for span in spans}


def _schema(ledger: Ledger, plan: Plan, survey: Survey, kind: str) -> pa.Schema:
    """Return the schema of the run's first rows of `kind`, without the column of positions."""
    first = int(np.flatnonzero(survey.sums.rows[kind])[0])
    commit = bare(ledger.read_commit(plan, first), kind)
    ((_, table, _),) = read_pieces(ledger.store, commit)
    return table.drop_columns([POSITION_COLUMN]).schema


def bare(commit: Commit, kind: str) -> Commit:
    """Return a copy of the commit with the pieces and positions of one kind, and no statistics."""
    pieces = tuple(piece for piece in commit.pieces if piece.kind == kind)
    good, failed = commit.good, commit.failed
    good, failed = (good, _NO_POSITIONS) if kind == "data" else (_NO_POSITIONS, failed)
    return replace(
        commit,
        good=good,
        failed=failed,
        skipped=_NO_POSITIONS,
        pieces=pieces,
        stats=_NO_STATS,
        failures={},
        where={},
    )
