"""Small runs on the local store, made with the package's own stages wherever they are cheap."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from helpers.specs import finish_stage, new_plan_of
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Commit, InputFile, Part, Plan, Receipt, Unit
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.report import report as reports
from prefect_raybatch.report.records import put_report
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.stages.block import Failure, tag
from prefect_raybatch.stages.finish import RECEIPT, Finish
from prefect_raybatch.storage import Store, open_store

from .engines import with_answers

MODEL = {"source": "demo", "revision": None, "identity": "0" * 64}
Positions = Iterable[tuple[int, int]]  # (shard, position)


def job_dict(**groups: Any) -> dict[str, Any]:
    """A whole job as a person would write it; a keyword replaces its group."""
    value: dict[str, Any] = {
        "name": "nightly",
        "source": {"uri": "data/in.parquet"},
        "prompt": {"template": "What is {Company}?"},
        "output": {"uri": "out"},
    }
    return {**value, **groups}


def make_job(**groups: Any) -> BatchJob:
    return BatchJob.from_dict(job_dict(**groups))


def input_rows(start: int, rows: int) -> pa.Table:
    """Rows of the input: an id that is the row's number, a text and a nested column."""
    ids = list(range(start, start + rows))
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "Company": [f"Company {i}" for i in ids],
            "tags": pa.array([[f"t{i}"] for i in ids], pa.list_(pa.string())),
        }
    )


@dataclass
class SmallRun:
    """A planned run in a folder. `finish` writes pieces as the Ray stage does."""

    root: Path
    plan: Plan
    shards: Shards
    ledger: Ledger
    store: Store
    job: BatchJob

    def finish(self, attempt: str = "attempt-a") -> Finish:
        return finish_stage(self.job.output, dict(MODEL), self.store, attempt)

    def block(self, unit: Unit, failed: Iterable[int] = (), text: str = "answer") -> pa.Table:
        """What the engine hands to finish for `unit`; `failed` positions failed in the engine."""
        start = self.shards[unit.shard].start + unit.offset
        table = tag(input_rows(start, unit.rows), unit)
        bad = set(failed)
        errors = [
            Failure("engine", "ValueError", "refused").to_dict() if p in bad else None
            for p in range(unit.offset, unit.offset + unit.rows)
        ]
        return with_answers(table, errors, [f"{text} {start + i}" for i in range(unit.rows)])

    def receipt(self, unit: Unit, failed: Iterable[int] = (), attempt: str = "a") -> Receipt:
        (receipt,) = receipts(self.finish(attempt)(self.block(unit, failed)))
        return receipt

    def whole(self, shard: int) -> Unit:
        return Unit(shard, 0, self.shards[shard].rows)

    def commit(self, shard: int, failed: Iterable[int] = (), attempt: str = "a") -> Commit | None:
        receipt = self.receipt(self.whole(shard), failed, attempt)
        return self.ledger.commit(self.plan, self.shards[shard].rows, [receipt])

    def commit_all(self, failed: Positions = ()) -> None:
        bad = set(failed)
        for shard in range(self.plan.shards):
            self.commit(shard, [p for s, p in bad if s == shard])


def receipts(table: pa.Table) -> list[Receipt]:
    return [Receipt.from_json(text) for text in table[RECEIPT].to_pylist()]


def small_run(
    root: Path,
    rows: int = 20,
    per_shard: int = 5,
    key: str = "key",
    created: str | None = None,
    **groups: Any,
) -> SmallRun:
    """A plan over `rows` rows with its tables in a store at `root`; it is made now, or `created`
    (an ISO time)."""
    groups.setdefault("source", {"uri": "data/in.parquet", "rows_per_shard": per_shard})
    job = make_job(**groups)
    files = [InputFile("data/in.parquet", 1000, None, 1, rows)]
    schema = input_rows(0, 1).schema
    plan, tables = new_plan_of(Resolved.of(job, MODEL), key, files, schema, 50.0, snapshot=False)
    store = open_store(str(root))
    ledger = Ledger(store)
    plan = ledger.create_plan(replace(plan, created=created or plan.created), tables)
    return SmallRun(root, plan, ledger.shards(plan), ledger, store, job)


@dataclass
class Passes:
    """A pass for the driver with the real finish stage: rows that kill, fail or are never heard
    of again, and whatever `before` does to the world.

    A poison row takes its unit with it and, where units are not isolated, those of the same
    `window` next to it: what an engine had in flight.
    """

    run: SmallRun
    poison: set[tuple[int, int]] = field(default_factory=set)
    failed: set[tuple[int, int]] = field(default_factory=set)
    silent: bool = False
    window: int = 1
    before: Callable[[int], None] = lambda number: None
    calls: list[tuple[tuple[Unit, ...], bool]] = field(default_factory=list)
    quarantined: list[tuple[Unit, str]] = field(default_factory=list)

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]:
        self.calls.append((tuple(units), isolated))
        self.before(len(self.calls))
        size = 1 if isolated else self.window
        for at in range(0, len(units), size):
            flight = units[at : at + size]
            dead = any(self._kills(unit) for unit in flight)
            for unit in flight:
                if not dead:
                    bad = [p for s, p in self.failed if s == unit.shard]
                    yield self.run.receipt(unit, bad)
                elif not self.silent:
                    yield Receipt.of_lost(unit, "a", Loss("EngineDied", "segmentation fault"))

    def _kills(self, unit: Unit) -> bool:
        return any(
            s == unit.shard and unit.offset <= p < unit.offset + unit.rows for s, p in self.poison
        )

    def quarantine(self, unit: Unit, why: Loss) -> Receipt:
        self.quarantined.append((unit, str(why)))
        rows = self.run.block(unit).select(["__rb_pos", "id", "Company", "tags"])
        failure = Failure("engine", "EngineDied", str(why))
        return self.run.finish().failed(unit, rows, failure, 2)


def success_of(
    run: SmallRun, parts: Iterable[Part] = (), row_number: str = "_row", compact: bool = True
) -> Success:
    """Write the report of a run; return its end as its commits say."""
    tally = Tally()
    for commit in run.ledger.commits(run.plan, run.ledger.listing(run.plan)):
        tally.add(commit)
    counts = (tally.good, tally.failed, tally.skipped)
    put_report(run.store, reports.build(run.store.uri, run.plan, tally, "completed"))
    return Success(run.plan.rows, *counts, tuple(parts), run.plan.hash, compact, row_number, 1.0)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
