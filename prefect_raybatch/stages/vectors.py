"""The finish stage of pooling tasks: turns raw vectors into result vectors, labels or scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from prefect_raybatch.job.tasks import probabilities
from prefect_raybatch.stages.answer_counts import MOST_COUNTED_LABELS, label_counts
from prefect_raybatch.stages.block import Failure, failures_of, input_columns, rows_of
from prefect_raybatch.stages.columns import POSITION, VECTOR
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.output_schema import ResultColumn
from prefect_raybatch.stages.pooling import Pooling
from prefect_raybatch.stages.row_outcomes import ColumnValues, FinishedRow, OutputRow, postprocessed

SMALL = {"float32": np.float32, "float16": np.float16}


@dataclass(frozen=True)
class FinishVectors(Finish):
    """The finish stage for a pooling task: embed, classify or score.

    For task classify, `labels` has the label of each value of a vector.
    """

    task: str = "embed"
    labels: tuple[str, ...] = ()

    def _outcomes(self, table: pa.Table) -> list[FinishedRow]:
        failures = failures_of(table)
        vectors = vectors_of(table) if VECTOR in table.column_names else [None] * len(failures)
        outcomes = [f or self._answer(v) for f, v in zip(failures, vectors, strict=True)]
        if self.spec.postprocess is None:
            return outcomes
        names = input_columns(table)
        rows = rows_of(table, names)
        taken = {POSITION, self.spec.row_number, *self.spec.kept(names)}
        with self.calls.function(self.spec.postprocess, "output.postprocess") as function:
            for i, outcome in enumerate(outcomes):
                if isinstance(outcome, OutputRow):
                    plain = {name: _plain(value) for name, value in outcome.columns.items()}
                    outcomes[i] = postprocessed(function, rows[i], plain, taken)
        return outcomes

    def _counts(self, table: pa.Table, outcomes: Sequence[FinishedRow]) -> dict[str, float]:
        if self.task != "classify" or not 0 < len(self.labels) <= MOST_COUNTED_LABELS:
            return {}
        well = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Failure)]
        if not well:
            return {}
        best = vectors_of(table)[well].argmax(axis=1)
        return label_counts([self.labels[int(at)] for at in best], self.labels)

    def _answer(self, vector: np.ndarray) -> FinishedRow:
        """Return the output columns of a row from its vector, or the row's failure."""
        name = self.spec.column
        if self.task == "score":
            return OutputRow({name: float(vector[0])})
        if self.task == "classify":
            if len(vector) != len(self.labels):
                return Failure(
                    "engine",
                    "OddVector",
                    f"the model returned {len(vector)} probabilities, but its config.json names "
                    f"{len(self.labels)} labels",
                )
            shares = dict(zip(self.labels, vector.tolist(), strict=True))
            best = self.labels[int(vector.argmax())]
            return OutputRow({name: best, probabilities(name): shares})
        with np.errstate(over="ignore"):
            kept = vector.astype(SMALL[self.spec.vector_type])
        if not np.isfinite(kept).all():
            return Failure(
                "postprocess",
                "SchemaError",
                f"a number of the vector ({np.abs(vector).max():g}) is too large for "
                "output.vector_type float16. Use float32",
            )
        return OutputRow({name: kept})

    def _result(
        self, table: pa.Table, rows: Mapping[int, ColumnValues]
    ) -> tuple[list[ResultColumn], dict[int, Failure]]:
        if self.task != "embed" or self.spec.postprocess is not None:
            return super()._result(table, rows)
        vectors = np.stack([row[self.spec.column] for row in rows.values()])
        array = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        return [(pa.field(self.spec.column, array.type), array)], {}

    def _schema(self, rows: Sequence[ColumnValues]) -> pa.Schema:
        if self.spec.postprocess is not None:
            return super()._schema(rows)
        name = self.spec.column
        if self.task == "score":
            return pa.schema([(name, pa.float32())])
        shares = pa.struct([(label, pa.float32()) for label in self.labels])
        return pa.schema([(name, pa.string()), (probabilities(name), shares)])


def finish_of(task: Pooling | None, *args: Any, **more: Any) -> Finish:
    """Return the finish stage for a pooling `task`, or for text generation (None).

    The other arguments are the stage's fields.
    """
    if task is None:
        return Finish(*args, **more)
    return FinishVectors(*args, **{**more, "task": task.task, "labels": task.labels})


def vectors_of(table: pa.Table) -> np.ndarray:
    """Return the vectors of a block as float32[rows, dimension].

    A row without a vector has arbitrary values.
    """
    column = table[VECTOR].combine_chunks()
    size = column.type.list_size
    flat = column.values.slice(column.offset * size, len(column) * size)
    numbers: np.ndarray = flat.to_numpy(zero_copy_only=False)
    return numbers.reshape(len(column), size)


def _plain(value: object) -> object:
    """Return the value for a user's function: a NumPy array as a list, other values unchanged."""
    return value.tolist() if isinstance(value, np.ndarray) else value
