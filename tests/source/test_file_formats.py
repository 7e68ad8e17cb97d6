"""CSV as others write it, JSON arrays, Arrow files, compressed files: read, or refused in words."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from helpers.specs import reads

from prefect_raybatch.errors import ConfigError, RayBatchError, SourceError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.source import detect_format, heads, peek, snapshot, streams
from prefect_raybatch.storage import open_store


def written(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def copied(tmp_path: Path, uri: Any, **fields: Any) -> pa.Table:
    made = snapshot(reads(uri=uri, **fields), open_store(str(tmp_path / "run")), "attempt")
    table = pa.concat_tables([pq.read_table(tmp_path / "run" / f.uri) for f in made.files])
    assert table.schema.equals(made.schema) and table.num_rows == made.rows
    return table


def refused(tmp_path: Path, uri: Any, *words: str, **fields: Any) -> None:
    """Refused by the copy and, where the first block shows it, by the look before."""
    with pytest.raises(RayBatchError) as caught:
        copied(tmp_path, uri, **fields)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not list((tmp_path / "run").rglob("*.parquet"))


# --- CSV --------------------------------------------------------------------------------------

EXCEL = 'Firma;Ort;Umsatz\r\nMüller & Söhne;"Köln; Deutz";1,5\r\nÜnal;;2\r\n'
ROWS = [
    {"Firma": "Müller & Söhne", "Ort": "Köln; Deutz", "Umsatz": "1,5"},
    {"Firma": "Ünal", "Ort": None, "Umsatz": "2"},
]


@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("cp1252", "a.csv"),
        ("latin-1", "a.csv.gz"),
        ("utf-8-sig", "a.csv"),
        ("utf-16", "a.csv"),
        ("utf-16-le", "a.csv"),
        ("utf-16-be", "a.csv"),
        ("utf-32", "a.csv"),
    ],
)
def test_excels_csv(tmp_path, monkeypatch, encoding, name):
    monkeypatch.setattr(streams, "TEXT_CHUNK", 7)  # characters lie across chunks
    data = EXCEL.encode(encoding)
    path = written(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    csv = {"delimiter": ";", "encoding": encoding}
    assert copied(tmp_path, path, csv=csv).to_pylist() == ROWS
    seen = peek(reads(uri=path, csv=csv))
    assert seen.schema.names == list(ROWS[0])
    assert [table.num_rows for _, table in heads(reads(uri=path, csv=csv), 2)] == [2]


def test_quotes_escapes_headers_and_nulls(tmp_path):
    path = written(tmp_path / "a.csv", "a report\n\nid|who\n1|'x|y'\n2|NULL\n3|'NULL'\n4|\\N\n")
    csv = {
        "delimiter": "|",
        "quote": "'",
        "skip_rows": 2,
        "null_values": ["NULL", "\\N"],
    }
    assert copied(tmp_path, path, csv=csv)["who"].to_pylist() == ["x|y", None, "NULL", None]
    path = written(tmp_path / "b.csv", '1,a \\"b\\, c\n')
    csv = {"header": False, "escape": "\\", "quote": ""}
    assert copied(tmp_path, path, csv=csv).to_pylist() == [{"f0": 1, "f1": 'a "b, c'}]
    csv |= {"names": ["id", "text"]}
    assert copied(tmp_path, path, csv=csv).to_pylist() == [{"id": 1, "text": 'a "b, c'}]
    path = written(tmp_path / "c.csv", "x\ty\n1\t2\n")
    csv = {"delimiter": "tab", "names": ["p", "q"]}
    assert copied(tmp_path, path, csv=csv).to_pylist() == [{"p": 1, "q": 2}]
    found = copied(tmp_path, path, csv={"delimiter": "tab"}, columns=["y"])
    assert found.to_pylist() == [{"y": 2}]


@pytest.mark.parametrize(
    ("content", "csv", "words"),
    [
        (
            EXCEL.encode("cp1252"),
            {"delimiter": ";"},
            ["line 2", "not UTF-8 (byte 0xfc at offset 19)", "cp1252"],
        ),
        (EXCEL, {}, ["has one column, 'Firma;Ort;Umsatz'", "Set source.csv.delimiter to ';'"]),
        ("a\tb\n1\t2\n", {}, ["Set source.csv.delimiter to tab"]),
        ("a|b\n1|2,3\n", {}, ["Set source.csv.delimiter to '|'"]),
        ("a;b,c;d\n1;2;3\n", {}, ["line 2 has 1 column", "source.csv.delimiter to ';'"]),
        ("sep=;\na;b\n1;2\n", {}, ["for Excel", "to ';' and source.csv.skip_rows to 1"]),
        (
            EXCEL,
            {"encoding": "latin-1", "delimiter": ";"},
            ["is UTF-8", "Remove source.csv.encoding"],
        ),
        (EXCEL.encode("utf-16"), {"encoding": "cp1252"}, ["is UTF-16", "to utf-16"]),
        (EXCEL.encode("utf-16-be"), {"encoding": "utf-16"}, ["is UTF-16BE", "to utf-16-be"]),
        (EXCEL, {"encoding": "utf-16"}, ["is not utf-16", "no zero bytes"]),
        (b"a\nx\n\xe9t\n", {"encoding": "ascii"}, ["line 3", "not ascii (byte 0xe9 at offset 4)"]),
        ("1,2\n1\n", {"names": ["a", "b"], "header": False}, ["source.csv.names has 2"]),
        ("1,2\n1\n", {"header": False}, ["line 2 has 1 column, but the first line has 2"]),
        ("x\n\n1,2\n1\n", {"skip_rows": 2}, ["line 4 has 1 column, but the header has 2"]),
    ],
)
def test_mistakes_in_how_a_csv_is_said_to_be_written(tmp_path, content, csv, words):
    path = written(tmp_path / "a.csv", content)
    refused(tmp_path, path, "a.csv", *words, csv=csv)


def test_one_column_may_hold_what_separates_elsewhere(tmp_path):
    path = written(tmp_path / "a.csv", "a;b\n1;2\n")
    assert copied(tmp_path, path, csv={"delimiter": ","}).to_pylist() == [{"a;b": "1;2"}]
    path = written(tmp_path / "b.csv", '"a;b"\n1;2\n')
    assert copied(tmp_path, path).to_pylist() == [{"a;b": "1;2"}]


def test_a_bad_byte_is_named_by_where_it_is_in_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "TEXT_CHUNK", 1 << 10)
    head = "id;name\n" + "".join(f"{i};Ürgüp\n" for i in range(2000))
    data = head.encode("euc_jp", "replace") + b"\xfe\xfe\n"
    refused(
        tmp_path,
        written(tmp_path / "a.csv", data),
        f"line 2002 is not euc_jp (byte 0xfe at offset {len(data) - 3})",
        csv={"delimiter": ";", "encoding": "euc-jp"},
    )


@pytest.mark.parametrize(
    ("csv", "words"),
    [
        ({"delimiter": ";;"}, "not a single ASCII character"),
        ({"delimiter": ""}, "is empty"),
        ({"delimiter": "§"}, "not a single ASCII character"),
        ({"delimiter": '"'}, "not all different"),
        ({"encoding": "latin-99"}, "not a text encoding in Python"),
        ({"encoding": "hex"}, "not a text encoding in Python"),
        ({"names": ["a", "a"]}, "duplicate name"),
        ({"seperator": ";"}, "unknown field"),
    ],
)
def test_options_that_cannot_be(csv, words):
    value = {"name": "j", "prompt": {"template": "{a}"}, "output": {"uri": "out"}}
    with pytest.raises(ConfigError, match=words):
        BatchJob.from_dict({**value, "source": {"uri": "a.csv", "csv": csv}})


# --- JSON arrays --------------------------------------------------------------------------------


def items(count: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    text = ["x", 'a "quoted" [one], {two}', "üñ\n漢字 \U0001f600", "\\", "2024-01-05T00:00:00Z"]
    return [
        {"id": i, "text": rng.choice(text), "deep": {"a": [i, None], "b": rng.random()}}
        for i in range(count)
    ]


@pytest.mark.parametrize("style", ["compact", "pretty", "ascii", "windows"])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_an_array_comes_out_as_its_lines_do(tmp_path, monkeypatch, style, name):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(streams, "TEXT_CHUNK", 13)
    rows = items(300)
    text = json.dumps(rows, indent=2 if style in ("pretty", "windows") else None)
    if style != "ascii":
        text = json.dumps(rows, indent=2 if style == "pretty" else None, ensure_ascii=False)
    if style == "windows":
        text = "\ufeff\r\n " + text.replace("\n", "\r\n") + "\r\n"
    data = text.encode()
    path = written(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    assert detect_format(reads(uri=path)) == "jsonl"
    found = copied(tmp_path, path)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert found.equals(copied(tmp_path, written(tmp_path / "b.jsonl", lines)))
    assert found.to_pylist() == rows
    if name == "a.json":
        assert 200 < peek(reads(uri=path)).rows < 450
    assert copied(tmp_path, path, columns=["id"], limit=7)["id"].to_pylist() == list(range(7))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", ["no rows in"]),
        ('[{"a": 1} {"a": 2}]', ["after item 1: ',' or ']' expected, but found '{'"]),
        ('[{"a": 1},]', ["item 2 is not an object"]),
        ('[{"a": 1}, 2]', ["item 2 is not an object"]),
        ('[{"a": 1}, {"a": }]', ["item 2 is not valid JSON (Expecting value"]),
        ('[{"a": 1}, {"a": "x', ["item 2", "Unterminated string"]),
        ('[{"a": 1}', ["but found the end of the file"]),
        ('[{"a": 1}] {"a": 2}', ["after the array"]),
        ('[{"a": 1}, {"a": "x"}]', ["item 2: key 'a' is a string", "a number in item 1"]),
        ('[{"a": 1, "a": 2}]', ["twice"]),
        ('[{"a": "\\ud800"}]', ["item 1", "half of a surrogate pair"]),
        (b'[{"a": "x"},\n{"a": "\xe4"}]', ["line 2", "not UTF-8 (byte 0xe4 at offset 20)"]),
        ("[" * 100_000, ["item 1 is not an object"]),
        ('[{"a":' * 100_000, ["item 1", "nested more than 100 levels"]),
        ('[{"__rb_pos": 1}]', ["reserved"]),
    ],
)
def test_what_is_wrong_with_an_array_is_told_by_its_item(tmp_path, content, words):
    refused(tmp_path, written(tmp_path / "data.json", content), "data.json", *words)


def test_an_array_is_read_with_bounded_memory(tmp_path, monkeypatch):
    """What is held is a block and not the file."""
    import tracemalloc

    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(streams, "TEXT_CHUNK", 1 << 14)
    row = json.dumps({"text": "x" * 2000})
    path = written(tmp_path / "a.json", "[" + ",".join([row] * 8000) + "]")
    from prefect_raybatch.source.find import find
    from prefect_raybatch.source.json_arrays import array_blocks

    (file,) = find(reads(uri=path))[1]
    tracemalloc.start()
    lines = sum(block.count(b"\n") for _, block in array_blocks(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == 8000 and Path(path).stat().st_size > 15 << 20
    assert peak < 4 << 20  # with what other threads of the process hold


# --- Arrow --------------------------------------------------------------------------------------


def arrow_table(rows: int = 10) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int32()),
            "who": pa.array([f"w{i % 3}" for i in range(rows)]).dictionary_encode(),
            "at": pa.array([i * 1000 for i in range(rows)], pa.timestamp("ms", tz="UTC")),
            "deep": pa.array([{"a": [i]} for i in range(rows)]),
        }
    )


def arrow_file(path: Path, table: pa.Table, kind: str, compression: str | None = None) -> str:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=4)
    return str(path)


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.arrow", "file", None),
        ("a.ipc", "file", "zstd"),
        ("a.arrows", "stream", None),
        ("a.arrow", "stream", "lz4"),
    ],
)
def test_arrow_files_and_streams(tmp_path, name, kind, compression):
    path = arrow_file(tmp_path / name, arrow_table(), kind, compression)
    assert detect_format(reads(uri=path)) == "arrow"
    found = copied(tmp_path, path)
    assert found.to_pylist() == arrow_table().to_pylist()
    assert found.schema.field("at").type == pa.timestamp("ms", tz="UTC")
    some = copied(tmp_path, path, columns=["deep", "id"], limit=5)
    assert some.schema.names == ["deep", "id"] and some["id"].to_pylist() == [0, 1, 2, 3, 4]
    seen = peek(reads(uri=path))
    assert seen.schema == found.schema
    assert seen.rows == 10 if kind == "file" else seen.rows > 0


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather_and_folders_of_it(tmp_path, compression):
    (tmp_path / "in").mkdir()
    for i in range(2):
        feather.write_feather(
            arrow_table(3), str(tmp_path / f"in/{i}.feather"), compression=compression
        )
    assert copied(tmp_path, str(tmp_path / "in"))["id"].to_pylist() == [0, 1, 2, 0, 1, 2]
    refused(
        tmp_path / "no", str(tmp_path / "in"), "no column 'ID' (columns: id, who", columns=["ID"]
    )


def test_arrow_files_that_cannot_be_read_are_named(tmp_path):
    whole = Path(arrow_file(tmp_path / "a.arrow", arrow_table(), "file")).read_bytes()
    for data in (whole[:-200], b"ARROW1 no", b"x" * 100, b"ARROW1\0\0" + whole[8:]):
        path = written(tmp_path / "b.arrow", data)
        if data == whole:
            continue
        refused(tmp_path, path, "b.arrow is not a readable Arrow file")
    refused(tmp_path, written(tmp_path / "c.feather", b"FEA1...."), "Feather file of version 1")
    table = pa.table({"a": pa.array([1], pa.int64())})
    schema = pa.schema([pa.field("a", pa.int64(), metadata={"ARROW:extension:name": "evil"})])
    path = arrow_file(tmp_path / "d.arrow", table.cast(schema), "file")
    refused(tmp_path, path, "extension type evil")
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xc3\x28")]
    )
    path = arrow_file(tmp_path / "e.arrow", pa.table({"s": bad}), "file")
    refused(tmp_path, path, "e.arrow, batch 1 is damaged")
    path = arrow_file(tmp_path / "f.arrow", arrow_table(0), "file")
    refused(tmp_path, path, "no rows in")
    for uri in (tmp_path / "f.arrow", tmp_path / "c.feather"):
        with pytest.raises(SourceError):
            peek(reads(uri=str(uri)))


# --- compression --------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["gz", "bz2", "zst", "lz4", "br"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_compressed_text(tmp_path, ending, kind):
    rows = [{"a": i, "b": f"x{i}"} for i in range(50)]
    plain = {
        "csv": "a,b\n" + "".join(f"{r['a']},{r['b']}\n" for r in rows),
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "json": json.dumps(rows),
    }[kind].encode()
    names = {"zst": "zstd", "lz4": "lz4", "br": "brotli"}
    if ending in names:
        buffer = pa.BufferOutputStream()
        with pa.CompressedOutputStream(buffer, names[ending]) as sink:
            sink.write(plain)
        data = buffer.getvalue().to_pybytes()
    else:
        data = {"gz": gzip, "bz2": bz2}[ending].compress(plain)
    path = written(tmp_path / f"a.{kind}.{ending}", data)
    assert copied(tmp_path, path).to_pylist() == rows
    assert peek(reads(uri=path)).schema.names == ["a", "b"]


def test_compressions_that_no_stream_can_be_read_of(tmp_path):
    for name in ("a.csv.snappy", "b.zip"):
        path = written(tmp_path / name, b"x")
        with pytest.raises(SourceError, match=r"cannot be read as a stream. Compress with gzip"):
            detect_format(reads(uri=path))
