"""A plan names files to read; they are read only where the job's source.uri reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.specs import reads

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.records import InputFile
from prefect_raybatch.source import check_planned, inventory


def parquet(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"a": [1]}), path)
    return str(path)


def planned(uri: str) -> list[InputFile]:
    return [InputFile(uri=uri, size=1, etag=None, mtime_ns=None, rows=1)]


@pytest.mark.parametrize(
    "uri",
    ["in", "in/", "in/*.parquet", "in/**/*.parquet", "in/a.parquet", ["in/a.parquet", "in/b[1]"]],
)
def test_files_that_were_listed_are_read(tmp_path, monkeypatch, uri):
    parquet(tmp_path / "in/a.parquet")
    parquet(tmp_path / "in/b[1]/a.parquet")
    parquet(tmp_path / "elsewhere/c.parquet")
    (tmp_path / "in/link.parquet").symlink_to(tmp_path / "elsewhere/c.parquet")
    (tmp_path / "in-link").symlink_to(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    for entry in (uri, str(tmp_path / "in-link")):
        source = reads(uri=entry)
        check_planned(inventory(source).files, source, snapshot=False)


@pytest.mark.parametrize(
    ("source", "uri"),
    [
        ("in", "{root}/secret.parquet"),
        ("in", "{root}/in-other/a.parquet"),
        ("in", "{root}/in/../secret.parquet"),
        ("in", "{root}/in/link/../secret.parquet"),
        ("in", "/etc/passwd"),
        ("in", "s3://bucket/a.parquet"),
        ("in/a.parquet", "{root}/in/b.parquet"),
        ("in/day=1/*", "{root}/in/day=2/a.parquet"),
        ("in/*.parquet", "{root}/in/below/a.parquet"),
        ("s3://bucket/in", "s3://bucket/inner/a.parquet"),
        ("s3://bucket/in", "s3://bucket/in/../a.parquet"),
        ("s3://bucket/in", "s3://other/in/a.parquet"),
        ("s3://bucket/in", "/in/a.parquet"),
    ],
)
def test_files_outside_of_the_source_are_refused(tmp_path, monkeypatch, source, uri):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorruptRun, match=r"plan\.json lists the input file .* not in source\.uri"):
        check_planned(planned(uri.format(root=tmp_path)), reads(uri=source), snapshot=False)


@pytest.mark.parametrize("uri", ["../a.parquet", "/etc/passwd", "s3://b/a", "_raybatch/../../a"])
def test_files_of_a_snapshot_are_in_the_run_directory(uri):
    source: Any = reads(uri="in")
    check_planned(planned("_raybatch/input/a/part-0.parquet"), source, snapshot=True)
    with pytest.raises(CorruptRun, match="not in the run directory"):
        check_planned(planned(uri), source, snapshot=True)
