"""Inventory and snapshot of the input: what is read, and what is said when it cannot be."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.specs import reads

from prefect_raybatch.errors import ConfigError, SourceError, StoreError
from prefect_raybatch.ledger.records import InputFile
from prefect_raybatch.source import (
    Inventory,
    detect_format,
    inventory,
    needs_snapshot,
    peek,
    snapshot,
    snapshot_writer,
    snapshots,
    streams,
)
from prefect_raybatch.source import parquet as footers
from prefect_raybatch.source.arrow_types import common_type, plain_type
from prefect_raybatch.source.find import find
from prefect_raybatch.storage import open_store


def parquet(path: Path, group: int | None = None, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return str(path)


def text(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def copy(tmp_path: Path, uri: Any, **fields: Any) -> tuple[Inventory, pa.Table]:
    """A snapshot of `uri` and its rows."""
    store = open_store(str(tmp_path / "run"))
    made = snapshot(reads(uri=uri, **fields), store, "attempt")
    tables = [pq.read_table(tmp_path / "run" / file.uri) for file in made.files]
    table = pa.concat_tables(tables)
    assert table.schema.equals(made.schema)
    assert [t.num_rows for t in tables] == [file.rows for file in made.files]
    return made, table


def refused(tmp_path: Path, uri: Any, *words: str, **fields: Any) -> str:
    with pytest.raises(SourceError) as caught:
        copy(tmp_path, uri, **fields)
    for word in words:
        assert word in str(caught.value)
    assert not list((tmp_path / "run").rglob("*.parquet"))
    return str(caught.value)


# --- finding ----------------------------------------------------------------------------------


def test_a_folder_is_read_recursively_in_name_order_without_hidden_files(tmp_path):
    for name in ("b/2.parquet", "a.parquet", "b/1.pq"):
        parquet(tmp_path / "in" / name, x=[1])
    for name in ("_SUCCESS", ".a.parquet.crc", "_temporary/0.parquet", "b/.hidden.parquet"):
        text(tmp_path / "in" / name, "no")
    found = inventory(reads(uri=str(tmp_path / "in")))
    assert [Path(f.uri).name for f in found.files] == ["a.parquet", "1.pq", "2.parquet"]
    assert found.rows == 3 and found.format == "parquet"
    info = os.stat(tmp_path / "in/a.parquet")
    first = found.files[0]
    assert first == InputFile(
        str(tmp_path / "in/a.parquet"),
        info.st_size,
        None,
        info.st_mtime_ns,
        1,
        info.st_ctime_ns,
        info.st_ino,
        first.footer,
    )
    assert first.footer and first.footer == found.files[0].footer


SYSTEM = (".DS_Store", "Thumbs.db", "desktop.ini", "~$b.xlsx", "x/thumbs.db", "$RECYCLE.BIN/a.csv")


@pytest.mark.parametrize("pattern", ["", "/", "/**", "/*", "/**/*"])
@pytest.mark.parametrize("format", ["auto", "csv"])
def test_what_a_desktop_leaves_in_a_folder_is_not_read(tmp_path, pattern, format):
    text(tmp_path / "in/a.csv", "x\n1\n")
    for name in SYSTEM:
        text(tmp_path / "in" / name, "no")
    kind, files = find(reads(uri=f"{tmp_path}/in{pattern}", format=format))
    assert kind == "csv" and [file.uri for file in files] == [str(tmp_path / "in/a.csv")]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("b.xlsx", "workbooks are not supported. Save the sheet as CSV"),
        ("b.docx", "documents are not supported"),
        ("b.log", "the extension does not show the format"),
        ("b.db", "a database cannot be read as a file"),
        ("b.zip", "this compression cannot be read as a stream"),
    ],
)
def test_a_file_that_is_no_table_is_named_and_how_to_leave_it_out(tmp_path, name, said):
    text(tmp_path / "in/a.csv.gz", "x\n1\n")
    text(tmp_path / "in" / name, "no")
    place = f"{tmp_path}/in"
    remedy = f"or exclude such files with a glob: source.uri: {place}/*.csv.gz"
    refused(tmp_path, place, f"{place}/{name}: {said}", remedy)
    text(tmp_path / "in/deep/c.csv.gz", "x\n1\n")
    refused(tmp_path, place, f"{place}/**/*.csv.gz")
    refused(tmp_path, f"{place}/{name[:2]}*", said, "or exclude such files with a glob")
    assert "glob" not in refused(tmp_path, f"{place}/{name}", said)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.parquet", ["a.parquet"]),
        ("**/*.parquet", ["a.parquet", "x/b.parquet", "x/y/c.parquet"]),
        ("*/b.parquet", ["x/b.parquet"]),
        ("x/**", ["x/b.parquet", "x/y/c.parquet"]),
        ("[a-b].parquet", ["a.parquet"]),
        ("x/?.parquet", ["x/b.parquet"]),
    ],
)
def test_globs(tmp_path, pattern, names):
    for name in ("a.parquet", "x/b.parquet", "x/y/c.parquet", "_h.parquet"):
        parquet(tmp_path / name, x=[1])
    found = inventory(reads(uri=f"{tmp_path}/{pattern}"))
    assert [f.uri for f in found.files] == [str(tmp_path / name) for name in names]


def test_a_named_file_is_read_whatever_its_name(tmp_path):
    path = parquet(tmp_path / "_odd", x=[1])
    assert inventory(reads(uri=path, format="parquet")).rows == 1
    assert inventory(reads(uri=f"file://{path}", format="parquet")).files[0].uri == path


def test_relative_paths_become_whole(tmp_path, monkeypatch):
    parquet(tmp_path / "a.parquet", x=[1])
    monkeypatch.chdir(tmp_path)
    assert inventory(reads(uri="a.parquet")).files[0].uri == str(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", "parquet"),
        ("a.PQ", "parquet"),
        ("a.csv", "csv"),
        ("a.csv.gz", "csv"),
        ("a.tsv", "csv"),
        ("a.jsonl", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.json.gz", "jsonl"),
    ],
)
def test_formats_by_ending(tmp_path, name, kind):
    source = reads(uri=text(tmp_path / name, "x"))
    assert detect_format(source) == kind
    assert needs_snapshot(source) == (kind != "parquet")


def test_mixed_and_unknown_formats_are_refused_with_the_remedy(tmp_path):
    text(tmp_path / "in/a.csv", "x\n1\n")
    parquet(tmp_path / "in/b.parquet", x=[2])
    uri = str(tmp_path / "in")
    with pytest.raises(SourceError, match=r"several formats.*a\.csv.*b\.parquet.*source\.format"):
        detect_format(reads(uri=uri))
    assert inventory(reads(uri=uri, format="parquet")).rows == 1
    text(tmp_path / "in/c.dat", "x")
    with pytest.raises(SourceError, match=r"c\.dat.*Set source\.format"):
        detect_format(reads(uri=uri))
    with pytest.raises(SourceError, match="no file"):
        text(tmp_path / "only/a.csv", "x")
        inventory(reads(uri=str(tmp_path / "only"), format="parquet"))


def test_nothing_to_read(tmp_path):
    (tmp_path / "empty").mkdir()
    text(tmp_path / "empty/_SUCCESS", "")
    for uri, words in [
        (f"{tmp_path}/no.parquet", "no file or folder 'no.parquet' in"),
        (f"{tmp_path}/empty", "has no files"),
        (f"{tmp_path}/empty/*.parquet", "no file in .* matches"),
        (f"{tmp_path}/none/*.parquet", "no file or folder 'none' in"),
        (f"{tmp_path}/none/a/b.csv", "no folder '.*/none/a', in which 'b.csv' should be"),
    ]:
        with pytest.raises(SourceError, match=words) as caught:
            inventory(reads(uri=uri))
        assert str(tmp_path) in str(caught.value)


def test_a_file_listed_twice_is_refused(tmp_path):
    path = parquet(tmp_path / "a.parquet", x=[1])
    for second in (path, f"file://{path}", str(tmp_path), f"{tmp_path}/*.parquet"):
        with pytest.raises(SourceError, match="listed twice"):
            inventory(reads(uri=[path, second]))


# --- Parquet ----------------------------------------------------------------------------------


def test_limit_reads_no_more_footers_than_it_needs(tmp_path, monkeypatch):
    for i in range(6):
        parquet(tmp_path / f"{i}.parquet", x=list(range(10)))
    text(tmp_path / "9.parquet", "not looked at")
    monkeypatch.setattr(footers, "FOOTERS_AHEAD", 2)
    found = inventory(reads(uri=str(tmp_path), limit=25))
    assert [f.rows for f in found.files] == [10, 10, 5]
    found = inventory(reads(uri=str(tmp_path), limit=20))
    assert [f.rows for f in found.files] == [10, 10]


def test_bytes_of_rows_are_told_by_row_group_and_end_with_the_limit(tmp_path):
    long, short = [f"x{i:06}" * 100 for i in range(100)], ["y"] * 100
    table = pa.table({"text": [*short, *long], "n": [1] * 200})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    (few, small), (many, large) = inventory(reads(uri=str(tmp_path))).weights
    assert few == many == 100 and large > 20 * small
    cut = inventory(reads(uri=str(tmp_path), limit=150)).weights
    assert cut == ((100, small), (50, large // 2))
    (_, one), (_, other) = inventory(reads(uri=str(tmp_path), columns=["n"])).weights
    assert one == other < small


def test_a_snapshot_tells_the_bytes_of_its_rows(tmp_path):
    lines = [f"{i},{'word ' * (200 if i >= 3000 else 1)}" for i in range(4000)]
    made, _ = copy(tmp_path, text(tmp_path / "a.csv", "\n".join(["i,text", *lines])))
    assert sum(rows for rows, _ in made.weights) == 4000
    assert made.weights[0][1] * 10 < made.weights[-1][1]


def test_columns_and_row_bytes(tmp_path):
    rng = random.Random(0)
    big = ["".join(rng.choices("abcdefgh", k=1000)) for _ in range(200)]
    path = parquet(tmp_path / "a.parquet", id=list(range(200)), big=big, small=[1] * 200)
    whole, part = inventory(reads(uri=path)), inventory(reads(uri=path, columns=["small", "id"]))
    assert part.schema.names == ["small", "id"]
    assert 16 <= part.row_bytes < 40 and 1000 < whole.row_bytes < 1200


def test_an_unknown_column_names_the_nearest(tmp_path):
    path = parquet(tmp_path / "a.parquet", Company=["x"], City=["y"])
    with pytest.raises(ConfigError, match=r"no column 'Compny'; did you mean 'Company'\?"):
        inventory(reads(uri=path, columns=["Compny"]))
    with pytest.raises(ConfigError, match="duplicate column"):
        inventory(reads(uri=path, columns=["City", "City"]))


def test_reserved_and_repeated_columns(tmp_path):
    with pytest.raises(SourceError, match=r"__rb_pos.*reserved"):
        inventory(reads(uri=parquet(tmp_path / "a.parquet", __rb_pos=[1])))
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match="duplicate column 'a'"):
        inventory(reads(uri=str(tmp_path / "b.parquet")))


@pytest.mark.parametrize("content", [b"", b"PAR1 not really PAR1", b"x" * 1000])
def test_a_corrupt_file_among_good_ones_is_named(tmp_path, content):
    parquet(tmp_path / "a.parquet", x=[1])
    text(tmp_path / "b.parquet", content)
    with pytest.raises(SourceError, match=r"b\.parquet is not a readable Parquet file"):
        inventory(reads(uri=str(tmp_path)))


def test_types_that_go_together_are_widened(tmp_path):
    parquet(
        tmp_path / "a.parquet",
        i=pa.array([1], pa.int32()),
        f=pa.array([1], pa.float32()),
        n=pa.nulls(1),
        d=pa.array(["x"]).dictionary_encode(),
        s=pa.array([{"k": 1, "v": ["x"]}]),
    )
    parquet(  # another order of columns as well
        tmp_path / "b.parquet",
        s=pa.array([{"v": None, "k": 2}]),
        d=pa.array(["y"], pa.large_string()),
        n=pa.array(["z"]),
        f=pa.array([2], pa.float64()),
        i=pa.array([2], pa.int64()),
    )
    schema = inventory(reads(uri=str(tmp_path))).schema
    assert schema == pa.schema(
        [
            ("i", pa.int64()),
            ("f", pa.float64()),
            ("n", pa.string()),
            ("d", pa.large_string()),
            ("s", pa.struct([("k", pa.int64()), ("v", pa.list_(pa.string()))])),
        ]
    )


def test_types_and_columns_that_do_not_agree(tmp_path):
    parquet(tmp_path / "a.parquet", x=[1], y=[1])
    parquet(tmp_path / "b.parquet", x=["1"], y=[1])
    with pytest.raises(SourceError) as caught:
        inventory(reads(uri=str(tmp_path)))
    for word in ("'x'", "int64", "string", "a.parquet", "b.parquet"):
        assert word in str(caught.value)
    assert inventory(reads(uri=str(tmp_path), columns=["y"])).rows == 2
    parquet(tmp_path / "b.parquet", x=[1])
    with pytest.raises(SourceError, match=r"b\.parquet has no column 'y', but .*a\.parquet has"):
        inventory(reads(uri=str(tmp_path)))


def test_no_rows(tmp_path):
    parquet(tmp_path / "a.parquet", x=pa.array([], pa.int64()))
    with pytest.raises(SourceError, match="no rows"):
        inventory(reads(uri=str(tmp_path)))
    parquet(tmp_path / "b.parquet", y=[1])  # the empty one may have any columns
    found = inventory(reads(uri=str(tmp_path)))
    assert [f.rows for f in found.files] == [0, 1] and found.schema.names == ["y"]


def test_dictionaries_are_decoded_at_any_depth():
    d = pa.dictionary(pa.int8(), pa.string())
    nested = pa.list_(pa.struct([("a", d), ("m", pa.map_(pa.string(), d))]))
    s = pa.string()
    assert plain_type(nested) == pa.list_(pa.struct([("a", s), ("m", pa.map_(s, s))]))
    assert plain_type(pa.string_view()) == s


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (pa.uint64(), pa.int64()),  # what is above 2**63 has no place
        (pa.int64(), pa.float64()),  # 2**53 + 1 would become 2**53, and 1 in a prompt 1.0
        (pa.int64(), pa.decimal128(9, 2)),
        (pa.decimal128(9, 2), pa.float64()),
        (pa.decimal128(5, 2), pa.decimal128(9, 2)),
        (pa.string(), pa.binary()),  # a prompt of bytes
        (pa.binary(), pa.binary(4)),
        (pa.date32(), pa.date64()),
        (pa.time32("s"), pa.time64("us")),
        (pa.timestamp("s"), pa.timestamp("us")),  # 2026-01-01 would get digits in a prompt
        (pa.duration("s"), pa.duration("ms")),
        (pa.list_(pa.int32()), pa.list_(pa.int32(), 3)),
        (pa.struct([("a", pa.int32())]), pa.struct([("b", pa.int32())])),
    ],
    ids=str,
)
def test_what_pyarrow_would_merge_and_a_run_does_not(a, b):
    """Alone and inside of others; files that differ so are refused, with both types named."""
    schemas = [pa.schema([("x", a)]), pa.schema([("x", b)])]
    assert pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    assert common_type(a, b) is None and common_type(b, a) is None
    assert common_type(pa.list_(a), pa.list_(b)) is None
    assert common_type(pa.struct([("s", a)]), pa.struct([("s", b)])) is None


def test_common_types():
    assert common_type(pa.int8(), pa.uint8()) is None
    assert common_type(pa.int64(), pa.float64()) is None
    assert common_type(pa.int64(), pa.float64(), union=True) == pa.float64()
    assert common_type(pa.list_(pa.null()), pa.list_(pa.int8())) == pa.list_(pa.int8())
    a, b = pa.struct([("a", pa.int64())]), pa.struct([("b", pa.int64())])
    assert common_type(a, b) is None
    assert common_type(a, b, union=True) == pa.struct([("a", pa.int64()), ("b", pa.int64())])


def test_three_thousand_files(tmp_path):
    parquet(tmp_path / "0000.parquet", x=[1, 2, 3])
    data = (tmp_path / "0000.parquet").read_bytes()
    for i in range(1, 3000):
        (tmp_path / f"{i:04}.parquet").write_bytes(data)
    assert inventory(reads(uri=str(tmp_path))).rows == 9000


# --- CSV --------------------------------------------------------------------------------------


def test_csv_types(tmp_path):
    path = text(
        tmp_path / "a.csv",
        "i,f,b,s,zip,id,day,none,name\n"
        '1,1.5,True,x,02139,12345678901234567890,2024-01-05,,"A, ""B""\nC"\n'
        ',,,,,,,,""\n'
        "-3,2.0,False,NA,10001,1,2024-01-06,,nan\n",
    )
    made, table = copy(tmp_path, path)
    kinds = dict(zip(made.schema.names, map(str, made.schema.types), strict=True))
    assert kinds == {
        "i": "int64",
        "f": "double",
        "b": "bool",
        "s": "string",
        "zip": "string",
        "id": "string",
        "day": "string",
        "none": "string",
        "name": "string",
    }
    rows = table.to_pylist()
    assert rows[0]["zip"] == "02139" and rows[0]["name"] == 'A, "B"\nC'
    assert {k: v for k, v in rows[1].items() if v is not None} == {"name": ""}
    assert rows[2]["s"] == "NA" and rows[2]["b"] is False and rows[2]["f"] == 2.0
    assert made.format == "csv" and made.row_bytes > 8
    assert all(f.uri.startswith("_raybatch/input/attempt-") for f in made.files)


@pytest.mark.parametrize(
    ("late", "kind", "last"), [("2.5", "string", "2.5"), ("abc", "string", "abc")]
)
def test_a_late_value_widens_the_column(tmp_path, monkeypatch, late, kind, last):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(snapshot_writer, "PART_ROWS", 1 << 10)
    monkeypatch.setattr(snapshot_writer, "GROUP_ROWS", 1 << 8)
    path = text(tmp_path / "a.csv", "x\n" + "1\n" * 5000 + late + "\n")
    made, table = copy(tmp_path, path)
    assert str(made.schema.field("x").type) == kind
    assert table["x"].to_pylist() == [type(last)("1")] * 5000 + [last]
    assert len(list((tmp_path / "run").rglob("*.parquet"))) == len(made.files) == 5


@pytest.mark.parametrize(("one", "other"), [("1", "2.5"), ("1", "True"), ("2.5", "x")])
def test_csv_columns_of_several_types_over_the_files_are_text(tmp_path, one, other):
    text(tmp_path / "in/a.csv", f"x,y\n{one},\n")
    text(tmp_path / "in/b.csv", f"y,x\nq,{other}\n")
    assert copy(tmp_path, str(tmp_path / "in"))[1].to_pylist() == [
        {"x": one, "y": None},
        {"x": other, "y": "q"},
    ]


def test_csv_files_of_other_columns_are_refused(tmp_path):
    text(tmp_path / "bad/a.csv", "x\n1\n")
    text(tmp_path / "bad/b.csv", "z\n1\n")
    refused(tmp_path, str(tmp_path / "bad"), "no column", "a.csv", "b.csv")


def test_csv_limit_stops_early_and_columns_choose(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 12)
    rows = "".join(f"{i},x{i},z\n" for i in range(5000))
    path = text(tmp_path / "a.csv", "i,s,t\n" + rows + "ragged\n")
    made, table = copy(tmp_path, path, limit=700, columns=["s", "i"])
    assert made.rows == 700 and made.schema.names == ["s", "i"]
    assert table["i"].to_pylist() == list(range(700))
    with pytest.raises(ConfigError, match="did you mean 's'"):
        copy(tmp_path, path, columns=["ss"])


def test_compressed_tsv_with_bom(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfa\tb\r\n1\tx,y\r\n"))
    assert copy(tmp_path, str(path))[1].to_pylist() == [{"a": 1, "b": "x,y"}]


def test_a_file_without_rows_before_others_is_no_reason_to_refuse_the_folder(tmp_path):
    text(tmp_path / "in" / "a.csv", "a,b\n")
    text(tmp_path / "in" / "b.csv", "a,b\n1,x\n2,y\n")
    given = reads(uri=str(tmp_path / "in"))
    assert copy(tmp_path, given.uris[0])[0].rows == 2
    found = peek(given)
    assert found.schema == pa.schema({"a": pa.int64(), "b": pa.string()})
    text(tmp_path / "in" / "b.csv", "a,b\n")
    with pytest.raises(SourceError, match=r"no rows after the header in .*a\.csv, .*b\.csv"):
        peek(given)


@pytest.mark.parametrize("columns", [None, ["a"]])
def test_a_quote_that_is_never_closed_swallows_no_rows(tmp_path, columns):
    content = 'a,b\n1,x\n2,"y\n""z"\n3,"Best Ltd\n4,x\n5,x\n'
    path = text(tmp_path / "data.csv", content)
    words = ["data.csv, line 5", "opens a quote", "never closed", "2 more lines"]
    refused(tmp_path, path, *words, columns=columns)
    with pytest.raises(SourceError, match="never closed"):
        peek(reads(uri=path, columns=columns))
    with gzip.open(tmp_path / "data.csv.gz", "wt", encoding="utf-16") as file:
        file.write(content + "6,x\n" * 50_000)  # longer than a value that Python's csv takes
    words = ["line 5", "never closed", "50,002 more lines"]
    packed = str(tmp_path / "data.csv.gz")
    refused(tmp_path, packed, *words, columns=columns, csv={"encoding": "utf-16"})
    # closed at the very end, whatever stands there, it is a value like any other
    for value in ("Best\n4,x\n", "Best\n", "\n", 'Best ""Ltd""\n""'):
        path = text(tmp_path / "fine.csv", f'a,b\n1,x\n3,"{value}"')
        made, table = copy(tmp_path, path, columns=columns)
        assert made.rows == 2 and table["a"].to_pylist() == [1, 3]
        if columns is None:
            assert table["b"].to_pylist() == ["x", value.replace('""', '"')]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", gzip.compress(b"a,b\n1,x\n", mtime=0), ["is compressed with gzip", "a.csv.gz"]),
        (
            "a.jsonl",
            gzip.compress(b'{"a": 1}\n', mtime=0),
            ["is compressed with gzip", "a.jsonl.gz"],
        ),
        ("a.csv", b"\x28\xb5\x2f\xfd\x24\x08", ["is compressed with zstd", "a.csv.zst"]),
        ("a.csv", b"PK\x03\x04\x14\x00", ["is a ZIP file or an Excel workbook"]),
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", ["is an Excel workbook"]),
        ("a.csv", b"PAR1\x15\x04", ["is a Parquet file", "source.format to parquet"]),
        ("a.csv.gz", b"a,b\n1,x\n", ["cannot be read", "incorrect header"]),
        ("a.csv.gz", gzip.compress(b"a,b\n1,x\n", mtime=0)[:-12], ["cannot be read", "runcated"]),
    ],
)
def test_a_file_of_another_kind_than_its_name_says(tmp_path, name, content, words):
    path = text(tmp_path / name, content)
    refused(tmp_path, path, name, *words)
    for look in (peek, snapshots.detect_csv):
        if look is peek or ".csv" in name:
            with pytest.raises(SourceError) as caught:
                look(reads(uri=path))
            assert not [word for word in words if word not in str(caught.value)]


def test_an_unnamed_index_column_is_named_as_pandas_does(tmp_path):
    path = text(tmp_path / "a.csv", ",a\n0,x\n")
    assert copy(tmp_path, path)[1].to_pylist() == [{"Unnamed: 0": 0, "a": "x"}]


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": [None, 1]}, {"a": [2, 3]}, {"a": [4]}],
        [{"a": [None, "x"]}],
        [{"a": [None, None]}, {"a": [None]}, {"b": [{"x": [None, None], "y": [None, 1]}]}],
        [{"a": [None, None, 1]}, {}, {"a": None}, {"a": [2]}],
        [{"a": [None, {"x": 1}]}, {"a": [{"x": 2}, {"x": 3}]}],
        [{"a": [[None, 1], [2]]}, {"a": [[3, 4]]}],
        [{"s": {"a": [None, 1]}}, {"s": {"a": [2, 3]}}],
        [{"a": [None, "2024-01-05"]}, {"a": ["2024-01-06", "x"]}],
        [{"a": [None, "2024-01-05"], "b": [None, 1]}, {"a": ["2024-01-06"], "b": [2]}],
    ],
)
def test_a_null_that_begins_the_first_list_of_a_json_column_moves_no_values(tmp_path, rows):
    _, table = copy(tmp_path, text(tmp_path / "a.jsonl", lines(*rows) + "\n"))
    assert table.to_pylist() == [
        {name: row.get(name) for name in table.column_names} for row in rows
    ]


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "k=1/a.jsonl"])
@pytest.mark.parametrize("block", [4, 1 << 20])
def test_json_objects_without_keys_are_rows(tmp_path, monkeypatch, name, block, end):
    monkeypatch.setattr(streams, "BLOCK_BYTES", block)
    rows: list[dict[str, Any]] = [*[{}] * 30, {"a": 1}, *[{}] * 30, {"b": 2}, *[{}] * 30]
    content = json.dumps(rows) if name.endswith("json") else lines(*rows) + end
    text(tmp_path / "in" / name, content)
    path = str(tmp_path / "in")
    _, table = copy(tmp_path, path)
    assert table["a"].to_pylist() == [row.get("a") for row in rows]
    assert table["b"].to_pylist() == [row.get("b") for row in rows]
    assert {*table.column_names} - {"k"} == {"a", "b"}
    assert copy(tmp_path, path, columns=["b"])[1].num_rows == 92
    assert copy(tmp_path, path, limit=35)[1].num_rows == 35
    assert copy(tmp_path, path, filter="a IS NULL")[1].num_rows == 91


@pytest.mark.parametrize("content", ["{}\n" * 20, "{}", "[{}, {}]"])
def test_json_without_any_key_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 16)
    path = text(tmp_path / "in/a.json", content)
    refused(tmp_path, path, "the rows have no columns")
    text(tmp_path / "in/b.jsonl", '{"a": 1}\n')
    _, table = copy(tmp_path, str(tmp_path / "in"))
    assert table["a"].to_pylist() == [None] * content.count("{}") + [1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["0 bytes"]),
        ("a,b\n", ["no rows after the header"]),
        ("\n\n", ["header"]),
        ('a,b\n1,"x\ny"\n\n3\n', ["line 5", "1 column,", "header has 2"]),
        ("a,b\n1,2,3\n", ["line 2", "3 columns"]),
        ("a,a\n1,2\n", ["duplicate column 'a'"]),
        ("__rb_pos\n1\n", ["reserved"]),
        (b"a\nx\n\xe4\n", ["line 3", "not UTF-8 (byte 0xe4 at offset 4)", "source.csv.encoding"]),
        (b"\xe4\nx\n", ["line 1", "not UTF-8"]),
    ],
)
def test_csv_errors_name_file_and_place(tmp_path, content, words):
    refused(tmp_path, text(tmp_path / "data.csv", content), "data.csv", *words)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl"])
@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-be", "UTF-16"),  # these without a mark are told by their zeros
        ("utf-16-le", "UTF-16"),
        ("utf-32", "UTF-32"),
    ],
)
def test_other_encodings_are_named_with_the_remedy(tmp_path, monkeypatch, name, encoding, said):
    ignored: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    rows = "id,city\n1,München\n2,Ürgüp, Nevşehir\n" if "csv" in name else '{"a": "ü"}\n'
    data = rows.encode(encoding)
    if encoding == "utf-16-be":
        data = b"\xfe\xff" + data
    text(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    remedy = "Set source.csv.encoding to utf-" if "csv" in name else "iconv -f"
    message = refused(tmp_path, str(tmp_path / name), name, said, remedy)
    assert "\n" not in message and not ignored
    with pytest.raises(SourceError, match=said):
        peek(reads(uri=str(tmp_path / name)))
    assert not ignored


def test_a_ragged_line_that_is_no_utf8_is_one_clean_error(tmp_path, monkeypatch):
    ignored: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    text(tmp_path / "a.csv", "id,city\n1,a\n2,Ürgüp,x\n".encode("latin-1"))
    refused(tmp_path, str(tmp_path / "a.csv"), "a.csv, line 3 has 3 columns, but the header has 2")
    assert not ignored


def test_an_open_quote_and_a_broken_archive(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 12)
    path = text(tmp_path / "a.csv", 'a\n"' + "x\n" * 9000)
    refused(tmp_path, path, "a.csv", "never closed")
    path = text(tmp_path / "b.csv.gz", b"\x1f\x8b nonsense")
    refused(tmp_path, path, "b.csv.gz", "cannot be read")


def test_a_source_that_changes_while_copied(tmp_path, monkeypatch):
    path = Path(text(tmp_path / "a.csv", "a\n1\n"))
    kept = snapshots.copy_tables

    def slow(*args: Any, **more: Any) -> Inventory:
        made = kept(*args, **more)
        path.write_text("a\n1\n2\n")
        return made

    monkeypatch.setattr(snapshots, "copy_tables", slow)
    with pytest.raises(SourceError, match=r"changed while it was being copied"):
        copy(tmp_path, str(path))


def test_a_source_that_is_rewritten_while_copied_with_its_size_and_time(tmp_path, monkeypatch):
    path = Path(text(tmp_path / "a.csv", "a\n1\n"))
    info = path.stat()
    kept = snapshots.copy_tables

    def slow(*args: Any, **more: Any) -> Inventory:
        made = kept(*args, **more)
        path.write_text("a\n2\n")
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        return made

    monkeypatch.setattr(snapshots, "copy_tables", slow)
    with pytest.raises(SourceError, match=r"a\.csv changed while it was being copied"):
        copy(tmp_path, str(path))


def test_parts_and_row_groups_are_bounded(tmp_path):
    rows = "".join(f"{i},name {i}\n" for i in range(300_000))
    made, table = copy(tmp_path, text(tmp_path / "a.csv", "i,s\n" + rows))
    assert [f.rows for f in made.files] == [1 << 18, 300_000 - (1 << 18)]
    metadata = pq.read_metadata(tmp_path / "run" / made.files[0].uri)
    assert metadata.row_group(0).num_rows == 16_384 and metadata.num_row_groups == 16
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert table["i"].to_pylist() == list(range(300_000))


@pytest.mark.parametrize("step", ["__init__", "write_table", "close"])
def test_a_full_local_disk_says_so_and_leaves_nothing(tmp_path, monkeypatch, step):
    real, errors = getattr(pq.ParquetWriter, step), [OSError(errno.ENOSPC, "No space left")]

    def full(*given: Any, **named: Any) -> None:
        if errors:
            raise errors.pop()
        real(*given, **named)

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(pq.ParquetWriter, step, full)
    with pytest.raises(StoreError, match=r"tmp: .* \(No space left\)\. .* TMPDIR"):
        copy(tmp_path, text(tmp_path / "a.csv", "a\n1\n"))
    assert os.listdir(tmp_path / "tmp") == []


# --- JSON Lines -------------------------------------------------------------------------------


def lines(*rows: Any) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


def test_json_rows_keys_and_times(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 64)
    rows = [
        {"a": 1, "t": "2024-01-05", "n": {"x": 1}},
        {},
        {"a": 2.5, "t": "later", "n": {"y": ["2024-01-05"]}},
        {"z": None, "b": True},
    ]
    made, table = copy(tmp_path, text(tmp_path / "a.jsonl", lines(*rows[:2], "", *rows[2:])))
    kinds = dict(zip(made.schema.names, map(str, made.schema.types), strict=True))
    assert kinds["a"] == "double" and kinds["t"] == "string" and kinds["z"] == "string"
    got = table.to_pylist()
    assert [row["a"] for row in got] == [1.0, None, 2.5, None]
    assert got[0]["t"] == "2024-01-05" and got[2]["n"] == {"x": None, "y": ["2024-01-05"]}
    made, table = copy(tmp_path, str(tmp_path / "a.jsonl"), columns=["b", "a"])
    assert [list(row.items()) for row in table.to_pylist()[::3]] == [
        [("b", None), ("a", 1.0)],
        [("b", True), ("a", None)],
    ]
    with pytest.raises(ConfigError, match=r"no column 'c'.*columns: a, t, n, "):
        copy(tmp_path, str(tmp_path / "a.jsonl"), columns=["c", "a"])


def test_objects_that_are_always_empty_are_text(tmp_path):
    rows = [
        {"a": 1, "meta": {}, "more": {"inner": {}, "n": 1}, "tags": [{}], "late": {}},
        {"a": 2, "meta": None, "more": {"inner": None, "n": 2}, "tags": [], "late": {"x": 1}},
        {"a": 3, "meta": {}, "more": None, "tags": None, "late": None},
    ]
    path = text(tmp_path / "a.jsonl", lines(*rows))
    made, table = copy(tmp_path, path)
    assert made.schema == peek(reads(uri=path)).schema
    assert table.to_pylist() == [
        {
            "a": 1,
            "meta": "{}",
            "more": {"inner": "{}", "n": 1},
            "tags": ["{}"],
            "late": {"x": None},
        },
        {"a": 2, "meta": None, "more": {"inner": None, "n": 2}, "tags": [], "late": {"x": 1}},
        {"a": 3, "meta": "{}", "more": None, "tags": None, "late": None},
    ]


def test_objects_that_are_empty_in_one_block_only_stay_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 16)
    rows: list[dict[str, Any]] = [{"m": {}, "n": {"i": {}}}, {"m": {"x": 1}, "n": {"i": {}}}]
    _, table = copy(tmp_path, text(tmp_path / "a.jsonl", lines(*rows, *rows)))
    want = [{"m": {"x": None}, "n": {"i": "{}"}}, {"m": {"x": 1}, "n": {"i": "{}"}}]
    assert table.to_pylist() == want * 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["0 bytes"]),
        ("\n\n", ["no rows in"]),
        (lines({"a": 1}, "", "[1]"), ["line 3", "is an array, not an object"]),
        (lines("null", {"a": 1}), ["line 1", "is null, not an object"]),
        (lines("", {"a": 1}, " null\t\r", {"a": 2}), ["line 3", "is null, not an object"]),
        (lines({"a": 1}, "null"), ["line 2", "is null, not an object"]),
        (lines('null{"a": 1}', ""), ["line 1", "not valid JSON"]),
        (lines({"a": 1}, '{"a": 1} null', {"a": 1}), ["line 2", "not valid JSON"]),
        (lines({"a": 1}, "{oops"), ["line 2", "not valid JSON"]),
        (
            lines({"a": 1}, {"a": "x"}, ""),
            ["line 2", "'a'", "a string", "a number in line 1"],
        ),
        ('{"a": 1, "a": 2}', ["twice"]),
        (b'{"a": "x"}\n{"a": "\xe4"}', ["line 2", "not UTF-8"]),
        ('{"__rb_pos": 1}', ["reserved"]),
    ],
)
def test_json_errors_name_file_and_line(tmp_path, content, words):
    refused(tmp_path, text(tmp_path / "data.jsonl", content), "data.jsonl", *words)


@pytest.mark.parametrize("block", [4, 1 << 20])
def test_texts_with_null_are_no_rows(tmp_path, monkeypatch, block):
    monkeypatch.setattr(streams, "BLOCK_BYTES", block)
    rows: list[dict[str, Any]] = [{"null": None, "t": "{} null"}, {"t": "null", "o": {"x": None}}]
    _, table = copy(tmp_path, text(tmp_path / "a.jsonl", lines(*rows)))
    assert table["t"].to_pylist() == ["{} null", "null"]


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ('{"a":\n null, "b": 1}\n{"a":\n 3, "b": 2}\n', [None, 3]),
        ('{"a": [\n1,\nnull\n]}\n{"a": []}\n', [[1, None], []]),
        ('{"a": "}null"}{"a": "y"}', ["}null", "y"]),
    ],
)
def test_nulls_within_objects_over_several_lines_are_no_rows(tmp_path, content, values):
    _, table = copy(tmp_path, text(tmp_path / "a.jsonl", content))
    assert table["a"].to_pylist() == values


def test_a_null_in_an_array_of_rows_is_named(tmp_path):
    path = text(tmp_path / "a.json", '[{"a": 1}, null]')
    refused(tmp_path, path, "item 2 is not an object")
    refused(tmp_path, text(tmp_path / "b.json", "[null]"), "item 1 is not an object")


def test_json_types_that_clash_across_blocks_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 16)
    path = text(tmp_path / "a.jsonl", lines(*[{"a": 1}] * 20, {"a": "x"}))
    refused(tmp_path, path, "a.jsonl", "from line 21", "'a'", "int64", "string")
    text(tmp_path / "in/a.jsonl", lines({"a": 1}))
    text(tmp_path / "in/b.jsonl", lines({"a": "x"}))
    refused(tmp_path, str(tmp_path / "in"), "'a'", "int64", "string", "a.jsonl", "b.jsonl")


def test_json_keys_that_are_not_read_may_clash(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 16)
    path = text(tmp_path / "a.jsonl", lines(*[{"a": 1, "b": 1}, {"a": 2, "b": "x"}] * 3))
    assert copy(tmp_path, path, columns=["a"])[1]["a"].to_pylist() == [1, 2] * 3


def test_peek_guesses_without_writing(tmp_path):
    path = text(tmp_path / "a.csv", "i,s\n" + "".join(f"{i},x\n" for i in range(1000)))
    found = peek(reads(uri=path))
    assert found.rows == 1000 and found.schema.names == ["i", "s"]
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(lines(*[{"a": i} for i in range(10_000)]).encode()))
    guess, few = peek(reads(uri=str(zipped))), peek(reads(uri=str(zipped), limit=5))
    assert 9000 < guess.rows < 11_000 and guess.guessed
    assert few.rows == 5 and not few.guessed


def test_half_of_a_surrogate_pair_in_json_is_named_with_its_line(tmp_path):
    lines = ['{"id": 0, "text": "a"}', r'{"id": 1, "text": "b \ud800 c"}', '{"id": 2, "text": "d"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(SourceError, match=r"in\.jsonl, line 2 has \\ud800, half of a surrogate"):
        snapshot(reads(uri=str(tmp_path / "in.jsonl")), open_store(str(tmp_path / "out")), "a")
