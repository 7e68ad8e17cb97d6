"""The finish stage of the requests phase: raw answers, which the rows phase finishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from prefect_raybatch.stages.block import Failure
from prefect_raybatch.stages.columns import ERROR
from prefect_raybatch.stages.finish import Finish
from prefect_raybatch.stages.raw_answers import raw_columns


class RawFinish(Finish):
    """Writes raw answers instead of result columns.

    A truncated answer is kept too: the rows phase decides whether it fails its row.
    """

    def _outcome(self, table: pa.Table) -> list[dict[str, Any] | Failure | None]:
        return [Failure(**error) if error else {} for error in table[ERROR].to_pylist()]

    def _result(
        self, table: pa.Table, outcome: list[Any], good: list[int]
    ) -> tuple[list[tuple[pa.Field, pa.Array]], dict[int, Failure]]:
        rows = raw_columns(table.take(pa.array(good)))
        made = [(field, rows[field.name].combine_chunks()) for field in rows.schema]
        return made, {}

    def _counts(self, table: pa.Table, outcome: Sequence[Any]) -> dict[str, float]:
        return {}  # the answers of rows are counted where rows are finished

    def _extras(self, table: pa.Table, good: list[int]) -> list[tuple[pa.Field, pa.Array]]:
        return []
