"""What plan.json says of a run that reuses answers, and what such a run records of its own answers.

Such a run has two ledgers. `_raybatch/asks/` is an ordinary run over the distinct requests that no
earlier run has answered; the run itself then looks answers up. Its plan holds the plan of the asks,
so whoever begins the asks begins the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import ANSWERS_RECORD, ASKS, BY_ROW_RECORD
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards, from_parquet
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.record_texts import SomePositions
from prefect_raybatch.ledger.records import JsonObject, Plan, digest, dump, load
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json
from prefect_raybatch.storage import Store

# Where a row's answer is: its row makes no request; among those taken over; among those asked for
# this row; among those asked for another row with the same request.
NO_REQUEST, REUSED, ASKED, MERGED_ROW = range(4)
PLACES_ROWS = 1 << 22  # rows of a table of places
OF_ROWS, OF_ASKS = "rows", "asks"  # the two ledgers of a run that reuses
OF_LARGER, OF_FIRST = "larger", "first"  # the two ledgers of a cascade, by model
FIRST_KEY = "first"  # run key of the first model
LEDGERS = (OF_ROWS, OF_ASKS, OF_LARGER, OF_FIRST)


@dataclass(frozen=True)
class RowCounts(StrictRecord):
    """Rows of a run that reuses answers, by the source of their answers. `none` make no request."""

    reused: Count = 0
    merged: Count = 0
    asked: Count = 0
    none: Count = 0


@dataclass(frozen=True)
class AnswerPart(StrictRecord):
    """A file of raw answers: its path in the run directory, and what proves that it is intact.

    `origin` is the run that asked, None where the file names it for each row.
    """

    path: str
    rows: Count
    bytes: Count
    sha256: str
    origin: str | None = None


@dataclass(frozen=True)
class TakenPrecision(StrictRecord):
    """The engine arguments that run `by` (a run key) decided on, with its `min_agreement`."""

    decided: Mapping[str, str]
    min_agreement: Number
    by: str


@dataclass(frozen=True)
class RowAnswers(StrictRecord):
    """A file of raw answers in the order of the run's rows.

    Its column `_row` has the row numbers, from `first` on.
    """

    path: str
    first: Count
    rows: Count
    bytes: Count
    sha256: str


@dataclass(frozen=True)
class AnswersByRow(StrictRecord):
    """The raw answers of all rows of a run in input order. `plan` is the hash of the run's plan."""

    plan: str
    files: tuple[RowAnswers, ...]
    format: int = 1

    def put(self, store: Store) -> None:
        """Write the record.

        Two concurrent writers write equally valid records, and one of them stays.
        """
        put_record_if_absent(store, BY_ROW_RECORD, dump(asdict(self)))


@dataclass(frozen=True)
class Increment(StrictRecord):
    """`Plan.increment`. `ledger` is `rows` in the run itself and `asks` in the run of its asks.

    In a cascade, they are `larger` and `first`: `asks` is the plan by which the first model answers
    all rows, and only `ledger` and `context` are set besides.

    `context` is the hash of what all requests have in common, `parts` what went into it. `places`
    names tables with (kind, at) for each row of the input. `reused` are the files of answers taken
    over, `earlier` the runs that they come from, newest first; `differs` lists the fields whose
    values differ from those of `earlier`, so that nothing was reused. `asks` is the plan of the
    asks. In the plan of the asks, `weights` names the table with the number of rows that wait for
    each ask, `rows` in all. `seconds` is the engine time of one earlier answer, None if unknown.
    `precision` is the earlier decision of a job with `try-fp8`.
    """

    ledger: str
    context: str
    merge: bool = True
    parts: JsonObject = field(default_factory=dict)
    places: tuple[str, ...] = ()
    reused: tuple[AnswerPart, ...] = ()
    asks: JsonObject | None = None
    earlier: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    counts: RowCounts = field(default_factory=RowCounts)
    weights: str | None = None
    rows: Count = 0
    seconds: Number | None = None
    precision: TakenPrecision | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without those that are defaults."""
        value, usual = asdict(self), asdict(Increment(self.ledger, self.context))
        needed = ("ledger", "context")
        return {k: v for k, v in value.items() if k in needed or v != usual[k]}

    @property
    def looks_up(self) -> bool:
        """Return whether the rows look up their answers, so that none of them needs an engine."""
        return self.ledger == OF_ROWS

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the tables beside the plan's own."""
        return (*self.places, *([self.weights] if self.weights else []))


@dataclass(frozen=True)
class Answers(StrictRecord):
    """The raw answers of a finished run, in order.

    They are reused and kept until `until` (seconds since 1970), or as long as the run if None;
    `raybatch reap` deletes them afterwards. `seconds` is the engine time of one answer, None if no
    run measured it. `rejected` marks, by file path, the answers whose rows all failed; they are not
    reused. `checksum` is the SHA-256 of the record without it, None in a record that has none.
    """

    run_key: str
    plan: str
    context: str
    parts: JsonObject
    files: tuple[AnswerPart, ...]
    until: Number | None = None
    seconds: Number | None = None
    format: int = 1
    rejected: Mapping[str, SomePositions] = field(default_factory=dict)
    checksum: str | None = None

    @property
    def expired(self) -> bool:
        return self.until is not None and time.time() >= self.until

    def usable(self, part: AnswerPart) -> np.ndarray:
        """Return bool for each answer in one of the files: whether it may be taken over.

        Raise `CorruptRun` if what was rejected is not readable.
        """
        usable = np.ones(part.rows, bool)
        text = self.rejected.get(part.path)
        if text is not None:
            try:
                usable[Positions.from_text(text, part.rows).numbers] = False
            except ValueError as error:
                raise CorruptRun(f"{ANSWERS_RECORD}: rejected: {part.path}: {error}") from None
        return usable

    def put(self, store: Store) -> None:
        """Write the record once.

        A second writer finds the first one's record, which says the same.
        """
        put_record_if_absent(store, ANSWERS_RECORD, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the record with its checksum."""
        return dump(asdict(replace(self, checksum=self._sum())))

    def _sum(self) -> str:
        return digest(dump({**asdict(self), "checksum": None}))


def increment_of(plan: Plan) -> Increment | None:
    """Return the plan's record of reuse; None if its run neither reuses nor keeps answers."""
    if plan.increment is None:
        return None
    increment = read_json(_INCREMENT, dump(plan.increment), "plan.json: increment")
    if increment.ledger not in LEDGERS:
        raise CorruptRun(
            f"plan.json: increment.ledger is {increment.ledger!r}, not one of {', '.join(LEDGERS)}"
        )
    return increment


def looks_up(plan: Plan) -> bool:
    """Return whether the rows of a run look up their answers, so that none needs an engine."""
    increment = increment_of(plan)
    return increment is not None and increment.looks_up


def is_first_phase(plan: Plan) -> bool:
    """Return whether a plan is that of a run's requests phase, or of a cascade's first model."""
    increment = increment_of(plan)
    return increment is not None and increment.ledger in (OF_ASKS, OF_FIRST)


def ledgers_of(ledger: Ledger, plan: Plan) -> tuple[Ledger, ...]:
    """Return the ledger of a run and, if it has a first phase, that of this phase."""
    increment = increment_of(plan)
    if increment is None or increment.asks is None:
        return (ledger,)
    return (ledger, asks_ledger(ledger.store))


def read_answers(store: Store) -> Answers | None:
    """Return the record of a run's raw answers; None if it keeps none."""
    try:
        data = read_record(store, ANSWERS_RECORD)
    except FileNotFoundError:
        return None
    if load(data, ANSWERS_RECORD).get("format") != 1:
        raise CorruptRun(
            f"{store.uri}/{ANSWERS_RECORD} was written by a newer version. Upgrade prefect-raybatch"
        )
    answers = read_json(_ANSWERS, data, ANSWERS_RECORD)
    if answers.checksum is not None and answers.to_bytes() != data:
        raise CorruptRun(
            f"{store.uri}/{ANSWERS_RECORD} does not match its checksum. Restore the file"
        )
    return answers


def read_answers_by_row(store: Store, plan: Plan) -> AnswersByRow | None:
    """Return the record of the files with answers in row order; None without them."""
    try:
        data = read_record(store, BY_ROW_RECORD)
    except FileNotFoundError:
        return None
    record = read_json(_BY_ROW, data, BY_ROW_RECORD)
    if record.plan != plan.hash or record.format != 1:
        raise CorruptRun(f"{store.uri}/{BY_ROW_RECORD} was written for another plan or version")
    return record


def asks_ledger(store: Store) -> Ledger:
    """Return the ledger of the asks of the run at `store`."""
    return Ledger(store.sub(ASKS))


def begin_asks(store: Store, increment: Increment) -> tuple[Ledger, Plan] | None:
    """Return ledger and plan of the asks of a run; None if it has none.

    The plan is written unless it is there: every caller writes the same bytes, which the run's own
    plan holds.
    """
    if increment.asks is None:
        return None
    ledger, plan = asks_ledger(store), Plan.from_bytes(dump(increment.asks))
    there = ledger.load_plan() or ledger.create_plan(plan, {})
    if there.hash != plan.hash:
        raise CorruptRun(
            f"{ledger.store.uri} holds another run than {store.uri}/_raybatch/plan.json names. "
            "Move it away and run the same command again"
        )
    return ledger, plan


def input_store(store: Store, plan: Plan) -> Store:
    """Return the store that the copy of a run's input is in.

    The first model of a cascade reads the copy of the run itself.
    """
    increment = increment_of(plan)
    if increment is None or increment.ledger != OF_FIRST:
        return store
    above: Store | None = store
    for _ in ASKS.split("/"):
        above = above.above() if above is not None else None
    if above is None:
        raise CorruptRun(f"{store.uri} is not inside the directory of a run")
    return above


def answer_files(plan: Plan, increment: Increment, store: Store) -> tuple[AnswerPart, ...]:
    """Return the files of raw answers of the run at `store`: reused ones, then its asks' own."""
    begun = begin_asks(store, increment)
    success = begun[0].finished(begun[1]) if begun is not None else None
    asked = [
        AnswerPart(f"{ASKS}/{part.path}", part.rows, part.bytes, part.sha256, plan.run_key)
        for part in (success.of("data") if success is not None else ())
    ]
    return (*increment.reused, *asked)


@dataclass(frozen=True)
class Waiting:
    """The number of rows that wait for each ask of a run.

    A failed ask fails all of them, so limits on failed rows count them all.
    """

    rows: int
    starts: np.ndarray
    weights: np.ndarray

    def count(self, shard: int, positions: Positions) -> int:
        """Return how many rows wait for the asks at these positions of a shard."""
        start = int(self.starts[shard])
        return int(self.weights[start + positions.numbers].sum())


def waiting_rows(ledger: Ledger, increment: Increment, shards: Shards) -> Waiting | None:
    """Return the rows that wait for the asks in `ledger`; None for any other run."""
    if increment.weights is None:
        return None
    table = from_parquet(ledger.table(increment.weights), "table of weights", ["rows"])
    weights = table["rows"].to_numpy()
    if weights.dtype != np.int64 or len(weights) != shards.starts[-1]:
        raise CorruptRun(
            f"{increment.weights} does not match the plan: it has {len(weights):,} values of type "
            f"{weights.dtype}, not {shards.starts[-1]:,} of int64"
        )
    return Waiting(increment.rows, shards.starts, weights)


_INCREMENT, _ANSWERS = TypeAdapter(Increment), TypeAdapter(Answers)
_BY_ROW = TypeAdapter(AnswersByRow)
