"""Publishing again: a target that lost the rows gets them once more, and each target its own."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lance
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from helpers.retries import FAILED, first_run
from helpers.small import read_json
from helpers.targets import TARGETS, catalog, published_rows
from pyiceberg.catalog import load_catalog
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.pool import Pool

from prefect_raybatch.api import publish_run
from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError, RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish import files
from prefect_raybatch.publish.planned import check_targets_of
from prefect_raybatch.publish.publish import open_sink
from prefect_raybatch.publish.sql import MARK_TABLE
from prefect_raybatch.storage import Store, open_store

ANSWERED = [n for n in range(20) if n not in FAILED]
INPUT = pa.schema([("id", pa.int64()), ("Company", pa.string()), ("tags", pa.list_(pa.string()))])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_run(tmp_path_factory.mktemp("finished")).store.uri)


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_run(tmp_path_factory.mktemp("other"), {}, text="other").store.uri)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out/key"))


@pytest.fixture
def other(other_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(other_run, tmp_path / "other/key"))


def job_of(run: Path, *targets: dict[str, Any]) -> BatchJob:
    value = read_json(run / "_raybatch/plan.json")["job"]
    value["output"] = {**value["output"], "publish": list(targets)}
    return BatchJob.from_dict(value)


def numbers(format: str, root: Path) -> list[int]:
    return sorted(row["_row"] for row in TARGETS[format][1](root))


# --- a target that lost the rows ----------------------------------------------------------------


def restore_delta(root: Path) -> None:
    DeltaTable(str(root / "delta")).restore(0)  # the empty table that publishing made


def roll_back_iceberg(root: Path) -> None:
    table = load_catalog(None, **catalog(root)).load_table("db.answers")
    table.manage_snapshots().set_current_snapshot(table.metadata.snapshots[0].snapshot_id).commit()


def truncate_sql(root: Path) -> None:
    with sqlite3.connect(root / "rows.db") as base:
        base.execute("DELETE FROM answers")


def drop_sql(root: Path) -> None:
    with sqlite3.connect(root / "rows.db") as base:
        base.execute("DROP TABLE answers")


def remove_file(root: Path) -> None:
    next((root / "parquet").rglob("part-*")).unlink()


def remove_mark(root: Path) -> None:
    next((root / "jsonl").glob("_raybatch.*")).unlink()


def remove_table(root: Path) -> None:
    shutil.rmtree(root / "delta")


def remove_set(root: Path) -> None:
    shutil.rmtree(next(root.glob("lance-*")))


def empty_delta(root: Path) -> None:
    DeltaTable(str(root / "delta")).delete()


def delete_all_of_delta(root: Path) -> None:
    DeltaTable(str(root / "delta")).delete("_row >= 0")


def empty_iceberg(root: Path) -> None:
    load_catalog(None, **catalog(root)).load_table("db.answers").delete()


def empty_lance(root: Path) -> None:
    lance.dataset(str(next(root.glob("lance-*")))).delete("true")


def cut_file(root: Path) -> None:
    path = next((root / "parquet").rglob("part-*"))
    path.write_bytes(path.read_bytes()[:-20])


def empty_file(root: Path) -> None:
    next((root / "jsonl").rglob("part-*")).write_text("")


LOSSES: list[tuple[str, Callable[[Path], None]]] = [
    ("delta", restore_delta),
    ("delta", remove_table),
    ("iceberg", roll_back_iceberg),
    ("sql", truncate_sql),
    ("sql", drop_sql),
    ("lance", remove_set),
    ("parquet", remove_file),
    ("jsonl", remove_mark),
    ("delta", empty_delta),
    ("delta", delete_all_of_delta),
    ("iceberg", empty_iceberg),
    ("lance", empty_lance),
    ("parquet", cut_file),
    ("jsonl", empty_file),
]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("format", "lose"), LOSSES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_target_that_lost_the_rows_gets_them_again(format, lose, recorded, run, tmp_path):
    if format == "iceberg":  # a table to roll back to, with one row of somebody else
        TARGETS[format][0](tmp_path)
        row = {"id": 99, "Company": "x", "tags": ["x"], "response": "x", "_row": 99}
        table = pa.Table.from_pylist([row])
        made = load_catalog(None, **catalog(tmp_path)).create_table("db.answers", table.schema)
        made.append(table)
    job = job_of(run, TARGETS[format][0](tmp_path))
    there = [*ANSWERED, 99] if format == "iceberg" else ANSWERED
    publish_run(job, str(run))
    assert numbers(format, tmp_path) == there
    lose(tmp_path)
    there = ANSWERED if lose is empty_iceberg else there
    if not recorded:
        shutil.rmtree(run / "_raybatch/published")
    for _ in range(2):
        (published,) = publish_run(job, str(run)).published
        assert published.rows == len(ANSWERED)
        assert numbers(format, tmp_path) == there


def test_a_mark_that_another_run_removes_from_an_emptied_table_counts_no_more(run, other, tmp_path):
    """The other run adds its rows after the marks were read and before the table is looked at."""
    target = TARGETS["sql"][0](tmp_path)
    publish_run(job_of(run, target), str(run))
    truncate_sql(tmp_path)
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT _raybatch_published") and not seen:
            seen.append("marks")

    def act(*_: Any) -> None:  # the connection that read the marks is given back
        if seen == ["marks"]:
            seen.append("published")
            publish_run(job_of(other, target), str(other))

    event.listen(Engine, "after_cursor_execute", note)
    event.listen(Pool, "checkin", act)
    try:
        publish_run(job_of(run, target), str(run))
    finally:
        event.remove(Engine, "after_cursor_execute", note)
        event.remove(Pool, "checkin", act)
    assert seen == ["marks", "published"]
    assert numbers("sql", tmp_path) == sorted([*ANSWERED, *range(20)])


def test_a_delta_table_that_is_restored_past_the_rows_and_back_has_them_once(run, other, tmp_path):
    """Versions: 0 made, 1 the rows, 2 restored to 0, 3 another run's, 4 restored to 1."""
    job, place = job_of(run, TARGETS["delta"][0](tmp_path)), str(tmp_path / "delta")
    publish_run(job, str(run))
    DeltaTable(place).restore(0)
    publish_run(job_of(other, TARGETS["delta"][0](tmp_path)), str(other))
    assert numbers("delta", tmp_path) == list(range(20))
    DeltaTable(place).restore(1)
    assert publish_run(job, str(run)).published[0].version == "1"
    assert numbers("delta", tmp_path) == ANSWERED
    DeltaTable(place).restore(0)
    first = DeltaTable(place).history()[-1]["timestamp"]
    publish_run(job, str(run))
    assert numbers("delta", tmp_path) == ANSWERED
    from datetime import UTC, datetime

    DeltaTable(place).restore(datetime.fromtimestamp(first / 1000, UTC))
    assert numbers("delta", tmp_path) == []
    publish_run(job, str(run))
    assert numbers("delta", tmp_path) == ANSWERED


@pytest.mark.parametrize("cleaned", [2, 3], ids=["the commit is in the log", "it is not"])
def test_a_delta_table_restored_past_the_rows_gets_them_again_though_its_log_was_cleaned(
    cleaned, run, other, tmp_path
):
    """Versions: 0 made, 1 another run's, 2 the rows, 3 restored to 1."""
    target, place = TARGETS["delta"][0](tmp_path), str(tmp_path / "delta")
    publish_run(job_of(other, target), str(other))
    publish_run(job_of(run, target), str(run))
    DeltaTable(place).restore(1)
    DeltaTable(place).create_checkpoint()
    for version in range(cleaned):
        (tmp_path / f"delta/_delta_log/{version:020d}.json").unlink()
    assert numbers("delta", tmp_path) == list(range(20))
    for _ in range(2):
        assert publish_run(job_of(run, target), str(run)).published[0].version == "4"
        assert numbers("delta", tmp_path) == sorted([*ANSWERED, *range(20)])


def test_a_mark_that_another_publisher_renews_meanwhile_is_kept(tmp_path):
    """Its rows are in the table again, and must not be published once more."""
    place, rows = tmp_path / "rows.db", pa.table({"id": [1, 2], "answer": ["a", "b"]})
    target = {"format": "sql", "uri": f"sqlite:///{place}", "table": "answers"}
    sink = open_sink(PublishTarget.model_validate(target), "key", {})

    def run(text: str) -> list[tuple[str, ...]]:
        with closing(sqlite3.connect(place)) as base, base:
            return base.execute(text).fetchall()

    for plan in "ab":
        sink.publish(published_rows(rows, plan * 64), lambda step: None)
    run("DELETE FROM answers")

    def meanwhile(step: str) -> None:
        if step == "looked":
            run(f"UPDATE {MARK_TABLE} SET published_at = 'later' WHERE plan LIKE 'b%'")

    sink.publish(published_rows(rows, "a" * 64), meanwhile)
    assert run(f"SELECT published_at FROM {MARK_TABLE} WHERE plan LIKE 'b%'") == [("later",)]


def test_files_are_written_with_the_options_of_the_target(tmp_path, monkeypatch):
    options, opened = {"anon": True}, list[dict[str, Any]]()

    def recorded(uri: str, options: dict[str, Any]) -> Store:
        opened.append(options)
        return open_store(uri)

    monkeypatch.setattr(files, "open_store", recorded)
    fields = {"format": "parquet", "uri": str(tmp_path), "partition_by": ["kind"]}
    rows = published_rows(pa.table({"id": [1, 2], "kind": ["a", "b"]}), "a" * 64)
    target = PublishTarget.model_validate(fields)
    open_sink(target, "key", options).publish(rows, lambda step: None)
    assert opened and all(given == options for given in opened)
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.parquet"))
    stem = f"part-{'a' * 16}"
    assert [name.rpartition("-")[0] for name in names] == [f"kind=a/{stem}", f"kind=b/{stem}"]


def test_a_partition_by_a_column_that_postprocess_adds_may_pass(tmp_path):
    """Its type is not known when the run is planned."""
    target = {"format": "parquet", "uri": str(tmp_path), "partition_by": ["made"]}
    sink = open_sink(PublishTarget.model_validate(target), "key", {})
    assert sink.check(pa.schema([("id", pa.int64())]), whole=False) == "gets new files"


def test_an_error_of_the_database_shows_no_row(tmp_path):
    with closing(sqlite3.connect(tmp_path / "rows.db")) as base:
        base.execute("CREATE TABLE answers (id INTEGER, answer TEXT CHECK (length(answer) < 3))")
    target = {"format": "sql", "uri": f"sqlite:///{tmp_path}/rows.db", "table": "answers"}
    sink = open_sink(PublishTarget.model_validate(target), "key", {})
    rows = published_rows(pa.table({"id": [1], "answer": ["private"]}), "a" * 64)
    with pytest.raises(RayBatchError, match="CHECK constraint") as caught:
        sink.publish(rows, lambda step: None)
    error: BaseException | None = caught.value
    while error is not None:  # a traceback shows all of them
        assert "private" not in str(error)
        error = error.__cause__ or error.__context__


def test_a_lance_set_of_the_run_is_no_table_to_append_to(tmp_path):
    """With append each run makes a data set; with a key there is one for all of them."""
    rows = published_rows(pa.table({"id": [1]}), "a" * 64)
    for more, there in (({}, False), ({"mode": "merge", "key": ["id"]}, True)):
        target = {"format": "lance", "uri": f"{tmp_path}/{there}-{{run_key}}", **more}
        sink = open_sink(PublishTarget.model_validate(target), "key", {})
        sink.publish(rows, lambda step: None)
        assert (sink.existing() is not None) == there
        assert sink.holds("a" * 64, "") and sink.holds("b" * 64, "") == there


def test_rows_that_another_publisher_inserts_meanwhile_are_not_inserted_twice(tmp_path):
    place, rows = tmp_path / "rows.db", pa.table({"id": [1, 2], "answer": ["a", "b"]})
    target = {"format": "sql", "uri": f"sqlite:///{place}", "table": "answers"}
    sink = open_sink(PublishTarget.model_validate(target), "key", {})
    other = open_sink(PublishTarget.model_validate(target), "key", {})

    def meanwhile(step: str) -> None:
        if step == "looked":
            other.publish(published_rows(rows, "a" * 64), lambda step: None)

    assert sink.publish(published_rows(rows, "a" * 64), meanwhile) == ""
    with closing(sqlite3.connect(place)) as base:
        assert base.execute("SELECT id FROM answers").fetchall() == [(1,), (2,)]


def test_rows_that_somebody_deleted_from_a_table_stay_deleted(run, tmp_path):
    """They were in the table and its history says so: deleting them was meant."""
    jobs = {format: job_of(run, TARGETS[format][0](tmp_path)) for format in ("delta", "iceberg")}
    for job in jobs.values():
        publish_run(job, str(run))
    DeltaTable(str(tmp_path / "delta")).delete("_row < 10")
    load_catalog(None, **catalog(tmp_path)).load_table("db.answers").delete("_row < 10")
    shutil.rmtree(run / "_raybatch/published")
    for format, job in jobs.items():
        publish_run(job, str(run))
        assert numbers(format, tmp_path) == [n for n in ANSWERED if n >= 10], format


def test_rows_of_a_table_that_somebody_overwrote_are_published_again(run, tmp_path):
    jobs = {format: job_of(run, TARGETS[format][0](tmp_path)) for format in ("delta", "iceberg")}
    for job in jobs.values():
        publish_run(job, str(run))
    place, table = str(tmp_path / "delta"), load_catalog(None, **catalog(tmp_path))
    one = pa.table(DeltaTable(place).to_pyarrow_table()).slice(0, 1)
    write_deltalake(place, one, mode="overwrite")
    answers = table.load_table("db.answers")
    answers.overwrite(answers.scan().to_arrow().slice(0, 1))
    for format, job in jobs.items():
        for _ in range(2):
            publish_run(job, str(run))
            assert len(numbers(format, tmp_path)) == len(ANSWERED) + 1, format


def test_rows_that_a_later_run_replaced_stay_replaced(run, other, tmp_path):
    for format in ("delta", "iceberg"):
        target = TARGETS[format][0](tmp_path, mode="merge", key=["id"])
        for one in (run, other, run):
            publish_run(job_of(one, target), str(one))
        rows = TARGETS[format][1](tmp_path)
        assert {row["response"].split()[0] for row in rows} == {"other"}, format


def test_an_iceberg_snapshot_that_expired_is_known_by_the_property(run, other, tmp_path):
    target = TARGETS["iceberg"][0](tmp_path)
    job = job_of(run, target)
    publish_run(job, str(run))
    publish_run(job_of(other, target), str(other))
    table = load_catalog(None, **catalog(tmp_path)).load_table("db.answers")
    first, last = table.metadata.snapshots
    table.maintenance.expire_snapshots().by_id(first.snapshot_id).commit()
    both = sorted([*ANSWERED, *range(20)])
    for _ in range(2):
        publish_run(job, str(run))
        assert numbers("iceberg", tmp_path) == both
        shutil.rmtree(run / "_raybatch/published")
    # Rolled back and expired: the abandoned snapshot is younger than what the table has.
    publish_run(job_of(run, target), str(run))
    third = first_run(tmp_path / "third", {}, text="third")
    third_run = Path(third.store.uri)
    publish_run(job_of(third_run, target), str(third_run))
    table = load_catalog(None, **catalog(tmp_path)).load_table("db.answers")
    lost = table.current_snapshot().snapshot_id
    table.manage_snapshots().set_current_snapshot(last.snapshot_id).commit()
    load_catalog(None, **catalog(tmp_path)).load_table(
        "db.answers"
    ).maintenance.expire_snapshots().by_id(lost).commit()
    publish_run(job_of(third_run, target), str(third_run))
    assert len(numbers("iceberg", tmp_path)) == len(both) + 20


def test_a_lance_set_that_is_restored_is_merged_into_again(run, other, tmp_path):
    target = TARGETS["lance"][0](
        tmp_path, mode="merge", key=["id"], uri=str(tmp_path / "lance-all")
    )
    publish_run(job_of(other, target), str(other))
    publish_run(job_of(run, target), str(run))
    before = lance.dataset(str(tmp_path / "lance-all")).version
    publish_run(job_of(run, target), str(run))
    assert lance.dataset(str(tmp_path / "lance-all")).version == before  # it has them
    lance.dataset(str(tmp_path / "lance-all"), version=1).restore()
    publish_run(job_of(run, target), str(run))
    rows = {row["id"]: row["response"] for row in TARGETS["lance"][1](tmp_path)}
    assert rows == {n: ("other" if n in FAILED else "answer") + f" {n}" for n in range(20)}


@pytest.mark.parametrize("later", [0, 1])
def test_a_lance_log_that_restores_no_earlier_version_ends_the_search(
    later, run, other, tmp_path, monkeypatch
):
    target = TARGETS["lance"][0](
        tmp_path, mode="merge", key=["id"], uri=str(tmp_path / "lance-all")
    )
    for one in (other, run):
        publish_run(job_of(one, target), str(one))
    lance.dataset(str(tmp_path / "lance-all")).delete("id = 3")
    asked = []

    def restores(dataset, version):
        assert not asked, "else the search might never end"
        asked.append(version)
        return SimpleNamespace(operation=lance.LanceOperation.Restore(version + later))

    monkeypatch.setattr(lance.LanceDataset, "read_transaction", restores)
    before = lance.dataset(str(tmp_path / "lance-all")).version
    publish_run(job_of(run, target), str(run))
    assert asked == [before] and lance.dataset(str(tmp_path / "lance-all")).version == before


def test_an_emptied_table_of_a_database_forgets_all_runs_that_it_lost(run, other, tmp_path):
    target = TARGETS["sql"][0](tmp_path)
    publish_run(job_of(run, target), str(run))
    truncate_sql(tmp_path)
    publish_run(job_of(other, target), str(other))  # the table is empty no more
    assert numbers("sql", tmp_path) == list(range(20))
    publish_run(job_of(run, target), str(run))
    assert numbers("sql", tmp_path) == sorted([*ANSWERED, *range(20)])


# --- several targets in one place ---------------------------------------------------------------


def test_two_tables_of_one_database_each_get_the_rows(run, tmp_path):
    first = TARGETS["sql"][0](tmp_path)
    second = {**first, "table": "second", "name": "second"}
    job = job_of(run, first, second)
    for _ in range(2):
        assert [one.rows for one in publish_run(job, str(run)).published] == [16, 16]
        with sqlite3.connect(tmp_path / "rows.db") as base:
            for table in ("answers", "second"):
                assert base.execute(f"select count(*) from {table}").fetchone() == (16,), table
        shutil.rmtree(run / "_raybatch/published")


def test_parquet_and_json_lines_in_one_folder_each_get_the_rows(run, tmp_path):
    place = str(tmp_path / "both")
    job = job_of(
        run, {"format": "parquet", "uri": place}, {"format": "jsonl", "uri": place, "name": "lines"}
    )
    for _ in range(2):
        publish_run(job, str(run))
        files = sorted(path.suffix for path in (tmp_path / "both").glob("part-*"))
        assert files == [".jsonl", ".parquet"]
        shutil.rmtree(run / "_raybatch/published")
    marks = [json.loads(path.read_text()) for path in (tmp_path / "both").glob("_raybatch.*")]
    assert sorted(mark["format"] for mark in marks) == ["jsonl", "parquet"]


def sqlite_target(root: Path, table: str = "t", **more: Any) -> dict[str, Any]:
    return {"format": "sql", "uri": f"sqlite:///{root}/rows.db", "table": table, **more}


def same_places(root: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    place = str(root / "place")
    files, table = {"format": "parquet", "uri": place}, {"format": "delta", "uri": place}
    return {
        "one folder": (files, {**files, "partition_by": ["Company"]}),
        "a folder in the other": (files, {**files, "uri": f"{place}/inner"}),
        "a slash": (files, {**files, "uri": f"{place}/"}),
        "a dot": (files, {**files, "uri": f"{root}/./place"}),
        "file://": (files, {**files, "uri": f"file://{place}"}),
        "a table and files": (table, files),
        "one Delta table": (table, {**table, "mode": "merge", "key": ["id"]}),
        "one SQL table": (sqlite_target(root), sqlite_target(root, mode="merge", key=["id"])),
        "another case": (sqlite_target(root), sqlite_target(root, "T")),
        "its schema": (sqlite_target(root), sqlite_target(root, "main.t")),
        "a link": (files, {**files, "uri": str(root / "link")}),
        "one Iceberg table": (
            TARGETS["iceberg"][0](root),
            TARGETS["iceberg"][0](root, mode="merge", key=["id"]),
        ),
    }


@pytest.mark.parametrize(
    "name",
    sorted(same_places(Path("/tmp/none")))
    if False
    else [
        "one folder",
        "a folder in the other",
        "a slash",
        "a dot",
        "file://",
        "a table and files",
        "one Delta table",
        "one SQL table",
        "another case",
        "its schema",
        "a link",
        "one Iceberg table",
    ],
)
def test_two_targets_that_write_the_same_place_are_refused_at_plan(name, run, tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "place")
    first, second = same_places(tmp_path)[name]
    job = job_of(run, {**first, "name": "a"}, {**second, "name": "b"})
    for work in (
        lambda: check_targets_of(compile_job(job), INPUT),
        lambda: publish_run(job, str(run)),
    ):
        with pytest.raises(ConfigError, match=r"targets 'a' and 'b' .*\. (Move|Remove|Give)"):
            work()
    assert not list((tmp_path / "place").iterdir())


def test_targets_of_a_delta_table_keep_it_after_another_writer(run, tmp_path):
    """A later commit of somebody else changes nothing about the rows being there."""
    job = job_of(run, TARGETS["delta"][0](tmp_path))
    publish_run(job, str(run))
    row = pa.Table.from_pylist([{"_row": 99}], pa.schema([("_row", pa.int64())]))
    write_deltalake(str(tmp_path / "delta"), row, mode="append", schema_mode="merge")
    shutil.rmtree(run / "_raybatch/published")
    publish_run(job, str(run))
    assert numbers("delta", tmp_path) == [*ANSWERED, 99]
