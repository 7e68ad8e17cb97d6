"""What publishing writes to a folder: the files, their sizes and the marker that lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.targets import published_rows

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish import files
from prefect_raybatch.publish.base import AnsweredRows, Sink
from prefect_raybatch.publish.publish import open_sink

PLAN = "a" * 64
STEM = f"part-{'a' * 16}"
ROWS = pa.table({"id": [1, 2, 3], "kind": ["x", None, "x"]})


def folder(root: Path, format: str = "jsonl", **more: Any) -> Sink:
    fields = {"format": format, "uri": str(root), **more}
    return open_sink(PublishTarget.model_validate(fields), "key", {})


def in_batches(table: pa.Table, size: int) -> AnsweredRows:
    read = lambda: iter(table.to_batches(max_chunksize=size))  # noqa: E731
    return AnsweredRows(PLAN, "key", "job", len(table), table.schema, read)


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_the_marker_lists_the_files_with_their_sizes(format: str, tmp_path: Path) -> None:
    sink, steps = folder(tmp_path, format, partition_by=["kind"]), list[str]()
    stray = tmp_path / f"kind=y/{STEM}-00000.{format}"
    others = [stray.with_suffix(".txt"), stray.with_name(f"part-b.{format}")]
    stray.parent.mkdir()
    for path in (stray, *others):
        path.write_text("x")
    assert sink.publish(published_rows(ROWS, PLAN), steps.append) == ""
    assert steps == ["opened", "looked", "file written", "file written", "committed"]
    marker = tmp_path / f"_raybatch.{'a' * 16}.{format}.json"
    written = [
        f"kind={value}/{STEM}-00000.{format}" for value in ("__HIVE_DEFAULT_PARTITION__", "x")
    ]
    kept = [str(path.relative_to(tmp_path)) for path in others]
    assert names(tmp_path) == sorted([marker.name, *written, *kept])
    assert json.loads(marker.read_text()) == {
        "raybatch.plan": PLAN,
        "raybatch.run_key": "key",
        "format": format,
        "rows": 3,
        "files": {path: (tmp_path / path).stat().st_size for path in written},
    }
    assert sink.holds(PLAN, "")
    assert not sink.holds("a" * 16 + "b" * 48, ""), "a plan with the same first digits"
    steps.clear()
    assert sink.publish(published_rows(ROWS, PLAN), steps.append) == "" and steps == ["opened"]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_file_ends_with_the_batch_that_reaches_its_size(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"id": pa.array(range(5), pa.int64())})
    monkeypatch.setattr(files, "FILE_BYTES", 16)  # two numbers
    folder(tmp_path, format).publish(in_batches(table, 1), lambda step: None)
    written = [f"{STEM}-{number:05d}.{format}" for number in range(3)]
    assert names(tmp_path) == [f"_raybatch.{'a' * 16}.{format}.json", *written]
    read = {
        "jsonl": lambda path: [json.loads(line)["id"] for line in path.read_text().splitlines()],
        "parquet": lambda path: pq.read_table(path)["id"].to_pylist(),
    }[format]
    assert [read(tmp_path / name) for name in written] == [[0, 1], [2, 3], [4]]
    if format == "parquet":
        column = pq.read_metadata(tmp_path / written[0]).row_group(0).column(0)
        assert column.compression == "ZSTD"


def test_the_sizes_and_limits_of_files() -> None:
    assert files.FILE_BYTES == 2**28 and files.MARK_BYTES == 2**26
    assert files.MOST_PARTITIONS == 1000


def test_as_many_partitions_as_allowed_are_written_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_PARTITIONS", 2)
    sink = folder(tmp_path, partition_by=["id"])
    sink.publish(published_rows(ROWS.slice(1), PLAN), lambda step: None)
    with pytest.raises(ConfigError) as caught:
        sink.publish(published_rows(ROWS, "b" * 64), lambda step: None)
    assert str(caught.value) == (
        "output.publish: partition_by id makes over 2 partitions. Choose columns with fewer values"
    )


@pytest.mark.parametrize(
    ("change", "whole"),
    [
        ({}, True),
        ({"more": 1}, True),
        ({"files": {}}, True),
        ({"raybatch.plan": "b" * 64}, False),
        ({"files": {"gone.jsonl": 1}}, False),
        ({"files": None}, False),
        ({"files": []}, False),
    ],
    ids=str,
)
def test_a_marker_proves_the_rows_if_it_names_the_plan_and_files_that_are_there(
    change: dict[str, Any], whole: bool, tmp_path: Path
) -> None:
    sink = folder(tmp_path)
    sink.publish(published_rows(ROWS, PLAN), lambda step: None)
    marker = next(tmp_path.glob("_raybatch.*"))
    marker.write_text(json.dumps(json.loads(marker.read_text()) | change))
    assert sink.holds(PLAN, "") == whole


@pytest.mark.parametrize("text", ["", "{}", '{"files": {}}', '{"files": 1}', "[]"])
def test_a_marker_that_names_no_file_decides_nothing_about_the_partitions(
    text: str, tmp_path: Path
) -> None:
    # Read before the first marker of a run, like files of others.
    for name in ("A.jsonl.json", "_raybatch.0.jsonl.json", "_raybatch.0.parquet.json"):
        (tmp_path / name).write_text(text)
    folder(tmp_path, partition_by=["kind"]).publish(published_rows(ROWS, PLAN), lambda step: None)
    folder(tmp_path, partition_by=["kind"]).publish(published_rows(ROWS, "b" * 64), str)
    with pytest.raises(ConfigError, match="partition_by is id, but the files of earlier runs"):
        folder(tmp_path, partition_by=["id"]).publish(published_rows(ROWS, "c" * 64), str)


@pytest.mark.parametrize(
    ("columns", "by", "said"),
    [
        ({"a": pa.int8(), "b": pa.date32()}, ["a"], ""),
        ({"a": pa.large_string(), "b": pa.bool_()}, ["a"], ""),
        ({"a": pa.string(), "b": pa.bool_()}, ["b"], ""),
        ({"a": pa.date64(), "b": pa.bool_()}, ["a"], ""),
        ({"a": pa.binary(), "b": pa.int8()}, ["a"], "column 'a' is of type binary. Partition by"),
        ({"a": pa.int8(), "b": pa.float32()}, ["a", "b"], "column 'b' is of type float. Part"),
        ({"a": pa.int8(), "b": pa.int8()}, ["a", "b"], "partition_by names all columns"),
        ({"a": pa.int8()}, ["b"], r"the result has no column 'b' \(columns: a\)"),
    ],
)
def test_partitions_are_of_a_few_types_and_leave_a_column_over(
    columns: dict[str, pa.DataType], by: list[str], said: str, tmp_path: Path
) -> None:
    sink, schema = folder(tmp_path, partition_by=by), pa.schema(list(columns.items()))
    if not said:
        assert sink.check(schema) == "gets new files"
        return
    with pytest.raises(ConfigError, match=said):
        sink.check(schema)


def test_folders_of_partitions_have_encoded_names_and_values(tmp_path: Path) -> None:
    table = pa.table({"a/b": ["1=ü", "x y"], "flag": [True, False], "id": [1, 2]})
    folder(tmp_path, partition_by=["a/b", "flag"]).publish(published_rows(table, PLAN), str)
    assert names(tmp_path)[1:] == [
        f"a%2Fb=1%3D%C3%BC/flag=true/{STEM}-00000.jsonl",
        f"a%2Fb=x%20y/flag=false/{STEM}-00000.jsonl",
    ]
    texts = [path.read_text() for path in sorted(tmp_path.rglob("part-*"))]
    assert texts == ['{"id": 1}\n', '{"id": 2}\n']


def test_an_answer_that_is_too_long_for_the_name_of_a_folder_is_named(tmp_path: Path) -> None:
    table = pa.table({"genre": ["a", "書籍・雑誌" * 10], "id": [1, 2]})
    with pytest.raises(ConfigError, match=r"genre: .* .書籍.* 456 bytes.* most 255") as caught:
        folder(tmp_path, partition_by=["genre"]).publish(published_rows(table, PLAN), str)
    assert len(str(caught.value)) < 300 and names(tmp_path) == []
