"""Whatever would make publishing fail is refused when the run is planned, and is not retried."""

from __future__ import annotations

import json
import sqlite3
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from helpers.small import make_job
from helpers.specs import reads
from helpers.targets import TARGETS, published_rows
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from prefect_raybatch.compile.job import compile_job, read_spec
from prefect_raybatch.errors import ConfigError, PublishFailed
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish import files
from prefect_raybatch.publish.planned import check_targets_of
from prefect_raybatch.publish.publish import check_publish, open_sink
from prefect_raybatch.source import inventory


def plan(schema: pa.Schema, *targets: dict[str, Any]) -> list[str]:
    return check_publish([PublishTarget.model_validate(one) for one in targets], "key", {}, schema)


def publish(table: pa.Table, target: dict[str, Any], plan: str = "p" * 64) -> None:
    sink = open_sink(PublishTarget.model_validate(target), "key", {})
    sink.publish(published_rows(table, plan), lambda step: None)


def duckdb(root: Path, **more: Any) -> dict[str, Any]:
    return {"format": "sql", "uri": f"duckdb:///{root}/rows.duckdb", "table": "answers", **more}


def texts(*names: str) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in names])


# --- names of columns ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "system"),
    [(TARGETS["delta"][0], "delta"), (TARGETS["sql"][0], "sqlite"), (duckdb, "duckdb")],
)
def test_columns_that_are_one_to_the_target_are_refused(make, system, tmp_path):
    with pytest.raises(
        ConfigError, match=f"columns 'Name' and 'name' differ only in case, which {system}"
    ):
        plan(texts("Name", "name"), make(tmp_path))
    job = make_job(output={"uri": str(tmp_path), "publish": [make(tmp_path)]})
    with pytest.raises(ConfigError, match="columns 'Response' and 'response'"):
        check_targets_of(compile_job(job), texts("id", "Company", "Response"))


@pytest.mark.parametrize("format", ["iceberg", "lance", "parquet", "jsonl"])
def test_other_targets_keep_columns_that_differ_in_case(format, tmp_path):
    target, table = TARGETS[format][0](tmp_path), pa.table({"_row": [1], "A": ["x"], "a": ["y"]})
    plan(table.schema, target)
    publish(table, target)
    assert TARGETS[format][1](tmp_path) == table.to_pylist()


def test_sqlite_tells_letters_beyond_ascii_apart_and_duckdb_too(tmp_path):
    table = pa.table({"_row": [1], "Ä": ["x"], "ä": ["y"]})
    plan(table.schema, TARGETS["sql"][0](tmp_path))
    publish(table, TARGETS["sql"][0](tmp_path))
    assert TARGETS["sql"][1](tmp_path) == table.to_pylist()


def test_a_field_without_a_name_is_refused_by_iceberg(tmp_path):
    schema = pa.schema([("n", pa.list_(pa.struct([("", pa.string())])))])
    with pytest.raises(ConfigError, match="a name for each field"):
        plan(schema, TARGETS["iceberg"][0](tmp_path))


@pytest.mark.parametrize(
    ("format", "name", "said"),
    [
        ("lance", "a.b", r"cannot contain `\.`"),
        ("lance", "_rowid", "reserved name"),
        ("iceberg", "", "a name for each column"),
        ("sql", "", "is empty or contains NUL"),
        ("sql", "a\0b", "is empty or contains NUL"),
    ],
)
def test_a_name_that_the_target_does_not_take_is_refused(format, name, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        plan(texts("_row", name), TARGETS[format][0](tmp_path))
    assert not list(tmp_path.glob("lance*")) and not (tmp_path / "rows.db").exists()


@pytest.mark.parametrize(
    ("uri", "name", "said"),
    [
        ("postgresql://127.0.0.1:1/x", "n" * 64, "has 64 bytes, but postgresql allows 63"),
        ("postgresql://127.0.0.1:1/x", "ö" * 31 + "ab", "has 64 bytes, but postgresql allows 63"),
    ],
)
def test_a_name_that_a_database_would_cut_off_is_refused(uri, name, said):
    target = {"format": "sql", "uri": uri, "table": "t"}
    with pytest.raises(ConfigError, match=f"column '{name}' {said}"):
        plan(texts(name), target)
    with pytest.raises(ConfigError, match=f"table '{name}' {said}"):
        plan(texts("a"), {**target, "table": name})
    with pytest.raises(PublishFailed):  # the name just fits, and nobody answers
        plan(texts(name[:-1]), target)


# --- tables that are there ----------------------------------------------------------------------


def never_null(root: Path, name: str = "id") -> dict[str, Any]:
    schema = pa.schema(
        [
            pa.field(one, pa.int64() if one in ("id", "_row") else pa.string(), one != name)
            for one in ("id", "Company", "response", "_row")
        ]
    )
    target = TARGETS["delta"][0](root)
    DeltaTable.create(target["uri"], schema=Schema.from_arrow(schema))
    return target


def test_a_null_that_a_delta_table_does_not_take_is_found_in_the_input(tmp_path):
    target, place = never_null(tmp_path), tmp_path / "in.parquet"
    for id, nulls in ([1, 2], 0), ([1, None], 1):
        table = pa.table({"id": pa.array(id, pa.int64()), "Company": ["x", "y"]})
        pq.write_table(table, place)
        job = make_job(
            source={"uri": str(place)}, output={"uri": str(tmp_path), "publish": [target]}
        )
        found = inventory(read_spec(job.source))
        if not nulls:
            (line,) = check_targets_of(compile_job(job), found.schema, "key", found)
            assert "its columns fit" in line
            continue
        with pytest.raises(
            ConfigError, match=r"null in column 'id', but it is null in 1 rows of the"
        ):
            check_targets_of(compile_job(job), found.schema, "key", found)
    with pytest.raises(ConfigError, match=r"null in column 'id', but the input column is nullable"):
        check_targets_of(compile_job(job), found.schema)


def test_properties_of_several_answers_are_not_columns_of_the_table(tmp_path):
    """A property may be null, and the input column of its name must not."""
    record = pa.struct([("id", pa.int64())])
    inputs = pa.schema([pa.field("id", pa.int64(), False), ("Company", pa.string())])
    columns = [*inputs, ("response", pa.list_(record)), ("_row", pa.int64())]
    target = TARGETS["delta"][0](tmp_path)
    DeltaTable.create(target["uri"], schema=Schema.from_arrow(pa.schema(columns)))
    form = {"type": "object", "properties": {"id": {"type": ["integer", "null"]}}}
    (tmp_path / "form.json").write_text(json.dumps(form | {"required": ["id"]}))
    output = {"uri": str(tmp_path), "schema_model": f"{tmp_path}/form.json", "publish": [target]}
    job = make_job(output=output, sampling={"n": 2, "temperature": 1})
    (line,) = check_targets_of(compile_job(job), inputs)
    assert "its columns fit" in line


def test_a_key_that_is_not_unique_or_null_is_found_in_the_input(tmp_path):
    place = tmp_path / "in.parquet"
    for ids, said in (([1, 1], "not unique in the input: 1 values"), ([1, None], "null in 1 rows")):
        pq.write_table(pa.table({"id": ids, "Company": ["x", "y"]}), place)
        target = TARGETS["sql"][0](tmp_path, mode="merge", key=["id"])
        job = make_job(
            source={"uri": str(place)}, output={"uri": str(tmp_path), "publish": [target]}
        )
        found = inventory(read_spec(job.source))
        with pytest.raises(ConfigError, match=said):
            check_targets_of(compile_job(job), found.schema, "key", found)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["x", "ü" * 41], ""),  # kind= and six bytes per letter
        (["x", "ü" * 42], "partition_by kind: the folder of the value 'üüü.* a name of 257 bytes"),
        (["x", "y", None], "partition_by kind makes over 2 partitions"),
    ],
)
def test_a_column_of_the_input_that_makes_no_partitions_is_refused(
    kinds, said, tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "MOST_PARTITIONS", 2)
    place = tmp_path / "in.parquet"
    table = pa.table({"id": range(len(kinds)), "Company": kinds})
    pq.write_table(table.append_column("kind", pa.array(kinds).dictionary_encode()), place)
    target = {"format": "parquet", "uri": str(tmp_path / "t"), "partition_by": ["kind"]}
    job = make_job(source={"uri": str(place)}, output={"uri": "out", "publish": [target]})
    found = inventory(read_spec(job.source))
    if not said:
        (line,) = check_targets_of(compile_job(job), found.schema, "key", found)
        assert "gets new files" in line
        return
    with pytest.raises(ConfigError, match=said):
        check_targets_of(compile_job(job), found.schema, "key", found)


def test_a_merge_into_a_delta_table_that_takes_appends_alone_is_refused(tmp_path):
    table = pa.table({"_row": [1], "a": ["x"]})
    write_deltalake(str(tmp_path / "delta"), table, configuration={"delta.appendOnly": "true"})
    plan(table.schema, TARGETS["delta"][0](tmp_path))
    with pytest.raises(ConfigError, match="only allows appends"):
        plan(table.schema, TARGETS["delta"][0](tmp_path, mode="merge", key=["_row"]))
    with pytest.raises(ConfigError, match="partitioned by no column"):
        plan(table.schema, TARGETS["delta"][0](tmp_path, partition_by=["a"]))


# --- places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["delta", "lance", "parquet", "jsonl"])
def test_a_folder_that_cannot_be_made_is_refused(format, tmp_path):
    (tmp_path / "file").write_text("in the way")
    more = {"uri": f"{tmp_path}/file/{{run_key}}"}
    with pytest.raises(ConfigError, match="file' is not a folder"):
        plan(texts("_row"), TARGETS[format][0](tmp_path, **more))


@pytest.mark.parametrize("make", [TARGETS["sql"][0], duckdb])
def test_a_plan_makes_no_database_file_and_refuses_one_that_cannot_be_made(make, tmp_path):
    schema = pa.schema([("_row", pa.int64()), ("a", pa.string())])
    plan(schema, make(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"nowhere' does not exist\. Create the folder"):
        plan(schema, make(tmp_path / "nowhere"))
    publish(pa.table({"_row": [1], "a": ["x"]}), make(tmp_path))
    assert "fit" in plan(schema, make(tmp_path))[0]


def test_a_database_in_memory_and_one_that_may_only_be_read_are_refused(tmp_path):
    memory = {"format": "sql", "uri": "sqlite://", "table": "t"}
    with pytest.raises(ConfigError, match="lost with the process"):
        plan(texts("a"), memory)
    place = tmp_path / "rows.db"
    sqlite3.connect(place).close()
    read_only = {**memory, "uri": f"sqlite:///file:{place}?mode=ro&uri=true"}
    place.touch()
    with pytest.raises(ConfigError, match=r"rejects the table: .*readonly database"):
        plan(texts("a"), read_only)


# --- drivers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("snowflake://a/b", "pip install snowflake-sqlalchemy"),
        ("bigquery://a/b", "pip install sqlalchemy-bigquery"),
        ("mysql://h/x", "needs MySQLdb, .*pip install mysqlclient"),
        ("mysql+pymysql://h/x", "needs pymysql, .*pip install pymysql"),
        ("mssql://h/x", "needs pyodbc, .*pip install pyodbc"),
        ("oracle://h/x", r"needs cx_Oracle, .*oracle\+oracledb://"),
        ("postgresql+pg8000://h/x", "needs pg8000, .*pip install "),
        ("postgresql+asyncpg://h/x", "asynchronous. Name another driver"),
        ("nonsense://h/x", "no dialect 'nonsense'"),
    ],
)
def test_a_dialect_or_driver_that_is_missing_is_told_with_its_package(uri, said):
    with pytest.raises(ConfigError, match=said):
        plan(texts("a"), {"format": "sql", "uri": uri, "table": "t"})


def test_duckdb_without_its_dialect_is_told_how_to_install_it(monkeypatch, tmp_path):
    from sqlalchemy.dialects import registry
    from sqlalchemy.exc import NoSuchModuleError

    def missing(name: str) -> None:
        raise NoSuchModuleError(f"Can't load plugin: sqlalchemy.dialects:{name}")

    monkeypatch.setattr(registry, "load", missing)
    with pytest.raises(ConfigError, match=r'pip install "prefect-raybatch\[duckdb\]"'):
        plan(texts("a"), duckdb(tmp_path))


def test_duckdb_is_published_to_and_read(tmp_path):
    import duckdb as base

    from prefect_raybatch.source.tables.sql import open_sql

    table = pa.table({"_row": [1, 2], "Name": ["x", None], "at": [1.5, 2.5]})
    for night in "pq":
        plan(table.schema, duckdb(tmp_path))
        publish(table, duckdb(tmp_path), night * 64)
        publish(table, duckdb(tmp_path), night * 64)
    merged = duckdb(tmp_path, mode="merge", key=["_row"]) | {"table": "merged"}
    for night in "pq":
        publish(table, merged, night * 64)
    with base.connect(str(tmp_path / "rows.duckdb")) as connection:
        count = connection.execute("select count(*) from answers").fetchall()
        rows = connection.execute("select * from merged order by _row").fetchall()
        connection.execute("delete from answers")
    assert (count, rows) == ([(4,)], [(1, "x", 1.5), (2, None, 2.5)])
    publish(table, duckdb(tmp_path), "p" * 64)  # the table is empty
    uri = f"duckdb:///{tmp_path}/rows.duckdb"
    found = open_sql(reads(uri=uri, format="sql", query="select * from answers order by _row"))
    assert pa.Table.from_batches(found.batches(None, None)).to_pylist() == table.to_pylist()
    found.close()


def test_a_plan_names_the_columns_that_refuse_what_they_would_round(tmp_path):
    import duckdb as base

    with base.connect(str(tmp_path / "rows.duckdb")) as connection:
        connection.execute("CREATE TABLE answers (_row bigint, p decimal(6,4), q decimal(6,4))")
    schema = pa.schema([("_row", pa.int64()), ("p", pa.float64()), ("q", pa.decimal128(6, 4))])
    (line,) = plan(schema, duckdb(tmp_path))
    assert line.endswith(
        "its columns fit; numbers that would change are refused in p (NUMERIC(6, 4))"
    )
    with pytest.raises(ConfigError, match=r"column 'p', is 0.87654321, .*NUMERIC\(6, 4\) would"):
        publish(
            pa.table({"_row": [0], "p": [0.87654321], "q": [None]}, schema=schema), duckdb(tmp_path)
        )


def test_tables_of_one_name_in_two_schemas_of_duckdb_are_told_apart(tmp_path):
    import duckdb as base

    table, path = pa.table({"_row": [1], "n": [0.5]}), str(tmp_path / "rows.duckdb")
    with base.connect(path) as connection:
        connection.execute("CREATE SCHEMA other")
        connection.execute("CREATE TABLE other.answers (_row bigint, n decimal(6,4), more text)")
        connection.execute("CREATE TABLE other._raybatch_published (plan text)")
    (line,) = plan(table.schema, duckdb(tmp_path))
    assert line.endswith("is created by publishing")
    with pytest.raises(ConfigError, match="table _raybatch_published has the columns plan, not"):
        plan(table.schema, duckdb(tmp_path, table="other.answers"))
    for night in "pq":
        publish(table, duckdb(tmp_path), night * 64)
        (line,) = plan(table.schema, duckdb(tmp_path))
        assert line.endswith("exists, and its columns fit")
    with pytest.raises(ConfigError, match=r"no column 'more' \(columns: _row, n\)"):
        plan(pa.schema([("more", pa.string())]), duckdb(tmp_path))
    with base.connect(path) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {schema}.answers").fetchall()
            for schema in ("main", "other")
        ]
    assert counts == [[(2,)], [(0,)]]


def test_a_real_of_duckdb_is_told_from_a_double(tmp_path):
    import duckdb as base

    with base.connect(str(tmp_path / "rows.duckdb")) as connection:
        connection.execute("CREATE TABLE answers (short real, long double)")
        connection.execute("CREATE TABLE others (long real)")
    with pytest.raises(ConfigError, match=r"'short', is 16777217, .* type REAL would change"):
        publish(pa.table({"short": [2**24 + 1]}), duckdb(tmp_path))
    publish(pa.table({"long": [2**24 + 1]}), duckdb(tmp_path))
    with base.connect(str(tmp_path / "rows.duckdb")) as connection:
        assert connection.execute("SELECT * FROM answers").fetchall() == [(None, 2.0**24 + 1)]


def test_duckdb_stores_times_in_utc_whatever_its_time_zone(tmp_path):
    import duckdb as base

    noon, path = datetime(2026, 7, 1, 12), str(tmp_path / "rows.duckdb")
    with base.connect(path) as connection:
        connection.execute("CREATE TABLE answers (plain timestamp, zoned timestamptz)")

    def in_new_york(connection: Any, record: object) -> None:
        connection.execute("SET TimeZone = 'America/New_York'")

    zoned = pa.array([noon], pa.timestamp("us", "UTC"))
    event.listen(Engine, "connect", in_new_york)
    try:
        publish(pa.table({"plain": zoned, "zoned": zoned}), duckdb(tmp_path))
    finally:
        event.remove(Engine, "connect", in_new_york)
    with base.connect(path) as connection:
        found = connection.execute("SELECT plain, epoch_us(zoned) FROM answers").fetchall()
    assert found == [(noon, zoned.cast(pa.int64())[0].as_py())]


# --- refused for good ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("duplicate column name: a", False),
        ("no such table: t", False),
        ("attempt to write a readonly database", False),
        ("too many SQL variables", False),
        ("database is locked", True),
        ("disk I/O error", True),
    ],
)
def test_what_sqlite_refuses_for_good_is_not_tried_again(said, passes, tmp_path, monkeypatch):
    from prefect_raybatch.publish.sql import SqlSink

    tries = []

    def fail(*arguments: Any) -> None:
        tries.append(said)
        raise OperationalError("INSERT", {}, sqlite3.OperationalError(said))

    monkeypatch.setattr(SqlSink, "_insert", fail)
    with pytest.raises(PublishFailed if passes else ConfigError, match=said):
        publish(pa.table({"a": ["x"]}), TARGETS["sql"][0](tmp_path))
    assert (len(tries) > 1) == passes


def test_rows_that_a_delta_constraint_refuses_are_not_tried_again(tmp_path):
    table = pa.table({"_row": [1]})
    target = TARGETS["delta"][0](tmp_path)
    publish(table, target)
    DeltaTable(target["uri"]).alter.add_constraint({"small": "_row < 2"})
    with pytest.raises(ConfigError, match="the table rejects the rows"):
        publish(pa.table({"_row": [3]}), target, "q" * 64)


def test_a_delta_table_that_became_append_only_is_not_tried_again(tmp_path):
    target = TARGETS["delta"][0](tmp_path, mode="merge", key=["_row"])
    table = pa.table({"_row": [1], "a": ["x"]})
    write_deltalake(target["uri"], table, configuration={"delta.appendOnly": "true"})
    with pytest.raises(ConfigError, match="append-only"):
        publish(table, target)
