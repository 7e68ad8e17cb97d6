"""Files whose counts are untrue, whose types cannot be carried, or that stand for far more than
their size: refused by name when the input is looked at, before anything is written."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.specs import reads

from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.result.parquet_footer import (
    ChunkField,
    ColumnField,
    FileField,
    GroupField,
    encoded,
    footer_of,
)
from prefect_raybatch.source import heads, inventory, ipc_sizes, peek, snapshot
from prefect_raybatch.source.find import find
from prefect_raybatch.source.ipc_files import arrow_rows
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.stages import block as blocks
from prefect_raybatch.stages.read import ShardReader
from prefect_raybatch.storage import open_store

LOOKS = ("peek", "heads", "snapshot")


def look(tmp_path: Path, path: Path, how: str, **fields: Any) -> None:
    source = reads(uri=str(path), **fields)
    if how == "peek":
        peek(source)
    elif how == "heads":
        list(heads(source, 16))
    else:
        snapshot(source, open_store(str(tmp_path / "run")), "attempt")


def refused(tmp_path: Path, path: Path, *words: str, **fields: Any) -> None:
    for how in LOOKS:
        with pytest.raises(RayBatchError) as caught:
            look(tmp_path, path, how, **fields)
        for word in words:
            assert word in str(caught.value), how


def forged(path: Path, rows: int | None, group: int | None, values: int | None) -> ReadSpec:
    """A Parquet file of 300 rows with other counts in its footer."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": ["x"] * 300, "n": [[1]] * 300}), sink)
    data = sink.getvalue()
    footer = footer_of(data)
    size = int.from_bytes(data[-8:-4], "little")
    if rows is not None:
        footer[FileField.ROWS] = (footer[FileField.ROWS][0], rows)
    first = footer[FileField.GROUPS][1][1][0]
    if group is not None:
        first[GroupField.ROWS] = (first[GroupField.ROWS][0], group)
    if values is not None:
        for chunk in first[GroupField.COLUMNS][1][1]:
            meta = chunk[ChunkField.META][1]
            meta[ColumnField.VALUES] = (meta[ColumnField.VALUES][0], values)
    text = encoded(footer)
    path.write_bytes(data[: -8 - size] + text + len(text).to_bytes(4, "little") + b"PAR1")
    return reads(uri=str(path))


@pytest.mark.parametrize(
    ("rows", "group", "values", "said"),
    [
        (10**9, None, None, "counts 1,000,000,000 rows, its row groups 300"),
        (10**18, None, None, "its row groups 300"),
        (-1, None, None, "negative row count"),
        (-(10**9), -(10**9), -(10**9), "negative row count"),
        (10**9, 10**9, None, "row group 0 has 1,000,000,000 rows, but 300 values of column 'a'"),
        (200, 200, None, "row group 0 has 200 rows, but 300 values of column 'a'"),
        (10**9, 10**9, 10**9, "RAYBATCH_MAX_ROWS_PER_BYTE"),
        (10**18, 10**18, 10**18, "RAYBATCH_MAX_ROWS_PER_BYTE"),
    ],
)
def test_a_footer_that_lies_about_its_rows_is_refused(tmp_path, rows, group, values, said):
    source = forged(tmp_path / "a.parquet", rows, group, values)
    with pytest.raises(SourceError, match=r"a\.parquet") as caught:
        inventory(source)
    assert said in str(caught.value)
    with pytest.raises(SourceError, match=r"a\.parquet"):
        snapshot(replace(source, filter="a = 'x'"), open_store(str(tmp_path)), "attempt")


def test_a_true_footer_is_read(tmp_path):
    assert inventory(forged(tmp_path / "a.parquet", None, None, None)).rows == 300


def ipc(path: Path, **columns: Any) -> Path:
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


UNION = pa.UnionArray.from_dense(
    pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["x"])]
)
SPARSE = pa.UnionArray.from_sparse(
    pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["x", "y"])]
)
INTERVAL = pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval())
VIEW = pa.array(["a"], pa.string_view())
RUNS = pa.RunEndEncodedArray.from_arrays([1, 2], ["a", "b"])


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (UNION, "dense_union"),
        (SPARSE, "sparse_union"),
        (INTERVAL, "month_day_nano_interval"),
        (pa.StructArray.from_arrays([INTERVAL], ["i"]), "month_day_nano_interval"),
        (pa.ListArray.from_arrays([0, 1, 2], UNION), "dense_union"),
        (pa.StructArray.from_arrays([RUNS], ["r"]), "run_end_encoded"),
        (pa.StructArray.from_arrays([RUNS.values] * 2, ["r", "r"]), "two fields named 'r'"),
        (pa.array([Decimal(1200)] * 2, pa.decimal128(5, -2)), "decimal128(5, -2)"),
        (pa.array([b""] * 2, pa.binary(0)), "fixed_size_binary[0]"),
        (pa.array([[], []], pa.list_(pa.int8(), 0)), "[0]"),
        (pa.DictionaryArray.from_arrays([0, 0], pa.array([[1]])), "dictionary<values=list"),
        (pa.DictionaryArray.from_arrays([0, 0], VIEW), "dictionary<values=string_view"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_types_that_parquet_cannot_hold_are_refused_by_name(tmp_path, column, kind):
    path = ipc(tmp_path / "a.arrow", odd=column, x=[1, 2])
    refused(tmp_path, path, "a.arrow", "'odd'", kind, "source.columns")
    look(tmp_path, path, "snapshot", columns=["x"])


def test_a_time_that_parquet_cannot_hold_is_told_of_the_input(tmp_path):
    path = ipc(tmp_path / "a.arrow", a=pa.array([2**60], pa.timestamp("s")))
    with pytest.raises(SourceError, match="Parquet cannot store a value of the input"):
        look(tmp_path, path, "snapshot")


@pytest.mark.parametrize(
    "column",
    [
        RUNS,
        pa.array([1.5, 2.5], pa.float16()),
        pa.array([1, 2], pa.duration("ns")),
        pa.array([1, 2], pa.time64("ns")),
        pa.array([1, 2], pa.uint64()),
        pa.array([1, 2], pa.decimal128(38, 0)),
        pa.array([1, 2], pa.decimal256(76, 2)),
        pa.array([1, 2], pa.decimal32(5, 2)),
        pa.array(["a", "b"], pa.string_view()),
        pa.array([b"a", b"b"], pa.binary_view()),
        pa.array([b"a", b"b"], pa.binary(1)),
        pa.array([[1], [2]], pa.list_view(pa.int8())),
        pa.array([[1], [2]], pa.large_list_view(pa.int8())),
        pa.array([[1], [2]], pa.list_(pa.int8(), 1)),
        pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int8())),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array([1, 2], pa.date64()),
        pa.array([1, 2], pa.timestamp("s", "Europe/Berlin")),
    ],
    ids=lambda column: str(column.type)[:30],
)
def test_every_other_type_is_carried(tmp_path, column):
    if pa.types.is_date64(column.type):
        column = pa.array([0, 86_400_000], pa.date64())
    path = ipc(tmp_path / "a.arrow", a=column)
    made = snapshot(reads(uri=str(path)), open_store(str(tmp_path / "run")), "attempt")
    table = pq.read_table(tmp_path / "run" / made.files[0].uri)
    assert table["a"].to_pylist() == column.to_pylist()
    assert peek(reads(uri=str(path))).schema == made.schema


def test_rows_of_nulls_are_bounded(tmp_path):
    path = ipc(tmp_path / "a.arrow", a=pa.nulls(50_000_000))
    refused(tmp_path, path, "50,000,000 rows", "RAYBATCH_MAX_ROWS_PER_BYTE")


def test_columns_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_MAX_COLUMNS", "10")
    names = [f"c{i}" for i in range(11)]
    csv = tmp_path / "a.csv"
    csv.write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text(json.dumps(dict.fromkeys(names, 1)) + "\n")
    growing = tmp_path / "b.jsonl"
    growing.write_text("".join(json.dumps({name: 1}) + "\n" for name in names))
    nested = tmp_path / "c.jsonl"
    nested.write_text(json.dumps({"a": [dict.fromkeys(names, 1)]}) + "\n")
    arrow = ipc(tmp_path / "a.arrow", **{name: [1] for name in names})
    for path in (csv, jsonl, growing, nested, arrow):
        refused(tmp_path, path, path.name, "the limit is 10 columns", "RAYBATCH_MAX_COLUMNS")
    pq.write_table(pa.table({name: [1] for name in names}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="RAYBATCH_MAX_COLUMNS"):
        inventory(reads(uri=str(tmp_path / "a.parquet")))
    assert inventory(reads(uri=str(tmp_path / "a.parquet"), columns=names[:10])).rows == 1
    monkeypatch.setenv("RAYBATCH_MAX_COLUMNS", "30")
    for path in (csv, jsonl, growing, nested, arrow):
        look(tmp_path, path, "peek")
    monkeypatch.setenv("RAYBATCH_MAX_COLUMNS", "many")
    with pytest.raises(ConfigError, match="RAYBATCH_MAX_COLUMNS=many: must be a whole number"):
        look(tmp_path, csv, "peek")


def test_a_line_of_300000_new_keys_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for line in range(2):
            file.write(json.dumps({f"k{line}_{i}": 1 for i in range(300_000)}) + "\n")
    refused(tmp_path, path, "a.jsonl", "more than 10,000 keys")


def test_nested_keys_of_few_names_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_MAX_COLUMNS", "1000")

    def tree(depth: int) -> Any:
        return {"a": tree(depth - 1), "b": tree(depth - 1)} if depth else 1

    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(tree(11)) + "\n")
    refused(tmp_path, path, "RAYBATCH_MAX_COLUMNS")


@pytest.mark.parametrize("ending", ["gz", "zst", "bz2"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_small_file_that_expands_far_is_refused(tmp_path, monkeypatch, ending, kind):
    monkeypatch.setattr("prefect_raybatch.source.streams.FREE_BYTES", 1 << 20)
    monkeypatch.setenv("RAYBATCH_MAX_EXPANSION", "50")
    path = tmp_path / f"a.{kind}.{ending}"
    names = {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}
    line = b"a\n" if kind == "csv" else b'{"a": 1}\n'
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), names[ending]) as stream:
        stream.write(line * ((4 << 20) // len(line)))
    with pytest.raises(SourceError, match=r"the limit is 50 times .* RAYBATCH_MAX_EXPANSION"):
        look(tmp_path, path, "snapshot")


def compressed_ipc(path: Path, codec: str, form: str, **columns: Any) -> Path:
    """An Arrow file or stream of two batches, with compressed buffers."""
    options = pa.ipc.IpcWriteOptions(compression=codec)
    table = pa.table(columns)
    make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with make(str(path), table.schema, options=options) as writer:
        for batch in [*table.to_batches(), *table.slice(0, 1).to_batches()]:
            writer.write_batch(batch, {"made": "by hand"})
    return path


LARGE = "x" * (2 << 20)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([LARGE, LARGE]),
        pa.array([LARGE, LARGE], pa.large_string()),
        pa.array([LARGE, LARGE], pa.string_view()),
        pa.array([[LARGE], [LARGE]]),
        pa.array([LARGE, "a"]).dictionary_encode(),
        pa.array([0] * 600_000),
    ],
    ids=lambda column: str(column.type)[:12],
)
def test_compressed_buffers_are_refused_before_they_are_decompressed(
    tmp_path, monkeypatch, codec, form, column
):
    monkeypatch.setattr("prefect_raybatch.source.bounds.FREE_BYTES", 1 << 20)
    monkeypatch.setenv("RAYBATCH_MAX_EXPANSION", "1")
    path = compressed_ipc(tmp_path / "a.arrow", codec, form, a=column)
    before = pa.default_memory_pool().max_memory()
    refused(tmp_path, path, "a.arrow", "claims to decompress from", "RAYBATCH_MAX_EXPANSION")
    with pytest.raises(SourceError, match="RAYBATCH_MAX_EXPANSION"):
        arrow_rows(find(reads(uri=str(path)))[1][0])
    assert pa.default_memory_pool().max_memory() == before
    monkeypatch.setenv("RAYBATCH_MAX_EXPANSION", "100000")
    look(tmp_path, path, "peek")


@pytest.mark.parametrize("codec", ["lz4", "zstd", None])
@pytest.mark.parametrize("form", ["file", "stream"])
def test_the_declared_sizes_are_those_that_come_out(tmp_path, monkeypatch, codec, form):
    """Of buffers that were not worth compressing as well; empty ones have no size."""
    table = {
        "text": ["a", None, "bc"] * 5000,
        "list": [[1, 2], [], None] * 5000,
        "nothing": pa.nulls(15_000),
        "code": pa.array(["a", "b", "a"] * 5000).dictionary_encode(),
    }
    path = compressed_ipc(tmp_path / "a.arrow", codec, form, **table)
    sums: list[int] = []
    monkeypatch.setattr(ipc_sizes, "check_expansion_bound", lambda total, *_: sums.append(total))
    with path.open("rb") as stream:
        ipc_sizes.check_declared_sizes(stream, 1, form == "file", "a")
    made = pa.table(table)
    least = sum(made[name].nbytes for name in ("text", "list", "code"))
    assert least <= sums[-1] < least * 1.1 + 1000 if codec else sums == []


@pytest.mark.parametrize("form", ["file", "stream"])
def test_damaged_metadata_of_an_arrow_file_is_an_error_with_its_name(tmp_path, form):
    path = compressed_ipc(tmp_path / "a.arrow", "zstd", form, a=["x"] * 100, b=[[1]] * 100)
    whole = path.read_bytes()
    for at in range(0, len(whole), 17):
        for byte in (0, 0xFF):
            path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            try:
                look(tmp_path, path, "peek")
            except SourceError as error:
                assert "a.arrow" in str(error)


def test_a_parquet_file_that_declares_far_more_than_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("prefect_raybatch.source.bounds.FREE_BYTES", 1 << 20)
    path = tmp_path / "a.parquet"
    column = [str(i) * 2000 for i in range(1000)]
    pq.write_table(pa.table({"a": column}), path, compression="zstd", use_dictionary=False)
    words = r"a\.parquet: claims .* RAYBATCH_MAX_EXPANSION"
    monkeypatch.setenv("RAYBATCH_MAX_EXPANSION", "50")
    for filter in (None, "a = '1'"):
        with pytest.raises(SourceError, match=words):
            if filter is None:
                inventory(reads(uri=str(path)))
            else:
                peek(reads(uri=str(path), filter=filter))
    monkeypatch.setenv("RAYBATCH_MAX_EXPANSION", "100000")
    assert inventory(reads(uri=str(path))).rows == 1000


@pytest.mark.parametrize("levels", [101, 3000, 20_000, 200_000])
@pytest.mark.parametrize("form", ["lines", "array"])
def test_json_that_is_nested_too_deep_is_refused(tmp_path, levels, form):
    value = '{"a": "]]]}}}", "b": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    good = '{"b": []}'
    path = tmp_path / ("a.json" if form == "array" else "a.jsonl")
    path.write_text(f"[{good}, {value}]" if form == "array" else f"{good}\n{value}\n")
    script = (
        "import sys; from prefect_raybatch.compile.job import read_spec\n"
        "from prefect_raybatch.job.source import Source\n"
        "from prefect_raybatch.source import peek\n"
        "from prefect_raybatch.errors import SourceError\n"
        "try: peek(read_spec(Source(uri=sys.argv[1])))\n"
        "except SourceError as error: print(error)\n"
    )
    if levels == 20_000:  # in a process of its own, which a fault would end
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
        )
        assert "deep" in done.stdout
    refused(tmp_path, path, "2 is nested more than 100 levels deep")


def test_json_that_is_nested_deep_enough_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "' + "[{" * 500 + '", "b": ' + "[" * 60 + "]" * 60 + "}\n")
    assert peek(reads(uri=str(path))).rows == 1


def int96(path: Path, *days: int, nanos: int = 0, nested: bool = False) -> Path:
    """A file with a column of INT96 times at these days of 1970."""
    times = pa.array([day * 86_400_000_000_000 + nanos for day in days], pa.timestamp("ns"))
    column = pa.ListArray.from_arrays([*range(len(days) + 1)], times) if nested else times
    pq.write_table(
        pa.table({"t": column, "x": [1] * len(days)}), path, use_deprecated_int96_timestamps=True
    )
    return path


def at_year_9999(path: Path) -> Path:
    """A file of INT96 with 9999-12-31, which pyarrow does not write: its Julian day is put in."""
    int96(path, 0)
    data = path.read_bytes()
    day = (2_440_588).to_bytes(4, "little")
    assert day in data
    path.write_bytes(data.replace(day, (5_373_484).to_bytes(4, "little")))
    return path


def read_all(path: Path) -> pa.Table:
    found = inventory(reads(uri=str(path)))
    reader = ShardReader(found.files, found.schema)
    (task,) = reader.tasks([(Unit(0, 0, found.rows), 0)])
    (table,) = reader.read(task)
    return table


@pytest.mark.parametrize("nested", [False, True])
def test_int96_is_read_as_microseconds(tmp_path, nested):
    table = read_all(int96(tmp_path / "a.parquet", -7, 20_000, nanos=1000, nested=nested))
    values = [row[0] if nested else row for row in table["t"].to_pylist()]
    assert [str(value) for value in values] == [
        "1969-12-25 00:00:00.000001",
        "2024-10-04 00:00:00.000001",
    ]


def test_int96_outside_of_the_years_of_nanoseconds_does_not_wrap(tmp_path):
    path = at_year_9999(tmp_path / "a.parquet")
    assert str(read_all(path)["t"][0].as_py()) == "9999-12-31 00:00:00"
    made = snapshot(
        reads(uri=str(path), filter="x = 1"), open_store(str(tmp_path / "run")), "attempt"
    )
    copied = pq.read_table(tmp_path / "run" / made.files[0].uri)
    assert str(copied["t"][0].as_py()) == "9999-12-31 00:00:00"


@pytest.mark.parametrize("nested", [False, True])
def test_int96_finer_than_a_microsecond_is_refused(tmp_path, nested):
    path = int96(tmp_path / "a.parquet", 1, nanos=1, nested=nested)
    (loss,) = blocks.losses(read_all(path))
    assert loss.fatal
    assert "column 't' has INT96 times finer than a microsecond" in loss.message
    with pytest.raises(SourceError, match="finer than a microsecond"):
        snapshot(reads(uri=str(path), filter="x = 1"), open_store(str(tmp_path / "run")), "at")


READ_THREE = """
import sys
import pyarrow as pa
from prefect_raybatch.compile.job import read_spec
from prefect_raybatch.job.source import Source
from prefect_raybatch.ledger.records import Unit
from prefect_raybatch.source import inventory
from prefect_raybatch.stages.read import ShardReader

found = inventory(read_spec(Source(uri=sys.argv[1], limit=3)))
reader = ShardReader(found.files, found.schema)
(task,) = reader.tasks([(Unit(0, 0, 3), 0)])
(table,) = reader.read(task)
print(table.num_rows, pa.default_memory_pool().max_memory())
"""


def test_a_dictionary_of_large_values_is_decoded_no_further_than_it_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    large = pa.array(["x" * (1 << 20)]).dictionary_encode().dictionary
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), large)
    pq.write_table(pa.table({"a": column}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    # The most memory that a process has held is known for the whole process alone.
    command = [sys.executable, "-c", READ_THREE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, most = map(int, done.stdout.split()[-2:])
    assert rows == 3
    assert most < 256 << 20
