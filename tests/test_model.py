"""The model of the ledger: what breaks each of the ways that were weighed, and that ours holds."""

from __future__ import annotations

import dataclasses

import pytest
from model import tlc
from model.explorer import explore
from model.variants import BAD, DOUBLED, LOST, OTHERS, RETRIES, VARIANTS, Variant

SMALL = [variant for variant in (*VARIANTS, *RETRIES) if not variant.large]


def test_the_explorer_finds_the_shortest_way_and_all_states():
    def following(n: int) -> list[tuple[str, int]]:
        return [("one on", (n + 1) % 50), ("twice", 2 * n % 50)]

    found = explore(1, following, lambda n: ["seven"] * (n == 7))
    assert (found.states, found.depth) == (50, 8)
    assert found.faults == {"seven": ("one on", "one on", "twice", "one on")}
    assert explore(1, following, lambda n: []).faults == {}
    assert explore(1, following, lambda n: ["seven"] * (n == 7), ["seven"]).states < 50


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


def test_tlc_finds_what_the_explorer_finds_and_a_difference_is_told():
    """In the smallest variants; `make chaos` compares all."""
    holds, breaks = RETRIES
    told: list[tlc.Told] = []
    assert list(tlc.differences(breaks, breaks.explored(), told)) == []
    assert (told[0].violated, told[0].states, told[0].steps) == (None, 81, 7)
    assert [(one.violated, one.steps) for one in told[1:]] == [("Once", 6)]
    said = tlc.differences(holds, dataclasses.replace(holds.explored(), states=67), [])
    assert list(said) == ["TLC finds 68 states, 8 steps deep; the explorer 67, 8 deep"]
    said = tlc.differences(breaks, dataclasses.replace(breaks.explored(), faults={}), [])
    assert list(said) == ["TLC finds Once violated in 6 steps, the explorer not"]


def test_what_tlc_cannot_judge_is_an_error():
    with pytest.raises(RuntimeError, match=r"TLC ended with status (?s:.*)Missing"):
        tlc.check(RETRIES[0], ["Missing"])
