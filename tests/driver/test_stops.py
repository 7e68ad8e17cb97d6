"""The failed rows that a person is shown of a run that stopped over its error budget."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.small import small_run

from prefect_raybatch.driver import stops
from prefect_raybatch.driver.stops import (
    FROM_A_SHARD,
    LINE,
    Sample,
    Stop,
    failed_rows,
    failed_sample,
    last_stop,
)
from prefect_raybatch.ledger.layout import PLAN, attempt_path
from prefect_raybatch.ledger.records import Piece, Unit
from prefect_raybatch.stages.block import Failure
from prefect_raybatch.storage import Store


def stop_of(rows: range) -> Stop:
    """A stop whose uncommitted shard, the second one, has these failed rows."""
    sample = tuple(Sample(row, "prepare", "KeyError", "no name") for row in rows)
    return Stop(len(rows) + 1, len(rows), 2, 40, 1, sample)


def rows_shown(folder: Path, most: int, stop: Stop | None) -> list[int]:
    return [one.row for one in failed_sample(str(folder), None, most, stop)]


def test_the_rows_shown_are_half_of_the_stop_and_half_of_committed_shards(tmp_path: Path) -> None:
    run = small_run(tmp_path, rows=40, per_shard=20)
    run.commit(0, failed=range(1, 9))
    stop = stop_of(range(20, 28))
    assert rows_shown(tmp_path, 6, stop) == [1, 2, 3, 20, 21, 22]
    assert rows_shown(tmp_path, 5, stop) == [1, 2, 3, 20, 21]
    of_one_shard = list(range(1, 1 + FROM_A_SHARD))
    assert rows_shown(tmp_path, 20, stop) == [*of_one_shard, *range(20, 28)]
    assert rows_shown(tmp_path, 20, None) == of_one_shard
    (first, *_) = failed_sample(str(tmp_path), None, 6, stop)
    assert first == Sample(1, "engine", "ValueError", "refused")


def test_rows_of_the_stop_take_the_place_of_committed_ones_that_are_few(tmp_path: Path) -> None:
    run = small_run(tmp_path, rows=60, per_shard=20)
    run.commit(0, failed=[4])
    run.commit(2)
    assert rows_shown(tmp_path, 6, stop_of(range(20, 28))) == [4, *range(20, 25)]


def test_rows_of_a_run_that_cannot_be_read_are_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = stop_of(range(20, 28))
    assert rows_shown(tmp_path / "none", 6, stop) == []
    small_run(tmp_path).store.put(PLAN, b"no plan")
    assert rows_shown(tmp_path, 6, stop) == []
    assert "failed rows cannot be shown" in caplog.text


def test_a_run_is_read_with_the_options_of_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, options, opened = small_run(tmp_path), {"region": "eu-west-1"}, list[object]()

    def opens(*of_store: object) -> Store:
        opened.append(of_store)
        return run.store

    monkeypatch.setattr(stops, "open_store", opens)
    failed_sample("s3://b/run", options, 6, None)
    last_stop("s3://b/run", options)
    assert opened == [("s3://b/run", options)] * 2


def test_the_stop_of_a_run_is_that_of_its_latest_attempt(tmp_path: Path) -> None:
    run, stop = small_run(tmp_path), stop_of(range(5, 7))
    assert last_stop(str(tmp_path), None) is None
    run.ledger.note_attempt("b" * 32, {"started": "2026-03-01", "stopped": stop.to_dict()})
    for name in ("0", "d"):  # before and after the others
        run.store.put(attempt_path(name * 32), b"no record")
    assert last_stop(str(tmp_path), None) == stop
    run.ledger.note_attempt("a" * 32, {"started": "2026-02-01"})
    assert last_stop(str(tmp_path), None) == stop
    run.ledger.note_attempt("c" * 32, {"started": "2026-03-02"})
    assert last_stop(str(tmp_path), None) is None


def test_a_stop_says_how_many_rows_failed_and_which_shard_was_not_committed() -> None:
    all_of_them = Stop(49, 49, 10, 100, 1, tried=100)
    assert all_of_them.line() == (
        "49 of 100 rows tried failed, at most 10 may; all in shard 1, which was therefore not "
        "committed"
    )
    some = Stop(1003, 2, 1001, 2000, 7, tried=1999)
    assert some.line() == (
        "1,003 of 1,999 rows tried failed, at most 1,001 may; 1 was not tried; 2 of them in shard "
        "7, which was therefore not committed"
    )
    assert Stop(3, 0, 2, 40).line() == "3 of 40 rows failed, at most 2 may"
    assert Stop(1, 0, 0, 3, tried=1).line() == (
        "1 of 1 row tried failed, at most 0 may; 2 were not tried"
    )


def test_a_message_shows_two_failed_rows_each_on_a_short_line() -> None:
    texts = ["a" * LINE, "b" * (LINE + 1), "not shown"]
    sample = tuple(Sample(999 + at, "engine", "ValueError", t) for at, t in enumerate(texts))
    assert Stop(3, 3, 2, 40, 1, sample).lines() == [
        f"row 999: engine: ValueError: {'a' * 160}",
        f"row 1,000: engine: ValueError: {'b' * 157}...",
    ]
    spaced = Sample(7, "prepare", "KeyError", " no\n  name ")
    assert Stop(1, 1, 0, 40, 1, (spaced,)).lines() == ["row 7: prepare: KeyError: no name"]


@pytest.mark.parametrize("wrong", ["3", 3.0, True, None])
@pytest.mark.parametrize("field", ["failed", "held_back", "allowed", "rows", "tried", "row"])
def test_a_stop_whose_numbers_are_none_is_not_read(field: str, wrong: object) -> None:
    stop = stop_of(range(20, 22))
    note = stop.to_dict()
    (note["sample"][1] if field == "row" else note)[field] = wrong
    unknown = (field, wrong) == ("tried", None)
    assert Stop.from_note({"stopped": note}) == (stop if unknown else None)


def test_failed_rows_are_a_bounded_number_in_order_with_bounded_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = small_run(tmp_path, rows=60, per_shard=30)
    pieces: list[Piece] = []
    for offset, letter in ((15, "b"), (0, "a")):
        unit = Unit(1, offset, 15)
        rows = run.block(unit).select(["__rb_pos", "id", "Company", "tags"])
        failure = Failure("prepare", "KeyError", letter * 501)
        pieces += run.finish().failed(unit, rows, failure, 2).pieces
    gone = replace(pieces[0], path=f"{pieces[0].path[:-1]}x")
    data = run.receipt(Unit(1, 0, 1)).pieces

    def sample(row: int, letter: str) -> Sample:
        return Sample(row, "prepare", "KeyError", f"{letter * 497}...")

    numbers = partial(run.ledger.numbers, run.plan)
    found = failed_rows(run.store, [gone, *data, *pieces], 30, numbers)
    assert found == tuple(sample(row, "a" if row < 45 else "b") for row in range(30, 50))
    assert len(caplog.records) == 1, "of the piece that is gone"


def test_so_many_commits_are_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path, rows=20, per_shard=5)
    run.commit_all({(1, 1), (2, 2), (3, 3)})
    for most, rows in ((1, []), (2, [6]), (3, [6, 12]), (1000, [6, 12, 18])):
        monkeypatch.setattr(stops, "COMMITS_READ", most)
        assert rows_shown(tmp_path, 6, None) == rows
