"""The number of each row of a run in the input of its root run.

A run over its own input numbers rows by position. A run that retries failed rows keeps the numbers
that the rows have in the root run's input, so that all results together are one table. Its plan
names a table with these numbers.
"""

from __future__ import annotations

import numpy as np

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.plan_tables import from_parquet, to_parquet

ROWS_NAMED = 5  # most rows that a text names one by one, if they are not adjacent


class RowNumbers:
    """Row numbers of a run of `rows` rows.

    `table` (int64, ascending) is the table that the plan names; without it a row's number is its
    position in the run's input.
    """

    def __init__(self, rows: int, table: np.ndarray | None = None):
        self.rows, self.table = rows, table

    def of(self, positions: np.ndarray) -> np.ndarray:
        """Return the row numbers (int64) of the rows at `positions` of the run's input.

        Without a table, numbers and positions are equal. In a run that retries failed rows, a row's
        number is its place in the input of the root run.
        """
        return positions if self.table is None else self.table[positions]

    def all(self) -> np.ndarray:
        """Return the numbers of all rows, ascending."""
        return np.arange(self.rows, dtype=np.int64) if self.table is None else self.table

    def positions(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (positions of `numbers` in the run, `numbers` that the table lacks).

        Without a table, all `numbers` are returned as positions, unchecked.
        """
        if self.table is None:
            return numbers, numbers[:0]
        known = among(self.table, numbers)
        return np.searchsorted(self.table, numbers[known]), numbers[~known]

    def name(self, start: int, stop: int) -> str:
        """Name the rows at positions [start, stop), e.g. `rows 4 to 9` or `rows 4, 7, 20`."""
        if self.table is None:
            return f"rows {start} to {stop - 1}"
        return name_rows(self.table[start:stop])


def among(table: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return bool[numbers]: whether each number is in the ascending `table`."""
    if not len(table):
        return np.zeros(len(numbers), bool)
    at = np.searchsorted(table, numbers)
    there: np.ndarray = table[np.minimum(at, len(table) - 1)] == numbers
    return there


def name_rows(numbers: np.ndarray) -> str:
    """Return ascending row numbers as text: `rows 4 to 9` if adjacent, else the first few."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1:
        return f"rows {first} to {last}"
    named = ", ".join(str(number) for number in numbers[:ROWS_NAMED])
    more = f" and {len(numbers) - ROWS_NAMED:,} more" if len(numbers) > ROWS_NAMED else ""
    return f"rows {named}{more}"


def numbers_table(numbers: np.ndarray) -> bytes:
    """Return row numbers as the bytes of a Parquet table (column row, int64)."""
    import pyarrow as pa

    return to_parquet(pa.table({"row": pa.array(numbers, pa.int64())}))


def read_numbers(data: bytes, rows: int) -> RowNumbers:
    """Decode the table that `numbers_table` encoded, for a run of `rows` rows.

    Raises `CorruptRun` unless it holds that many distinct row numbers, ascending.
    """
    import pyarrow as pa

    column = from_parquet(data, "table of row numbers", ["row"])["row"]
    if column.type != pa.int64() or column.null_count or len(column) != rows:
        raise CorruptRun(f"the table of row numbers must hold {rows} values of int64")
    table = column.to_numpy()
    if rows and (table[0] < 0 or (np.diff(table) <= 0).any()):
        raise CorruptRun("the table of row numbers is not ascending")
    return RowNumbers(rows, table)
