"""Sets of positions against sets of ints, and how they are written."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from helpers.reports import COMMIT, PIECE, RECEIPT
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.positions import MOST_POSITIONS, Positions, disjoint
from prefect_raybatch.ledger.records import Commit, Receipt, dump

positions = st.sets(st.integers(0, 60), max_size=40)


def of(held: set[int]) -> Positions:
    return Positions.of(np.array(list(held), np.int64))  # in any order


def scattered(rows: int, share: float) -> Positions:
    """Positions of a shard of `rows`, each with chance `share`."""
    return Positions.of(np.flatnonzero(np.random.default_rng(rows).random(rows) < share))


@given(positions)
def test_positions_are_their_set(held):
    found = of(held)
    assert found.numbers.tolist() == sorted(held)
    assert (len(found), bool(found), found.end) == (
        len(held),
        bool(held),
        max(held, default=-1) + 1,
    )
    assert {p for start, stop in found.ranges for p in range(start, stop)} == held
    assert all(start < stop for start, stop in found.ranges)
    assert all(a[1] < b[0] for a, b in pairwise(found.ranges))  # no two touch
    assert Positions.spans(*found.ranges) == found
    assert Positions.spans(*((p, p + 1) for p in sorted(held))) == found  # touching ones are joined


@given(positions, positions)
def test_they_work_as_sets_do(one, other):
    assert of(one) | of(other) == of(one | other) and of(one) & of(other) == of(one & other)


@given(st.lists(positions, max_size=5))
def test_disjoint_is_union_or_none(parts):
    union: set[int] = set().union(*parts)
    whole = sum(len(p) for p in parts) == len(union)
    assert disjoint(of(p) for p in parts) == (of(union) if whole else None)


@given(positions, st.integers(0, 61))
def test_what_is_lacking_is_the_complement(held, rows):
    assert of(held).lacking(rows) == of(set(range(rows)) - held)


@pytest.mark.parametrize("numbers", [[3, 3], [-1, 2], [0, MOST_POSITIONS]])
def test_what_is_no_set_of_a_shards_positions_is_refused(numbers):
    with pytest.raises(ValueError, match=r"repeated|exceed 0 to"):
        Positions.of(np.array(numbers))


FIVE = ((1, 2), (3, 4), (5, 6), (7, 8))
NO_RANGES = [
    *([(3, 3)], [(5, 2)], [(0, 4), (2, 6)], [(0, 2), (0, 2)], [(-1, 2)], [(0, MOST_POSITIONS + 1)]),
    *([*FIVE, (8, 8)], [*FIVE, (7, 9)], [(-1, 0), *FIVE], [*FIVE, (9, 1 << 70)], [(5, 0), (0, 9)]),
    [*FIVE, (9, MOST_POSITIONS + 1)],
]


@pytest.mark.parametrize("ranges", NO_RANGES)
def test_ranges_that_are_none_are_refused(ranges):
    with pytest.raises(ValueError, match=r"range|position"):
        Positions.spans(*ranges)


# --- in records -----------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 200), max_size=60), st.integers(201, 300))
def test_they_are_read_as_they_were_written(held, rows):
    text = of(held).to_text()
    assert Positions.from_text(json.loads(dump(text)), rows) == of(held)
    assert isinstance(text, str) == (len(of(held).ranges) > 4)


@pytest.mark.parametrize(
    ("rows", "share", "most"),
    [(4_000, 0.1, 480), (4_000, 0.5, 684), (10**6, 0.1, 95_000), (10**6, 0.5, 167_000)],
)
def test_a_record_grows_with_what_it_says(rows, share, most):
    """Rows left out at random: 13, 35, 4,300 and 11,800 KB as ranges."""
    left_out = scattered(rows, share)
    assert len(str(left_out.to_text())) <= most
    good = left_out.lacking(rows)
    piece = replace(PIECE, positions=good, rows=len(good))
    commit = replace(COMMIT, good=good, failed=Positions(), skipped=left_out, pieces=(piece,))
    assert len(commit.to_bytes()) <= most + 800
    assert Commit.from_bytes(commit.to_bytes()) == commit


def test_a_receipt_of_any_positions_crosses_the_stages():
    skipped = scattered(4_000, 0.3)
    piece = replace(PIECE, positions=skipped.lacking(4_000))
    receipt = replace(
        RECEIPT, good=piece.positions, failed=Positions(), skipped=skipped, pieces=(piece,)
    )
    assert Receipt.from_json(receipt.to_json()) == receipt


def bomb(size: int) -> str:
    return base64.b64encode(zlib.compress(b"\1" * size)).decode()


@pytest.mark.parametrize(
    "text",
    [
        *("", "?", "AAAA", "AAA", bomb(3), bomb(10**8), bomb(2)[:-4], bomb(1) + bomb(1)),
        *([[0, 11]], [[3, 3]], [[0, 4], [2, 6]], [[0, 1 << 70]], [[0]], [[0, 1, 2]], 7, {}),
    ],
    ids=lambda text: str(text)[:20],
)
def test_positions_that_are_none_of_the_shard_are_a_corrupt_run(text):
    value = {**json.loads(COMMIT.to_bytes()), "rows": 10, "failed": text}
    with pytest.raises(CorruptRun, match=r"^commits/7 is malformed: failed"):
        Commit.from_bytes(dump(value), "commits/7")


def test_a_bitmap_may_end_at_each_bit_of_its_last_byte():
    for rows in range(30, 50):
        held = Positions.of(np.arange(0, rows, 2)) | Positions.spans((rows - 1, rows))
        assert Positions.from_text(held.to_text(), rows) == held
        with pytest.raises(ValueError, match=r"not a bitmap|not in a shard"):
            Positions.from_text(held.to_text(), rows - 1)


def test_pieces_say_their_positions_only_where_the_commit_does_not():
    value = json.loads(COMMIT.to_bytes())
    assert "good" not in value and "positions" not in value["pieces"][0]
    halves = [Positions.spans((0, 1)), Positions.spans((1, 2), (4, 5))]
    pieces = tuple(replace(PIECE, positions=half, rows=len(half)) for half in halves)
    two = replace(COMMIT, pieces=pieces)
    value = json.loads(two.to_bytes())
    assert [p["positions"] for p in value["pieces"]] == [[[0, 1]], [[1, 2], [4, 5]]]
    assert Commit.from_bytes(two.to_bytes()) == two
    del value["pieces"][1]["positions"]
    with pytest.raises(CorruptRun, match=r"pieces\.1\.positions is missing"):
        Commit.from_bytes(dump(value))


def test_a_commit_counts_its_rows_and_does_not_name_the_good_ones():
    value = json.loads(COMMIT.to_bytes())
    for change, said in (
        ({"good": [[0, 2], [4, 5]]}, "unknown fields good"),
        ({"rows": MOST_POSITIONS + 1}, "rows is "),
    ):
        with pytest.raises(CorruptRun, match=said):
            Commit.from_bytes(dump({**value, **change}))
    del value["rows"]
    with pytest.raises(CorruptRun, match="rows is missing"):
        Commit.from_bytes(dump(value))


def test_the_bytes_that_were_read_are_kept_beside_a_commit():
    """Another zlib writes the same positions in another way; a checkpoint compares bytes."""
    skipped = scattered(4_000, 0.5)
    good = skipped.lacking(4_000)
    piece = replace(PIECE, positions=good)
    commit = replace(COMMIT, good=good, failed=Positions(), skipped=skipped, pieces=(piece,))
    value = json.loads(commit.to_bytes())
    packed = zlib.decompress(base64.b64decode(value["skipped"]))
    value["skipped"] = base64.b64encode(zlib.compress(packed, 0)).decode()
    found = Commit.from_bytes(dump(value))
    assert found == commit and found.body == dump(value) != found.to_bytes()
    assert replace(found, shard=9).body != found.body
