"""Columns of `key=value` folders: their types and values, in place and in a snapshot."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from helpers.small import MODEL, make_job
from helpers.specs import check_columns, new_plan_of, reads

from prefect_raybatch.compile.resolved import Resolved, fingerprint
from prefect_raybatch.errors import ConfigError, CorruptRun, SourceError
from prefect_raybatch.ledger.plan_tables import files_table, read_files, to_parquet
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.source import Inventory, heads, inventory, peek, snapshot
from prefect_raybatch.stages import block as blocks
from prefect_raybatch.stages.read import ShardReader
from prefect_raybatch.storage import open_store

NULL = "__HIVE_DEFAULT_PARTITION__"


def parquet(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def rows(inventory: Inventory) -> pa.Table:
    """All rows as a run reads them, by way of what its directory keeps."""
    files = read_files(files_table(inventory.files))
    reader = ShardReader(files, inventory.schema)
    units = [
        (Unit(i, 0, min(2, reader.rows - at)), at) for i, at in enumerate(range(0, reader.rows, 2))
    ]
    tables = []
    for task in reader.tasks(units, min_tasks=1):
        for table in pickle.loads(pickle.dumps(reader.bind(task)))():
            assert not blocks.is_lost(table), table.to_pylist()
            tables.append(table.select(inventory.schema.names))
    table = pa.concat_tables(tables)
    assert table.schema.equals(inventory.schema)
    return table


def place(uri: Any, **fields: Any) -> pa.Table:
    return rows(inventory(reads(uri=uri, **fields)))


def copied(tmp_path: Path, uri: Any, **fields: Any) -> pa.Table:
    made = snapshot(reads(uri=uri, **fields), open_store(str(tmp_path / "run")), "attempt")
    table = pa.concat_tables([pq.read_table(tmp_path / "run" / f.uri) for f in made.files])
    assert table.schema.equals(made.schema)
    return table


@pytest.mark.parametrize(
    "folders",
    [
        ["k=1", "k=2"],
        ["k=1", "k=b"],
        ["k=3000000000", "k=1"],
        [f"k={NULL}", "k=1"],
        [f"k={NULL}", "k=x"],
        ["k=", "k=1"],
        ["k=a%20b%2Fc", "k=%C3%BC"],
        ["k=%zz", "k=a+b"],
        ["k=-1", "k=31"],
        ["k=a=b", "k=true"],
        ["k=2026-11-21", "k=1.5"],
        ["k%20y=1", "k%20y=2"],
        ["k=1/sub/j=3", "k=2/sub/j=x"],
    ],
)
def test_types_and_values_are_those_of_pyarrow(tmp_path, folders):
    for number, folder in enumerate(folders):
        parquet(tmp_path / "in" / folder / "a.parquet", x=[number] * 3)
    wanted = ds.dataset(str(tmp_path / "in"), partitioning="hive").to_table()
    # pyarrow orders the columns of the path by their depth, as here.
    found = place(str(tmp_path / "in"))
    assert found.schema.equals(wanted.schema)
    key = [(name, "ascending") for name in ("x", *wanted.column_names[1:])]
    assert found.sort_by(key).to_pylist() == wanted.sort_by(key).to_pylist()


@pytest.mark.parametrize("value", ["02139", "+1", "%201", "0x1f", "-0", "1.0", "00"])
def test_a_value_that_is_not_written_as_a_whole_number_is_stays_text(tmp_path, value):
    parquet(tmp_path / f"in/k={value}/a.parquet", x=[1])
    parquet(tmp_path / "in/k=7/a.parquet", x=[1])
    written = value.replace("%20", " ")
    assert sorted(place(str(tmp_path / "in"))["k"].to_pylist()) == sorted([written, "7"])
    typed = {"k": "double"} if value in ("02139", "1.0") else {"k": "string"}
    found = place(str(tmp_path / "in"), types=typed)["k"]
    assert str(found.type) == typed["k"]


def test_types_of_the_path_are_checked_at_plan(tmp_path):
    parquet(tmp_path / "in/k=02139/a.parquet", x=[1])
    uri = str(tmp_path / "in")
    assert place(uri, types={"k": "int64"})["k"].to_pylist() == [2139]
    with pytest.raises(ConfigError, match=r"source.types: 'k' is '02139' in a path, .*date32"):
        inventory(reads(uri=uri, types={"k": "date32"}))
    with pytest.raises(ConfigError, match=r"'x' is not the column of a key=value folder"):
        inventory(reads(uri=uri, types={"x": "string"}))
    text(tmp_path / "csv/k=02139/a.csv", "x\n1\n")
    assert copied(
        tmp_path, str(tmp_path / "csv"), types={"k": "int32", "x": "string"}
    ).to_pylist() == [{"x": "1", "k": 2139}]


def test_what_is_given_decides_which_rows_and_not_which_columns(tmp_path):
    for name in ("y=1/m=a", "y=1/m=b", "y=2/m=a"):
        parquet(tmp_path / "in" / name / "f.parquet", x=[len(name)])
    one = {"x": 7, "y": 1, "m": "a"}
    for uri in (
        f"{tmp_path}/in/y=1/m=a",
        f"{tmp_path}/in/y=1/m=a/f.parquet",
        f"{tmp_path}/in/y=1/m=a/*",
    ):
        assert place(uri).to_pylist() == [one]
    assert place(f"{tmp_path}/in/y=1").to_pylist() == [one, one | {"m": "b"}]
    assert place(f"{tmp_path}/**/m=b/*.parquet").to_pylist() == [one | {"m": "b"}]
    assert place([f"{tmp_path}/in/y=2", f"{tmp_path}/in/y=1/m=b"])["y"].to_pylist() == [1, 2]
    parquet(tmp_path / "env=prod/plain/f.parquet", x=[1])  # not a column: plain lies between
    assert place(f"{tmp_path}/env=prod/plain").column_names == ["x"]


def test_columns_choose_those_of_the_path_as_well(tmp_path):
    for y in (1, 2):
        parquet(tmp_path / f"in/y={y}/f.parquet", x=[1, 2, 3], z=["a"] * 3)
    uri = str(tmp_path / "in")
    assert place(uri, columns=["y", "x"]).column_names == ["y", "x"]
    assert place(uri, columns=["y"])["y"].to_pylist() == [1, 1, 1, 2, 2, 2]
    assert place(uri, columns=["z"]).column_names == ["z"]
    assert place(uri, columns=["y"], limit=4)["y"].to_pylist() == [1, 1, 1, 2]
    with pytest.raises(ConfigError, match="no column 'yy'; did you mean 'y'"):
        inventory(reads(uri=uri, columns=["yy"]))
    job = make_job(prompt={"template": "{x} of {y}?"}, output={"uri": "out", "columns": ["y"]})
    check_columns(job, inventory(reads(uri=uri)).schema)


def test_a_column_in_file_and_path_must_be_the_same(tmp_path):
    uri = str(tmp_path / "in")
    parquet(tmp_path / "in/y=1/f.parquet", x=[1, 2], y=pa.array([1, 1], pa.int64()))
    parquet(tmp_path / "in/y=2/f.parquet", x=[3], y=pa.array([2], pa.int64()))
    assert place(uri).to_pylist() == [{"x": 1, "y": 1}, {"x": 2, "y": 1}, {"x": 3, "y": 2}]
    assert place(uri).schema.field("y").type == pa.int64()  # the file's
    parquet(tmp_path / "in/y=3/f.parquet", x=[3])  # some have it in the path alone
    assert place(uri)["y"].to_pylist() == [1, 1, 2, 3]
    for other in ([3, 4], [3, None]):
        parquet(tmp_path / "in/y=3/f.parquet", x=[3, 3], y=pa.array(other, pa.int64()))
        with pytest.raises(SourceError, match=r"y=3/f\.parquet: column 'y'.*'3'.*source\.columns"):
            inventory(reads(uri=uri))
        assert place(uri, columns=["x"]).num_rows == 5
    pq.write_table(
        pa.table({"x": [3], "y": [3]}), tmp_path / "in/y=3/f.parquet", write_statistics=False
    )
    with pytest.raises(SourceError, match="'y'"):
        inventory(reads(uri=uri))


def test_a_column_in_file_and_path_where_there_are_no_rows(tmp_path):
    parquet(tmp_path / "in/y=1/f.parquet", x=[1], y=[1])
    with pq.ParquetWriter(
        tmp_path / "in/y=1/empty.parquet", pa.schema([("x", pa.int64()), ("y", pa.int64())])
    ) as writer:
        writer.write_table(writer.schema.empty_table())
    assert place(str(tmp_path / "in")).to_pylist() == [{"x": 1, "y": 1}]


def test_folders_that_make_no_columns(tmp_path):
    parquet(tmp_path / "twice/k=1/k=2/f.parquet", x=[1])
    parquet(tmp_path / "bytes/k=%FF/f.parquet", x=[1])
    parquet(tmp_path / "ours/__rb_pos=1/f.parquet", x=[1])
    parquet(tmp_path / "some/k=1/f.parquet", x=[1])
    parquet(tmp_path / "some/f.parquet", x=[1])
    for name, said in [
        ("twice", "duplicate column 'k' in the path"),
        ("bytes", "UTF-8"),
        ("ours/__rb_pos=1", "reserved|__rb_"),
        ("some", "no column 'k'"),
    ]:
        with pytest.raises(SourceError, match=said):
            inventory(reads(uri=f"{tmp_path}/{name}"))
    parquet(tmp_path / f"null/k={NULL}/f.parquet", x=[1])
    assert place(f"{tmp_path}/null").to_pylist() == [{"x": 1, "k": None}]
    parquet(tmp_path / "plain/=1/a=/f.parquet", x=[1])
    assert place(f"{tmp_path}/plain").to_pylist() == [{"x": 1, "a": ""}]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_snapshots_get_the_columns_of_the_path(tmp_path, kind):
    for value in ("1", "2", NULL):
        content = (
            "id,t\n7,a\n8,b\n" if kind == "csv" else '{"id": 7, "t": "a"}\n{"id": 8, "t": "b"}\n'
        )
        text(tmp_path / f"in/y={value}/m=007%2B/f.{kind}", content)
    uri = str(tmp_path / "in")
    table = copied(tmp_path, uri)
    assert table.column_names == ["id", "t", "y", "m"]
    assert table.schema.field("y").type == pa.int32()
    assert table["y"].to_pylist() == [1, 1, 2, 2, None, None]
    assert set(table["m"].to_pylist()) == {"007+"}
    assert copied(tmp_path, uri, columns=["y", "id"]).column_names == ["y", "id"]
    assert copied(tmp_path, uri, columns=["y"])["y"].to_pylist() == [1, 1, 2, 2, None, None]
    assert copied(tmp_path, uri, columns=["t"]).column_names == ["t"]
    assert copied(tmp_path, uri, columns=["y"], limit=3).num_rows == 3
    with pytest.raises(ConfigError, match="'yy'"):
        copied(tmp_path, uri, columns=["yy"])
    guess = peek(reads(uri=uri))
    assert guess.schema.equals(table.schema)
    tops = list(heads(reads(uri=uri), 2))
    assert [top["y"].to_pylist() for _, top in tops] == [[1, 1], [None, None]]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_column_in_a_text_file_and_its_path_must_be_the_same(tmp_path, kind):
    def one(y: str) -> None:
        text(
            tmp_path / f"in/y=1/f.{kind}",
            f"id,y\n7,{y}\n" if kind == "csv" else f'{{"id": 7, "y": {y}}}\n',
        )

    uri = str(tmp_path / "in")
    one("1")
    assert copied(tmp_path, uri).to_pylist() == [{"id": 7, "y": 1}]
    assert copied(tmp_path, uri, columns=["y"]).to_pylist() == [{"y": 1}]
    one("2")
    for columns in (None, ["y"]):
        with pytest.raises(SourceError, match=rf"f\.{kind}: column 'y'.*'1'"):
            copied(tmp_path, uri, columns=columns)
    assert copied(tmp_path, uri, columns=["id"]).to_pylist() == [{"id": 7}]


def test_text_in_the_path_stays_text_in_a_csv(tmp_path):
    text(tmp_path / "in/k=true/f.csv", "a\n1\n")
    text(tmp_path / "in/k=3000000000/f.csv", "a\n1\n")
    assert copied(tmp_path, str(tmp_path / "in"))["k"].to_pylist() == ["3000000000", "true"]


def test_a_plan_of_before_is_read_as_it_says(tmp_path):
    parquet(tmp_path / "in/y=1/f.parquet", x=[1, 2])
    found = inventory(reads(uri=str(tmp_path / "in")))
    old = tuple(replace(file, values=()) for file in found.files)
    table = rows(Inventory(old, pa.schema([("x", pa.int64())]), 8.0, "parquet"))
    assert table.to_pylist() == [{"x": 1}, {"x": 2}]
    job = make_job(source={"uri": str(tmp_path / "in")}, prompt={"template": "{x}"})
    made, tables = new_plan_of(
        Resolved.of(job, MODEL), "k", found.files, found.schema, 8.0, snapshot=False
    )
    assert made.fingerprint == fingerprint(job, MODEL).fingerprint
    assert read_files(tables[made.files_table]) == found.files
    # What the path says stands in the table of files alone, and damage of it is named.
    table = pq.read_table(pa.BufferReader(tables[made.files_table]))
    for damage in ("{", "[1]", '[["y"]]', '[["y", 1]]', "null"):
        bad = table.set_column(table.column_names.index("values"), "values", pa.array([damage]))
        with pytest.raises(CorruptRun, match="file table"):
            read_files(to_parquet(bad))
