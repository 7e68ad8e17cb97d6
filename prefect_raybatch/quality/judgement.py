"""The judgement of a sample of a run's answers by a judge model, as a record and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from prefect_raybatch.ledger.json_record import JsonRecord
from prefect_raybatch.ledger.layout import JUDGE, JUDGEMENT
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord
from prefect_raybatch.quality.accuracy import Accuracy, interval
from prefect_raybatch.quality.agreement import Agreement
from prefect_raybatch.quality.alarm import ShareSeries
from prefect_raybatch.quality.correction import LEAST_LABELLED, Confusion, Labelled, by_confusion
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

BY_LABELS, BY_CONFUSION = "PPI++", "Rogan-Gladen"  # names of the methods in records and texts
JUDGE_RUNS = "runs"  # folder of a judgement, with the run in which the judge answers


@dataclass(frozen=True)
class RejectedAnswer(StrictRecord):
    """A sampled row whose answer the judge called wrong.

    `shown` is the row with its answer as "column: value, ...", cut to `JUDGED_ROW_SHOWN`
    characters.
    """

    shown: str


@dataclass(frozen=True)
class JudgedRow:
    """A row that was sent to the judge.

    `in_sample`: it is in the random sample, not only a golden row. `verdict`: the judge called its
    answer right (None: not judged). `right`: its answer is right (None: unknown, because the row is
    not golden).
    """

    in_sample: bool
    verdict: bool | None
    right: bool | None = None


@dataclass(frozen=True)
class Corrected(StrictRecord):
    """The accuracy after correction for the judge's errors, with the ends of its 95 % interval.

    `method` is BY_LABELS or BY_CONFUSION. If the verdicts say nothing about the accuracy (see
    `by_confusion`), `share` is None, `low` 0 and `high` 1; this happens only with BY_CONFUSION. The
    last four fields are explained in `Confusion`.
    """

    method: str
    share: Number | None
    low: Number
    high: Number
    right: Count
    right_called_right: Count
    wrong: Count
    wrong_called_right: Count

    def text(self) -> str:
        """Return how the accuracy was corrected, as a phrase for `Judgement.text`."""
        parts = []
        for name, said, rows in (
            ("right", self.right_called_right, self.right),
            ("wrong", self.wrong - self.wrong_called_right, self.wrong),
        ):
            parts.append(f"{said:,} of {rows:,} {name} ones {name}")
        called = f"of which it called {' and '.join(parts)}"
        if self.share is None:
            return f"it does not tell right from wrong on the golden rows, {called}"
        counts = (self.right, self.right_called_right, self.wrong, self.wrong_called_right)
        note = ""
        if self.method == BY_LABELS and not Confusion(*counts).tells_apart:
            note = (
                "; this does not show that it tells right from wrong, so the accuracy rests on the "
                "golden rows"
            )
        return f"corrected by golden rows ({self.method}), {called}{note}"


@dataclass(frozen=True)
class Judgement(StrictRecord):
    """A judge model's verdict on a sample of a run's answers.

    `plan` is the hash of the run's plan, `judge` the judge's model. `key` identifies the judge with
    its prompt and its golden rows. The judge called `right` of `rows` sampled answers right.
    `not_judged` further answers have no verdict, because the judge failed. `low` and `high` are the
    ends of the exact 95 % interval of the uncorrected share `right` / `rows`. `rejected` has some
    of the answers that the judge called wrong.

    `corrected` is the accuracy, corrected for the judge's errors on golden rows. It is None if the
    job has no golden rows, or if they do not allow it; then `uncorrected` says why. `series`
    compares the uncorrected share with earlier runs. `cost` has the "gpu_hours" of the judge's run
    and its "total" cost (in `currency`), each only if known.
    """

    plan: str
    judge: str
    key: str
    right: Count
    rows: Count
    not_judged: Count
    low: Number
    high: Number
    corrected: Corrected | None = None
    uncorrected: str = ""
    rejected: tuple[RejectedAnswer, ...] = ()
    series: ShareSeries | None = None
    cost: Mapping[str, Number] = field(default_factory=dict)
    currency: str = ""

    @property
    def share(self) -> float | None:
        """Return the accuracy (0 to 1), corrected by golden rows if possible; None if unknown."""
        if self.corrected is not None:
            return self.corrected.share
        return self.right / self.rows if self.rows else None

    @property
    def headline(self) -> str:
        """Return the accuracy without its interval, such as `93.0%`; "unknown" if there is none."""
        return "unknown" if self.share is None else f"{self.share:.1%}"

    def short(self) -> str:
        """Return the accuracy with its interval, such as `93.0% (88.5% to 96.1%)`.

        If it is not known, returns "unknown" or "no judged answer".
        """
        if not self.rows:
            return "no judged answer"
        found = self.corrected or self
        if self.share is None:
            return self.headline
        return f"{self.headline} ({found.low:.1%} to {found.high:.1%})"

    def text(self) -> str:
        """Return the judged accuracy in one line, with the numbers of answers it is based on."""
        failed = f"; {self.not_judged:,} not judged" if self.not_judged else ""
        if not self.rows:
            return f"unknown: {self.judge} judged no answer{failed}"
        counts = f"{self.judge} called {self.right:,} of {counted(self.rows, 'answer')} right"
        about = self.corrected.text() if self.corrected else self.uncorrected
        separator = ":" if self.share is None else ","
        return f"{self.short()}{separator} {counts}{failed}{f'; {about}' if about else ''}"

    def remedy(self, least: float) -> str:
        """Return advice for a run whose `low` is below `least`, quality.at_least (0 to 1)."""
        if not self.rows:
            return (
                "All its requests failed: look into quarantine/ of its run, below "
                "_raybatch/judge/, and correct quality.judge.prompt or the model. Or remove "
                "at_least"
            )
        if self.right / self.rows > least:
            return f"Raise quality.judge.sample: {self.rows:,} are too few. Or lower at_least"
        return (
            f"A larger sample cannot help: the judge called {self.right / self.rows:.1%} of the "
            "answers right. Look at the others in the report, or lower at_least"
        )


_FILE = JsonRecord(JUDGEMENT, Judgement)
read_judgement, put_judgement = _FILE.read, _FILE.put


def series_of(
    accuracy: Accuracy | None, judgement: Judgement | None, agreement: Agreement | None
) -> dict[str, ShareSeries]:
    """Return {what a run's answers were compared with: series of this run and earlier ones}.

    The keys are "golden rows" (for `accuracy`), "judge" (for `judgement`) and "larger model" (for
    `agreement`). A key is left out if its record is None or has no series.
    """
    found = {"golden rows": accuracy, "judge": judgement, "larger model": agreement}
    return {name: one.series for name, one in found.items() if one and one.series}


def judgement_of(
    *,
    plan: str,
    judge: str,
    key: str,
    judged: Sequence[JudgedRow],
    has_golden: bool = False,
    rejected: Sequence[RejectedAnswer] = (),
    cost: Mapping[str, float] | None = None,
    currency: str = "",
) -> Judgement:
    """Return the judgement of a sample, corrected if the job has golden rows that allow it.

    `judged` are all rows sent to the judge. Other parameters are fields of `Judgement`.
    """
    verdicts = [row.verdict for row in judged if row.in_sample]
    corrected, why = _corrected(judged) if has_golden else (None, "")
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
        corrected=corrected,
        uncorrected=why,
        rejected=tuple(rejected),
        cost={name: cost[name] for name in ("gpu_hours", "total") if name in cost} if cost else {},
        currency=currency,
    )


def _corrected(judged: Sequence[JudgedRow]) -> tuple[Corrected | None, str]:
    """Return (corrected accuracy, ""), or (None, why it cannot be corrected)."""
    golden = [row for row in judged if row.right is not None and row.verdict is not None]
    counts = Counter((row.right, row.verdict) for row in golden)
    hits, misses = counts[True, True], counts[False, True]
    confusion = Confusion(hits + counts[True, False], hits, misses + counts[False, False], misses)
    inside = Counter((row.right, row.verdict) for row in golden if row.in_sample)
    cells = ((True, True), (True, False), (False, True), (False, False))
    labelled = Labelled(*(inside[cell] for cell in cells))
    sample = [row.verdict for row in judged if row.in_sample and row.verdict is not None]
    if labelled.rows >= LEAST_LABELLED:
        method = BY_LABELS
        called = sum(sample) - inside[True, True] - inside[False, True]
        share, low, high = labelled.estimate(called, len(sample) - labelled.rows)
    else:
        method = BY_CONFUSION
        share, low, high = by_confusion(sum(sample), len(sample), confusion)
        for name in ("right", "wrong"):
            if not getattr(confusion, name):
                why = f"not corrected, because no golden row that was answered {name} was judged"
                return None, f"{why}: add golden rows"
    found = None if math.isnan(share) else round(share, 6)
    return Corrected(method, found, round(low, 6), round(high, 6), **asdict(confusion)), ""


def judge_runs(store: Store) -> Iterator[tuple[str, Store]]:
    """Yield the runs of all judges, as (name of the judgement's folder, run directory).

    A judgement needs a run of its own, in which the judge model answers. `store` is the directory
    of the judged run.
    """
    for judgement in store.sub(JUDGE).folders():
        runs = store.sub(f"{JUDGE}/{judgement}/{JUDGE_RUNS}")
        for name in runs.folders():
            yield judgement, runs.sub(name)


def is_judging(store: Store) -> bool:
    """Return whether a judge's run has begun, but the judgement is not written yet.

    `store` is the directory of the judged run.
    """
    return any(True for _ in store.sub(JUDGE).folders()) and not store.holds(JUDGEMENT)
