"""What a judge said about a sample of a run's answers, as a record and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter

from prefect_raybatch.ledger.layout import JUDGEMENT
from prefect_raybatch.ledger.record_files import put_record, read_record
from prefect_raybatch.ledger.records import dump, with_checksum, without_checksum
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted


@dataclass(frozen=True)
class RejectedAnswer(StrictRecord):
    """An answer that the judge called wrong: what it was asked, cut to a length."""

    asked: str


@dataclass(frozen=True)
class Judgement(StrictRecord):
    """How many answers of the run with this `plan` its judge called right.

    `judge` is the judge's model, and `key` identifies the judge with its prompt and its golden
    rows. The judge called `right` of `rows` sampled answers right; `not_judged` further ones have
    no verdict, because the judge failed. `low` and `high` are the ends of the exact 95 % interval.
    `cost` is that of the judge's run (gpu_hours, total).
    """

    plan: str
    judge: str
    key: str
    right: Count
    rows: Count
    not_judged: Count
    low: Number
    high: Number
    rejected: tuple[RejectedAnswer, ...] = ()
    cost: Mapping[str, Number] = field(default_factory=dict)
    currency: str = ""

    @property
    def share(self) -> float:
        """Return the share of answers that the judge called right, 0 without any."""
        return self.right / self.rows if self.rows else 0.0

    def short(self) -> str:
        """Return e.g. `93.0% (88.5% to 96.1%)`."""
        if not self.rows:
            return "no judged answer"
        return f"{self.share:.1%} ({self.low:.1%} to {self.high:.1%})"

    def text(self) -> str:
        """Return the judged accuracy in one line, with what it was measured on."""
        failed = f"; {self.not_judged:,} not judged" if self.not_judged else ""
        if not self.rows:
            return f"unknown: {self.judge} judged no answer{failed}"
        counts = f"{self.judge} called {self.right:,} of {counted(self.rows, 'answer')} right"
        return f"{self.short()}, {counts}{failed}"


_RECORD = TypeAdapter(Judgement)


def judgement_of(
    *,
    plan: str,
    judge: str,
    key: str,
    verdicts: Sequence[bool | None],
    rejected: Sequence[RejectedAnswer] = (),
    cost: Mapping[str, float] | None = None,
    currency: str = "",
) -> Judgement:
    """Return the judgement of a sample; a verdict is None for a row that was not judged."""
    right, rows = verdicts.count(True), len(verdicts) - verdicts.count(None)
    low, high = interval(right, rows)
    return Judgement(
        plan=plan,
        judge=judge,
        key=key,
        right=right,
        rows=rows,
        not_judged=len(verdicts) - rows,
        low=round(low, 6),
        high=round(high, 6),
        rejected=tuple(rejected),
        cost={name: cost[name] for name in ("gpu_hours", "total") if name in cost} if cost else {},
        currency=currency,
    )


def put_judgement(store: Store, judgement: Judgement) -> None:
    """Write judgement.json of a run."""
    put_record(store, JUDGEMENT, with_checksum(dump(asdict(judgement))))


def read_judgement(store: Store) -> Judgement | None:
    """Return the judgement of a run, or None; raise `CorruptRun` for a malformed record."""
    try:
        data = read_record(store, JUDGEMENT)
    except FileNotFoundError:
        return None
    return read_json(_RECORD, without_checksum(data, f"{store.uri}/{JUDGEMENT}"), JUDGEMENT)
