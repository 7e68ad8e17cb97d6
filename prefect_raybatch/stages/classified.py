"""The finish stage of a job with an embedding model, whose vectors a classifier labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from prefect_raybatch.distill.classifier import Classifier
from prefect_raybatch.stages.answer_counts import MOST_COUNTED_LABELS, label_counts
from prefect_raybatch.stages.block import failures_of
from prefect_raybatch.stages.columns import CHANCES, PROBABILITIES_TYPE
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.output_schema import ResultColumn
from prefect_raybatch.stages.row_outcomes import ColumnValues, FinishedRow, OutputRow
from prefect_raybatch.stages.vectors import vectors_of


@dataclass(frozen=True, kw_only=True)
class FinishClassified(Finish):
    """The finish stage that answers each row with the most probable label of a `classifier`.

    If vectors do not have the length that the classifier expects, the block is lost and the run
    ends, because all rows would be wrong.
    """

    classifier: Classifier

    def _outcomes(self, table: pa.Table) -> list[FinishedRow]:
        failures = failures_of(table)
        if all(failures):  # then there may be no vector
            return [failure for failure in failures if failure is not None]
        labels = [self.classifier.labels[at] for at in self._chances(table).argmax(axis=1)]
        rows = zip(failures, labels, strict=True)
        return [failure or OutputRow({self.spec.column: label}) for failure, label in rows]

    def _chances(self, table: pa.Table) -> np.ndarray:
        """Return float64[rows, labels]: each row's probability of each label."""
        return self.classifier.probabilities(vectors_of(table))

    def _extras(self, table: pa.Table, good: list[int]) -> list[ResultColumn]:
        if self.spec.probabilities:
            table = table.append_column(str(CHANCES), self._maps(self._chances(table)))
        return super()._extras(table, good)

    def _maps(self, chances: np.ndarray) -> pa.Array:
        """Convert float64[rows, labels] to a map for each row, the most probable label first."""
        rows, number = chances.shape
        order = np.argsort(-chances, axis=1, kind="stable")
        names = pa.array(self.classifier.labels, pa.string()).take(pa.array(order.reshape(-1)))
        values = pa.array(np.take_along_axis(chances, order, axis=1).reshape(-1))
        offsets = pa.array(np.arange(rows + 1) * number, pa.int32())
        return pa.MapArray.from_arrays(offsets, names, values).cast(PROBABILITIES_TYPE)

    def _schema(self, rows: Sequence[ColumnValues]) -> pa.Schema:
        return pa.schema([(self.spec.column, pa.string())])

    def _counts(self, table: pa.Table, outcomes: Sequence[FinishedRow]) -> dict[str, float]:
        labels = self.classifier.labels
        if len(labels) > MOST_COUNTED_LABELS:
            return {}
        rows = [outcome for outcome in outcomes if isinstance(outcome, OutputRow)]
        return label_counts([row.columns[self.spec.column] for row in rows], labels)
