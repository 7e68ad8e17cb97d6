"""Plan and commit records in the run directory, and the proof that shards are covered.

Knows neither Ray nor Prefect. docs/exactly-once.md explains why each shard counts exactly once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.checkpoints import Copies, Listing, folded
from prefect_raybatch.ledger.failures import FailureKey, Failures, add_failures
from prefect_raybatch.ledger.layout import (
    ATTEMPT_NAME,
    ATTEMPTS,
    COMMIT_NAME,
    COMMITS,
    PLAN,
    SUCCESS,
    attempt_path,
    commit_path,
)
from prefect_raybatch.ledger.many_uris import read_uris
from prefect_raybatch.ledger.plan_tables import Shards, read_classifier, read_files, read_shards
from prefect_raybatch.ledger.positions import Positions, Ranges, disjoint
from prefect_raybatch.ledger.record_files import (
    put_record,
    put_record_if_absent,
    put_table,
    read_record,
    read_table,
)
from prefect_raybatch.ledger.records import (
    NO_POSITIONS,
    Commit,
    InputFile,
    JsonObject,
    Plan,
    Receipt,
    dump,
    load,
)
from prefect_raybatch.ledger.row_numbers import RowNumbers, read_numbers
from prefect_raybatch.ledger.same_job import check_same
from prefect_raybatch.ledger.stats import fold_stats
from prefect_raybatch.ledger.success import Success, put_success, read_success
from prefect_raybatch.spec.run import Identity
from prefect_raybatch.storage import Store, read_ahead

FAILURES = 1000  # messages of failed rows that a commit counts separately
READERS = 16  # parallel GETs; one connection alone reads a few hundred records a second


class Ledger:
    """The records of one run directory."""

    def __init__(self, store: Store):
        self.store = store

    # --- plan -------------------------------------------------------------------------------

    def load_plan(self) -> Plan | None:
        """Return the plan, or None if the run has none yet.

        Raises `CorruptRun` for a file that is not a plan.
        """
        try:
            return Plan.from_bytes(read_record(self.store, PLAN))
        except FileNotFoundError:
            return None

    def create_plan(self, plan: Plan, tables: Mapping[str, bytes]) -> Plan:
        """Create the run's plan with its tables ({name: content}), or return the existing plan.

        Tables are written first, under names with their hash, so that plan.json never names a table
        that is missing or belongs to another plan. Raises `PlanMismatch` if the existing plan has
        another fingerprint.
        """
        for name, data in tables.items():
            put_table(self.store, name, data)
        if put_record_if_absent(self.store, PLAN, plan.to_bytes()):
            return plan
        winner = self.load_plan()
        if winner is None:
            raise CorruptRun(f"{self.store.uri}: plan.json exists, but cannot be read")
        check_same(winner, Identity(plan.fingerprint, plan.parts), self.store.uri)
        return winner

    def shards(self, plan: Plan) -> Shards:
        """Return the plan's shards; raise `CorruptRun` if their table does not match the plan."""
        shards = read_shards(self.table(plan.shards_table))
        if len(shards) != plan.shards or int(shards.starts[-1]) != plan.rows:
            raise CorruptRun(
                f"{plan.shards_table} does not match the plan: it has {len(shards):,} shards of "
                f"{int(shards.starts[-1]):,} rows, the plan {plan.shards:,} of {plan.rows:,}"
            )
        return shards

    def files(self, plan: Plan) -> tuple[InputFile, ...]:
        """Return the input files that the plan names."""
        return read_files(self.table(plan.files_table))

    def uris(self, plan: Plan) -> list[str]:
        """Return `source.uri` of the plan's job as a list, complete even if it is very long."""
        if plan.uris_table is not None:
            return read_uris(self.table(plan.uris_table))
        uris = plan.job.get("source", {}).get("uri", [])
        return [uris] if isinstance(uris, str) else list(uris)

    def numbers(self, plan: Plan) -> RowNumbers:
        """Return the number of each row: its position in the input of the run.

        In a retry run, it is the position in the input of the root run.
        """
        if plan.numbers_table is None:
            return RowNumbers(plan.rows)
        return read_numbers(self.table(plan.numbers_table), plan.rows)

    def classifier(self, plan: Plan) -> bytes | None:
        """Return the bytes of the classifier file that the plan's job uses; None if it has none."""
        name = plan.classifier_table
        return None if name is None else read_classifier(self.table(name))

    def table(self, name: str) -> bytes:
        """Return a table that the plan names, checked against the hash in its name.

        Raises `CorruptRun` if it is missing, too large, or does not match the hash.
        """
        return read_table(self.store, name)

    # --- commits ----------------------------------------------------------------------------

    def listing(self, plan: Plan, on_fault: Callable[[CorruptRun], None] | None = None) -> Listing:
        """List commits/ anew and return which shards have a commit record.

        Only names that this package writes count. Copies beside them, such as `00000001 2.json`,
        prove nothing and are returned as strays. For a shard that the plan does not have, calls
        `on_fault` with the error and continues; without `on_fault`, raises `CorruptRun`.
        """
        listing = Listing.empty(plan.shards)
        for info in self.store.list(COMMITS):
            match = COMMIT_NAME.match(info.path)
            if match is None or info.path != commit_path(int(match[1])):
                listing.add_unexpected(info.path)
                continue
            if int(match[1]) >= plan.shards:
                last = plan.shards - 1
                fault = CorruptRun(f"{info.path} is beyond the last shard of the plan ({last})")
                if on_fault is None:
                    raise fault
                on_fault(fault)
                continue
            listing.note(int(match[1]), info)
        return listing

    def committed(self, plan: Plan) -> np.ndarray:
        """List commits/ anew and return bool[shards]: True for a shard with a commit record."""
        return self.listing(plan).done

    def is_committed(self, shard: int) -> bool:
        """Return whether the shard has a commit record, by asking the store."""
        return self.store.holds(commit_path(shard))

    def commits(
        self,
        plan: Plan,
        listing: Listing,
        exact: bool = False,
        on_read: Callable[[Commit], None] = lambda commit: None,
        on_fault: Callable[[CorruptRun], None] | None = None,
        copies: bool = True,
    ) -> Iterator[Commit]:
        """Yield the commits that `listing` shows, in shard order, from checkpoints where possible.

        `exact`: take a record from a checkpoint only if the store's checksum proves it. `copies`
        False: use no checkpoints, and read all records from the store. This also finds a damaged
        record whose checksum in the listing is still the intact one. `on_read` is called with each
        commit that no checkpoint supplied. For a record that is no commit of this plan, calls
        `on_fault` with the error and continues; without `on_fault`, raises `CorruptRun`.
        """
        shards = np.flatnonzero(listing.done).tolist()
        none = Copies(plan.shards, listing.fits)
        with closing(folded(self.store, plan.hash, listing, exact) if copies else none) as known:
            rest = [shard for shard in shards if shard not in known]
            read = read_ahead(partial(self._try_read, plan), rest, READERS, 4 * READERS)
            for shard in shards:
                copied = shard in known
                body = known.take(shard) if copied else None
                if body is not None:
                    commit = _try(plan, shard, body)
                else:
                    commit = self._try_read(plan, shard) if copied else next(read)
                if isinstance(commit, CorruptRun):
                    if on_fault is None:
                        raise commit
                    on_fault(commit)
                    continue
                if body is None:
                    on_read(commit)
                yield commit

    def every_commit(self, plan: Plan) -> Iterator[Commit]:
        """Yield all commits of a complete run; those that the store's listing lacks come last.

        Raises `CorruptRun` if a commit is missing or malformed.
        """
        listing = self.listing(plan)
        yield from self.commits(plan, listing)
        for shard in np.flatnonzero(~listing.done).tolist():
            yield self.read_commit(plan, shard)

    def _try_read(self, plan: Plan, shard: int) -> Commit | CorruptRun:
        try:
            return self.read_commit(plan, shard)
        except CorruptRun as fault:
            return fault

    def read_commit(self, plan: Plan, shard: int) -> Commit:
        """Return one commit, checked against the plan.

        Raises `CorruptRun` if it is missing, malformed, or of another shard or plan.
        """
        path = commit_path(shard)
        try:
            return _commit_of(plan, shard, read_record(self.store, path))
        except FileNotFoundError:
            raise CorruptRun(f"{path} is missing, although its shard was committed") from None

    def commit(self, plan: Plan, rows: int, receipts: list[Receipt]) -> Commit | None:
        """Commit a shard of `rows` rows by one put-if-absent; return None if another driver won.

        Raises `CorruptRun` unless the receipts are disjoint and cover exactly the positions [0,
        rows).
        """
        parts = [receipt.held for receipt in receipts]
        held = disjoint(part for part in parts if part)
        if not all(parts) or held != Positions.spans((0, rows)):
            raise CorruptRun(
                f"shard {receipts[0].shard}: receipts do not cover its {rows} rows exactly once"
            )
        commit = Commit(
            shard=receipts[0].shard,
            attempt=receipts[0].attempt,
            token=uuid.uuid4().hex,
            plan_hash=plan.hash,
            good=_union(r.good for r in receipts),
            failed=_union(r.failed for r in receipts),
            skipped=_union(r.skipped for r in receipts),
            pieces=tuple(piece for r in receipts for piece in r.pieces),
            stats=fold_stats(r.stats for r in receipts),
            failures=_commonest(add_failures(r.failures for r in receipts)),
            where=receipts[-1].where,
            committed=time.time(),
        )
        path = commit_path(commit.shard)
        won = put_record_if_absent(self.store, path, commit.body)
        return commit if won else None

    # --- the end ----------------------------------------------------------------------------

    def finished(self, plan: Plan | None = None) -> Success | None:
        """Return the `_SUCCESS` record of a run, or None while it is not complete.

        `plan` is the run's plan; it is read if None. Raises `CorruptRun` if the record is malformed
        or of another plan, or if there is a record and no plan.
        """
        plan = plan or self.load_plan()
        if plan is None:
            self._check_unplanned()
            return None
        return read_success(self.store, plan)

    def _check_unplanned(self) -> None:
        try:
            self.store.stat(SUCCESS)
        except FileNotFoundError:
            return
        raise CorruptRun(
            f"{self.store.uri} has {SUCCESS}, but no {PLAN}. Nothing was deleted. Restore {PLAN}, "
            "or choose another run key"
        )

    def succeed(self, success: Success) -> None:
        """Write `_SUCCESS` unless it exists."""
        put_success(self.store, success)

    def note_attempt(self, attempt: str, info: JsonObject) -> None:
        """Write the record `info` of an attempt: who drives the run, since when and from where.

        It informs people; correctness does not depend on it.
        """
        put_record(self.store, attempt_path(attempt), dump(dict(info)))

    def attempts(self) -> list[str]:
        """Return the ids of the recorded attempts, active or ended."""
        matches = (ATTEMPT_NAME.match(info.path) for info in self.store.list(ATTEMPTS))
        return [match[1] for match in matches if match]

    def read_attempt(self, attempt: str) -> dict[str, Any]:
        """Return the `info` that `note_attempt` wrote for an attempt.

        Raises `CorruptRun` if it is malformed, and `FileNotFoundError` if it does not exist.
        """
        path = attempt_path(attempt)
        return load(read_record(self.store, path), path)


class Coverage:
    """Collects the receipts of uncommitted shards until their positions cover a shard.

    Ray runs a task again after a death, possibly with other block boundaries. Adding up row counts
    would then commit shards with some rows lost and others doubled, so positions are compared, and
    a receipt that overlaps an earlier one is ignored as a whole.
    """

    def __init__(self, shards: Shards):
        self._shards = shards
        self._parts: dict[int, list[Receipt]] = {}
        self._held: dict[int, Positions] = {}

    def add(self, receipt: Receipt) -> list[Receipt] | None:
        """Add a receipt; return all receipts of its shard once they cover it, else None.

        Ignores a receipt that is empty, overlaps an earlier one, or exceeds the shard. A covered
        shard is then forgotten, so the caller must commit it.
        """
        held = receipt.held
        shard = self._shards[receipt.shard]
        if not held or held.end > shard.rows:
            return None
        union = disjoint((self._held.get(shard.id, NO_POSITIONS), held))
        if union is None:
            return None
        self._held[shard.id] = union
        self._parts.setdefault(shard.id, []).append(receipt)
        if len(union) < shard.rows:
            return None
        del self._held[shard.id]
        return self._parts.pop(shard.id)

    def gaps(self, shard: int) -> Ranges:
        """Return the positions of an uncommitted shard that no receipt covers yet."""
        return self._held.get(shard, NO_POSITIONS).lacking(self._shards[shard].rows).ranges

    def lacking(self, shard: int) -> int:
        """Return the number of positions of an uncommitted shard that no receipt covers yet."""
        return self._shards[shard].rows - len(self._held.get(shard, NO_POSITIONS))

    def drop(self, shard: int) -> None:
        """Forget the receipts of a shard, because another driver committed it."""
        self._held.pop(shard, None)
        self._parts.pop(shard, None)


def _commit_of(plan: Plan, shard: int, body: bytes) -> Commit:
    path = commit_path(shard)
    commit = Commit.from_bytes(body, path)
    if commit.shard != shard:
        raise CorruptRun(f"{path} holds the commit of shard {commit.shard}")
    # A commit under another plan's hash may count other rows: never mix the two.
    if commit.plan_hash != plan.hash:
        raise CorruptRun(f"{path} was written for another plan ({commit.plan_hash[:12]})")
    return commit


def _try(plan: Plan, shard: int, body: bytes) -> Commit | CorruptRun:
    try:
        return _commit_of(plan, shard, body)
    except CorruptRun as fault:
        return fault


def _commonest(failures: Failures) -> Failures:
    """Keep the FAILURES most frequent failure counts, and sum the others by stage and error class.

    Messages that differ from row to row would make the record as large as the rows.
    """
    ordered = sorted(failures.items(), key=lambda item: -item[1])
    kept = dict(ordered[:FAILURES])
    for key, rows in ordered[FAILURES:]:
        other = FailureKey(key.stage, key.error, "(other messages)")
        kept[other] = kept.get(other, 0) + rows
    return kept


def _union(parts: Iterable[Positions]) -> Positions:
    return disjoint(parts) or NO_POSITIONS
