"""Which rows were seen, against sets of ints, over the edges of blocks and windows."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.result import seen_rows
from prefect_raybatch.result.seen_rows import SeenRows

ROWS = 100
parts = st.lists(st.sets(st.integers(0, ROWS - 1)), max_size=6)


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_rows, "BLOCK_ROWS", 16)
        patch.setattr(seen_rows, "WINDOW_ROWS", 48)
        yield


def array(rows: set[int]) -> np.ndarray:
    return np.array(sorted(rows), np.int64)


@given(parts)
def test_gaps_are_what_nobody_added(sets):
    seen = SeenRows(ROWS, 5)
    for rows in sets:
        seen.add(array(rows))
    gaps = list(seen.gaps())
    absent = set(range(ROWS)) - set().union(*sets)
    assert {row for start, stop in gaps for row in range(start, stop)} == absent
    assert all(a[1] < b[0] for a, b in pairwise(gaps))


@given(parts)
def test_what_comes_again_is_noted_once_a_span(sets):
    seen = SeenRows(ROWS, 1_000)
    before: set[int] = set()
    for rows in sets:
        noted = len(seen.twice)
        seen.add(array(rows))
        again = rows & before
        before |= rows
        found = set(seen.twice[noted:])
        # The first of each span of neighbours, and of each block that it goes on in.
        assert {row for row in again if row - 1 not in again} <= found <= again
    few = SeenRows(ROWS, 3)
    for rows in sets:
        few.add(array(rows))
    assert few.twice == seen.twice[:3]


def test_memory_is_an_eighth_of_a_byte_a_row(monkeypatch):
    monkeypatch.setattr(seen_rows, "BLOCK_ROWS", 1 << 18)
    monkeypatch.setattr(seen_rows, "WINDOW_ROWS", 1 << 22)
    rows = 1 << 24
    tracemalloc.start()
    seen = SeenRows(rows, 5)
    for start in range(0, rows, 1 << 18):
        numbers = np.arange(start, start + (1 << 18))
        seen.add(numbers[numbers % 10 == 0])
        seen.add(numbers[numbers % 10 != 0])
    assert list(seen.gaps()) == [] and seen.twice == []
    assert tracemalloc.get_traced_memory()[1] < rows / 8 + 8e6
    tracemalloc.stop()
