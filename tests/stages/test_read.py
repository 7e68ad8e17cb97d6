"""Reading shards: every row once, in order, at its position; and what a broken input becomes."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.specs import reads
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_raybatch.errors import ConfigError, SourceError, StoreError, StoreUnavailable
from prefect_raybatch.ledger.plan_tables import files_table, read_files
from prefect_raybatch.ledger.records import InputFile, Unit
from prefect_raybatch.source import (
    dataset_copies,
    inventory,
    parquet,
    peek,
    snapshot,
    snapshot_dataset,
)
from prefect_raybatch.source.snapshot_writer import SnapshotWriter
from prefect_raybatch.stages import block as blocks
from prefect_raybatch.stages import read
from prefect_raybatch.stages.columns import POSITION, READ_SPENT, SHARD
from prefect_raybatch.stages.read import ShardReader, Task
from prefect_raybatch.storage import Store, open_store


def write(path: Path, table: pa.Table, group: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not compressed: what has as many rows has the same size.
    pq.write_table(table, path, row_group_size=group, compression="none")


def numbers(start: int, rows: int) -> pa.Table:
    """Column i counts the rows of the whole input."""
    return pa.table({"i": np.arange(start, start + rows)})


def shards(rows: int, size: int) -> list[tuple[Unit, int]]:
    return [(Unit(n, 0, min(size, rows - at)), at) for n, at in enumerate(range(0, rows, size))]


def reader(uri: Path, **fields: Any) -> ShardReader:
    found = inventory(reads(uri=str(uri), **fields))
    return ShardReader(found.files, found.schema)


def everything(reader: ShardReader, tasks: list[Task], done: Any = None) -> list[pa.Table]:
    bound = [pickle.loads(pickle.dumps(reader.bind(task, done))) for task in tasks]
    return [table for read_task in bound for table in read_task()]


def check_rows(tables: list[pa.Table], units: list[tuple[Unit, int]]) -> None:
    """Each unit is one block, with its rows at their positions."""
    assert len(tables) == len(units)
    for table, (unit, start) in zip(tables, units, strict=True):
        assert not blocks.is_lost(table), table.to_pylist()
        assert table.column_names[:2] == [SHARD, POSITION]
        assert set(table[SHARD].to_pylist()) == {unit.shard}
        assert table[POSITION].to_pylist() == list(range(unit.offset, unit.offset + unit.rows))
        assert table["i"].to_pylist() == list(range(start, start + unit.rows))


def lost(table: pa.Table) -> tuple[str, bool]:
    assert blocks.is_lost(table) and table.num_rows == 1
    (why,) = blocks.losses(table)
    return str(why), why.fatal


# --- layouts ----------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    files=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 15)), min_size=1, max_size=6
    ).filter(lambda files: any(rows for rows, _ in files)),
    size=st.integers(1, 50),
    limit=st.none() | st.integers(1, 60),
    per_task=st.integers(1, 9),
    batch=st.sampled_from([1, 3, 7, 1000]),
    data=st.data(),
)
def test_any_layout_gives_each_row_once_in_order(tmp_path_factory, **drawn: Any) -> None:
    folder = tmp_path_factory.mktemp("layout")
    at = 0
    for number, (rows, group) in enumerate(drawn["files"]):
        write(folder / f"{number}.parquet", numbers(at, rows), group)
        at += rows
    one = reader(folder, limit=drawn["limit"])
    assert one.rows == min(at, drawn["limit"] or at)
    units = shards(one.rows, drawn["size"])
    # What is pending may have gaps, and parts of shards.
    units = [pair for pair in units if drawn["data"].draw(st.booleans(), "pending")]
    units = [
        part
        for unit, start in units
        for part in (
            [(Unit(unit.shard, unit.rows // 2, unit.rows - unit.rows // 2), start + unit.rows // 2)]
            if unit.rows > 1 and drawn["data"].draw(st.booleans(), "half")
            else [(unit, start)]
        )
    ]
    tasks = one.tasks(units, min_tasks=1, units_per_task=drawn["per_task"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "BATCH_ROWS", drawn["batch"])
        check_rows(everything(one, tasks), units)


def test_one_huge_row_group_is_decoded_once_a_task(tmp_path, monkeypatch):
    rows = 200_000
    write(tmp_path / "a.parquet", numbers(0, rows), rows)
    one = reader(tmp_path)
    decoded = []
    kept = pq.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
        for batch in kept(self, *args, **kwargs):
            decoded.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    units = shards(rows, 1000)
    tasks = one.tasks(units, min_tasks=1)
    assert len(tasks) == 25 and all(len(task.units) == 8 for task in tasks)
    check_rows(list(one.read(tasks[0])), units[:8])
    assert sum(decoded) <= 8000 + parquet.BATCH_ROWS


def test_row_groups_that_are_not_needed_are_not_decoded(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", numbers(0, 10_000), 100)
    one = reader(tmp_path)
    asked: list[int] = []
    kept = pq.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
        for batch in kept(self, *args, **kwargs):
            asked.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 100)
    units = [(Unit(0, 0, 50), 120), (Unit(1, 0, 10), 180), (Unit(2, 0, 10), 9_950)]
    (task,) = one.tasks(units, min_tasks=1)
    check_rows(list(one.read(task)), units)
    assert sum(asked) <= 200, "two row groups of 100, and of the last one no more than needed"


def test_three_thousand_files_of_three_rows(tmp_path):
    for number in range(3000):
        write(tmp_path / f"{number:04}.parquet", numbers(number * 3, 3))
    one = reader(tmp_path)
    units = shards(one.rows, 1000)
    tasks = one.tasks(units, min_tasks=1)
    check_rows(everything(one, tasks), units)
    assert len(pickle.dumps(one.bind(one.tasks(units[:1])[0]))) < 100_000


def test_a_task_pickles_to_little(tmp_path):
    files = [InputFile(f"s3://b/{n}.parquet", 1, "e", None, 1000) for n in range(10_000)]
    one = ShardReader(files, numbers(0, 1).schema)
    tasks = one.tasks(shards(one.rows, 5000))
    assert len(tasks) == 250 and max(len(pickle.dumps(one.bind(task))) for task in tasks) < 6000
    for task in tasks:
        assert len(task.files) == len({f for parts in task.parts for f in parts})


def test_nested_dictionary_and_widened_columns(tmp_path):
    inner = pa.array(["x", "y", None]).dictionary_encode()
    write(
        tmp_path / "a.parquet",
        pa.table(
            {
                "i": pa.array([0, 1, 2], pa.int32()),
                "d": inner,
                "s": pa.StructArray.from_arrays([inner, pa.array([1, 2, 3])], ["k", "n"]),
                "l": pa.ListArray.from_arrays([0, 1, 3, 3], inner),
                "n": pa.nulls(3),
                "a.b": [1, 2, 3],
            }
        ),
    )
    write(
        tmp_path / "b.parquet",
        pa.table(
            {
                "a.b": [4],
                "n": ["z"],
                "l": [["q"]],
                "s": pa.array([{"n": 4, "k": "w"}]),
                "d": ["v"],
                "i": pa.array([3], pa.int64()),
            }
        ),
    )
    one = reader(tmp_path)
    units = shards(4, 3)
    tables = everything(one, one.tasks(units))
    check_rows(tables, units)
    for table in tables:
        assert table.select(blocks.input_columns(table)).schema == one.schema
    took = READ_SPENT
    assert all(seconds >= 0 for table in tables for seconds in table[took].to_pylist())
    rows = [row for table in tables for row in table.drop_columns([took]).to_pylist()]
    assert rows[1]["l"] == ["y", None] and rows[2]["l"] == [] and rows[2]["d"] is None
    assert rows[3] == {
        **{SHARD: 1, POSITION: 0, "i": 3, "d": "v", "n": "z", "a.b": 4},
        **{"s": {"k": "w", "n": 4}, "l": ["q"]},
    }
    part = reader(tmp_path, columns=["a.b", "i"])
    assert blocks.input_columns(everything(part, part.tasks(units))[0]) == ["a.b", "i"]


def test_large_rows_are_decoded_in_small_batches(tmp_path, monkeypatch):
    table = pa.table({"i": range(64), "image": [os.urandom(10_000) for _ in range(64)]})
    write(tmp_path / "a.parquet", table)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 100_000)
    monkeypatch.setattr(read, "CHUNK_BYTES", 100_000)
    one = reader(tmp_path)
    units = shards(64, 20)
    tables = everything(one, one.tasks(units))
    check_rows(tables, units)
    assert tables[1]["image"][3] == table["image"][23]


# --- tasks ------------------------------------------------------------------------------------


def test_tasks_are_grouped_by_what_parallelism_allows():
    one = ShardReader([InputFile("f", 1, None, 1, 100_000)], numbers(0, 1).schema)
    for count, tasks, most in [(10, 10, 1), (64, 64, 1), (128, 64, 2), (1000, 125, 8)]:
        made = one.tasks(shards(count * 5, 5))
        assert len(made) == tasks and max(len(task.units) for task in made) == most
    assert len(one.tasks(shards(100_000, 1))) <= read.MAX_TASKS
    assert len(one.tasks(shards(50, 1), max_tasks=7)) <= 7
    assert one.tasks([]) == []


def test_attempts_visit_shards_in_different_orders():
    one = ShardReader([InputFile("f", 1, None, 1, 1000)], numbers(0, 1).schema)
    units = shards(1000, 1)
    natural = one.tasks(units)
    a, again, b = (one.tasks(units, shuffle_seed=seed) for seed in ("a", "a", "b"))
    assert a == again and a != b and a != natural
    assert sorted(a, key=lambda task: task.units[0].shard) == natural


def test_the_longest_shards_are_read_first_and_those_alike_in_order():
    one = ShardReader([InputFile("f", 1, None, 1, 40)], numbers(0, 1).schema)
    units = shards(40, 5)
    work = np.array([10, 10, 1000, 10, 1000, 2000, 10, 10])
    made = one.tasks(units, work=work)
    assert [task.units[0].shard for task in made] == [5, 2, 4, 0, 1, 3, 6, 7]
    pairs = one.tasks(units, min_tasks=4, work=work)
    assert [[u.shard for u in task.units] for task in pairs] == [[4, 5], [2, 3], [0, 1], [6, 7]]
    assert one.tasks(units, shuffle_seed="a", work=work) == one.tasks(units, shuffle_seed="a")


def test_units_outside_of_the_input_are_refused():
    one = ShardReader([InputFile("f", 1, None, 1, 10)], numbers(0, 1).schema)
    with pytest.raises(ValueError, match="of an input of 10 rows"):
        one.tasks([(Unit(0, 0, 5), 6)])


def committed(shard: int) -> bool:
    if shard == 4:
        raise StoreUnavailable("try later")
    return shard in (0, 2)


def test_done_shards_are_left_out(tmp_path):
    write(tmp_path / "a.parquet", numbers(0, 50))
    one = reader(tmp_path)
    units = shards(50, 10)
    tables = everything(one, one.tasks(units, min_tasks=1), committed)
    check_rows(tables, [units[1], units[3], units[4]])


# --- what goes wrong --------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path) -> ShardReader:
    write(tmp_path / "a.parquet", numbers(0, 10))
    write(tmp_path / "b.parquet", numbers(10, 10))
    return reader(tmp_path)


def outcome(one: ShardReader) -> list[pa.Table]:
    """Shards 0 (a), 1 (a and b) and 2 (b), in one task."""
    units = [(Unit(0, 0, 8), 0), (Unit(1, 0, 4), 8), (Unit(2, 0, 8), 12)]
    return everything(one, one.tasks(units, min_tasks=1))


def test_a_changed_size_names_both(two, tmp_path):
    before = os.stat(tmp_path / "b.parquet").st_size
    write(tmp_path / "b.parquet", numbers(10, 5000))
    first, *others = outcome(two)
    assert not blocks.is_lost(first)
    for table in others:
        reason, fatal = lost(table)
        after = os.stat(tmp_path / "b.parquet").st_size
        assert f"{tmp_path}/b.parquet" in reason and f"size {before} -> {after}" in reason
        assert fatal


def test_a_changed_time_and_a_missing_file(two, tmp_path):
    os.utime(tmp_path / "a.parquet", ns=(1, 1))
    (tmp_path / "b.parquet").unlink()
    reasons = [lost(table) for table in outcome(two)]
    assert "modification time" in reasons[0][0] and "a.parquet" in reasons[0][0]
    assert "b.parquet no longer exists" in reasons[2][0]
    assert all(fatal for _, fatal in reasons)


def test_a_file_replaced_while_it_is_read(two, tmp_path, monkeypatch):
    kept = read.Cursor.take

    def take(self: Any, start: int, rows: int) -> list[pa.Table]:
        tables = kept(self, start, rows)
        os.utime(tmp_path / "a.parquet", ns=(1, 1))
        return tables

    monkeypatch.setattr(read.Cursor, "take", take)
    first, second, third = outcome(two)
    assert "a.parquet has changed since the run was planned" in lost(first)[0] and lost(first)[1]
    assert "a.parquet" in lost(second)[0]
    assert not blocks.is_lost(third)


def rewritten(path: Path, table: pa.Table, move: bool = False) -> None:
    """Other rows in a file of the same name, size and time of change, as `cp -p` leaves it."""
    info = os.stat(path)
    new = path.with_name("new")
    write(new, table)
    if move:
        os.replace(new, path)
    else:
        path.write_bytes(new.read_bytes())
        new.unlink()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    now = os.stat(path)
    assert (now.st_size, now.st_mtime_ns) == (info.st_size, info.st_mtime_ns)


@pytest.mark.parametrize("move", [False, True])
def test_other_rows_of_the_same_size_and_time_are_noticed(two, tmp_path, move):
    rewritten(tmp_path / "a.parquet", numbers(10, 10), move)
    for planned in (two.files, read_files(files_table(two.files))):  # as the run directory has it
        first, second, third = outcome(ShardReader(planned, two.schema))
        for table in (first, second):
            reason, fatal = lost(table)
            assert f"{tmp_path}/a.parquet has changed since the run was planned" in reason and fatal
            assert "footer" in reason
        assert not blocks.is_lost(third)


def test_rows_changed_while_they_are_read_are_noticed(two, tmp_path, monkeypatch):
    kept = read.Cursor.take

    def take(self: Any, start: int, rows: int) -> list[pa.Table]:
        tables = kept(self, start, rows)
        if start == 8:
            rewritten(tmp_path / "a.parquet", numbers(10, 10))
        return tables

    monkeypatch.setattr(read.Cursor, "take", take)
    first, second, third = outcome(two)
    assert not blocks.is_lost(first) and not blocks.is_lost(third)
    assert "a.parquet has changed since the run was planned" in lost(second)[0] and lost(second)[1]


def test_a_file_that_is_touched_but_the_same_goes_on(two, tmp_path):
    path = tmp_path / "a.parquet"
    path.chmod(0o640)
    os.link(path, tmp_path / "backup")
    assert os.stat(path).st_ctime_ns != two.files[0].ctime_ns
    assert not any(blocks.is_lost(table) for table in outcome(two))
    rewritten(path, numbers(10, 10), move=True)
    assert blocks.is_lost(outcome(two)[0])
    rewritten(path, numbers(0, 10), move=True)  # put back, as the error says
    assert not any(blocks.is_lost(table) for table in outcome(two))


def test_a_plan_of_before_checks_what_it_recorded(two, tmp_path):
    old = [InputFile(f.uri, f.size, f.etag, f.mtime_ns, f.rows) for f in two.files]
    one = ShardReader(old, two.schema)
    (tmp_path / "a.parquet").chmod(0o640)
    assert not any(blocks.is_lost(table) for table in outcome(one))
    os.utime(tmp_path / "a.parquet", ns=(1, 1))
    assert "modification time" in lost(outcome(one)[0])[0]


def test_a_corrupt_page_names_file_and_rows(two, tmp_path):
    path = tmp_path / "b.parquet"
    info = os.stat(path)
    data = bytearray(path.read_bytes())
    data[4:60] = b"\xff" * 56
    path.write_bytes(data)
    os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))
    first, second, third = outcome(two)
    assert not blocks.is_lost(first)
    reason, fatal = lost(third)
    assert f"{path}, rows 2 to 9: " in reason and fatal
    assert "rows 0 to 1" in lost(second)[0]


def test_a_store_in_trouble_is_not_fatal(two, monkeypatch):
    def unavailable(self: Store, path: str) -> Any:
        raise StoreUnavailable(f"{path}: 503")

    monkeypatch.setattr(type(open_store("/")), "open", unavailable)
    for table in outcome(two):
        reason, fatal = lost(table)
        assert "StoreUnavailable" in reason and "503" in reason and not fatal


def test_a_snapshot_is_read_from_the_run_store(tmp_path):
    (tmp_path / "a.csv").write_text("i\n" + "".join(f"{i}\n" for i in range(100)))
    store = open_store(str(tmp_path / "run"))
    found = snapshot(reads(uri=str(tmp_path / "a.csv")), store, "attempt")
    place = tmp_path / "run" / found.files[0].uri
    os.utime(place, ns=(1, 1))  # only the size counts: a copied run directory still works
    one = ShardReader(found.files, found.schema, store)
    units = shards(100, 30)
    check_rows(everything(one, one.tasks(units)), units)
    place.write_bytes(b"")
    reason, fatal = lost(everything(one, one.tasks(units))[0])
    assert str(place) in reason and "size" in reason and fatal


# --- stores and Ray ---------------------------------------------------------------------------


def test_s3_in_place(s3, tmp_path, monkeypatch):
    store = open_store("s3://read/data", s3.options)
    for number in range(20):
        write(tmp_path / "f.parquet", numbers(number * 30, 30), 7)
        store.put(f"x/{number:02}.parquet", (tmp_path / "f.parquet").read_bytes())
    store.put("x/_SUCCESS", b"")
    for uri in ("s3://read/data", "s3://read/data/x/", "s3://read/data/*/0*.parquet"):
        found = inventory(reads(uri=uri, options=s3.options))
        assert found.rows == (300 if "*" in uri else 600)
    one = ShardReader(found.files, found.schema, options=s3.options)
    assert found.files[0].etag and found.files[0].mtime_ns is None
    units = shards(300, 70)
    for small in (read.SMALL_FILE, 0):  # fetched whole and ahead, or by ranges
        monkeypatch.setattr(read, "SMALL_FILE", small)
        check_rows(everything(one, one.tasks(units, min_tasks=2)), units)
    write(tmp_path / "f.parquet", numbers(1000, 30), 7)  # same size, other content
    store.put("x/00.parquet", (tmp_path / "f.parquet").read_bytes())
    store.delete(["x/09.parquet"])
    first, *_, last = everything(one, one.tasks(units, min_tasks=1))
    assert "x/00.parquet has changed since the run was planned" in lost(first)[0]
    assert "x/09.parquet no longer exists" in lost(last)[0] and lost(last)[1]


def test_tables_runs_and_brackets_on_s3(s3, tmp_path):
    store = open_store("s3://read/lake", s3.options)
    write(tmp_path / "f.parquet", numbers(0, 5))
    data = (tmp_path / "f.parquet").read_bytes()
    files = ["delta/p=1/a.parquet", "iceberg/data/a.parquet", "hudi/a.parquet", "a1.parquet"]
    files += ["out/run/data/a.parquet", "d[1]/a.parquet", "d1/b.parquet", "a[1].parquet"]
    files += ["iceberg/metadata/v1.metadata.json", "hudi/.hoodie/hoodie.properties"]
    for path in (*files, "delta/_delta_log/0.json", "out/run/_raybatch/plan.json"):
        store.put(path, data)

    def names(below: str) -> list[str]:
        found = inventory(reads(uri=f"s3://read/lake/{below}", options=s3.options))
        return [file.uri.removeprefix("s3://read/lake/") for file in found.files]

    reached = {
        "delta": ["", "/p=1", "/p=1/*.parquet", "/p=1/a.parquet"],
        "hudi": ["", "/*.parquet"],
    }
    reached["iceberg"] = ["", "/data", "/*/*.parquet"]
    for table, ways in reached.items():
        for way in ways:
            with pytest.raises(SourceError, match=f"(?i)read/lake/{table} is an? {table} table"):
                names(f"{table}{way}")
    with pytest.raises(SourceError, match="table"):
        names("**/a.parquet")
    with pytest.raises(SourceError, match="run in s3://read/lake/out/run is not finished"):
        names("out/run/data")
    store.put("out/run/_SUCCESS", b"{}")
    assert names("out/run/data") == names("out/*/data/*") == ["out/run/data/a.parquet"]
    assert names("a[1].parquet") == ["a[1].parquet"]
    assert names("d[1]") == names("d[1]/*.parquet") == ["d[1]/a.parquet"]
    store.delete(["a[1].parquet"])
    assert names("a[1].parquet") == ["a1.parquet"]
    store.put("h/y=7/m=x%20y/a.parquet", data)
    for uri in ("h", "h/y=7/*/*", "h/y=7/m=x%20y/a.parquet"):
        found = inventory(reads(uri=f"s3://read/lake/{uri}", options=s3.options))
        one = ShardReader(found.files, found.schema, options=s3.options)
        table = everything(one, one.tasks(shards(5, 5)))[0]
        assert (table["y"].to_pylist(), set(table["m"].to_pylist())) == ([7] * 5, {"x y"})


def test_s3_that_cannot_be_read(s3, tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        inventory(reads(uri="s3://no-such-bucket/x", options=s3.options))
    with pytest.raises(SourceError, match="does not exist"):
        inventory(reads(uri="s3://read/none.parquet", options=s3.options))


def test_s3_snapshot(s3, tmp_path):
    store = open_store("s3://read", s3.options)
    store.put("in/a.csv.gz", gzip.compress(b"i\n" + b"".join(b"%d\n" % i for i in range(100))))
    run = open_store("s3://read/run", s3.options)
    uri = "s3://read/in/a.csv.gz"
    found = snapshot(reads(uri=uri, options=s3.options), run, "attempt")
    one = ShardReader(found.files, found.schema, run)
    check_rows(everything(one, one.tasks(shards(100, 30))), shards(100, 30))


def test_other_formats_on_s3(s3, tmp_path):
    store, run = open_store("s3://read", s3.options), open_store("s3://read/run", s3.options)
    store.put("csv/a.csv", "i;s\n1;ü\n2;ß\n".encode("cp1252"))
    store.put("json/a.json.gz", gzip.compress(b'[{"i": 1, "s": "u"},\n {"i": 2}]'))
    table, sink = pa.table({"i": [1, 2]}), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    store.put("arrow/a.arrow", sink.getvalue().to_pybytes())
    csv = {"delimiter": ";", "encoding": "cp1252"}
    for kind in ("csv", "json", "arrow"):
        given = reads(uri=f"s3://read/{kind}", options=s3.options, csv=csv)
        found = snapshot(given, run, "attempt")
        assert peek(given).schema == found.schema
        one = ShardReader(found.files, found.schema, run)
        rows = everything(one, one.tasks(shards(2, 2)))[0]
        assert rows["i"].to_pylist() == [1, 2]
        if kind == "csv":
            assert rows["s"].to_pylist() == ["ü", "ß"]


def test_a_dataset_is_copied_in_order(local_ray, tmp_path):
    import ray.data

    store = open_store(str(tmp_path / "run"))
    dataset = ray.data.range(1000, override_num_blocks=8).map(lambda row: {"i": row["id"], "j": 1})
    found = snapshot_dataset(dataset, store, "attempt", limit=600, columns=["i"])
    assert found.rows == 600 and found.schema == pa.schema([("i", pa.int64())])
    one = ShardReader(found.files, found.schema, store)
    check_rows(everything(one, one.tasks(shards(600, 100))), shards(600, 100))
    with pytest.raises(ConfigError, match="did you mean 'i'"):
        snapshot_dataset(ray.data.from_items([{"i": 1}]), store, "attempt", columns=["ii"])
    with pytest.raises(SourceError, match="no rows"):
        snapshot_dataset(ray.data.from_items([{"i": 1}]).limit(0), store, "attempt")


def test_a_dataset_is_written_by_its_own_tasks(local_ray, tmp_path, monkeypatch):
    """Here, in the driver, nothing is written but what has to be written once more."""
    import ray.data

    store = open_store(str(tmp_path / "run"))
    monkeypatch.setattr(dataset_copies, "SMALL_BYTES", 0)
    dataset = ray.data.range(1000, override_num_blocks=8).map(lambda row: {"i": row["id"]})
    with monkeypatch.context() as patch:
        patch.delattr(SnapshotWriter, "write")
        found = snapshot_dataset(dataset, store, "attempt")
    assert found.rows == 1000 and len(found.files) == 8
    assert sum(rows for rows, _ in found.weights) == 1000
    one = ShardReader(found.files, found.schema, store)
    check_rows(everything(one, one.tasks(shards(1000, 300))), shards(1000, 300))


def test_blocks_of_a_dataset_have_one_schema_and_small_ones_are_joined(local_ray, tmp_path):
    """Types that no block alone can know, nested ones that hold nothing yet among them."""
    import ray.data

    tables = [
        pa.table({"i": pa.array([0, 1], pa.int32()), "s": pa.nulls(2), "t": [[None], []]}),
        pa.table({"i": pa.array([2], pa.int64()), "s": ["two"], "t": [[{"a": 1}]]}),
        pa.table({"i": pa.array([3], pa.int16()), "s": pa.nulls(1), "t": [None]}),
    ]
    store = open_store(str(tmp_path / "run"))
    found = snapshot_dataset(ray.data.from_arrow(tables), store, "attempt")
    nested = pa.list_(pa.struct([("a", pa.int64())]))
    assert found.schema == pa.schema([("i", pa.int64()), ("s", pa.string()), ("t", nested)])
    (file,) = found.files
    with store.open(file.uri) as stream:
        assert pq.read_table(stream).to_pylist() == [r for t in tables for r in t.to_pylist()]
    assert [info.path for info in store.list()] == [file.uri]
    with pytest.raises(SourceError, match=r"the dataset: column 'i' changes from int64 to string"):
        other = ray.data.range(8, override_num_blocks=2).map_batches(
            lambda ids: {"i": ids["id"] if 0 in ids["id"] else ids["id"].astype(str)},
            batch_size=None,
        )
        snapshot_dataset(other, store, "attempt")
    assert [info.path for info in store.list()] == [file.uri]


@pytest.mark.parametrize("fused", [True, False])
def test_ray_hands_on_one_block_a_unit(local_ray, tmp_path, fused):
    import ray.data

    write(tmp_path / "a.parquet", numbers(0, 110), 7)
    write(tmp_path / "b.parquet", numbers(110, 190))
    one = reader(tmp_path)
    units = shards(300, 20)
    os.utime(tmp_path / "b.parquet", ns=(1, 1))  # shards 5 to 9 become lost blocks
    tasks = one.tasks(units, min_tasks=1, units_per_task=4)
    # The function goes by value: workers do not know this module.
    source = read.ShardDatasource(one, tasks, lambda shard: shard >= 10)
    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = None
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    with ray.data.DataContext.current(context):
        # Even without override_num_blocks, where Ray wants 200 blocks of 4 tasks.
        dataset = source.dataset() if fused else ray.data.read_datasource(source)
        dataset = dataset.map_batches(
            lambda table: table,
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=1 if fused else 0.5,
        )
        tables = [
            table
            for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow")
            if table.num_rows
        ]
    assert "ReadShards" in dataset.stats() and ("ReadShards->" in dataset.stats()) == fused
    check_rows(tables[:5], units[:5])
    assert len(tables) == 10 and all("b.parquet" in lost(table)[0] for table in tables[5:])
