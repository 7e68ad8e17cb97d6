"""What each target keeps of the types: told when a run is planned, and kept as it was told."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy
from helpers.position_deletes import delete_equal, delete_positions
from helpers.small import make_job
from helpers.targets import TARGETS, catalog, iceberg, published_rows
from numpy import float32
from pyiceberg.catalog import load_catalog
from sqlalchemy.dialects import mysql, oracle

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError, PublishFailed
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.planned import check_targets_of
from prefect_raybatch.publish.publish import check_publish, check_unique, open_sink
from prefect_raybatch.publish.sql import INSERT_ROWS, sql_type_of
from prefect_raybatch.publish.sql_numbers import number_check
from prefect_raybatch.publish.types import to_schema
from prefect_raybatch.source.hive import path_values

BERLIN = ZoneInfo("Europe/Berlin")
ZONED = pa.timestamp("us", "Europe/Berlin")
TABLE = pa.table(
    {
        "_row": pa.array([0, 1], pa.int64()),
        "price": pa.array([Decimal("1.25"), None], pa.decimal128(10, 2)),
        "at": pa.array([datetime(2026, 7, 1, 12, tzinfo=BERLIN), None], ZONED),
        "naive": pa.array([datetime(2026, 7, 1, 12), None], pa.timestamp("us")),
        "day": pa.array([date(2026, 7, 1), None], pa.date32()),
        "kind": pa.array(["a", None]).dictionary_encode(),
        "vector": pa.array([[1.0, 2.5], None], pa.list_(pa.float32(), 2)),
        "nested": pa.array([{"a": [{"b": 1}]}, None]),
        "pairs": pa.array([[("k", 1.5)], None], pa.map_(pa.string(), pa.float64())),
        "byte": pa.array([200, None], pa.uint8()),
        "long": pa.array([2**63 + 1, None], pa.uint64()),
        "raw": pa.array([b"\x00\xff", None], pa.large_binary()),
        "flag": pa.array([True, None]),
    }
)
NOON = datetime(2026, 7, 1, 10, tzinfo=UTC)
KEPT: dict[str, dict[str, Any]] = {
    "jsonl": {
        **{"price": "1.25", "at": "2026-07-01T12:00:00+02:00", "naive": "2026-07-01T12:00:00"},
        **{"day": "2026-07-01", "pairs": [["k", 1.5]], "raw": "AP8="},
    },
    "sql": {
        **{"price": "1.25", "at": "2026-07-01 10:00:00.000000", "long": "9223372036854775809"},
        **{"naive": "2026-07-01 12:00:00.000000", "day": "2026-07-01", "flag": 1},
        **{"vector": "[1.0, 2.5]", "nested": '{"a": [{"b": 1}]}', "pairs": '[["k", 1.5]]'},
    },
}


def put(format: str, root: Path, table: pa.Table, **more: Any) -> None:
    target = PublishTarget.model_validate(TARGETS[format][0](root, **more))
    sink = open_sink(target, "key", {})
    sink.check(table.schema)
    sink.publish(published_rows(table), lambda step: None)


def quiet(schema: pa.Schema, *targets: dict[str, Any]) -> list[str]:
    found = [PublishTarget.model_validate(target) for target in targets]
    return check_publish(found, "key", {}, schema)


@pytest.mark.parametrize("format", sorted(TARGETS))
def test_what_a_target_keeps_comes_back(format, tmp_path):
    table = TABLE
    if format == "iceberg":  # another zone than UTC is refused there
        table = table.set_column(2, "at", table["at"].cast(pa.timestamp("us", "UTC")))
    put(format, tmp_path, table)
    first, second = TARGETS[format][1](tmp_path)
    wanted = {**table.to_pylist()[0], **KEPT.get(format, {})}
    assert {name: first[name] for name in wanted} == wanted
    if format in ("delta", "iceberg", "parquet", "lance"):
        assert first["at"] == NOON and first["price"] == Decimal("1.25")
    assert {v for n, v in second.items() if n not in ("_row", "byte")} == {None}


@pytest.mark.parametrize("format", ["jsonl", "sql"])
def test_nested_numbers_that_json_cannot_express_become_null(format, tmp_path):
    odd = pa.array([[0.5, float("nan"), float("-inf")]])
    put(format, tmp_path, pa.table({"_row": [0], "ratios": odd}))
    (row,) = TARGETS[format][1](tmp_path)
    assert row["ratios"] in ([0.5, None, None], "[0.5, null, null]")


BAD = [
    ("delta", pa.float16(), "float32"),
    ("delta", pa.time64("us"), "postprocess"),
    ("delta", pa.duration("us"), "postprocess"),
    ("delta", pa.timestamp("ns"), r"timestamp\[us\]"),
    ("delta", pa.list_(pa.struct([("a", pa.float16())])), "float32"),
    ("delta", pa.decimal256(50, 2), "38 digits"),
    ("iceberg", ZONED, "Cast it from Europe/Berlin to UTC"),
    ("iceberg", pa.timestamp("ns"), r"timestamp\[us\]"),
    ("iceberg", pa.duration("us"), "postprocess"),
    ("sql", pa.duration("s"), "postprocess"),
    ("jsonl", pa.duration("s"), "seconds"),
]


@pytest.mark.parametrize(("format", "kind", "said"), BAD, ids=lambda value: str(value))
def test_what_a_target_cannot_keep_is_told_by_column_and_remedy(format, kind, said, tmp_path):
    schema = pa.schema([("_row", pa.int64()), ("odd", kind)])
    with pytest.raises(ConfigError, match=f"column 'odd' .*{format} cannot store.*{said}"):
        quiet(schema, TARGETS[format][0](tmp_path))


@pytest.mark.parametrize("format", ["delta", "iceberg", "sql"])
def test_a_table_with_another_schema_is_told_when_the_run_is_planned(format, tmp_path):
    target = TARGETS[format][0](tmp_path)
    made = pa.table({"_row": pa.array([7], pa.int64()), "answer": ["x"], "more": [1]})
    assert "is created" in quiet(made.schema, target)[0]
    put(format, tmp_path, made)
    assert "fit" in quiet(made.schema.remove(2), target)[0]  # one that may be null
    with pytest.raises(ConfigError, match=r"has no column 'new' \(columns: _row, answer, more\)"):
        quiet(made.schema.append(pa.field("new", pa.string())), target)
    with pytest.raises(
        ConfigError, match=r"'_row' is int64 in the existing table, .*string in the result"
    ):
        quiet(made.schema.set(0, pa.field("_row", pa.string())), target)
    if format != "sql":  # a database makes text of it
        with pytest.raises(
            ConfigError, match=r"'answer' is .*string in the existing table, .*double"
        ):
            quiet(made.schema.set(1, pa.field("answer", pa.float64())), target)


def change(format: str, root: Path) -> None:
    """Column `answer` of the target becomes `reply`, as its owner would do it."""
    if format == "delta":
        from deltalake import DeltaTable, write_deltalake

        table = pa.table(DeltaTable(str(root / "delta")).to_pyarrow_table())
        table = table.rename_columns({"answer": "reply"})
        write_deltalake(str(root / "delta"), table, mode="overwrite", schema_mode="overwrite")
    elif format == "iceberg":
        with load_catalog(None, **catalog(root)).load_table("db.answers").update_schema() as schema:
            schema.rename_column("answer", "reply")
    elif format == "lance":
        lance.dataset(str(root / "lance-all")).alter_columns({"path": "answer", "name": "reply"})
    else:
        with sqlite3.connect(root / "rows.db") as base:
            base.execute("ALTER TABLE answers RENAME COLUMN answer TO reply")


@pytest.mark.parametrize("format", ["delta", "iceberg", "sql", "lance"])
def test_a_target_that_changed_since_it_was_published_to_is_told_by_column(format, tmp_path):
    merge = {"mode": "merge", "key": ["_row"], "uri": str(tmp_path / "lance-all")}
    more = merge if format == "lance" else {}
    table = pa.table({"_row": pa.array([7], pa.int64()), "answer": ["x"]})
    put(format, tmp_path, table, **more)
    change(format, tmp_path)
    target = TARGETS[format][0](tmp_path, **more)
    with pytest.raises(ConfigError, match=r"has no column 'answer' \(columns: _row, reply\)"):
        quiet(table.schema, target)
    given = pa.schema([("id", pa.int64()), ("Company", pa.string())])
    output = {"uri": str(tmp_path / "out"), "publish": [target], "column": "answer"}
    with pytest.raises(ConfigError, match=r"no column '(id|Company|answer)'"):
        check_targets_of(compile_job(make_job(output=output)), given)
    sink = open_sink(PublishTarget.model_validate(target), "key", {})
    with pytest.raises(ConfigError, match="'answer'"):
        sink.publish(published_rows(table, "q" * 64), lambda step: None)
    assert [row["reply"] for row in TARGETS[format][1](tmp_path)] == ["x"]


def test_a_null_that_a_table_does_not_take_gives_up_the_whole_commit(tmp_path):
    schema = pa.schema([pa.field("_row", pa.int64(), False), pa.field("a", pa.string(), False)])
    put("delta", tmp_path, pa.table({"_row": [1], "a": ["x"]}, schema=schema))
    table = pa.table({"_row": [2, 3], "a": ["y", None]})
    sink = open_sink(PublishTarget.model_validate(TARGETS["delta"][0](tmp_path)), "key", {})
    with pytest.raises(ConfigError, match="not allow null in column 'a', which is null in 1 rows"):
        sink.publish(published_rows(table, "q" * 64), lambda step: None)
    assert [row["_row"] for row in TARGETS["delta"][1](tmp_path)] == [1]
    with pytest.raises(ConfigError, match="column 'a', which the result lacks"):
        quiet(pa.schema([("_row", pa.int64())]), TARGETS["delta"][0](tmp_path))


@pytest.mark.parametrize("format", ["delta", "iceberg", "sql", "lance"])
def test_columns_that_a_table_has_more_are_null_where_a_merge_replaces_a_row(format, tmp_path):
    more = {"uri": str(tmp_path / "lance-all")} if format == "lance" else {}
    target = TARGETS[format][0](tmp_path, mode="merge", key=["id"], **more)
    nights = [
        pa.table({"id": [1, 2], "a": ["x", "y"], "more": ["m1", "m2"]}),
        pa.table({"id": [2, 3], "a": ["Y", "Z"]}),
    ]
    for plan, night in zip("pq", nights, strict=True):
        sink = open_sink(PublishTarget.model_validate(target), "key", {})
        sink.check(night.schema)
        sink.publish(published_rows(night, plan * 64), lambda step: None)
    rows = sorted(tuple(row.values()) for row in TARGETS[format][1](tmp_path))
    kept = "m2" if format == "delta" else None
    assert rows == [(1, "x", "m1"), (2, "Y", kept), (3, "Z", None)]


def test_a_column_of_booleans_takes_the_integers_0_and_1_alone(tmp_path):
    with sqlite3.connect(tmp_path / "rows.db") as base:
        base.execute("CREATE TABLE answers (flag boolean)")
    sink = open_sink(PublishTarget.model_validate(TARGETS["sql"][0](tmp_path)), "key", {})
    fits = pa.table({"flag": pa.array([0, 1, None], pa.int64())})
    sink.check(fits.schema)
    sink.publish(published_rows(fits, "k" * 64), lambda step: None)
    other = published_rows(pa.table({"flag": pa.array([1, 2])}), "l" * 64)
    with pytest.raises(ConfigError, match=r"row 1 .*'flag', is 2, .* type BOOLEAN would change"):
        sink.publish(other, lambda step: None)
    with sqlite3.connect(tmp_path / "rows.db") as base:
        assert base.execute("SELECT flag FROM answers").fetchall() == [(0,), (1,), (None,)]


ROUNDED = [
    ("decimal(30, 4)", None, Decimal("0.1"), Decimal("12345678901234567.8901")),
    ("decimal(30, 4)", pa.int64(), 2**60, 2**53 + 1),
    ("double", None, Decimal("0.3"), Decimal("0.12345678901234567890")),
    ("double", pa.int64(), 2**60, 2**53 + 1),
    ("double", pa.uint64(), 2**63, 2**63 + 1),
]


@pytest.mark.parametrize(("column", "kind", "kept", "rounded"), ROUNDED)
def test_a_number_that_a_column_would_round_is_refused_by_row_and_column(
    column, kind, kept, rounded, tmp_path
):
    def rows(value: object) -> pa.Table:
        typed = pa.decimal128(38, 20) if isinstance(value, Decimal) else kind
        return pa.table({"_row": [0, 1, 2], "n": pa.array([None, kept, value], typed)})

    with sqlite3.connect(tmp_path / "rows.db") as base:
        base.execute(f"CREATE TABLE answers (_row integer, n {column})")
    said = rf"row 2 of the result .*column 'n', is {rounded}.*{column[:6].upper()}.* would change"
    with pytest.raises(ConfigError, match=said):
        put("sql", tmp_path, rows(rounded))
    assert TARGETS["sql"][1](tmp_path) == []
    put("sql", tmp_path, rows(kept))
    assert [row["n"] for row in TARGETS["sql"][1](tmp_path)] == [None, float(kept), float(kept)]


NOISE = [19.99 * 3 - 59, 100.1 - 100, 0.3 - 0.2 - 0.1]
NUMERIC = sqlalchemy.Numeric(10, 2)
SHORT = float(float32(100.1) - float32(100))


@pytest.mark.parametrize(
    ("kind", "column", "kept", "rounded"),
    [
        (pa.float64(), NUMERIC, [*NOISE, 0.87, 1e15, math.nan, math.inf], [0.126, 1e-9]),
        (pa.float32(), NUMERIC, [0.1, SHORT], [0.126, 1e-3]),
        (pa.float64(), sqlalchemy.Numeric(6, 4), [0.8765, *NOISE], [0.87654321]),
        (pa.decimal128(20, 4), NUMERIC, [Decimal("0.1200")], [Decimal("0.1201")]),
        *[(pa.float64(), column, [0.8765, *NOISE], [0.87654321])
          for column in (mysql.FLOAT(7, 4), mysql.DOUBLE(8, 4), mysql.REAL(8, 4))],
        (pa.decimal128(20, 4), mysql.DOUBLE(10, 2), [Decimal("0.1200")], [Decimal("0.1201")]),
        (pa.decimal128(38, 2), mysql.DOUBLE(38, 4), [Decimal("0.12")], [Decimal(2**53 + 1)]),
        (pa.int64(), sqlalchemy.REAL(), [2**24, 2**60], [2**24 + 1]),
        (pa.int64(), sqlalchemy.Float(24), [2**24], [2**24 + 1]),
        (pa.int64(), mysql.FLOAT(), [2**24], [2**24 + 1]),
        (pa.int64(), oracle.BINARY_FLOAT(), [2**24], [2**24 + 1]),
        (pa.decimal128(38, 3), sqlalchemy.REAL(), [Decimal("1234.567")], [Decimal(10**9 + 1)]),
        (pa.decimal256(60, 0), sqlalchemy.REAL(), [], [Decimal(10**50)]),
        *[(pa.int64(), column, [2**24 + 1], [2**53 + 1])
          for column in (sqlalchemy.Float(53), mysql.DOUBLE(10, 2), oracle.BINARY_DOUBLE())],
    ],
    ids=str,
)  # fmt: skip
def test_a_number_is_held_if_only_noise_would_be_rounded(kind, column, kept, rounded):
    holds = number_check(kind, column, "any")
    assert holds is not None
    assert [value for value in [*kept, *rounded] if holds(value)] == kept


@pytest.mark.parametrize(
    ("kind", "column", "dialect"),
    [
        (pa.decimal128(10, 2), sqlalchemy.Numeric(10, 2), "postgresql"),
        (pa.decimal128(10, 2), sqlalchemy.Numeric(20, 4), "postgresql"),
        (pa.int64(), oracle.FLOAT(126), "oracle"),
        (pa.decimal128(10, 2), sqlalchemy.DOUBLE_PRECISION(), "oracle"),
        (pa.float64(), sqlalchemy.REAL(), "postgresql"),
        (pa.float64(), mysql.DOUBLE(), "mysql"),
        (pa.float64(), sqlalchemy.Numeric(10, 2), "sqlite"),
    ],
    ids=str,
)
def test_numbers_that_no_column_would_round_are_not_checked(kind, column, dialect):
    assert number_check(kind, column, dialect) is None


def test_a_real_of_sqlite_is_a_double():
    holds = number_check(pa.int64(), sqlalchemy.REAL(), "sqlite")
    assert holds is not None and holds(2**24 + 1) and not holds(2**53 + 1)


@pytest.mark.parametrize("unique", [False, True])
def test_a_merge_loses_no_row_where_the_database_compares_keys_without_case(unique, tmp_path):
    target = TARGETS["sql"][0](tmp_path, mode="merge", key=["id"])
    with sqlite3.connect(tmp_path / "rows.db") as base:
        key = "COLLATE NOCASE" + " UNIQUE" * unique
        base.execute(f"CREATE TABLE answers (id TEXT {key}, a TEXT)")
        base.execute("INSERT INTO answers VALUES ('A1', 'old'), ('other', 'old')")
    ids = [f"{letter}{n}" for letter in "Aa" for n in range(INSERT_ROWS)]
    rows = pa.table({"id": ids, "a": ["new"] * len(ids)})
    sink = open_sink(PublishTarget.model_validate(target), "key", {})
    if unique:
        with pytest.raises(ConfigError, match=r"rejects the rows.*UNIQUE constraint"):
            sink.publish(published_rows(rows), lambda step: None)
    else:
        sink.publish(published_rows(rows), lambda step: None)
    with sqlite3.connect(tmp_path / "rows.db") as base:
        found = sorted(base.execute("SELECT id, a FROM answers"))
    new = [(id, "new") for id in ids]
    assert found == sorted([("other", "old"), *([("A1", "old")] if unique else new)])


def test_iceberg_merges_by_keys_of_several_columns_and_of_each_type(tmp_path, monkeypatch):
    def merged(key: list[str], table: pa.Table, plan: str) -> list[dict[str, Any]]:
        target = iceberg(tmp_path, mode="merge", key=key) | {"table": f"db.{'_'.join(key)}"}
        sink = open_sink(PublishTarget.model_validate(target), "key", {})
        sink.publish(published_rows(table, plan * 64), lambda step: None)
        found = load_catalog(None, **catalog(tmp_path)).load_table(target["table"])
        return list(found.scan().to_arrow().sort_by("n").to_pylist())

    days = [date(2026, 7, d) for d in (1, 1, 2, 2)]
    values = {
        **{"day": days, "name": ["it's", "b", "it's", "b"], "n": [0, 1, 2, 3]},
        **{"at": [datetime(2026, 7, 1, hour, tzinfo=UTC) for hour in range(4)]},
        **{"price": [Decimal(f"{i}.50") for i in range(4)], "raw": [bytes([i]) for i in range(4)]},
    }
    first = pa.table(values)
    later = first.slice(1, 2).append_column("more", pa.array(["x", "y"]))
    first = first.append_column("more", pa.nulls(4, pa.string()))
    wanted = [first.to_pylist()[0], *later.to_pylist(), first.to_pylist()[3]]
    for key in (["day", "name"], ["at"], ["price"], ["raw"], ["n", "at", "name"]):
        assert merged(key, first, "p") == first.to_pylist()
        assert merged(key, later, "q") == wanted, key
        assert merged(key, later, "q") == wanted, key
    monkeypatch.setattr("prefect_raybatch.publish.iceberg.MOST_GROUPS", 1)
    with pytest.raises(
        ConfigError, match=r"key day, name makes 2 groups .*Merge by one unique column"
    ):
        merged(["day", "name"], first, "r")


def test_a_merge_into_an_iceberg_table_with_deletes_brings_no_deleted_row_back(tmp_path):
    target = iceberg(tmp_path, mode="merge", key=["id"])
    sink = open_sink(PublishTarget.model_validate(target), "key", {})
    rows = pa.table({"id": pa.array(range(6), pa.int64()), "a": ["x"] * 6})
    lake = load_catalog(None, **catalog(tmp_path))
    made = lake.create_table("db.answers", rows.schema, properties={"format-version": "2"})
    made.append(rows)
    delete_positions(made, tmp_path, [0, 2])
    later = pa.table({"id": pa.array([1, 2, 9], pa.int64()), "a": ["y"] * 3})
    sink.publish(published_rows(later, "q" * 64), lambda step: None)
    found = sorted((row["id"], row["a"]) for row in TARGETS["iceberg"][1](tmp_path))
    assert found == [(1, "y"), (2, "y"), (3, "x"), (4, "x"), (5, "x"), (9, "y")]
    delete_equal(lake.load_table("db.answers"), tmp_path, "id", [4])
    with pytest.raises(ConfigError, match="equality deletes, which pyiceberg cannot apply"):
        sink.publish(published_rows(later, "r" * 64), lambda step: None)


def test_a_merge_into_an_iceberg_table_with_partitions_is_refused_when_it_is_planned(tmp_path):
    target, schema = iceberg(tmp_path, mode="merge", key=["_row"]), TABLE.schema.remove(2)
    made = load_catalog(None, **catalog(tmp_path)).create_table(
        "db.answers", schema=pa.schema([("_row", pa.int64()), ("flag", pa.bool_())])
    )
    with made.update_spec() as change:
        change.add_identity("flag")
    with pytest.raises(ConfigError, match="is partitioned, and pyiceberg's merges"):
        quiet(schema, target)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_nulls_and_empty_texts_are_partitions_of_their_own(tmp_path, format):
    keys = [None, "", "__HIVE_DEFAULT_PARTITION__", "a/b", "02139", " ", "null"]
    table = pa.table({"k": keys, "x": [*range(len(keys))]})

    put(format, tmp_path, table, partition_by=["k"])

    found: dict[Any, Any] = {}
    for path in sorted((tmp_path / format).rglob(f"part-*.{format}")):
        folder = path.parent.relative_to(tmp_path / format)
        value = dict(path_values(str(tmp_path / format), str(folder)))["k"]
        assert value not in found
        text = path.read_text() if format == "jsonl" else ""
        rows = json.loads(text) if text else pq.read_table(path).to_pylist()[0]
        found[value] = rows["x"]
    assert found == dict(zip(keys, range(len(keys)), strict=True))


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ([], ["day"], r"partition_by is day, .* by no column\. Set partition_by to \[\]"),
        (["day"], [], r'is not set, .* by day\. Set partition_by to \["day"\]'),
        (["day"], ["a b"], r"partition_by is a b, .* by day\. Set"),
        (["a b", "day"], ["day", "a b"], r"is day, a b, .* by a b, day\. Set"),
    ],
)
def test_a_folder_keeps_the_partitions_of_earlier_runs(tmp_path, format, first, then, said):
    table = pa.table({"_row": [0, 1], "day": ["1", "2"], "a b": ["x", None]})
    other = next(iter({"parquet", "jsonl"} - {format}))
    folder = {"uri": str(tmp_path / "rows")}
    put(format, tmp_path, table, partition_by=first, **folder)
    put(other, tmp_path, table, partition_by=then, **folder)  # its readers see its files only
    before = sorted(tmp_path.rglob("*"))
    target = TARGETS[format][0](tmp_path, partition_by=then) | folder
    with pytest.raises(ConfigError, match=said):
        quiet(table.schema, target)
    sink = open_sink(PublishTarget.model_validate(target), "key", {})
    with pytest.raises(ConfigError, match=said):
        sink.publish(published_rows(table, "q" * 64), lambda step: None)
    assert sorted(tmp_path.rglob("*")) == before
    again = PublishTarget.model_validate(target | {"partition_by": first})
    open_sink(again, "key", {}).publish(published_rows(table, "q" * 64), lambda step: None)
    assert "gets new files" in quiet(table.schema, target | {"partition_by": first})[0]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_folder_with_two_layouts_takes_runs_in_either(tmp_path, format):
    """An earlier version of this package wrote such folders."""
    table = pa.table({"_row": [0, 1], "day": ["1", "2"], "kind": ["x", "y"]})
    layouts: list[list[str]] = [[], ["day"]]
    for name, by in zip("ab", layouts, strict=True):
        target = PublishTarget.model_validate(TARGETS[format][0](tmp_path, partition_by=by))
        (tmp_path / name).mkdir()
        moved = target.model_copy(update={"uri": str(tmp_path / name)})
        open_sink(moved, "key", {}).publish(published_rows(table, name * 64), lambda step: None)
        shutil.copytree(tmp_path / name, str(target.uri), dirs_exist_ok=True)
    for plan, by in zip("0z", layouts, strict=True):
        fields = TARGETS[format][0](tmp_path, partition_by=by)
        assert "gets new files" in quiet(table.schema, fields)[0]
        sink = open_sink(PublishTarget.model_validate(fields), "key", {})
        sink.publish(published_rows(table, plan * 64), lambda step: None)
    with pytest.raises(ConfigError, match=r"partition_by is kind, .* by (day|no column)\. Set"):
        quiet(table.schema, TARGETS[format][0](tmp_path, partition_by=["kind"]))


def test_a_marker_of_another_run_that_cannot_be_read_keeps_no_run_away(tmp_path, monkeypatch):
    table = pa.table({"_row": [0], "day": ["1"]})
    put("parquet", tmp_path, table, partition_by=["day"])
    monkeypatch.setattr("prefect_raybatch.publish.files.MARK_BYTES", 8)  # less than it has
    assert "gets new files" in quiet(table.schema, TARGETS["parquet"][0](tmp_path))[0]


def test_partitions_are_folders_and_the_files_leave_their_columns_out(tmp_path):
    table = pa.table({"_row": list(range(6)), "day": ["1/7", "2", None] * 2, "a": ["x"] * 6})
    for format in ("parquet", "jsonl", "delta"):
        put(format, tmp_path, table, partition_by=["day"])
    places = sorted(p.parent.name for p in (tmp_path / "parquet").rglob("part-*"))
    assert places == ["day=1%2F7", "day=2", "day=__HIVE_DEFAULT_PARTITION__"]
    rows = TARGETS["parquet"][1](tmp_path)
    assert [(row["_row"], row["day"]) for row in rows][:3] == [(0, "1/7"), (1, "2"), (2, None)]
    assert "day" not in TARGETS["jsonl"][1](tmp_path)[0]
    assert sorted(row["_row"] for row in TARGETS["delta"][1](tmp_path)) == list(range(6))
    with pytest.raises(ConfigError, match="partition_by: column 'a' is of type double"):
        quiet(
            pa.schema([("a", pa.float64()), ("b", pa.int64())]),
            TARGETS["parquet"][0](tmp_path, partition_by=["a"]),
        )


def test_a_plan_checks_the_columns_that_it_knows(tmp_path):
    target = TARGETS["delta"][0](tmp_path, mode="merge", key=["Id"])
    given = pa.schema([("id", pa.int64()), ("Company", pa.string())])
    job = make_job(output={"uri": str(tmp_path / "out"), "publish": [target]})
    with pytest.raises(ConfigError, match=r"no column 'Id' \(columns: id, Company, response, _row"):
        check_targets_of(compile_job(job), given)
    output = {"uri": "out", "publish": [target], "postprocess": "helpers.functions:shout"}
    (line,) = check_targets_of(compile_job(make_job(output=output)), given)  # it may return one
    assert line == f"delta: {tmp_path}/delta is created by publishing"
    job = make_job(output={**output, "schema": {"Id": "int64", "vector": "halffloat"}})
    with pytest.raises(ConfigError, match="column 'vector'"):
        check_targets_of(compile_job(job), given)


# --- what is missing ----------------------------------------------------------------------------


def test_a_missing_library_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr("prefect_raybatch.publish.base.find_spec", lambda name: None)
    modules = {"delta": "deltalake", "iceberg": "pyiceberg", "lance": "lance", "sql": "sqlalchemy"}
    for format, module in modules.items():
        extra = "postgresql" if format == "sql" else format
        said = rf'{format}: {module} is not installed.*pip install "prefect-raybatch\[{extra}\]"'
        with pytest.raises(ConfigError, match=said):
            quiet(TABLE.schema, TARGETS[format][0](tmp_path))


def test_a_password_comes_from_the_environment_and_is_never_shown(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"write \${NAME}"):
        PublishTarget(format="sql", uri="postgresql://me:hunter2@host/db", table="t")
    uri = "postgresql+psycopg://me:${WAREHOUSE_PW}@127.0.0.1:1/db"
    target = {"format": "sql", "uri": uri, "table": "t"}
    with pytest.raises(ConfigError, match="variable WAREHOUSE_PW is not set"):
        quiet(TABLE.schema, target)
    monkeypatch.setenv("WAREHOUSE_PW", "hunter2")
    with pytest.raises(PublishFailed, match="OperationalError: ") as caught:
        quiet(TABLE.schema, target)
    assert "hunter2" not in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_catalog_that_is_not_there_is_one_line(tmp_path):
    target = iceberg(tmp_path) | {"table": "nowhere.answers"}
    with pytest.raises(ConfigError, match=r"no namespace for 'nowhere.answers'"):
        quiet(TABLE.schema.remove(2), target)  # told when the run is planned
    with pytest.raises(ConfigError, match=r"no namespace for 'nowhere.answers'"):
        sink = open_sink(PublishTarget.model_validate(target), "key", {})
        sink.publish(published_rows(TABLE.drop_columns(["at"])), lambda step: None)
    target["catalog"] = {"type": "rest", "uri": "http://127.0.0.1:1", "token": "hunter2"}
    with pytest.raises(PublishFailed, match="run the same command again") as caught:
        quiet(TABLE.schema.remove(2), target)
    assert "hunter2" not in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert "data/ is complete" not in str(caught.value)  # there is none yet


def test_a_catalog_cannot_name_python_to_load(tmp_path):
    target = iceberg(tmp_path)
    target["catalog"] = {**target["catalog"], "py-io-impl": "os.path"}
    with pytest.raises(ValueError, match="py-io-impl names Python code to load"):
        PublishTarget.model_validate(target)


def test_columns_that_rows_lack_are_null_wherever_the_schema_has_them():
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.int32())])
    batch = pa.record_batch({"c": pa.array([1, 2], pa.int64()), "a": [3, 4]})
    (made,) = to_schema([batch], schema)
    assert made.schema == schema
    assert made.to_pylist() == [{"a": 3, "b": None, "c": 1}, {"a": 4, "b": None, "c": 2}]


def test_a_decimal_keeps_its_digits_in_a_database_that_has_decimals():
    kind = sql_type_of(pa.decimal128(10, 2), "postgresql")
    assert (kind.precision, kind.scale) == (10, 2)
    assert isinstance(sql_type_of(pa.decimal128(10, 2), "sqlite"), sqlalchemy.Text)


WHOLE = [
    ("mysql", pa.timestamp("us"), "DATETIME(6)"),
    ("mysql", pa.timestamp("us", "UTC"), "DATETIME(6)"),
    ("mysql", pa.time64("us"), "TIME(6)"),
    ("mysql", pa.string(), "LONGTEXT"),
    ("mysql", pa.binary(), "LONGBLOB"),
    ("mariadb", pa.timestamp("us"), "DATETIME(6)"),
    ("mariadb", pa.string(), "LONGTEXT"),
    ("oracle", pa.timestamp("us"), "TIMESTAMP"),
    ("oracle", pa.timestamp("us", "UTC"), "TIMESTAMP"),
    ("mssql", pa.timestamp("us"), "DATETIME2"),
    ("mssql", pa.timestamp("us", "UTC"), "DATETIMEOFFSET"),
    ("mssql", pa.time64("us"), "TIME"),
    ("mssql", pa.string(), "NVARCHAR(max)"),
    ("mssql", pa.binary(), "VARBINARY(max)"),
    ("postgresql", pa.timestamp("us", "UTC"), "TIMESTAMP WITH TIME ZONE"),
    ("postgresql", pa.string(), "TEXT"),
    ("sqlite", pa.timestamp("us"), "DATETIME"),
]


@pytest.mark.parametrize(("dialect", "kind", "wanted"), WHOLE, ids=str)
def test_a_created_column_keeps_long_texts_and_fractions_of_seconds(dialect, kind, wanted):
    compiler = sqlalchemy.URL.create(dialect.replace("mssql", "mssql+pymssql")).get_dialect()()
    compiler.deprecate_large_types = True  # as SQL Server later than 2008 sets it
    column = sqlalchemy.Column("a", sql_type_of(kind, dialect))
    table = sqlalchemy.Table("t", sqlalchemy.MetaData(), column)
    lines = str(sqlalchemy.schema.CreateTable(table).compile(dialect=compiler)).splitlines()
    assert lines[2].strip().removesuffix(" NULL") == f"a {wanted}"


def test_a_key_may_have_any_name():
    target = PublishTarget.model_validate(
        {"format": "delta", "uri": "t", "mode": "merge", "key": ["count_all"]}
    )
    check_unique(target, pa.table({"count_all": [1, 2]}), "the input")
    with pytest.raises(ConfigError, match=r"1 values occur more than once \(count_all=2\)"):
        check_unique(target, pa.table({"count_all": [1, 2, 2]}), "the input")
