"""Prepare and finish stages of a cascade's larger model, which answers the unsure rows.

The first model has answered all rows before, in a separate phase. In the blocks of the larger
model, a row that keeps its first answer is marked as failed, so that it skips the engine; the
finish stage then gives it the first answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job.escalate import ANSWERED_BY
from prefect_raybatch.ledger.failures import Loss
from prefect_raybatch.ledger.records import Receipt
from prefect_raybatch.ledger.stats import (
    AGREED,
    CHECKED,
    LARGER_ANSWERED,
    LARGER_FAILED,
    UNANSWERED,
)
from prefect_raybatch.sizing.agreement import comparable_rows
from prefect_raybatch.spec.cascade import CascadeSpec
from prefect_raybatch.stages.block import (
    Failure,
    failures_of,
    is_lost,
    is_passthrough,
    losses,
    lost_block_like,
    numbers_of,
    timed,
    with_failures,
)
from prefect_raybatch.stages.columns import (
    ANSWERS,
    CACHED_TOKENS,
    CHAT,
    ENDS,
    ENGINE_BEGAN,
    FINISH,
    MERGED,
    PARAMS,
    POSITION,
    PROMPT_TOKENS,
    SHARD,
    TEXTS,
    TOKENS,
)
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.output_schema import ResultColumn
from prefect_raybatch.stages.raw_answers import AnswerFiles
from prefect_raybatch.stages.row_outcomes import ColumnValues, FinishedRow, OutputRow
from prefect_raybatch.stages.text_answers import CUT_OFF

KEEPS_FIRST = Failure("cascade", "KeepsFirstAnswer", "the first model's answer is kept")
FAILS_SCHEMA = ("AnswerNotValid", CUT_OFF)
NOT_EMBEDDED = ("PromptTooLong", "EmptyPrompt", "ControlTokenInRow", "OddVector", "NotFinite")
AT = "__rb_index"


@dataclass(frozen=True)
class FirstAnswers:
    """The first model's result, and the choice of rows that the larger model answers.

    `data` and `failed` are the files of the first model's valid and failed rows; rows are looked up
    by row number. `unsure` is the number of rows that meet the conditions of `cascade`.

    `escalated` is the number of unsure rows that get the larger model's answer. If `last` is None,
    all of them get it. Otherwise `last` is the (sureness, row number) of the last one that gets it,
    in ascending order of these pairs; rows in `again` get it too.

    `again` and `checked` are ascending row numbers. In a retry run, `again` has the rows that an
    earlier run sent to the larger model. The larger model answers the rows in `checked` only for
    comparison: they keep the first model's outcome, or fail if the larger model's engine dies of
    them.
    """

    data: AnswerFiles
    failed: AnswerFiles
    cascade: CascadeSpec
    unsure: int = 0
    escalated: int = 0
    last: tuple[float, int] | None = None
    checked: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    again: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def choosing(self, unsure: int, escalated: int, last: tuple[float, int] | None) -> FirstAnswers:
        """Return a copy with these fields, which choose the rows for the larger model."""
        return replace(self, unsure=unsure, escalated=escalated, last=last)

    @property
    def asked(self) -> int:
        """Return the number of rows that the larger model answers, checked rows included."""
        return self.escalated + len(self.checked)

    def is_checked(self, numbers: np.ndarray) -> np.ndarray:
        """Return bool[rows]: whether the larger model answers a row only for comparison.

        `numbers` are the row numbers.
        """
        return np.isin(numbers, self.checked)

    def chosen(self, numbers: np.ndarray) -> np.ndarray:
        """Return bool[rows]: whether each row gets the larger model's answer, by row `numbers`.

        These are the unsure rows: all of them if `last` is None, else those up to `last` and those
        in `again` (see the class). Rows that are only checked are not among them.
        """
        sureness = sureness_of(self, numbers)
        chosen = np.asarray(sureness < np.inf)
        if self.last is None:
            return chosen
        value, number = self.last
        least = (sureness < value) | ((sureness == value) & (numbers <= number))
        return np.asarray(chosen & (least | np.isin(numbers, self.again)))

    def failures(self, numbers: np.ndarray) -> list[Failure | None]:
        """Return why each row failed at the first model; None for an answered row."""
        there, table = self.failed.take(numbers)
        reasons = iter(table.to_pylist() if table is not None else ())
        return [
            Failure(row["stage"], row["error"], row["message"])
            if failed and (row := next(reasons))
            else None
            for failed in there.tolist()
        ]

    def answers(self, numbers: np.ndarray) -> pa.Table | None:
        """Return the first model's result columns for the rows `numbers`; None for no rows.

        Raises `CorruptRun` if a row has no answer.
        """
        there, table = self.data.take(numbers)
        if not there.all():
            raise CorruptRun(f"the first model has no answer to row {numbers[~there][0]}")
        return table


def sureness_of(first: FirstAnswers, numbers: np.ndarray) -> np.ndarray:
    """Return float64[rows]: how sure the first model was of its answers, by row `numbers`.

    For an unsure row, it is the figure that the cascade compares with its threshold: a probability
    or a mean log probability. It is infinity for a row that keeps the first model's outcome. It is
    minus infinity for a row that failed with an error of `failing_kinds`.
    """
    cascade, sureness = first.cascade, np.full(len(numbers), np.inf)
    if kinds := failing_kinds(cascade):
        for i, failure in enumerate(first.failures(numbers)):
            if failure is not None and failure.kind in kinds:
                sureness[i] = -np.inf
    if cascade.measure is not None and cascade.below is not None:
        column = cascade.measure_column
        there, table = replace(first.data, columns=(column,)).take(numbers)
        if table is not None:
            measured = MEASURES[cascade.measure](table[column].combine_chunks())
            measured[~(measured < cascade.below)] = np.inf
            sureness[there] = measured
    return sureness


def failing_kinds(cascade: CascadeSpec) -> tuple[str, ...]:
    """Return the error classes of rows that failed at the first model and go to the larger one."""
    return (FAILS_SCHEMA if cascade.fails_schema else ()) + (
        NOT_EMBEDDED if cascade.classifies else ()
    )


def highest_probabilities(column: pa.Array) -> np.ndarray:
    """Return the probability of the most probable label of each row (float64)."""
    values = column.items.to_numpy(zero_copy_only=False)
    return _reduced(np.maximum, column.offsets.to_numpy(), values)


def mean_logprobs(column: pa.Array) -> np.ndarray:
    """Return the mean log probability of the tokens of each row's answer (float64).

    0 for an answer without tokens.
    """
    offsets = column.offsets.to_numpy()
    values = column.values.field("logprob").to_numpy(zero_copy_only=False).astype(float)
    return np.asarray(_reduced(np.add, offsets, values) / np.maximum(np.diff(offsets), 1))


def _reduced(function: np.ufunc, offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Reduce each list to one number with a NumPy function; 0 for an empty list.

    List i holds values[offsets[i]:offsets[i + 1]].
    """
    made, filled = np.zeros(len(offsets) - 1), np.diff(offsets) > 0
    if filled.any():
        made[filled] = function.reduceat(values[: offsets[-1]], offsets[:-1][filled])
    return made


MEASURES: dict[str, Callable[[pa.Array], np.ndarray]] = {
    "probability": highest_probabilities,
    "logprob": mean_logprobs,
}


@dataclass(frozen=True)
class EscalatePrepare:
    """The prepare stage of a cascade's larger model: only unsure and checked rows become requests.

    `prepare` is the job's usual stage; `hosted`: the larger model is behind an HTTP API.
    """

    prepare: Callable[[pa.Table], pa.Table]
    first: FirstAnswers
    rows_per_shard: int
    hosted: bool

    def __call__(self, table: pa.Table) -> pa.Table:
        """Prepare the rows for the larger model; mark other rows as failed, with KEEPS_FIRST.

        Returns a lost block if the first model's files cannot be read.
        """
        if is_passthrough(table):
            return table
        began = time.time()
        try:
            numbers = numbers_of(table, self.rows_per_shard)
            chosen = self.first.chosen(numbers) | self.first.is_checked(numbers)
        except CorruptRun as error:
            return lost_block_like(table, Loss(type(error).__name__, str(error), fatal=True))
        except Exception as error:  # from the store, so no row's fault
            return lost_block_like(table, Loss.of(error))
        asked = self.prepare(table.filter(pa.array(chosen))) if chosen.any() else None
        if asked is not None and is_lost(asked):  # then the whole block is lost
            return lost_block_like(table, losses(asked)[0])
        if asked is not None and chosen.all():
            return asked
        kept = table.filter(pa.array(~chosen))
        kept = TOKENS.add_to(kept, [[]] * kept.num_rows)
        for column in (PARAMS, *([CHAT] if self.hosted else [])):
            kept = column.add_to(kept, [None] * kept.num_rows)
        kept = with_failures(kept, [KEEPS_FIRST] * kept.num_rows)
        if not self.first.asked:
            kept = _unasked(kept, began)
        kept = timed(kept, "prepare", began)
        if asked is None:
            return kept
        joined = pa.concat_tables([asked, kept], promote_options="default")
        return joined.sort_by([(SHARD, "ascending"), (POSITION, "ascending")]).combine_chunks()


def _unasked(table: pa.Table, began: float) -> pa.Table:
    """Return the block with the columns that an engine adds, without an answer in any row.

    Used if no row of the run goes to the larger model. `began` is when the block came to this
    stage, in seconds since 1970.
    """
    for column in (ANSWERS, TEXTS, FINISH, ENDS, PROMPT_TOKENS, CACHED_TOKENS):
        table = column.add_to(table, [None] * table.num_rows)
    table = MERGED.add_to(table, [False] * table.num_rows)
    table = ENGINE_BEGAN.add_to(table, [began] * table.num_rows)
    return timed(table, "engine", time.time())


def failed_at_larger(receipt: Receipt) -> Receipt:
    """Return the receipt with stats that count its failed rows as failures of the larger model."""
    counts = {LARGER_FAILED: float(len(receipt.failed))}
    return replace(receipt, stats=replace(receipt.stats, others=counts))


@dataclass(frozen=True, kw_only=True)
class EscalateFinish(Finish):
    """The finish stage of a cascade's larger model.

    Rows that were not sent to the larger model, and checked rows, get the first model's answer.
    """

    first: FirstAnswers
    rows_per_shard: int

    def _outcomes(self, table: pa.Table) -> list[FinishedRow]:
        outcomes = super()._outcomes(table)
        kept = self._kept_rows(table)
        if not kept:
            return outcomes
        numbers = numbers_of(table, self.rows_per_shard)[kept]
        for i, failure in zip(kept, self.first.failures(numbers), strict=True):
            outcomes[i] = failure or OutputRow({})
        good = [i for i in kept if isinstance(outcomes[i], OutputRow)]
        answers = self._first_columns(table, good)
        for i, row in zip(good, answers.to_pylist() if answers is not None else (), strict=True):
            outcomes[i] = OutputRow(row)
        return outcomes

    def _first_columns(self, table: pa.Table, rows: Sequence[int]) -> pa.Table | None:
        """Return the first model's result columns for `rows` (indexes in the block).

        The answer column is renamed to its name in this run's result. None if `rows` is empty.
        """
        if not rows:
            return None
        found = self.first.answers(numbers_of(table, self.rows_per_shard)[list(rows)])
        if found is None:
            return None
        found = found.drop_columns(list(self.first.cascade.columns))
        own = self.first.cascade.column  # this run's answer column may have another name
        names = [self.spec.column if name == own else name for name in found.column_names]
        return found.rename_columns(names)

    def _result(
        self, table: pa.Table, rows: Mapping[int, ColumnValues]
    ) -> tuple[list[ResultColumn], dict[int, Failure]]:
        """Return all output columns of the valid rows, extras included, and {row index: failure}.

        `rows` has the answer columns of the valid rows by index in the block. A row that does not
        fit the schema gets a failure.
        """
        kept = set(self._kept_rows(table))
        asked = {i: columns for i, columns in rows.items() if i not in kept}
        columns, misfits = super()._result(table, asked) if asked else ([], {})
        good = [i for i in asked if i not in misfits]
        parts = []
        if good:
            columns = [*columns, *super()._extras(table, good)]
            parts.append(self._part(columns, good, self.first.cascade.larger_name))
        others = [i for i in rows if i in kept]
        if (first := self._first_columns(table, others)) is not None:
            fields = [
                (first.schema.field(n), first[n].combine_chunks()) for n in first.column_names
            ]
            parts.append(self._part(fields, others, self.first.cascade.first_name))
        if not parts:
            return [], misfits
        whole = pa.concat_tables(parts, promote_options="permissive").sort_by(AT)
        whole = whole.drop_columns([AT]).combine_chunks()
        return [(field, whole[field.name].combine_chunks()) for field in whole.schema], misfits

    def _part(self, columns: Sequence[ResultColumn], rows: Sequence[int], name: str) -> pa.Table:
        made = pa.table({AT: pa.array(rows, pa.int64())})
        for column, values in columns:
            made = made.append_column(column, values)
        return made.append_column(ANSWERED_BY, pa.array([name] * len(rows), pa.string()))

    def _extras(self, table: pa.Table, good: list[int]) -> list[ResultColumn]:
        return []

    def _counts(self, table: pa.Table, outcomes: Sequence[FinishedRow]) -> dict[str, float]:
        """Return {name: count}: the counts of `Finish._counts`, and those of the larger model.

        The larger model's counts are:
        - rows that get its answer, and rows that failed at it;
        - checked rows that it answered, and checked rows that it did not answer;
        - checked rows that both models answered equally: all columns are equal except the thinking.

        Lengths and finish reasons of the first model's answers are not counted, because its result
        does not have them.
        """
        kept = set(self._kept_rows(table))
        decided = [outcome for i, outcome in enumerate(outcomes) if i not in kept]
        failed = sum(isinstance(outcome, Failure) for outcome in decided)
        counted = [KEEPS_FIRST if i in kept else row for i, row in enumerate(outcomes)]
        in_result = self._counts_labels() and self.spec.postprocess is None
        counts = {
            **super()._counts(table, outcomes if in_result else counted),
            LARGER_ANSWERED: float(len(decided) - failed),
            LARGER_FAILED: float(failed),
        }
        checked = np.flatnonzero(self._is_checked(table)).tolist()
        if not checked:
            return counts
        larger = [
            row.columns if isinstance(row, OutputRow) else None
            for row in super()._outcomes(table.take(pa.array(checked)))
        ]
        compared = comparable_rows(larger)
        agreed = sum(
            self._is_equal(outcomes[i], other)
            for i, other in zip(checked, larger, strict=True)
            if other is not None
        )
        rows = int(compared.sum())
        figures = {CHECKED: rows, AGREED: agreed, UNANSWERED: len(checked) - rows}
        return {**counts, **{name: float(value) for name, value in figures.items()}}

    def _is_equal(self, first: FinishedRow, larger: ColumnValues) -> bool:
        """Return whether both models' answers to a row are equal in all columns but thinking."""
        parsing = self.spec.parsing
        thoughts = None if parsing is None else parsing.reasoning_column
        return isinstance(first, OutputRow) and all(
            first.columns.get(name) == value for name, value in larger.items() if name != thoughts
        )

    def _is_checked(self, table: pa.Table) -> np.ndarray:
        return self.first.is_checked(numbers_of(table, self.rows_per_shard))

    def _kept_rows(self, table: pa.Table) -> list[int]:
        """Return the indexes of the rows in a block that keep the first model's answer."""
        checked = self._is_checked(table)
        return [i for i, why in enumerate(failures_of(table)) if checked[i] or why == KEEPS_FIRST]
