"""Delta Lake as input, with the real library: which rows of which version, and what is said."""

from __future__ import annotations

import base64
import json
import os
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from helpers.deletion_vectors import delete_by_vector
from helpers.small import make_job
from helpers.specs import reads
from helpers.table_sources import (
    KINDS_FITTING,
    all_kinds,
    companies,
    copied,
    refused,
    without_keys,
)
from s3server import S3Server

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.cli.show import show_plan
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import decode_schema
from prefect_raybatch.source import detect_format, heads, needs_snapshot, peek
from prefect_raybatch.source.tables.copying import GUESS_ROWS
from prefect_raybatch.storage import open_store


def table_of(path: Path, *parts: pa.Table, **options: Any) -> str:
    for part in parts:
        write_deltalake(str(path), part, mode="append", **options)
    return str(path)


def ids(table: pa.Table) -> list[int]:
    return sorted(table["id"].to_pylist())


def test_a_folder_with_a_log_is_opened_as_the_table_with_its_partition_values(tmp_path):
    table = tmp_path / "sales"
    uri = table_of(table, companies(0, 6), companies(6, 4), partition_by=["city"])
    source = reads(uri=uri)
    assert detect_format(source) == "delta" and needs_snapshot(source)
    made, rows = copied(tmp_path, uri)
    assert rows.schema.names == ["id", "Company", "city"]
    assert rows.schema.types == [pa.int64(), pa.string(), pa.string()]
    assert sorted(map(tuple, map(dict.values, rows.to_pylist()))) == sorted(
        map(tuple, map(dict.values, companies(0, 10).to_pylist()))
    )
    assert made.format == "delta" and made.table["version"] == "1"
    assert made.table["id"] == str(DeltaTable(uri).metadata().id)
    assert made.table["uri"] == uri and made.table["made"].startswith("20")
    assert decode_schema(made.table["schema"]).names == rows.schema.names
    again = copied(tmp_path, f"file://{uri}/", format="delta")[1]
    assert again.equals(rows)  # in the same order each time


def test_rows_that_a_deletion_vector_hides_are_not_read(tmp_path):
    options = {"delta.enableDeletionVectors": "true"}
    uri = table_of(tmp_path / "t", companies(0, 10), configuration=options)
    delete_by_vector(tmp_path / "t", [2, 3, 5])
    assert DeltaTable(uri).version() == 1
    assert ids(copied(tmp_path, uri)[1]) == [0, 1, 4, 6, 7, 8, 9]
    assert ids(copied(tmp_path, uri, filter="id >= 3")[1]) == [4, 6, 7, 8, 9]
    assert ids(copied(tmp_path, uri, version="0")[1]) == list(range(10))


def test_the_rows_of_a_table_with_deletion_vectors_are_an_estimate(tmp_path):
    rows = GUESS_ROWS + 10
    table = pa.table({"id": range(rows)})
    options = {"delta.enableDeletionVectors": "true"}
    uri = table_of(tmp_path / "t", table, configuration=options)
    delete_by_vector(tmp_path / "t", [2, 3, 5])
    found = peek(reads(uri=uri))
    assert (found.rows, found.guessed) == (rows, True)
    assert len(ids(copied(tmp_path, uri)[1])) == rows - 3


def test_columns_that_the_log_renames_have_its_names(tmp_path):
    table = tmp_path / "t"
    (table / "_delta_log").mkdir(parents=True)
    pq.write_table(pa.table({"col-1": [1, 2, 3], "col-2": ["a", "b", "c"]}), table / "a.parquet")
    fields = [
        {
            "name": name,
            "type": kind,
            "nullable": True,
            "metadata": {
                "delta.columnMapping.id": number,
                "delta.columnMapping.physicalName": f"col-{number}",
            },
        }
        for number, (name, kind) in enumerate((("id", "long"), ("Company", "string")), 1)
    ]
    configuration = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"}
    actions = [
        {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
        {
            "metaData": {
                "id": "5a9ed5a4-0000-4000-8000-000000000000",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "partitionColumns": [],
                "configuration": configuration,
                "createdTime": 1,
            }
        },
        {
            "add": {
                "path": "a.parquet",
                "partitionValues": {},
                "size": (table / "a.parquet").stat().st_size,
                "modificationTime": 1,
                "dataChange": True,
            }
        },
    ]
    log = table / f"_delta_log/{0:020}.json"
    log.write_text("\n".join(map(json.dumps, actions)))
    rows = copied(tmp_path, str(table), filter="id >= 2")[1]
    assert rows.to_pydict() == {"id": [2, 3], "Company": ["b", "c"]}
    assert peek(reads(uri=str(table))).rows == 3  # the log does not say how many


def test_rows_that_were_deleted_and_files_that_were_rewritten_are_not_read(tmp_path):
    uri = table_of(tmp_path / "t", companies(0, 10), companies(10, 10))
    DeltaTable(uri).delete("id % 2 = 0")
    DeltaTable(uri).optimize.compact()
    assert ids(copied(tmp_path, uri)[1]) == list(range(1, 20, 2))


def test_a_version_or_a_time_of_before_is_read_as_it_was(tmp_path):
    uri = table_of(tmp_path / "t", companies(0, 3), companies(3, 3), companies(6, 3))
    for number, when in enumerate((1_700_000_000, 1_700_000_100, 1_700_000_200)):
        log = tmp_path / f"t/_delta_log/{number:020}.json"
        os.utime(log, (when, when))
        text = log.read_text()
        stamp = text.partition('"timestamp":')[2].partition(",")[0]
        log.write_text(text.replace(f'"timestamp":{stamp}', f'"timestamp":{when}000'))
        os.utime(log, (when, when))
    made, rows = copied(tmp_path, uri, version=0)
    assert ids(rows) == [0, 1, 2] and made.table["version"] == "0"
    when = datetime.fromtimestamp(1_700_000_150, UTC)
    made, rows = copied(tmp_path, uri, version=when)
    assert ids(rows) == list(range(6)) and made.table["version"] == "1"
    assert made.table["made"] == datetime.fromtimestamp(1_700_000_100, UTC).isoformat()
    naive = when.replace(tzinfo=None).isoformat()
    assert ids(copied(tmp_path, uri, version=naive)[1]) == list(range(6))
    assert ids(copied(tmp_path, uri)[1]) == list(range(9))
    refused(uri, "source.version", "no readable version 7", "newest is 2", version=7)
    refused(uri, "source.version", "older than the first", version=date(2020, 1, 1))
    refused(uri, "neither a version number", error=ConfigError, version="last week")


def test_columns_filter_and_limit_choose(tmp_path):
    uri = table_of(tmp_path / "t", companies(0, 20_000), companies(20_000, 20_000))
    made, rows = copied(tmp_path, uri, columns=["Company"], filter="id >= 39990 AND city = 'Bonn'")
    assert rows.to_pydict() == {"Company": [f"Company {i}" for i in range(39_990, 40_000, 2)]}
    assert made.table["filter"] == "id >= 39990 AND city = 'Bonn'"
    assert copied(tmp_path, uri, limit=7)[1].num_rows == 7
    assert copied(tmp_path, uri, limit=3, filter="id > 30000")[1].num_rows == 3
    found = peek(reads(uri=uri, filter="city = 'Bonn'"))
    assert found.rows == 20_000 and found.schema.names == ["id", "Company", "city"]
    assert found.guessed and not peek(reads(uri=uri)).guessed
    looked = peek(reads(uri=uri, limit=5))
    assert looked.rows == 5 and not looked.guessed
    ((name, head),) = heads(reads(uri=uri, filter="id > 39000"), 4)
    assert name == uri and min(head["id"].to_pylist()) == 39_001
    with pytest.raises(SourceError, match="no row matches"):
        copied(tmp_path, uri, filter="id < 0")
    refused(uri, "no column 'Citi'", "did you mean 'city'", error=ConfigError, filter="Citi = 'x'")
    refused(uri, "no column 'citi'", error=ConfigError, columns=["citi"])


def test_values_of_all_kinds_come_through_and_are_filtered_by_the_table_itself(tmp_path):
    rows = all_kinds()
    uri = table_of(tmp_path / "t", rows)
    found = copied(tmp_path, uri)[1]
    assert found.schema.types == [field.type for field in rows.schema]
    assert str(found.to_pylist()) == str(rows.to_pylist())  # NaN is not equal to itself
    for text, fitting in KINDS_FITTING:
        assert ids(copied(tmp_path, uri, filter=text)[1]) == fitting, text


def test_the_plan_keeps_the_version_and_a_resume_asks_the_table_nothing(tmp_path, capsys):
    uri = table_of(tmp_path / "t", companies(0, 30))
    job = make_job(
        source={"uri": uri, "filter": "id >= 10", "columns": ["id", "Company"]},
        output={"uri": str(tmp_path / "out")},
        engine={"model": "demo"},
    )
    seen = dry_run(job)
    assert seen.table is not None and seen.table["version"] == "0"
    show_plan(seen)
    assert "20 rows of a Delta source at version 0" in capsys.readouterr().out
    assert (seen.rows, seen.format, seen.columns) == (20, "delta", ("id", "Company"))
    run = plan_run(job, "one")
    assert run.rows == 20
    kept = Ledger(open_store(str(tmp_path / "out/one"))).load_plan()
    assert (
        kept is not None and kept.table is not None and kept.snapshot and kept.hash == run.plan_hash
    )
    assert (kept.table["format"], kept.table["version"]) == ("delta", "0")
    assert decode_schema(kept.table["schema"]).names == ["id", "Company", "city"]
    assert kept.parts["source.filter"] == "id >= 10" and kept.parts["source.version"] is None
    write_deltalake(uri, companies(30, 30), mode="append")
    assert plan_run(job, "one").plan_hash == run.plan_hash
    (tmp_path / "t").rename(tmp_path / "gone")
    assert plan_run(job, "one").plan_hash == run.plan_hash


def test_what_is_no_table_or_lacks_files_is_told(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(str(tmp_path / "empty"), "no Delta table in", format="delta")
    refused(str(tmp_path / "nowhere"), "no Delta table in", format="delta")
    uri = table_of(tmp_path / "t", companies(0, 3))
    next((tmp_path / "t").glob("*.parquet")).unlink()
    refused(uri, "Delta table", "vacuum")
    empty = table_of(tmp_path / "none", companies(0, 0))
    refused(empty, "has no rows")


def test_a_missing_library_is_told_with_what_to_install(tmp_path, monkeypatch):
    uri = table_of(tmp_path / "t", companies(0, 3))
    monkeypatch.setattr(
        "prefect_raybatch.source.tables.copying.find_spec", lambda name: None, raising=True
    )
    refused(uri, 'pip install "prefect-raybatch[delta]"', error=ConfigError)


def test_a_table_on_s3_is_read_with_the_keys_of_the_job(tmp_path, s3: S3Server, monkeypatch):
    without_keys(monkeypatch)
    options = s3.options
    uri = "s3://delta/lake/sales"
    write_deltalake(
        uri,
        companies(0, 10),
        partition_by=["city"],
        storage_options={
            "AWS_ENDPOINT_URL": options["endpoint_url"],
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        },
    )
    made, rows = copied(tmp_path, uri, options=options, filter="id > 4")
    assert ids(rows) == [5, 6, 7, 8, 9] and made.format == "delta"
    wrong = {**options, "secret": "not-the-secret-at-all"}
    said = refused(uri, "denied", options=wrong, format="delta")
    assert "not-the-secret" not in said
    refused("s3://delta/no", "no Delta table in", options=options, format="delta")


def test_the_schema_in_a_plan_is_arrow(tmp_path):
    uri = table_of(tmp_path / "t", companies(0, 3))
    record = copied(tmp_path, uri)[0].table
    assert record is not None
    assert pa.ipc.read_schema(pa.BufferReader(base64.b64decode(record["schema"]))).names == [
        *("id", "Company", "city")
    ]
