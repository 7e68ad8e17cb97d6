"""Records of runs that reuse or keep answers, and of cascades.

`Increment`, the field `increment` of plan.json, says how a run reuses or keeps answers, or that it
is a cascade. Further records list the files that hold a run's answers.

A run that reuses answers has two ledgers. The one in `_raybatch/asks/` is that of its requests
phase: an ordinary run over the distinct requests that no earlier run has answered. The run itself
then looks up the answer of each row. In a cascade, a first model answers all rows and a larger
model answers some of them again; the second ledger is that of the first model. The run's plan
contains the plan of the second ledger, so every process that begins that phase writes the same
plan.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import ANSWERS_RECORD, BY_ROW_RECORD, REQUESTS_FOLDER
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards, from_parquet
from prefect_raybatch.ledger.positions import Positions
from prefect_raybatch.ledger.record_files import put_record_if_absent, read_record
from prefect_raybatch.ledger.record_texts import SomePositions
from prefect_raybatch.ledger.records import JsonObject, Plan, digest, dump, load
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json
from prefect_raybatch.storage import Store

# The source of a row's answer: none, since the row makes no request; the reused answers; the
# requests phase, by this row's request; the requests phase, by the equal request of another row.
NO_REQUEST, REUSED, ASKED, MERGED_ROW = range(4)
PLACES_ROWS = 1 << 22  # rows of one table in `Increment.places`
OF_ROWS, OF_ASKS = "rows", "asks"  # the two ledgers of a run that reuses
OF_LARGER, OF_FIRST = "larger", "first"  # the two ledgers of a cascade, by model
FIRST_KEY = "first"  # run key of the first model
LEDGERS = (OF_ROWS, OF_ASKS, OF_LARGER, OF_FIRST)


@dataclass(frozen=True)
class RowCounts(StrictRecord):
    """Row counts of a run that reuses answers, by the source of the answer.

    `reused`: an earlier run's answer. `asked`: the answer to a request made for this row. `merged`:
    the answer to the equal request of another row. `none`: no answer, since the row makes no
    request.
    """

    reused: Count = 0
    merged: Count = 0
    asked: Count = 0
    none: Count = 0


@dataclass(frozen=True)
class AnswerPart(StrictRecord):
    """A file of raw answers: its path in the run directory, its rows, and its size and checksum.

    `origin` is the key of the run that inferred the answers, None if the file has a column with it.
    """

    path: str
    rows: Count
    bytes: Count
    sha256: str
    origin: str | None = None


@dataclass(frozen=True)
class TakenPrecision(StrictRecord):
    """The precision that an earlier run decided on.

    `decided` are the engine arguments of that precision, `min_agreement` is the share of equal
    answers that the earlier run required, and `by` is its run key.
    """

    decided: Mapping[str, str]
    min_agreement: Number
    by: str


@dataclass(frozen=True)
class RowAnswers(StrictRecord):
    """A file of raw answers in the order of the run's rows.

    Its column `_row` holds the row numbers; `first` is the first of them.
    """

    path: str
    first: Count
    rows: Count
    bytes: Count
    sha256: str


@dataclass(frozen=True)
class AnswersByRow(StrictRecord):
    """The record of the files that hold the raw answers to all rows of a run, in input order.

    `plan` is the hash of the run's plan.
    """

    plan: str
    files: tuple[RowAnswers, ...]
    format: int = 1

    def put(self, store: Store) -> None:
        """Write the record unless one exists.

        Two concurrent writers write equally valid records, and one of them stays.
        """
        put_record_if_absent(store, BY_ROW_RECORD, dump(asdict(self)))


@dataclass(frozen=True)
class RetryShare(StrictRecord):
    """How many rows of a retry of a cascade may go to the larger model.

    The root run has `rows` rows. It and all its retries together may send at most the share
    `output.escalate.at_most` of these rows to the larger model. Earlier runs already sent `sent`
    rows of this retry; these rows may go again, and `table` is the name of the table with their
    positions. Of the other rows of this retry, at most `more` may go.
    """

    rows: Count
    table: str
    sent: Count
    more: Count


@dataclass(frozen=True)
class Increment(StrictRecord):
    """The value of `Plan.increment`: how a run reuses or keeps answers, or that it is a cascade.

    `ledger` says which plan contains this record:

    - `rows`: the own plan of a run that reuses answers;
    - `asks`: the plan of its requests phase;
    - `larger`: the own plan of a cascade;
    - `first`: the plan of a cascade's first model.

    In an own plan, the field `asks` holds the plan of the requests phase or of the first model. The
    plans of a cascade set no other fields, except that its own plan sets `share` in a retry with
    `output.escalate.at_most`. Their `context` is "".

    `context` is the hash of what all requests have in common, `parts` the values behind it.
    `merge`: equal requests are made once, if sampling gives them equal answers. `places` names
    tables with two columns and a row for each input row: `kind`, the source of its answer
    (NO_REQUEST to MERGED_ROW), and `at`, the index of the answer in that source.

    `reused` are the files of reused answers. `earlier` has the URIs of the runs whose answers could
    be reused (`ReusableRuns.runs`). `differs` has a line `field: old -> new` for each job field in
    which the first of these runs differs from the job. Its answers are not reused for that reason.

    `weights`, in a requests phase, names the table with the number of rows that wait for each
    request. `rows` counts the input rows of the run. `seconds` is the engine time of one earlier
    answer, None if unknown. `precision` is the earlier decision of a job with `try-fp8`.
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
    share: RetryShare | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, leaving out defaults except ledger and context."""
        value, usual = asdict(self), asdict(Increment(self.ledger, self.context))
        needed = ("ledger", "context")
        return {k: v for k, v in value.items() if k in needed or v != usual[k]}

    @property
    def looks_up(self) -> bool:
        """Return whether the run only looks up stored answers: it needs no engine of its own."""
        return self.ledger == OF_ROWS

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the tables to which this record refers: places, weights and share."""
        share = [self.share.table] if self.share is not None else []
        return (*self.places, *([self.weights] if self.weights else []), *share)


@dataclass(frozen=True)
class Answers(StrictRecord):
    """The record of the files that hold a finished run's raw answers.

    They can be reused until `until` (seconds since 1970), or as long as the run exists if None;
    `raybatch reap` deletes them afterwards. `plan` is the plan's hash; `context` and `parts` are as
    in `Increment`. `seconds` is the engine time of one answer, None if no run measured it.
    `rejected` holds, by file path, the positions of answers whose rows all failed; they are not
    reused. `checksum` is the SHA-256 of the record with `checksum` None; a record whose `checksum`
    is None is not checked.
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
        """Return whether the retention of the answers has ended."""
        return self.until is not None and time.time() >= self.until

    def usable(self, part: AnswerPart) -> np.ndarray:
        """Return bool[rows] for one of the files: True for answers that may be reused.

        Raise `CorruptRun` if the file's positions in `rejected` are malformed.
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
        """Write the record unless one exists. All writers of a run write the same content."""
        put_record_if_absent(store, ANSWERS_RECORD, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the record, with its checksum, as the bytes of a JSON file."""
        return dump(asdict(replace(self, checksum=self._sum())))

    def _sum(self) -> str:
        return digest(dump({**asdict(self), "checksum": None}))


def increment_of(plan: Plan) -> Increment | None:
    """Return `Plan.increment` decoded; None if the plan has none.

    Raises `CorruptRun` if it is malformed.
    """
    if plan.increment is None:
        return None
    increment = read_json(_INCREMENT, dump(plan.increment), "plan.json: increment")
    if increment.ledger not in LEDGERS:
        raise CorruptRun(
            f"plan.json: increment.ledger is {increment.ledger!r}, not one of {', '.join(LEDGERS)}"
        )
    return increment


def looks_up(plan: Plan) -> bool:
    """Return whether a run only looks up stored answers, so that it needs no engine of its own.

    These are the answers of earlier runs and of the run's requests phase. The requests phase itself
    uses engines.
    """
    increment = increment_of(plan)
    return increment is not None and increment.looks_up


def is_first_phase(plan: Plan) -> bool:
    """Return whether a plan belongs to a requests phase or to the first model of a cascade."""
    increment = increment_of(plan)
    return increment is not None and increment.ledger in (OF_ASKS, OF_FIRST)


def ledgers_of(ledger: Ledger, plan: Plan) -> tuple[Ledger, ...]:
    """Return the ledger of a run, followed by that of its requests phase or first model, if any.

    The second may not have begun yet.
    """
    increment = increment_of(plan)
    if increment is None or increment.asks is None:
        return (ledger,)
    return (ledger, requests_ledger(ledger.store))


def read_answers(store: Store) -> Answers | None:
    """Return the record of a run's raw answers; None if it keeps none.

    Raises `CorruptRun` if the record is malformed, damaged or from a newer version.
    """
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
    """Return the record of the files with answers in row order; None if the run has none.

    Raises `CorruptRun` if the record is malformed, or of another plan or version.
    """
    try:
        data = read_record(store, BY_ROW_RECORD)
    except FileNotFoundError:
        return None
    record = read_json(_BY_ROW, data, BY_ROW_RECORD)
    if record.plan != plan.hash or record.format != 1:
        raise CorruptRun(f"{store.uri}/{BY_ROW_RECORD} was written for another plan or version")
    return record


def requests_ledger(store: Store) -> Ledger:
    """Return the ledger of a run's requests phase or, in a cascade, of its first model.

    `store` is the run directory. Reads nothing: the phase may not have begun, or not exist.
    """
    return Ledger(store.sub(REQUESTS_FOLDER))


def has_begun(ledger: Ledger, plan: Plan, committed: bool) -> bool:
    """Return whether any shard of a run, of its requests phase or of its first model is committed.

    `committed`: a shard of the run itself is committed.
    """
    increment = increment_of(plan)
    if committed or increment is None or increment.asks is None:
        return committed
    requests = requests_ledger(ledger.store)
    asked = requests.load_plan()
    return asked is not None and bool(requests.committed(asked).any())


def begin_requests_phase(store: Store, increment: Increment) -> tuple[Ledger, Plan] | None:
    """Return (ledger, plan) of a run's requests phase or, in a cascade, of its first model's part.

    Returns None if the run has neither. `store` is the run directory, and `increment` is from the
    run's plan, which holds the plan of that phase. Writes this plan to the phase's own folder
    unless one is there; raises `CorruptRun` if the folder holds another plan.
    """
    if increment.asks is None:
        return None
    ledger, plan = requests_ledger(store), Plan.from_bytes(dump(increment.asks))
    there = ledger.load_plan() or ledger.create_plan(plan, {})
    if there.hash != plan.hash:
        raise CorruptRun(
            f"{ledger.store.uri} holds another run than {store.uri}/_raybatch/plan.json names. "
            "Move it away and run the same command again"
        )
    return ledger, plan


def input_store(store: Store, plan: Plan) -> Store:
    """Return the run directory with the snapshot of a run's input, usually `store` itself.

    The first model of a cascade has a run directory of its own, inside the cascade's directory. For
    it, returns the cascade's directory. Raises `CorruptRun` if `store` is a first model's directory
    that is not inside another one.
    """
    increment = increment_of(plan)
    if increment is None or increment.ledger != OF_FIRST:
        return store
    above: Store | None = store
    for _ in REQUESTS_FOLDER.split("/"):
        above = above.above() if above is not None else None
    if above is None:
        raise CorruptRun(f"{store.uri} is not inside the directory of a run")
    return above


def answer_files(plan: Plan, increment: Increment, store: Store) -> tuple[AnswerPart, ...]:
    """Return the files with raw answers of the run at `store`: reused answers, then inferred ones.

    The files with inferred answers are left out until the requests phase is complete. Writes the
    plan of the requests phase if it is missing (see `begin_requests_phase`).
    """
    begun = begin_requests_phase(store, increment)
    success = begun[0].finished(begun[1]) if begun is not None else None
    asked = [
        AnswerPart(
            f"{REQUESTS_FOLDER}/{part.path}", part.rows, part.bytes, part.sha256, plan.run_key
        )
        for part in (success.of("data") if success is not None else ())
    ]
    return (*increment.reused, *asked)


@dataclass(frozen=True)
class RequestWeights:
    """The number of rows that wait for each request of a requests phase.

    A failed request fails all rows that wait for it, so limits on failed rows count them all.
    `rows` counts all rows of the run. `starts` is int64[shards + 1], the first request of each
    shard; `weights` is int64[requests], the rows that wait for each.
    """

    rows: int
    starts: np.ndarray
    weights: np.ndarray

    def count(self, shard: int, positions: Positions) -> int:
        """Return how many rows wait for the requests at these positions of a shard."""
        start = int(self.starts[shard])
        return int(self.weights[start + positions.numbers].sum())


def waiting_rows(ledger: Ledger, increment: Increment, shards: Shards) -> RequestWeights | None:
    """Read how many rows wait for each request of a requests phase.

    `ledger` and `shards` are those of the requests phase, and `increment` is from its plan. Returns
    None if `increment` names no table of weights, because it is not from a requests phase. Raises
    `CorruptRun` if the table does not match `shards`.
    """
    if increment.weights is None:
        return None
    table = from_parquet(ledger.table(increment.weights), "table of weights", ["rows"])
    weights = table["rows"].to_numpy()
    if weights.dtype != np.int64 or len(weights) != shards.starts[-1]:
        raise CorruptRun(
            f"{increment.weights} does not match the plan: it has {len(weights):,} values of type "
            f"{weights.dtype}, not {shards.starts[-1]:,} of int64"
        )
    return RequestWeights(increment.rows, shards.starts, weights)


_INCREMENT, _ANSWERS = TypeAdapter(Increment), TypeAdapter(Answers)
_BY_ROW = TypeAdapter(AnswersByRow)
