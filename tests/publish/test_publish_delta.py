"""Publishing to a local Delta table that others publish to at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from helpers.publisher import ROWS, run_at_once, started
from helpers.targets import published_rows

from prefect_raybatch.errors import PublishFailed
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish import delta
from prefect_raybatch.publish.base import PUBLISH_TRIES, Sink
from prefect_raybatch.publish.delta import empties_table, restored_version, version_with
from prefect_raybatch.publish.publish import open_sink

OURS = {"operation": "WRITE", "raybatch.plan": "a" * 64}
COMMITS = {number: {"timestamp": 1000 * number} for number in range(5)}


@pytest.mark.parametrize(
    ("given", "version"),
    [
        ({"version": "3"}, 3),
        ({"version": "4"}, None),
        ({"version": "5"}, None),
        ({"version": "null", "timestamp": "2000"}, 2),
        ({"datetime": "2999"}, 2),
        ({"timestamp": "1970-01-01 00:00:02.0"}, 2),
        ({"timestamp": "1970-01-01T00:00:03+00:00"}, 3),
        ({"timestamp": "9000"}, 3),  # not itself
        ({"timestamp": "1969-12-31 23:59:59.0"}, None),
        ({"timestamp": "yesterday"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_restore_names_its_version_by_number_or_time(
    given: dict[str, str] | None, version: int | None
) -> None:
    assert restored_version({"version": 4, "operationParameters": given}, COMMITS) == version


@pytest.mark.parametrize(
    ("operation", "given", "emptied"),
    [
        ("TRUNCATE", None, True),
        ("REPLACE TABLE AS SELECT", {}, True),
        ("CREATE OR REPLACE TABLE", {}, True),
        ("CREATE TABLE", {}, False),
        ("DELETE", {}, True),
        ("DELETE", {"predicate": '["true"]'}, True),
        ("DELETE", {"predicate": "id > 1"}, False),
        ("WRITE", {"mode": "Overwrite"}, True),
        ("WRITE", {"mode": "Overwrite", "predicate": "id > 1"}, False),
        ("WRITE", {"mode": "Append"}, False),
        (None, {}, False),
    ],
)
def test_a_commit_that_empties_the_table_is_known_by_its_operation(
    operation: str | None, given: dict[str, str] | None, emptied: bool, tmp_path: Path
) -> None:
    published(tmp_path / "t", "a")
    table = DeltaTable(str(tmp_path / "t"))
    assert empties_table(table, {"operation": operation, "operationParameters": given}) == emptied


@pytest.mark.parametrize(
    ("recorded", "log", "version"),
    [
        ("3", {5: {"operation": "WRITE"}}, "3"),  # written before the log begins
        ("", {5: {"operation": "WRITE"}}, "4"),
        ("4", {5: {"operation": "RESTORE", "operationParameters": {"version": "4"}}}, "4"),
        ("4", {5: {"operation": "RESTORE", "operationParameters": {"version": "3"}}}, None),
        ("4", {5: {"operation": "RESTORE", "operationParameters": {"version": "5"}}}, "4"),
        ("", {1: {"operation": "WRITE"}}, "0"),
        ("", {0: {"operation": "WRITE"}}, None),  # the whole log
        ("", {3: OURS, 4: {"operation": "RESTORE", "operationParameters": {"version": "2"}}}, None),
    ],
)
def test_a_log_that_was_cleaned_proves_no_rows_that_a_restore_went_back_behind(
    recorded: str,
    log: dict[int, dict[str, str]],
    version: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published(tmp_path / "t", "a")
    commits = {number: {**commit, "version": number} for number, commit in log.items()}
    monkeypatch.setattr(delta, "commits_of_log", lambda handle: (max(log), commits))
    table = DeltaTable(str(tmp_path / "t"))
    assert version_with(table, "a" * 64, recorded) == version
    sink = sink_of(tmp_path / "t")
    assert sink.holds("a" * 64, recorded) == (version is not None)
    assert sink.holds("b" * 64, recorded) == bool(recorded and version)  # without a transaction


def sink_of(place: Path) -> Sink:
    target = PublishTarget.model_validate({"format": "delta", "uri": str(place)})
    return open_sink(target, "key", {})


def published(place: Path, plan: str) -> str:
    return sink_of(place).publish(published_rows(ROWS, plan * 64), lambda step: None)


def test_a_commit_names_the_run_and_counts_its_publications(tmp_path: Path) -> None:
    for number in (1, 2):
        assert published(tmp_path / "t", "a") == str(2 * number - 1)
        table = DeltaTable(str(tmp_path / "t"))
        assert table.transaction_version(f"raybatch:{'a' * 64}") == number
        commit = table.history(1)[0]
        marks = {name: commit[name] for name in commit if name.startswith("raybatch")}
        assert marks == {"raybatch.plan": "a" * 64, "raybatch.run_key": "key"}
        table.delete()


def test_the_version_of_rows_stays_while_others_publish(tmp_path: Path) -> None:
    place, others = tmp_path / "t", iter("bcd")
    first = published(place, "a")

    def meanwhile(step: str) -> None:
        if step == "opened":
            for plan in others:
                published(place, plan)

    again = sink_of(place).publish(published_rows(ROWS, "a" * 64), meanwhile)
    assert again == first == "1"


def test_the_version_stays_when_others_publish_while_the_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, others = tmp_path / "t", iter("bc")
    published(place, "a")
    history = DeltaTable.history

    def late(table: DeltaTable) -> list[dict[str, object]]:
        if plan := next(others, ""):
            published(place, plan)
        return history(table)

    monkeypatch.setattr(DeltaTable, "history", late)
    assert published(place, "a") == "1"


def test_a_table_that_never_rests_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(tmp_path / "t", "a")
    numbers = iter(range(10**6))
    monkeypatch.setattr(DeltaTable, "version", lambda table: next(numbers))
    with pytest.raises(PublishFailed, match=f"{PUBLISH_TRIES} times others committed to the table"):
        published(tmp_path / "t", "a")


@pytest.mark.whole
def test_nine_publishers_at_once_report_the_versions_that_have_their_rows(tmp_path: Path) -> None:
    plans = "abc" * 3
    ends = run_at_once(*(started(str(tmp_path / "t"), plan, {}) for plan in plans))
    table = DeltaTable(str(tmp_path / "t"))
    there = {one["raybatch.plan"][0]: str(one["version"]) for one in table.history()[:3]}
    assert ends == [(0, there[plan]) for plan in plans]
    assert len(table.to_pyarrow_table()) == 3 * len(ROWS)
