"""Why an attempt stopped over its error budget: how many rows had failed, and a sample of them.

The shard that crossed the limit is not committed, so its failed rows are in no commit. They are
recorded at the end of the attempt instead. That record only informs people. `failed_sample` returns
rows from it, and failed rows of committed shards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.ledger.layout import POSITION_COLUMN, piece_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import from_parquet
from prefect_raybatch.ledger.records import JsonObject, Piece, Plan
from prefect_raybatch.ledger.row_numbers import RowNumbers
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)

KEPT, SAID = 20, 2  # failed rows that a stop keeps, and that a message shows
TEXT, LINE = 500, 160  # characters of a row's message that are kept and shown
MAX_PIECE = 1 << 30  # bytes
COMMITS_READ = 1000  # commits that are looked through for failed rows: more would take too long
FROM_A_SHARD = 5  # sampled rows of one shard at most, so that others are shown too


@dataclass(frozen=True)
class Sample:
    """A failed row: its row number, with stage, error and message from the quarantine files."""

    row: int
    stage: str
    error: str
    message: str


@dataclass(frozen=True)
class Stop:
    """How an attempt crossed its error budget.

    `rows` rows were planned, and `failed` of them had failed; the limit is `allowed`. `held_back`
    is the number of failed rows in `shard`, which was not committed; `sample` holds some of these.
    `tried` counts the rows that had been tried; None if unknown.
    """

    failed: int
    held_back: int
    allowed: int
    rows: int
    shard: int | None = None
    sample: tuple[Sample, ...] = ()
    tried: int | None = None

    def to_dict(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_note(cls, note: JsonObject) -> Stop | None:
        """Read the stop from the record of an attempt; None if it has none or an unreadable one."""
        try:
            value = dict(note["stopped"])
            value["sample"] = tuple(Sample(**one) for one in value["sample"])
            found = cls(**value)
            numbers = [found.failed, found.held_back, found.allowed, found.rows]
            numbers += [one.row for one in found.sample]
            numbers += [] if found.tried is None else [found.tried]
            return found if all(type(number) is int for number in numbers) else None
        except (KeyError, TypeError, ValueError):
            return None

    def line(self) -> str:
        """Describe the stop in one sentence without a full stop."""
        text = f"{self.share()}, at most {self.allowed:,} may{self.rest()}"
        if self.held_back:
            rest = "all" if self.held_back == self.failed else f"{self.held_back:,} of them"
            text += f"; {rest} in shard {self.shard}, which was therefore not committed"
        return text

    def share(self) -> str:
        """Return e.g. `3 of 40 rows tried failed`.

        If `tried` is None, return the share of the planned rows, e.g. `3 of 100 rows failed`.
        """
        if self.tried is None:
            return f"{self.failed:,} of {counted(self.rows, 'row')} failed"
        return f"{self.failed:,} of {counted(self.tried, 'row')} tried failed"

    def rest(self) -> str:
        """Return e.g. `; 60 were not tried`, to append to a sentence.

        Returns "" if all rows were tried, or if `tried` is None.
        """
        left = 0 if self.tried is None else self.rows - self.tried
        return f"; {left:,} {'was' if left == 1 else 'were'} not tried" if left > 0 else ""

    def lines(self) -> list[str]:
        """Return one line for each of the first SAID (2) failed rows of the sample."""
        return [
            f"row {one.row:,}: {one.stage}: {one.error}: {_short(one.message, LINE)}"
            for one in self.sample[:SAID]
        ]


def failed_rows(
    store: Store, pieces: Iterable[Piece], start: int, numbers: Callable[[], RowNumbers]
) -> tuple[Sample, ...]:
    """Return up to KEPT (20) failed rows from the quarantine files among a shard's `pieces`.

    `start` is the position of the shard's first row in the run's input. `numbers` reads the table
    that turns such positions into row numbers; in a retry run these are the numbers of the original
    input. Unreadable pieces are skipped, because the sample is only for display.
    """
    found: list[Sample] = []
    for piece in pieces:
        if piece.kind == "quarantine" and len(found) < KEPT:
            found += _of_piece(store, piece, start, numbers)
    return tuple(sorted(found, key=lambda one: one.row)[:KEPT])


def _of_piece(
    store: Store, piece: Piece, start: int, numbers: Callable[[], RowNumbers]
) -> list[Sample]:
    names = [POSITION_COLUMN, "stage", "error", "message"]
    try:
        data = store.read(piece_path(piece.path), MAX_PIECE)
        table = from_parquet(data, piece.path, names).slice(0, KEPT)
        rows = numbers().of(table[POSITION_COLUMN].to_numpy() + start).tolist()
        columns = [table[name].to_pylist() for name in names[1:]]
    except (RayBatchError, OSError) as error:
        log.warning("failed rows cannot be shown: %s: %s", type(error).__name__, error)
        return []
    return [
        Sample(int(row), str(stage), str(kind), _short(str(message), TEXT))
        for row, stage, kind, message in zip(rows, *columns, strict=True)
    ]


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def failed_sample(
    uri: str, options: StoreOptions | None, most: int, stop: Stop | None
) -> list[Sample]:
    """Return up to `most` failed rows of a run, sorted by row number.

    They come from committed shards. If `stop` is given, they also come from the shard that crossed
    the error budget in the run's latest attempt. Unreadable rows, or an unreadable run, are only
    logged, because the sample is for display.
    """
    try:
        return _sample(Ledger(open_store(uri, options)), most, stop)
    except (RayBatchError, OSError) as error:
        log.warning("failed rows cannot be shown: %s: %s", type(error).__name__, error)
        return []


def last_stop(uri: str, options: StoreOptions | None) -> Stop | None:
    """Return how a run's latest attempt crossed its error budget; None if it did not.

    Earlier attempts do not count. Also returns None if the run cannot be read.
    """
    try:
        return _latest_stop(Ledger(open_store(uri, options)))
    except (RayBatchError, OSError) as error:
        log.warning("the failed rows are unknown: %s: %s", type(error).__name__, error)
        return None


def _sample(ledger: Ledger, most: int, stop: Stop | None) -> list[Sample]:
    plan = ledger.load_plan()
    if plan is None:
        return []
    found = list(stop.sample[: most // 2]) if stop else []
    committed = _committed(ledger, plan)
    found += islice(committed, most - len(found))
    if stop and len(found) < most:
        found += stop.sample[most // 2 : most - len(found) + most // 2]
    return sorted(found, key=lambda one: one.row)


def _latest_stop(ledger: Ledger) -> Stop | None:
    """Return how the latest readable attempt crossed its error budget; None if it did not."""
    notes = []
    for name in ledger.attempts():
        try:
            notes.append(ledger.read_attempt(name))
        except (CorruptRun, FileNotFoundError):  # only informative: use the other attempts
            continue
    return Stop.from_note(max(notes, key=lambda note: str(note.get("started")))) if notes else None


def _committed(ledger: Ledger, plan: Plan) -> Iterator[Sample]:
    shards, numbers = ledger.shards(plan), partial(ledger.numbers, plan)
    for commit in islice(ledger.commits(plan, ledger.listing(plan)), COMMITS_READ):
        if commit.failed:
            start = shards[commit.shard].start
            yield from failed_rows(ledger.store, commit.pieces, start, numbers)[:FROM_A_SHARD]
