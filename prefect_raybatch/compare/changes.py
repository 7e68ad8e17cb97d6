"""Finds which answers changed, and estimates the share of all rows that would change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefect_raybatch.compare.sample import AnswerValues
from prefect_raybatch.quality.accuracy import interval
from prefect_raybatch.words import counted

FAILED_ROW = "(failed)"
LEFT_OUT_ROW = "(left out)"
NO_COLUMN = "(no such column)"
WHOLE_ROW = "(row)"  # in place of a column, if neither side has an answer


@dataclass(frozen=True)
class Change:
    """A row whose answer changed: its number, its input as text, and {column: (old, new value)}."""

    row: int
    input: str
    values: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Diff:
    """The outcome of comparing the answers of a `run` with those of a `job`, on a sample of rows.

    The sample has `rows` of the run's `total` rows; `changed` of them have another answer. `low`
    and `high` are the ends of the exact 95 % interval for the share of all rows that change.
    `columns` is {column: number of rows that changed in it}.

    `newly_failed` rows were answered in the run, and failed now; `newly_answered` rows failed in
    the run, and were answered now. For `reused` rows, the job's requests equal those of the run:
    they were not sent to a model, and keep the run's answers. `notes` are remarks for the user.
    """

    run: str
    job: str
    rows: int
    total: int
    changed: int
    low: float
    high: float
    newly_failed: int
    newly_answered: int
    columns: Mapping[str, int]
    reused: int
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Return the share of the sampled rows that changed."""
        return self.changed / self.rows

    def line(self) -> str:
        """Return the outcome in a sentence."""
        return (
            f"{self.changed:,} of {counted(self.rows, 'sampled row')} changed: {self.share:.1%}; "
            f"of all {self.total:,} rows {self.low:.1%} to {self.high:.1%} (95 % interval)"
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return (name, value) for each figure and note that is shown beside the share."""
        made = [
            ("compared with", self.run),
            ("reused", f"{self.reused:,} rows were not asked: their requests are the run's"),
            ("failed now, answered before", f"{self.newly_failed:,}"),
            ("answered now, failed before", f"{self.newly_answered:,}"),
        ]
        made += [(f"changed in {name}", f"{rows:,}") for name, rows in self.columns.items()]
        return made + [("note", text) for text in self.notes]

    def table(self) -> list[dict[str, Any]]:
        """Return a dict (row, input, column, old, new) for each changed value."""
        return [
            {"row": change.row, "input": change.input, "column": name, "old": before, "new": after}
            for change in self.changes
            for name, (before, after) in change.values.items()
        ]

    def page(self) -> dict[str, Any]:
        """Return the texts, figures and table that the HTML page shows, by name."""
        return {
            "title": f"Answers of {self.job}",
            "line": self.line(),
            "changed": self.changed,
            "facts": self.facts(),
            "rows": self.table(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "share": self.share}


def changes_of(
    numbers: Sequence[int],
    inputs: Sequence[str],
    old: Sequence[AnswerValues],
    new: Sequence[AnswerValues],
    renamed: Mapping[str, str],
) -> tuple[Change, ...]:
    """Return the sampled rows whose answer changed.

    `numbers` are their row numbers, `inputs` their inputs as text, `old` and `new` the answers of
    the run and of the job; each has one entry per sampled row. `renamed` maps column names of the
    new answers to those of the old ones.
    """
    made = []
    for number, given, before, after in zip(numbers, inputs, old, new, strict=True):
        if after is not None:
            after = {renamed.get(name, name): value for name, value in after.items()}
        if values := _differing(before, after):
            made.append(Change(number, given, values))
    return tuple(made)


def diff_of(
    *,
    run: str,
    job: str,
    total: int,
    changes: tuple[Change, ...],
    old: Sequence[AnswerValues],
    new: Sequence[AnswerValues],
    reused: int,
    notes: tuple[str, ...],
) -> Diff:
    """Return the comparison of the `old` and `new` answers to the sampled rows.

    `changes` are the changed rows among them; the run has `total` rows. The other arguments are
    fields of the result.
    """
    low, high = interval(len(changes), len(old))
    if len(old) == total:  # nothing is left to be estimated
        low = high = len(changes) / total
    pairs = list(zip(old, new, strict=True))
    columns = Counter(name for change in changes for name in change.values)
    return Diff(
        *(run, job, len(old), total, len(changes), round(low, 6), round(high, 6)),
        newly_failed=sum(before is not None and after is None for before, after in pairs),
        newly_answered=sum(before is None and bool(after) for before, after in pairs),
        columns=dict(columns.most_common()),
        reused=reused,
        changes=changes,
        notes=notes,
    )


def _differing(old: AnswerValues, new: AnswerValues) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*(old or {}), *(new or {})]) or [WHOLE_ROW]
    pairs = {name: (_value(old, name), _value(new, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if not _is_equal(*pair)}


def _is_equal(old: Any, new: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN, at any depth."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_is_equal(old[name], new[name]) for name in old)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(map(_is_equal, old, new))
    return bool(old == new or (old != old and new != new))


def _value(answer: AnswerValues, name: str) -> Any:
    if answer is None:
        return FAILED_ROW
    return answer.get(name, NO_COLUMN) if answer else LEFT_OUT_ROW
