"""The statements, marks and columns with which rows go into a database."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.targets import published_rows
from helpers.targets import sql as sqlite_target
from sqlalchemy import Engine, event

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish import base, sql
from prefect_raybatch.publish.base import Sink
from prefect_raybatch.publish.publish import open_sink

ROWS = pa.table({"id": [1, 2, 3], "answer": ["a", "b", "c"]})


def sink_of(root: Path, **more: Any) -> Sink:
    return open_sink(PublishTarget.model_validate(sqlite_target(root, **more)), "key", {})


def run(root: Path, text: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(root / "rows.db")) as rows, rows:
        return rows.execute(text).fetchall()


MARKS = "_raybatch_published"
TURN = ("merge", "answers", "key", None, None)
PLAN = f'{MARKS}."plan" = ? AND {MARKS}.target = ?'


def test_a_publication_is_these_statements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is empty, so that the mark of this plan is renewed, and another one removed."""
    monkeypatch.setattr(sql, "INSERT_ROWS", 2)
    sink, done = sink_of(tmp_path, mode="merge", key=["id"]), list[Any]()
    for plan in "ab":
        sink.publish(published_rows(ROWS, plan * 64), str)
        run(tmp_path, "DELETE FROM answers")
        run(tmp_path, f"UPDATE {MARKS} SET published_at = 'then' WHERE \"plan\" != 'merge'")
    before = run(tmp_path, f'SELECT * FROM {MARKS} ORDER BY "plan"')
    assert before == [("b" * 64, "answers", "key", 3, "then"), TURN]

    def note(_: Any, cursor: Any, statement: str, parameters: Any, *more: Any) -> None:
        if not statement.startswith(("PRAGMA", "SELECT")):
            done.append((statement, parameters))

    run(tmp_path, f"INSERT INTO {MARKS} VALUES ('{'a' * 64}', 'answers', 'old', 9, 'then')")
    event.listen(Engine, "before_cursor_execute", note)
    began = datetime.now(UTC)
    try:
        sink.publish(published_rows(ROWS, "a" * 64), done.append)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    (mark,) = run(tmp_path, f"SELECT * FROM {MARKS} WHERE \"plan\" != 'merge'")
    assert mark[:-1] == ("a" * 64, "answers", "key", 3)
    assert began <= datetime.fromisoformat(mark[-1]) <= datetime.now(UTC)
    assert done == [
        (f'INSERT INTO {MARKS} ("plan", target) VALUES (?, ?)', ("merge", "answers")),
        *("opened", "looked"),
        (
            f"UPDATE {MARKS} SET run_key=?, rows=?, published_at=? WHERE {PLAN} "
            f"AND {MARKS}.published_at = ?",
            ("key", 3, mark[-1], "a" * 64, "answers", "then"),
        ),
        (
            f"DELETE FROM {MARKS} WHERE {PLAN} AND {MARKS}.published_at = ?",
            ("b" * 64, "answers", "then"),
        ),
        "in transaction",
        (f"UPDATE {MARKS} SET run_key=? WHERE {PLAN}", ("key", "merge", "answers")),
        ("DELETE FROM answers WHERE answers.id = ?", [(1,), (2,)]),
        ("DELETE FROM answers WHERE answers.id = ?", (3,)),
        ("INSERT INTO answers (id, answer) VALUES (?, ?)", [(1, "a"), (2, "b")]),
        ("INSERT INTO answers (id, answer) VALUES (?, ?)", (3, "c")),
        *("inserted", "committed"),
    ]
    assert run(tmp_path, f"SELECT * FROM {MARKS} WHERE \"plan\" = 'merge'") == [TURN]


def test_the_tables_that_publishing_creates(tmp_path: Path) -> None:
    sink_of(tmp_path).publish(published_rows(ROWS, "a" * 64), str)
    found = run(tmp_path, "SELECT sql FROM sqlite_master WHERE type = 'table'")
    assert [" ".join(text.split()) for (text,) in found] == [
        "CREATE TABLE answers ( id BIGINT, answer TEXT )",
        f'CREATE TABLE {MARKS} ( "plan" VARCHAR(64) NOT NULL, target VARCHAR(255) NOT NULL, '
        "run_key VARCHAR(200), rows BIGINT, published_at VARCHAR(40), "
        'PRIMARY KEY ("plan", target) )',
    ]


COLUMNS = {
    "id": ("BIGINT NOT NULL", pa.int64()),
    "flag": ("BOOLEAN", pa.bool_()),
    "score": ("DOUBLE", pa.float64()),
    "price": ("DECIMAL(10, 2)", pa.decimal128(38, 9)),
    "day": ("DATE", pa.date32()),
    "at": ("DATETIME", pa.timestamp("us")),
    "hour": ("TIME", pa.time64("us")),
    "raw": ("BLOB NOT NULL", pa.binary()),
    "text": ("TEXT", pa.string()),  # any type fits
    "name": ("TEXT NOT NULL", pa.string()),
}


def test_the_columns_of_a_table_with_their_types_and_nulls(tmp_path: Path) -> None:
    listed = ", ".join(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())
    run(tmp_path, f"CREATE TABLE answers ({listed})")
    wanted = [
        pa.field(name, kind, "NOT NULL" not in column) for name, (column, kind) in COLUMNS.items()
    ]
    sink = sink_of(tmp_path)
    assert sink.existing() == pa.schema(wanted)
    texts = [("text", pa.string()), ("name", pa.string())]
    given = pa.schema([("id", pa.int32()), *texts, ("raw", pa.binary())])
    assert sink.check(given) == "exists, and its columns fit"
    assert sink.never_null == ("id", "raw", "name")
    with pytest.raises(ConfigError, match="does not allow null in column 'raw', which the result"):
        sink.check(given.remove(3))


KINDS = {
    "bool": pa.bool_(),
    "int": pa.int16(),
    "float": pa.float32(),
    "decimal": pa.decimal128(5, 1),
    "date": pa.date64(),
    "time": pa.time32("s"),
    "naive": pa.timestamp("s"),
    "zoned": pa.timestamp("us", "Europe/Berlin"),
    "binary": pa.large_binary(),
    "text": pa.string(),
    "list": pa.list_(pa.int8()),
}
FITTING = {
    "id": {"bool", "int"},
    "flag": {"bool", "int"},
    "score": {"bool", "int", "float", "decimal"},
    "price": {"bool", "int", "float", "decimal"},
    "day": {"date"},
    "at": {"date", "naive", "zoned"},
    "hour": {"time"},
    "raw": {"binary"},
    "text": set(KINDS),
    "name": set(KINDS),
}


def test_which_types_fit_the_columns_of_a_table(tmp_path: Path) -> None:
    listed = ", ".join(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())
    run(tmp_path, f"CREATE TABLE answers ({listed})")
    sink, found = sink_of(tmp_path), {name: set[str]() for name in COLUMNS}
    for column in COLUMNS:
        for name, kind in KINDS.items():
            with suppress(ConfigError):
                sink.check(pa.schema([(column, kind)]), whole=False)
                found[column].add(name)
    assert found == FITTING


@pytest.mark.parametrize(
    ("table", "target"),
    [("answers", "answers"), ("Answers", "answers"), ("main.ÄRGER", "Ärger")],
)
def test_a_mark_has_the_name_of_the_table_without_its_schema(
    table: str, target: str, tmp_path: Path
) -> None:
    sink = sink_of(tmp_path, table=table)
    for plan in "ab":
        sink.publish(published_rows(ROWS, plan * 64), str)
    found = run(tmp_path, f'SELECT "plan", target, "rows" FROM {MARKS}')
    assert found == [("a" * 64, target, 3), ("b" * 64, target, 3)]


def test_the_limits_of_statements_and_names() -> None:
    assert sql.INSERT_ROWS == 1000
    assert sql.LONGEST_NAMES == {
        "postgresql": (63, "bytes"),
        "redshift": (127, "bytes"),
        "oracle": (128, "bytes"),
        "mysql": (64, "characters"),
        "mariadb": (64, "characters"),
        "mssql": (128, "characters"),
        "snowflake": (255, "characters"),
        "bigquery": (300, "characters"),
        "db2": (128, "bytes"),
        "vertica": (128, "bytes"),
    }
    assert base.PUBLISH_TRIES == 20 and base.ERROR_SHOWN == 400


PLACES = [
    ("postgresql://h/db", "T", ("postgresql", "h:None", "db", "public", "T")),
    ("postgresql://me:pw@h:5/db", "s.T", ("postgresql", "h:5", "db", "s", "T")),
    ("mysql+pymysql://h:3306/db", "T", ("mysql", "h:3306", "db", "", "t")),
    ("oracle+oracledb://h/", "s.t", ("oracle", "h:None", "", "s", "T")),
    ("oracle+oracledb://h/", "tT", ("oracle", "h:None", "", "", "tT")),
    ("sqlite:////nowhere/a/../b.db", "T", ("sqlite", "None:None", "/nowhere/b.db", "main", "t")),
    ("duckdb:////nowhere/b.db", "s.Ä", ("duckdb", "None:None", "/nowhere/b.db", "s", "ä")),
]


@pytest.mark.parametrize(("uri", "table", "place"), PLACES)
def test_the_place_of_a_table(
    uri: str, table: str, place: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PW", "pw")
    fields = {"format": "sql", "uri": uri.replace(":pw@", ":${PW}@"), "table": table}
    sink = open_sink(PublishTarget.model_validate(fields), "key", {})
    assert sink.place() == ("sql", *place)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"ä": [1, None, float("inf")]}, '{"ä": [1, null, null]}'),
        ([b"\x00\xff", Decimal("1.50")], '["AP8=", "1.50"]'),
        ([date(2026, 7, 1), time(1, 2, 3)], '["2026-07-01", "01:02:03"]'),
        (timedelta(seconds=1), '"0:00:01"'),
    ],
)
def test_a_nested_value_becomes_json(value: object, text: str) -> None:
    assert sql.json_text(value) == text
