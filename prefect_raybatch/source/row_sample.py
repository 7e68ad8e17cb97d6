"""Chooses the rows of `source.sample`: those whose row numbers have the smallest hashes.

Uses hashes and no random generator, so that the choice is the same with every version of numpy. A
larger sample with the same seed includes a smaller one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from prefect_raybatch.spec.read import ReadSpec

SampledNumbers: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint64]
HASHED_TOGETHER = 1 << 20  # row numbers that are hashed together


@dataclass(frozen=True)
class RowSample:
    """A sample of `rows` rows of the input, chosen by `seed`."""

    rows: int
    seed: int

    def numbers(self, total: int) -> SampledNumbers:
        """Return the numbers, from 0, of the sampled rows among `total`, in increasing order."""
        best = np.empty(0, np.uint64)
        for start in range(0, total, HASHED_TOGETHER):
            hashes = self._hashes(start, min(total, start + HASHED_TOGETHER))
            best = np.concatenate([best, hashes])
            if len(best) > self.rows:
                best = np.partition(best, self.rows - 1)[: self.rows]
        if len(best) < self.rows:
            return np.arange(total, dtype=np.int64)
        highest = best.max()  # no two numbers have the same hash
        parts = [
            start
            + np.flatnonzero(self._hashes(start, min(total, start + HASHED_TOGETHER)) <= highest)
            for start in range(0, total, HASHED_TOGETHER)
        ]
        return np.concatenate(parts).astype(np.int64)

    def among(self, parts: Iterable[SampledNumbers]) -> SampledNumbers:
        """Return the sample of the row numbers in all `parts` together, in increasing order."""
        best = np.empty(0, np.int64)
        for part in parts:
            best = np.concatenate([best, part.astype(np.int64)])
            if len(best) > self.rows:
                hashes = _mixed(best.astype(np.uint64) ^ self._salt)
                best = best[np.argpartition(hashes, self.rows - 1)[: self.rows]]
        return np.sort(best)

    def _hashes(self, start: int, end: int) -> Hashes:
        """Return the hash of each row number from `start` up to `end`, excluded.

        The hash is splitmix64, which maps distinct numbers to distinct hashes. The seed is hashed
        too: with seeds added to the numbers, samples would be shifted copies.
        """
        return _mixed(np.arange(start, end, dtype=np.uint64) ^ self._salt)

    @property
    def _salt(self) -> np.uint64:
        salt: np.uint64 = _mixed(np.array([self.seed], np.uint64))[0]
        return salt


def sample_of(source: ReadSpec) -> RowSample | None:
    """Return the sample that a source asks for, or None."""
    return None if source.sample is None else RowSample(source.sample, source.sample_seed)


def rows_in_sample(table: pa.Table, first: int, numbers: SampledNumbers) -> pa.Table:
    """Return the rows of a table whose numbers are in `numbers`, which are in increasing order.

    The first row of the table has the number `first`.
    """
    start, end = np.searchsorted(numbers, [first, first + table.num_rows])
    return table.take(pa.array(numbers[start:end] - first))


def _mixed(values: Hashes) -> Hashes:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
