"""A database's query as input: SQLite, and a real PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.postgresql import PASSWORD, postgresql
from helpers.small import make_job
from helpers.specs import reads

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError, StoreUnavailable
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.source import Inventory, needs_snapshot, peek, snapshot
from prefect_raybatch.source.tables import copying, sql
from prefect_raybatch.stages.cell_text import cell_texts
from prefect_raybatch.storage import open_store

KEYS = {"username": "reader", "password_env": "TEST_PG_PASSWORD"}


def copy(tmp_path: Path, uri: str, query: str, **fields: Any) -> tuple[Inventory, pa.Table]:
    source = reads(uri=uri, query=query, **fields)
    assert needs_snapshot(source)
    made = snapshot(source, open_store(str(tmp_path / "run")), "attempt")
    tables = [pq.read_table(tmp_path / "run" / file.uri) for file in made.files]
    assert pa.concat_tables(tables).schema.equals(made.schema)
    return made, pa.concat_tables(tables)


def refused(uri: str, query: str, *words: str, **fields: Any) -> None:
    with pytest.raises(RayBatchError) as caught:
        peek(reads(uri=uri, query=query, **fields))
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.fixture
def companies(tmp_path: Path) -> str:
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE companies (id INTEGER, name TEXT, amount REAL, data BLOB)")
        rows = [(i, f"Company {i}", i / 2, b"\x00" if i % 2 else None) for i in range(100)]
        database.executemany("INSERT INTO companies VALUES (?, ?, ?, ?)", rows)
    database.close()
    return f"sqlite:///{tmp_path}/a.db"


def test_sqlite(tmp_path, monkeypatch, companies):
    monkeypatch.setattr(sql, "FETCH_ROWS", 7)
    query = 'SELECT id, name AS "Company", amount, data FROM companies ORDER BY id DESC'
    made, table = copy(tmp_path, companies, query)
    assert table["id"].to_pylist() == list(range(99, -1, -1))
    assert [str(kind) for kind in made.schema.types] == ["int64", "string", "double", "binary"]
    assert made.table["format"] == "sql" and made.table["uri"] == companies
    some = copy(
        tmp_path, companies, query, columns=["Company"], filter="id < 5 AND data IS NULL", limit=2
    )[1]
    assert some.to_pylist() == [{"Company": "Company 4"}, {"Company": "Company 2"}]
    assert peek(reads(uri=companies, query=query)).rows == 100


@pytest.mark.parametrize(
    ("query", "rows", "estimate"),
    [
        ("SELECT id FROM companies -- all", 100, 100),
        ("SELECT id FROM companies /* all */;", 100, 100),
        ("SELECT id FROM companies; -- all", 100, 9),
        ("SELECT id FROM companies;\n-- all", 100, 9),
        ("PRAGMA table_info(companies)", 4, 4),
    ],
)
def test_a_statement_that_sqlite_cannot_count_is_read(
    tmp_path, monkeypatch, companies, query, rows, estimate
):
    monkeypatch.setattr(sql, "FETCH_ROWS", 9)
    monkeypatch.setattr(copying, "GUESS_ROWS", 5)
    assert copy(tmp_path, companies, query)[0].rows == rows
    looked = peek(reads(uri=companies, query=query))
    assert (looked.rows, looked.guessed) == (estimate, rows == 100)


def test_a_plan_over_a_query_and_no_key_in_it(tmp_path, companies):
    source = {
        "uri": companies,
        "query": "SELECT id, name AS \"Company\" FROM companies WHERE name LIKE '%1' ORDER BY id",
        "options": {"username": "u", "password": PASSWORD},
    }
    job = make_job(
        source=source,
        prompt={"template": "{Company}"},
        output={"uri": str(tmp_path / "out")},
    )
    assert dry_run(job).rows == 10
    run = plan_run(job, "r1")
    ledger = Ledger(open_store(run.uri))
    assert run.rows == 10 and ledger.load_plan().table["version"]
    for path in Path(run.uri).rglob("*.json"):
        assert PASSWORD not in path.read_text()
    Path(tmp_path / "a.db").unlink()  # a resume reads the copy
    assert plan_run(job, "r1").plan_hash == run.plan_hash
    other = make_job(
        source={**source, "query": "SELECT 1 AS id"},
        prompt={"template": "{id}"},
        output={"uri": str(tmp_path / "out")},
    )
    with pytest.raises(RayBatchError, match=r"source.query"):
        plan_run(other, "r1")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("SELECT * FROM nowhere", ["source.query", "no such table: nowhere"]),
        ("SELECT nme FROM companies", ["no such column: nme"]),
        ("SELEC 1", ["syntax error"]),
        ("DELETE FROM companies", ["readonly"]),
        ("SELECT id, id FROM companies", ["two columns 'id'"]),
        ("SELECT id FROM companies WHERE id < 0", ["has no rows"]),
        ("SELECT 1 AS a UNION ALL SELECT 'x'", ["column 'a' has values of different types"]),
    ],
)
def test_queries_that_cannot_be_read(companies, query, words):
    refused(companies, query, *words)


def test_types_that_show_late_are_declared(tmp_path, monkeypatch, companies):
    monkeypatch.setattr(sql, "FETCH_ROWS", 10)
    query = "SELECT id, CASE WHEN id > 50 THEN amount END AS a, CASE WHEN id = 70 THEN 'x' "
    query += "ELSE id END AS m FROM companies ORDER BY id"
    with pytest.raises(SourceError, match=r"'a' is null in the first 50 rows.*in row 51 .*types"):
        copy(tmp_path, companies, query, columns=["a"])
    with pytest.raises(SourceError, match=r"'m' is int64, but row 70 .*does not fit"):
        copy(tmp_path, companies, query, columns=["m"])
    types = {"a": "decimal(10,1)", "m": "string"}
    table = copy(tmp_path, companies, query, types=types)[1]
    assert table["a"][60].as_py() == Decimal("30.0")
    assert table["m"].to_pylist()[69:71] == ["69", "x"]
    refused(companies, query, "returns no column 'b' (columns: id, a, m)", types={"b": "int64"})


@pytest.mark.parametrize(
    ("values", "types", "words"),
    [
        (["1", "2.5"], {}, "row 1 (counted from 0) does not fit (2.5 does not fit int64)"),
        (["2.5"], {"a": "int64"}, "2.5 does not fit int64"),
        (["0.5", "9007199254740993"], {}, "9007199254740993"),
        (["16777217.0"], {"a": "float"}, "16777217.0 does not fit float"),
        (["1", "x'ff'"], {"a": "string"}, "row 1 (counted from 0) does not fit"),
    ],
)
def test_a_value_is_never_cut_to_the_type_of_the_first_rows(
    monkeypatch, companies, values, types, words
):
    monkeypatch.setattr(sql, "FETCH_ROWS", 1)
    query = " UNION ALL ".join(f"SELECT {value} AS a" for value in values)
    refused(companies, query, words, types=types)


@pytest.mark.parametrize(
    ("value", "types", "held"),
    [
        ("19.99::FLOAT", {}, "float [19.99]"),
        ("18446744073709551615::UBIGINT", {}, "uint64 [18446744073709551615]"),
        ("'caf\\xC3\\xA9'::BLOB", {"a": "string"}, "string ['café']"),
        ("'2026-01-01 00:00:00'::TIMESTAMP", {"a": "date32"}, "date32[day] [2026-01-01]"),
        ("'2026-01-01 01:00'::TIMESTAMP", {"a": "timestamp[us, UTC]"}, "[2026-01-01 01:00:00"),
        ("'2026-01-01 12:00'::TIMESTAMP", {"a": "date32"}, None),
        ("'2026-01-01 00:00:00+02'::TIMESTAMPTZ", {"a": "timestamp[us]"}, None),
        ("'2026-01-01'::TIMESTAMP_NS", {}, None),
        ("'12:00:00+05'::TIMETZ", {}, None),
        ("'12:00:00+05'::TIMETZ", {"a": "string"}, "string ['12:00:00+05:00']"),
        ("2.5::DECIMAL(3,1)", {"a": "int64"}, None),
        ("0.1::DECIMAL(3,1)", {"a": "double"}, "double [0.1]"),
        ("19.99::DECIMAL(5,2)", {"a": "float"}, "float [19.99]"),
        ("9007199254740992::DECIMAL(20,0)", {"a": "double"}, "double [9007199254740992"),
        ("9007199254740993::DECIMAL(20,0)", {"a": "double"}, None),
    ],
)
def test_values_of_duckdb(tmp_path, value, types, held):
    import duckdb

    duckdb.connect(str(tmp_path / "a.duckdb")).close()
    uri, query = f"duckdb:///{tmp_path}/a.duckdb", f"SELECT {value} AS a"
    if held is None:
        refused(uri, query, "column 'a'", "CAST it", types=types)
        return
    column = copy(tmp_path, uri, query, types=types)[1]["a"]
    (text,) = cell_texts(column, "a")
    shown = f"{column.type} ['{text}']" if "'" in held else f"{column.type} [{text}]"
    assert held in shown


def test_places_that_are_none(tmp_path):
    refused(f"sqlite:///{tmp_path}/none.db", "SELECT 1", "no database file")
    assert not (tmp_path / "none.db").exists()
    refused("mysql://host/x", "SELECT 1", "not installed")
    refused("vertica://host/x", "SELECT 1", "not installed")
    refused(
        "sqlite://", "SELECT 1", "variable NO_SUCH is not set", options={"password_env": "NO_SUCH"}
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"uri": "postgresql://u:p@host/x", "query": "SELECT 1"}, "contains a user or key"),
        ({"uri": "postgresql://host/x"}, "query: is required"),
        ({"uri": "in.csv", "query": "SELECT 1"}, "query needs a database"),
        (
            {"uri": "sqlite:///x", "query": "SELECT 1", "types": {"a": "int"}},
            "'int' is not an Arrow type",
        ),
        ({"uri": "sqlite:///x", "query": "SELECT 1", "format": "csv"}, "cannot be read as format"),
    ],
)
def test_jobs_that_cannot_be(fields, words):
    with pytest.raises(ConfigError, match=words):
        make_job(source=fields)


# --- PostgreSQL ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgresql() as url:
        yield url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PG_PASSWORD", PASSWORD)


def connect(server: str) -> psycopg.Connection:
    return psycopg.connect(server, user="reader", password=PASSWORD, autocommit=True)


def test_postgresql_types_come_from_the_database(server, tmp_path):
    query = """SELECT 1::int AS i, 2::bigint AS b, 1.50::numeric(10,2) AS d, true AS t,
      'x%:y'::text AS s, '2026-01-02'::date AS day, '2026-01-02T03:04:05+02'::timestamptz AS at,
      '{"a": [1]}'::jsonb AS j, ARRAY['p', 'q'] AS l, '\\x00ff'::bytea AS y,
      '11111111-1111-1111-1111-111111111111'::uuid AS u, NULL::int AS n, '1 day'::interval AS v"""
    made, table = copy(tmp_path, server, query, options=KEYS)
    row = table.to_pylist()[0]
    assert row["d"] == Decimal("1.50") and row["s"] == "x%:y" and row["day"] == date(2026, 1, 2)
    assert row["at"] == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert json.loads(row["j"]) == {"a": [1]} and row["l"] == ["p", "q"]
    assert row["y"] == b"\x00\xff" and row["u"].startswith("1111") and row["n"] is None
    kinds = {field.name: str(field.type) for field in made.schema}
    assert kinds["n"] == "int32" and kinds["at"] == "timestamp[us, tz=UTC]"
    assert "decimal128(38, 2)" in kinds["d"]
    few = "SELECT * FROM generate_series(1, (SELECT 30))"  # of which the database expects 1,000
    assert peek(reads(uri=server, query=few, options=KEYS)).rows == 30
    assert PASSWORD not in json.dumps(dict(made.table)) and "reader" not in made.table["uri"]


def test_a_copy_shows_one_moment_and_writes_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setattr(sql, "FETCH_ROWS", 100)
    with connect(server) as own:
        own.execute("CREATE TABLE big AS SELECT i AS id FROM generate_series(0, 4999) i")
        own.execute("ANALYZE big")
        source = reads(uri=server, query="SELECT id FROM big ORDER BY id", options=KEYS)
        looked = peek(source)  # as the database expects
        assert 4000 < looked.rows < 6000 and (looked.guessed or looked.rows == 5000)
        opened = sql.open_sql(source)
        batches = opened.batches(None, None)
        first = next(batches)
        own.execute("DELETE FROM big WHERE id % 2 = 0")
        own.execute("INSERT INTO big SELECT 1000000 + i FROM generate_series(0, 9) i")
        rest = pa.Table.from_batches([first, *batches])
        again = pa.Table.from_batches(list(opened.batches(None, None)))
        opened.close()
        assert rest["id"].to_pylist() == again["id"].to_pylist() == list(range(5000))
        assert copy(tmp_path, server, source.query, options=KEYS)[0].rows == 2510
    refused(server, "DELETE FROM big RETURNING id", "source.query", options=KEYS)
    refused(server, "SELECT setval('x', 1)", "source.query", options=KEYS)


def test_postgresql_that_cannot_be_read(server):
    wrong = {"username": "reader", "password": "wrong"}
    refused(server, "SELECT 1 AS a", "access denied", "password_env", options=wrong)
    nobody = {"username": "who", "password_env": "TEST_PG_PASSWORD"}
    refused(server, "SELECT 1 AS a", "access denied", options=nobody)
    place = server.replace("/postgres", "/none", 1) if server.count("/postgres") == 1 else None
    other = server.rpartition("/")[0] + "/none"
    assert place in (None, other)
    refused(other, "SELECT 1 AS a", 'database "none" does not exist', options=KEYS)
    refused(server, "SELECT * FROM nothing", 'relation "nothing" does not', options=KEYS)
    refused(server, "SELECT nme FROM pg_class", 'column "nme" does not exist', options=KEYS)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
        peek(reads(uri="postgresql://127.0.0.1:1/x", query="SELECT 1", options=KEYS))


def test_the_file_of_a_database_says_how_to_name_it(tmp_path):
    (tmp_path / "rows.sqlite3").write_bytes(b"SQLite format 3\0")
    with pytest.raises(SourceError, match=r"sqlite:////FOLDER/FILE .*source\.query"):
        peek(reads(uri=str(tmp_path / "rows.sqlite3")))
