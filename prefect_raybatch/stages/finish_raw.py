"""The finish stage of the requests phase: raw answers, which the rows phase finishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from prefect_raybatch.stages.block import Failure, failures_of
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.output_schema import ResultColumn
from prefect_raybatch.stages.raw_answers import raw_columns
from prefect_raybatch.stages.row_outcomes import ColumnValues, FinishedRow, OutputRow


class RawFinish(Finish):
    """Writes raw answers instead of result columns.

    A truncated answer is kept too: the rows phase decides whether it fails its row.
    """

    def _outcomes(self, table: pa.Table) -> list[FinishedRow]:
        return [failure or OutputRow({}) for failure in failures_of(table)]

    def _result(
        self, table: pa.Table, rows: Mapping[int, ColumnValues]
    ) -> tuple[list[ResultColumn], dict[int, Failure]]:
        answers = raw_columns(table.take(pa.array(list(rows))))
        return [(field, answers[field.name].combine_chunks()) for field in answers.schema], {}

    def _counts(self, table: pa.Table, outcomes: Sequence[FinishedRow]) -> dict[str, float]:
        return {}  # the answers of rows are counted where rows are finished

    def _extras(self, table: pa.Table, good: list[int]) -> list[ResultColumn]:
        return []
