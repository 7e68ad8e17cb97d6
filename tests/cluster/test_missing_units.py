"""What a pass has not told of, by the units that its receipts tell of."""

from __future__ import annotations

import random

import pytest

from prefect_raybatch.cluster.pipeline import Missing
from prefect_raybatch.ledger.records import Unit


def positions(units: list[Unit]) -> set[tuple[int, int]]:
    return {(unit.shard, at) for unit in units for at in range(unit.offset, unit.end)}


@pytest.mark.parametrize("seed", range(20))
def test_what_was_told_is_missing_no_more(seed):
    rng = random.Random(seed)
    units = []
    for shard in range(3):
        edges = sorted(rng.sample(range(101), 12))
        units += [Unit(shard, a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    rng.shuffle(units)
    missing, left = Missing(units), positions(units)
    for _ in range(30):
        told = Unit(rng.randrange(4), rng.randrange(90), rng.randrange(40))
        missing.take(told)
        left -= positions([told])
        found = missing.units()
        assert positions(found) == left
        assert sum(unit.rows for unit in found) == len(left), "none twice"
        assert all(unit.rows > 0 for unit in found)


def test_a_shard_that_is_asked_row_by_row_is_not_gone_through_for_each_receipt(monkeypatch):
    rows, looks = 4_000, 0
    missing = Missing([Unit(0, at, 1) for at in range(rows)])
    without = Unit.without

    def counting(unit: Unit, other: Unit) -> list[Unit]:
        nonlocal looks
        looks += 1
        return without(unit, other)

    monkeypatch.setattr(Unit, "without", counting)
    for at in random.Random(0).sample(range(rows), rows):
        missing.take(Unit(0, at, 1))
    assert missing.units() == []
    assert looks == rows
