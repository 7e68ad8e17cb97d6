"""Tracks with one bit per row which rows were seen, to verify that each is in exactly one place.

Rows may be added in any order and from several threads. Memory is allocated in windows; a window is
allocated when its first row is seen. Row numbers are kept only for rows seen more than once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from threading import Lock

import numpy as np

WINDOW_ROWS = 1 << 30  # rows; 128 MiB
BLOCK_ROWS = 1 << 20  # rows unpacked at once
ALL = 0xFF


class SeenRows:
    """The set of rows seen so far, out of rows 0 to `rows` - 1.

    `twice` tells which rows were seen more than once. It has the first row of each span of
    neighbouring such rows, for at most `most` spans.
    """

    def __init__(self, rows: int, most: int):
        self.rows, self.most = rows, most
        self.twice: list[int] = []
        self._windows: dict[int, np.ndarray] = {}
        self._lock = Lock()

    def add(self, rows: np.ndarray) -> None:
        """Add row numbers, which must be ascending, distinct and from 0 to `rows` - 1."""
        if not len(rows):
            return
        cuts = np.arange(rows[0] // BLOCK_ROWS + 1, rows[-1] // BLOCK_ROWS + 1) * BLOCK_ROWS
        edges = [0, *np.searchsorted(rows, cuts).tolist(), len(rows)]
        for start, stop in pairwise(edges):
            if start < stop:
                self._add(rows[start:stop])

    def _add(self, rows: np.ndarray) -> None:
        """Add ascending row numbers that lie between two neighbouring multiples of BLOCK_ROWS."""
        first = int(rows[0]) & ~7
        flags = np.zeros(int(rows[-1]) + 1 - first, bool)
        flags[rows - first] = True
        packed = np.packbits(flags, bitorder="little")
        window, at = divmod(first, WINDOW_ROWS)
        with self._lock:
            bits = self._window(window)[at // 8 : at // 8 + len(packed)]
            again = bits & packed
            bits |= packed
            if again.any():
                starts, _ = to_spans(first + _set_bits(again))
                self.twice += starts[: self.most - len(self.twice)].tolist()

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, row after the last) of the spans of rows not seen, ascending."""
        last: tuple[int, int] | None = None
        for start, stop in self._block_gaps():
            if last is not None and last[1] == start:
                last = (last[0], stop)
                continue
            if last is not None:
                yield last
            last = (start, stop)
        if last is not None:
            yield last

    def _block_gaps(self) -> Iterator[tuple[int, int]]:
        """Yield what `gaps` yields, but with spans cut at multiples of BLOCK_ROWS."""
        for start in range(0, self.rows, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, self.rows)
            window, at = divmod(start, WINDOW_ROWS)
            if window not in self._windows:
                yield start, stop
                continue
            bits = self._windows[window][at // 8 : (at + stop - start + 7) // 8]
            if (bits == ALL).all():
                continue
            absent = _set_bits(~bits)
            starts, stops = to_spans(start + absent[absent < stop - start])
            yield from zip(starts.tolist(), stops.tolist(), strict=True)

    def _window(self, number: int) -> np.ndarray:
        if number not in self._windows:
            rows = min(WINDOW_ROWS, self.rows - number * WINDOW_ROWS)
            self._windows[number] = np.zeros(-(-rows // 8), np.uint8)
        return self._windows[number]


def to_spans(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (first numbers, numbers after the last) of the spans of consecutive numbers in `rows`.

    `rows` must be ascending.
    """
    if not len(rows):
        return rows, rows
    breaks = np.flatnonzero(np.diff(rows) != 1)
    starts = rows[np.concatenate([[0], breaks + 1])]
    stops = rows[np.concatenate([breaks, [len(rows) - 1]])] + 1
    return starts, stops


def _set_bits(packed: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(packed, bitorder="little"))
