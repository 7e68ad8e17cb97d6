"""The accuracy of a run on its golden rows, with an exact interval, as a record and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect_raybatch.ledger.json_record import JsonRecord
from prefect_raybatch.ledger.layout import QUALITY
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord
from prefect_raybatch.quality.alarm import ShareSeries
from prefect_raybatch.sizing.agreement import lower_bound
from prefect_raybatch.words import counted

CONFIDENCE_OF_END = 0.975  # confidence of each end of a 95 % interval


@dataclass(frozen=True)
class WrongAnswer(StrictRecord):
    """A golden row that was answered wrong: its key, the right answer and the model's answer.

    `row` has the values of the key columns. `answer` is "(failed)" for a failed row. Texts are cut
    to 200 characters.
    """

    row: str
    expected: str
    answer: str


@dataclass(frozen=True)
class Accuracy(StrictRecord):
    """The accuracy of a run on golden rows, whose right answers are known.

    `plan` is the hash of the run's plan. `right` of the `rows` golden rows in the run were answered
    right; `low` and `high` are the ends of the 95 % interval of that share. `unanswered` further
    golden rows are not in the run. `wrong` has some of the wrong answers. `series` compares the run
    with earlier ones.
    """

    plan: str
    right: Count
    rows: Count
    unanswered: Count
    low: Number
    high: Number
    wrong: tuple[WrongAnswer, ...] = ()
    series: ShareSeries | None = None

    @property
    def share(self) -> float:
        """Return the share of right answers, from 0 to 1; 0 if no golden row is in the run."""
        return self.right / self.rows if self.rows else 0.0

    def short(self) -> str:
        """Return the share with its interval, such as `93.0% (88.5% to 96.1%)`.

        Return "no golden row" if none is in the run.
        """
        if not self.rows:
            return "no golden row"
        return f"{self.share:.1%} ({self.low:.1%} to {self.high:.1%})"

    def text(self) -> str:
        """Return the accuracy in one line, with the numbers of golden rows it is based on."""
        missing = f"; {self.unanswered:,} have no answer in this run" if self.unanswered else ""
        if not self.rows:
            return f"unknown: none of {counted(self.unanswered, 'golden row')} has an answer"
        counts = f"{self.right:,} of {counted(self.rows, 'golden row')} right"
        return f"{self.short()}, {counts}{missing}"

    def remedy(self, least: float, golden: str) -> str:
        """Return advice for a run whose interval has its lower end below `least`.

        `least` is quality.at_least (0 to 1). `golden` is the golden file.
        """
        if not self.rows:
            return f"Correct the keys in {golden}, or quality.key, or remove quality.at_least"
        if self.share > least:
            return f"Add golden rows: {self.rows:,} are too few to show it. Or lower at_least"
        return (
            f"More golden rows cannot help: {self.share:.1%} of the answers are right. Look at the "
            "wrong ones in the report. Correct the golden file, or lower at_least"
        )


_FILE = JsonRecord(QUALITY, Accuracy)
read_accuracy, put_accuracy = _FILE.read, _FILE.put


def interval(right: int, rows: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share (Clopper and Pearson); (0, 1) without rows."""
    if not rows:
        return 0.0, 1.0
    low = lower_bound(right, rows, CONFIDENCE_OF_END)
    return low, 1.0 - lower_bound(rows - right, rows, CONFIDENCE_OF_END)


def accuracy_of(
    plan: str, right: int, rows: int, unanswered: int, wrong: Sequence[WrongAnswer] = ()
) -> Accuracy:
    """Compute the 95 % interval; return the accuracy record of the run with plan hash `plan`."""
    low, high = interval(right, rows)
    return Accuracy(plan, right, rows, unanswered, round(low, 6), round(high, 6), tuple(wrong))
