"""What is in a CSV or JSON file is what is read: no digit, zero or sign is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.specs import reads

from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.source import cuts, peek, snapshot, streams
from prefect_raybatch.storage import open_store

IDS = [9007199254740993, 9007199254740992]  # one float to both


def copy(tmp_path: Path, name: str, content: str, **fields: Any) -> pa.Table:
    path = tmp_path / "in" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())
    return copied(tmp_path, str(path), **fields)


def copied(tmp_path: Path, uri: Any, **fields: Any) -> pa.Table:
    made = snapshot(reads(uri=uri, **fields), open_store(str(tmp_path / "run")), "attempt")
    tables = [pq.read_table(tmp_path / "run" / file.uri) for file in made.files]
    return pa.concat_tables(tables)


def lines(*rows: Any) -> str:
    return "".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    "values",
    [
        ["3.10", "2.5"],
        ["1E5"],
        ["1e5"],
        ["-0"],
        ["02139", "10115"],
        ["+5"],
        [" 5", "6"],
        ["5 "],
        ["1", "2.5"],
        ["1.", "2.0"],
        [".5"],
        ["0.00001"],
        ["true", "false"],
        ["TRUE"],
        ["1_000"],
        ["1234567890123456789"],
        ["0.1234567890123456789"],
        ["12345678901234567.5"],
        ["1e400"],
        ["inf", "nan"],
        ["0x1f"],
        ["2026-01-02"],
        ["1,5"],
    ],
)
def test_csv_values_that_would_be_written_otherwise_stay_text(tmp_path, values):
    content = "a,b\n" + "".join(f'"{value}",x\n' for value in values)
    assert copy(tmp_path, "a.csv", content)["a"].to_pylist() == values


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["0", "-7", "123456789012345678"], pa.int64()),
        (["0.5", "-0.0", "1.0", "0.30000000000000004", "1e-07", "1e+16"], pa.float64()),
        (["123456789.012345", "0.0001"], pa.float64()),
        (["True", "False"], pa.bool_()),
    ],
)
def test_csv_values_that_are_written_so_get_a_type(tmp_path, values, kind):
    column = copy(tmp_path, "a.csv", "a,b\n" + "".join(f"{v},\n" for v in values))["a"]
    assert column.type == kind
    assert [str(value) for value in column.to_pylist()] == values


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_empty_line_of_one_column_is_a_null(tmp_path, monkeypatch, end):
    content = end.join(["", "a", "1", "", "2", "", ""])
    assert copy(tmp_path, "a.csv", content)["a"].to_pylist() == [1, None, 2, None]
    fields = {"csv": {"names": ["x"]}}
    assert copy(tmp_path, "a.csv", content, **fields)["x"].to_pylist() == [1, None, 2, None]
    bare = {"csv": {"header": False}}
    assert copy(tmp_path, "a.csv", f"x{end}{end}y{end}", **bare)["f0"].to_pylist() == [
        "x",
        None,
        "y",
    ]
    # of several columns it is no row
    assert copy(tmp_path, "b.csv", f"a,b{end}1,2{end}{end}3,4{end}")["a"].to_pylist() == [1, 3]


def test_empty_lines_are_rows_also_where_a_file_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(cuts, "CUT_BYTES", 1 << 13)
    values = [None if i % 3 == 1 else f"value {i}" for i in range(5000)]
    content = "\na\n" + "".join(f"{value or ''}\n" for value in values)
    assert copy(tmp_path, "a.csv", content)["a"].to_pylist() == values


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_before_a_block_of_empty_lines_come_once(tmp_path, monkeypatch, end):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 10)
    rows = [f"{i},x{end}" for i in range(200)]
    gap = [end] * 5000
    content = "".join([f"a,b{end}", *gap, *rows[:100], *gap, *rows[100:], *gap])
    assert copy(tmp_path, "a.csv", content)["a"].to_pylist() == list(range(200))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([2**63, 1], [str(2**63), "1"]),
        ([2**64 - 1, 10**40], [str(2**64 - 1), str(10**40)]),
        ([-(2**63) - 1], [str(-(2**63) - 1)]),
        ([*IDS, 1.5], [*map(str, IDS), "1.5"]),
        (["0.1234567890123456789", 3.1], ["0.1234567890123456789", "3.1"]),
        ([1, 2.5], [1.0, 2.5]),
        ([2**63 - 1, 5], [2**63 - 1, 5]),
        ([0.30000000000000004, 1e300, 1e-07], [0.30000000000000004, 1e300, 1e-07]),
        (["1e-400", 2.5], ["1e-400", "2.5"]),
    ],
)
@pytest.mark.parametrize("form", ["lines", "array", "blocks", "nested"])
def test_json_numbers_keep_their_value(tmp_path, monkeypatch, rows, expected, form):
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    objects = [f'{{"a": {text}, "t": "12345678901234567890"}}' for text in texts]
    if form == "nested":
        content = "".join(f'{{"n": {{"list": [{one}]}}}}\n' for one in objects)
        found = [row["n"]["list"][0]["a"] for row in copy(tmp_path, "a.jsonl", content).to_pylist()]
        assert found == expected
        return
    if form == "blocks":
        monkeypatch.setattr(streams, "BLOCK_BYTES", 16)
    content = f"[{', '.join(objects)}]" if form == "array" else lines(*objects)
    found = copy(tmp_path, "a.json" if form == "array" else "a.jsonl", content)
    assert found["a"].to_pylist() == expected
    assert found["t"].to_pylist() == ["12345678901234567890"] * len(rows)


def test_json_numbers_keep_their_value_over_several_files(tmp_path):
    for name, value in (("a", IDS[0]), ("b", IDS[1]), ("c", 0.5)):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.jsonl").write_text(lines({"id": value}))
    found = copied(tmp_path, str(tmp_path / "in"))
    assert found["id"].to_pylist() == [*map(str, IDS), "0.5"]


def test_each_of_many_long_json_numbers_keeps_its_value(tmp_path):
    rows = [{"id": 10**18 + 7 * i, "score": 0.5} for i in range(50_000)]
    content = lines(*rows, {"id": 1, "score": "0.1234567890123456789"})
    content = content.replace('"0.1234567890123456789"', "0.1234567890123456789")
    found = copy(tmp_path, "a.jsonl", content)
    assert found["id"].to_pylist() == [*(row["id"] for row in rows), 1]
    assert found["score"].to_pylist()[-2:] == ["0.5", "0.1234567890123456789"]


def test_json_numbers_do_not_go_together_with_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 16)
    with pytest.raises(SourceError, match="key 'a' is string, but large_string in earlier rows"):
        copy(tmp_path, "a.jsonl", lines({"a": 2**63}, {"a": "x"}))


def test_declared_types_of_csv_and_json(tmp_path):
    types = {"zip": "string", "amount": "decimal(10,2)", "day": "date32", "on": "bool"}
    content = "zip,amount,day,on\n2139,3.10,2026-01-02,true\n1,,2026-01-03,false\n"
    found = copy(tmp_path, "a.csv", content, types=types)
    assert [str(t) for t in found.schema.types] == [
        "string",
        "decimal128(10, 2)",
        "date32[day]",
        "bool",
    ]
    assert [str(value) for value in found.to_pylist()[0].values()] == [
        "2139",
        "3.10",
        "2026-01-02",
        "True",
    ]
    rows = lines({"id": 1, "x": 2.0, "t": "2026-01-02T03:04:05"}, {"id": 2**64})
    types = {"id": "string", "x": "string", "t": "timestamp[us]"}
    found = copy(tmp_path, "a.jsonl", rows, types=types)
    assert found["id"].to_pylist() == ["1", str(2**64)]
    assert found["x"].to_pylist() == ["2.0", None]
    assert str(found["t"].type) == "timestamp[us]"


def test_a_value_that_its_declared_type_does_not_hold_is_named(tmp_path):
    content = "a,b\n1,x\nmany,y\n"
    with pytest.raises(
        SourceError, match=r"a\.csv: column 'a' .*'many', which is not a valid int64"
    ):
        copy(tmp_path, "a.csv", content, types={"a": "int64"})
    with pytest.raises(ConfigError, match=r"source\.types: the input has no column 'aa'; did you"):
        peek(reads(uri=str(tmp_path / "in/a.csv"), types={"aa": "int64"}))
    with pytest.raises(ConfigError, match="column 'n' is struct"):
        copy(tmp_path, "a.jsonl", lines({"n": {"x": 1}}), types={"n": "string"})


@pytest.mark.parametrize("block", [1 << 20, 16])
def test_numbers_of_json_are_declared_text_or_decimals_as_they_are_written(
    tmp_path, monkeypatch, block
):
    monkeypatch.setattr(streams, "BLOCK_BYTES", block)
    content = '{"a": 3.10, "d": 3}\n{"a": 1E5, "d": 0.1}\n{"a": 3, "d": null}\n'
    found = copy(tmp_path, "a.jsonl", content, types={"a": "string", "d": "decimal(38,20)"})
    assert found["a"].to_pylist() == ["3.10", "1E5", "3"]
    assert [str(value) for value in found["d"].to_pylist()] == [
        f"3.{'0' * 20}",
        f"0.1{'0' * 19}",
        "None",
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
@pytest.mark.parametrize(
    ("value", "kind"), [(str(IDS[0]), "double"), ("16777217", "float"), ("9" * 5000, "double")]
)
def test_a_whole_number_that_its_declared_float_does_not_hold_is_refused(
    tmp_path, name, value, kind
):
    rows = f"a,b\n1.5,x\n{value},y\n" if name == "a.csv" else f'{{"a": 1.5}}\n{{"a": {value}}}\n'
    with pytest.raises(
        SourceError, match=rf"column 'a' .*'?{value}(\.0)?'?, which is not a valid {kind}"
    ):
        copy(tmp_path, name, rows, types={"a": kind})


@pytest.mark.parametrize("format", ["delta", "iceberg", "lance", "huggingface"])
def test_tables_have_types_of_their_own(format):
    with pytest.raises(ValueError, match="types does not apply to a"):
        reads(uri="/tmp/table", format=format, types={"a": "int64"})


def test_a_filter_on_text_says_how_to_give_the_column_a_type(tmp_path):
    content = "amount,b\n3.10,x\n12.00,y\n"
    with pytest.raises(RayBatchError, match=r"source\.types: \{amount: double\}"):
        copy(tmp_path, "a.csv", content, filter="amount >= 10")
    found = copy(
        tmp_path, "a.csv", content, filter="amount >= 10", types={"amount": "decimal(10,2)"}
    )
    assert [str(value) for value in found["amount"].to_pylist()] == ["12.00"]
