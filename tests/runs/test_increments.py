"""Two nights: what was answered is taken over, what is new is asked once, each row comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.nights import Nights, words


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def answers(nights: Nights, key: str) -> list[tuple[str, str]]:
    found = nights.result(key)
    assert [row["_row"] for row in found] == sorted(row["_row"] for row in found)
    return [(row["text"], row["response"]) for row in found]


def right(*texts: str) -> list[tuple[str, str]]:
    return [(text, f"answer to {text}") for text in texts]


def test_moved_edited_deleted_and_doubled_rows_come_out_right(nights: Nights) -> None:
    first = ["a", "b", "c", "d", "e", "f", "g", "b", "a"]
    nights.write(*first)
    report = nights.night("n1")
    assert answers(nights, "n1") == right(*first)
    assert sorted(map(words, nights.asked)) == list("abcdefg")  # b and a once, in other shards
    assert (report.reuse["asked"], report.reuse["merged"], report.reuse["reused"]) == (7, 2, 0)
    nights.asked.clear()
    # a moved and doubled, b edited, c deleted, z new and doubled
    second = ["g", "z", "a", "b2", "d", "e", "f", "a", "z", "a", "g"]
    nights.write(*second)
    report = nights.night("n2")
    assert answers(nights, "n2") == right(*second)
    assert sorted(map(words, nights.asked)) == ["b2", "z"]
    assert (report.reuse["asked"], report.reuse["merged"], report.reuse["reused"]) == (2, 1, 8)
    assert report.reuse["saved_tokens"] > 0
