"""The join of a run's keys with earlier answers, against a plain one in Python."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from prefect_raybatch.ledger.increments import ASKED, MERGED_ROW, NO_REQUEST, REUSED
from prefect_raybatch.plan import joining
from prefect_raybatch.plan.joining import Join

Key = tuple[int, bool]  # a number that stands for a key, whether equal ones share an answer


def bytes_of(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def run(rows: list[Key | None], earlier: list[int]) -> tuple[Join, list[int], list[int]]:
    """The join, and (kinds, at) of the rows; keys come in several blocks."""
    with Join(len(rows), len(earlier)) as join:
        for start in range(0, len(earlier), 7):
            part = earlier[start : start + 7]
            numbers = np.arange(start, start + len(part))
            join.theirs.add([bytes_of(k) for k in part], numbers, np.zeros(len(part), bool))
        for start in range(0, len(rows), 5):
            part = [(i, k) for i, k in enumerate(rows[start : start + 5], start) if k is not None]
            join.ours.add(
                [bytes_of(k) for _, (k, _) in part],
                np.array([i for i, _ in part], np.int64),
                np.array([exact for _, (_, exact) in part], bool),
            )
        join.run()
        kinds, at = zip(*join.places(), strict=True) if rows else ((), ())
        join.kept = {  # type: ignore[attr-defined]
            "needed": np.array(join.needed),
            "weights": join.weights(),
            "leaders": join.leaders(0, len(rows)),
        }
        flat = (np.concatenate(kinds).tolist(), np.concatenate(at).tolist()) if rows else ([], [])
        return join, *flat


def plainly(rows: list[Key | None], earlier: list[int]) -> list[tuple[int, int]]:
    """What should come of it: (kind, answer taken or row that is asked)."""
    stored = defaultdict(list)
    for number, key in enumerate(earlier):
        stored[key].append(number)
    first: dict[int, int] = {}
    used: dict[int, int] = defaultdict(int)
    made = []
    for row, key in enumerate(rows):
        if key is None:
            made.append((NO_REQUEST, 0))
            continue
        name, exact = key
        turn = 0 if exact else used[name]
        used[name] += 1
        if turn < len(stored[name]):
            made.append((REUSED, stored[name][turn]))
        elif exact and name in first:
            made.append((MERGED_ROW, first[name]))
        else:
            first.setdefault(name, row)
            made.append((ASKED, row))
    return made


def check(rows: list[Key | None], earlier: list[int]) -> None:
    join, kinds, at = run(rows, earlier)
    wanted = plainly(rows, earlier)
    assert kinds == [kind for kind, _ in wanted]
    asked = [row for row, (kind, _) in enumerate(wanted) if kind == ASKED]
    taken = sorted({number for kind, number in wanted if kind == REUSED})
    where = {REUSED: taken.index, ASKED: asked.index, MERGED_ROW: asked.index}
    assert at == [where[k](n) if k else 0 for k, n in wanted]
    counts = join.counts
    found = (counts.reused, counts.merged, counts.asked, counts.none)
    assert found == tuple(kinds.count(k) for k in (REUSED, MERGED_ROW, ASKED, NO_REQUEST))
    kept = join.kept  # type: ignore[attr-defined]
    assert np.flatnonzero(kept["needed"]).tolist() == taken
    assert np.flatnonzero(kept["leaders"]).tolist() == asked
    waiting = [a for k, a in zip(kinds, at, strict=True) if k in (ASKED, MERGED_ROW)]
    assert kept["weights"].tolist() == [waiting.count(n) for n in range(len(asked))]


def test_nothing_was_answered_before() -> None:
    check([(1, True), (2, True), (1, True), None, (2, False)], [])


def test_moved_doubled_and_deleted_rows_take_what_is_there() -> None:
    check([(3, True), (1, True), (3, True), (4, True)], [1, 2, 3])


def test_sampled_rows_take_one_answer_each_and_the_rest_is_asked() -> None:
    check([(1, False)] * 5 + [(2, False)], [1, 2, 1])


def test_all_is_there_or_nothing_is_to_do() -> None:
    check([(1, True), (2, True)], [2, 1, 1])
    check([None, None], [1])


@pytest.mark.parametrize("seed", range(6))
def test_any_keys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many buckets, small steps, keys that are shared and keys that are not."""
    monkeypatch.setattr(joining, "BUCKET_ROWS", 16)
    monkeypatch.setattr(joining, "STEP", 11)
    monkeypatch.setattr(joining, "PLACES_ROWS", 13)
    draw = random.Random(seed)
    kinds = {key: draw.random() < 0.6 for key in range(40)}

    def key() -> Key | None:
        number = draw.randrange(40)
        return None if draw.random() < 0.1 else (number, kinds[number])

    check([key() for _ in range(200)], [draw.randrange(50) for _ in range(60)])
