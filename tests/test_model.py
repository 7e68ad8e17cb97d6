"""The model of the ledger: what breaks each of the ways that were weighed, and that ours holds."""

from __future__ import annotations

import pytest
from model.explorer import explore
from model.variants import BAD, DOUBLED, LOST, OTHERS, RETRIES, VARIANTS, Variant

SMALL = [variant for variant in (*VARIANTS, *RETRIES) if not variant.large]


def test_the_explorer_finds_the_shortest_way_and_all_states():
    def following(n: int) -> list[tuple[str, int]]:
        return [("one on", (n + 1) % 50), ("twice", 2 * n % 50)]

    found = explore(1, following, lambda n: "seven" if n == 7 else None)
    assert found.states == 50
    assert found.faults == {"seven": ("one on", "one on", "twice", "one on")}
    assert explore(1, following, lambda n: None).faults == {}
    assert explore(1, following, lambda n: "seven" if n == 7 else None, ["seven"]).states < 50


@pytest.mark.parametrize("variant", SMALL, ids=[variant.name for variant in SMALL])
def test_each_variant_has_its_faults_and_ours_has_none(variant: Variant):
    """Of what holds, all states; `make chaos` visits those of the others and the largest, too."""
    found = variant.explored(enough=variant.faults)
    assert set(found.faults) == set(variant.faults), found


def test_the_table_of_the_ways_to_write_parts():
    told = {variant.name: set(variant.faults) for variant in VARIANTS[:4]}
    assert {BAD, OTHERS} <= told["plain PUT, fixed names"]
    assert DOUBLED in told["names by content, others tidied away"]
    assert LOST in told["put-if-absent, a bad part deleted"]
    assert told["put-if-absent and If-Match"] == set()
