"""source.filter on files: copied where it is true, whatever their format tells of types."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from helpers.small import make_job
from helpers.specs import reads
from helpers.table_sources import copied, refused

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.source import detect_format, heads, needs_snapshot, peek, streams
from prefect_raybatch.storage import open_store

ROWS = pa.table(
    {
        "id": pa.array(range(1000), pa.int64()),
        "name": [f"n{i}" for i in range(1000)],
        "city": [("Bonn", "Köln", None, "Ulm")[i % 4] for i in range(1000)],
    }
)


def parquet(path: Path) -> str:
    pq.write_table(ROWS, path, row_group_size=100)
    return str(path)


def csv(path: Path) -> str:
    lines = [f"{r['id']},{r['name']},{r['city'] or ''}" for r in ROWS.to_pylist()]
    path.write_bytes(gzip.compress("\n".join(["id,name,city", *lines]).encode()))
    return str(path)


def jsonl(path: Path) -> str:
    path.write_text("\n".join(json.dumps(row) for row in ROWS.to_pylist()))
    return str(path)


def arrow(path: Path) -> str:
    pyarrow.feather.write_feather(ROWS, path, chunksize=100)
    return str(path)


FILES = {"a.parquet": parquet, "a.csv.gz": csv, "a.jsonl": jsonl, "a.feather": arrow}


@pytest.mark.parametrize("name", FILES)
def test_rows_that_fit_are_copied_from_files_of_each_format(tmp_path, name):
    uri = FILES[name](tmp_path / name)
    text = "id >= 500 AND (city = 'Köln' OR city IS NULL)"
    fitting = [i for i in range(500, 1000) if i % 4 in (1, 2)]
    source = reads(uri=uri, filter=text)
    assert needs_snapshot(source) and detect_format(source) == ENDS[name.partition(".")[2]]
    made, rows = copied(tmp_path, uri, filter=text)
    assert rows["id"].to_pylist() == fitting and rows.column_names == ["id", "name", "city"]
    assert made.rows == len(fitting)
    alone = copied(tmp_path, uri, filter=text, columns=["name"], limit=3)[1]
    assert alone.to_pydict() == {"name": [f"n{i}" for i in fitting[:3]]}
    with pytest.raises(SourceError, match=r"no row of .* matches"):
        copied(tmp_path, uri, filter="id > 5000")
    assert peek(reads(uri=uri, filter="id < 500", columns=["name"])).schema.names == ["name"]
    ((_, head),) = heads(reads(uri=uri, filter="id IN (7, 8)"), 4)
    assert head["id"].to_pylist() == [7, 8]
    with pytest.raises(ConfigError, match=r"source\.filter: .* no column 'Id'"):
        copied(tmp_path, uri, filter="Id > 5")
    with pytest.raises(ConfigError, match=r"source\.filter: .* no column 'Id'"):
        copied(tmp_path, uri, filter="Id > 5", columns=["name"])
    with pytest.raises(ConfigError, match="'id' is int64, which cannot be compared with a text"):
        copied(tmp_path, uri, filter="id = '5'")
    refused(uri, "source.version", "Remove source.version", error=ConfigError, version=3)


ENDS = {"parquet": "parquet", "csv.gz": "csv", "jsonl": "jsonl", "feather": "arrow"}


def test_a_type_that_a_late_value_widens_counts_for_the_rows_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 10)
    lines = [f"{i},{10_000 + i}" for i in range(300)]
    file = tmp_path / "a.csv"
    file.write_text("\n".join(["id,zip", *lines, "300,02139"]))
    assert copied(tmp_path, str(file), filter="zip = '10007'")[1]["id"].to_pylist() == [7]
    assert copied(tmp_path, str(file), filter="zip = '02139'")[1]["zip"].to_pylist() == ["02139"]
    peek(reads(uri=str(file), filter="zip = '02139'"))  # its first block says numbers
    with pytest.raises(ConfigError, match=r"'zip' is string, .* a number"):
        copied(tmp_path, str(file), filter="zip = 10007")
    file.write_text("\n".join(["id,late", *(f"{i}," for i in range(300)), "300,2.5"]))
    assert copied(tmp_path, str(file), filter="late > 2")[1]["id"].to_pylist() == [300]
    assert copied(tmp_path, str(file), filter="late IS NULL", limit=5)[1].num_rows == 5


def test_columns_of_the_path_and_several_files_are_filtered(tmp_path):
    for year in (2025, 2026):
        folder = tmp_path / f"in/year={year}"
        folder.mkdir(parents=True)
        parquet(folder / "a.parquet")
    rows = copied(tmp_path, str(tmp_path / "in"), filter="year = 2026 AND id < 2")[1]
    assert rows.select(["id", "year"]).to_pydict() == {"id": [0, 1], "year": [2026, 2026]}
    rows = copied(tmp_path, str(tmp_path / "in"), filter="year = 2026 AND id < 2", columns=["id"])
    assert rows[1].to_pydict() == {"id": [0, 1]}


def test_row_groups_that_cannot_hold_a_row_that_fits_are_not_read(tmp_path, monkeypatch):
    uri = parquet(tmp_path / "a.parquet")
    read: list[list[int]] = []
    kept = pq.ParquetFile.iter_batches

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        read.append(options["row_groups"])
        return kept(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
    assert copied(tmp_path, uri, filter="id >= 890 AND city = 'Bonn'")[1].num_rows == 27
    assert read == [[8, 9]]
    floats = pa.table({"id": [0, 1], "x": [5.0, float("nan")]})
    pq.write_table(floats, tmp_path / "f.parquet")
    found = copied(tmp_path, str(tmp_path / "f.parquet"), filter="x != 5")[1]
    assert found["id"].to_pylist() == [1]  # by the statistics all are 5


def test_a_filtered_file_is_planned_from_its_copy(tmp_path):
    fields: dict[str, Any] = {"uri": parquet(tmp_path / "a.parquet"), "filter": "city = 'Bonn'"}
    job = make_job(
        source=fields,
        prompt={"template": "{name}"},
        output={"uri": str(tmp_path / "out")},
        engine={"model": "demo"},
    )
    assert dry_run(job).rows == 250
    run = plan_run(job, "one")
    kept = Ledger(open_store(str(tmp_path / "out/one"))).load_plan()
    assert run.rows == 250 and kept is not None and kept.snapshot
    assert kept.parts["source.filter"] == "city = 'Bonn'"
