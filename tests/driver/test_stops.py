"""The failed rows that a person is shown of a run that stopped over its error budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.small import small_run

from prefect_raybatch.driver.stops import FROM_A_SHARD, Sample, Stop, failed_sample, last_stop
from prefect_raybatch.ledger.layout import PLAN, attempt_path


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


def test_the_stop_of_a_run_is_that_of_its_latest_attempt(tmp_path: Path) -> None:
    run, stop = small_run(tmp_path), stop_of(range(5, 7))
    assert last_stop(str(tmp_path), None) is None
    run.ledger.note_attempt("b" * 32, {"started": "2026-03-01", "stopped": stop.to_dict()})
    run.store.put(attempt_path("d" * 32), b"no record")
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
