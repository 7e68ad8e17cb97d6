"""Sets of positions as sorted, disjoint, half-open ranges: a shard done in one go is one range."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

Ranges = tuple[tuple[int, int], ...]


def to_ranges(positions: Iterable[int]) -> Ranges:
    """Sorted positions (ints, ascending, no repeats) as half-open ranges: [0,1,2,5] -> (0,3),(5,6).

    Raises ValueError when positions are not strictly ascending.
    """
    ranges: list[list[int]] = []
    for position in positions:
        if ranges and position < ranges[-1][1]:
            raise ValueError(f"position {position} is repeated or out of order")
        if ranges and position == ranges[-1][1]:
            ranges[-1][1] = position + 1
        else:
            ranges.append([position, position + 1])
    return tuple((start, stop) for start, stop in ranges)


def count(ranges: Ranges) -> int:
    """How many positions the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def merge(*parts: Ranges) -> Ranges | None:
    """The union of disjoint range sets, or None when any position is held twice."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(r for part in parts for r in part):
        if start >= stop or (merged and start < merged[-1][1]):
            return None
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def missing(held: Ranges, rows: int) -> Ranges:
    """The positions of [0, rows) that `held` (sorted, disjoint) lacks."""
    gaps, at = [], 0
    for start, stop in held:
        if start > at:
            gaps.append((at, start))
        at = stop
    if at < rows:
        gaps.append((at, rows))
    return tuple(gaps)


def as_ranges(value: Any) -> Ranges:
    """Ranges out of JSON; TypeError or ValueError for what is none."""
    ranges = tuple(map(tuple, value))
    if not {*map(len, ranges)} <= {2} or not {*map(type, chain.from_iterable(ranges))} <= {int}:
        raise TypeError("a position is not a whole number, or not one of a pair")
    return ranges
