"""Iceberg tables as input, with the real library: which rows, and what is said."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.position_deletes import delete_equal, delete_positions
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
from pyiceberg.catalog import Catalog, load_catalog
from s3server import S3Server

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.cli.show import show_plan
from prefect_raybatch.errors import (
    ConfigError,
    CredentialsUnusable,
    SourceError,
    StoreUnavailable,
)
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.source import detect_format, needs_snapshot
from prefect_raybatch.storage import open_store


def properties(tmp_path: Path) -> dict[str, str]:
    return {
        "name": "lake",
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    made = load_catalog(**properties(tmp_path))
    made.create_namespace("sales")
    return made


def table_of(catalog: Catalog, name: str, *parts: pa.Table, **options: Any) -> Any:
    table = catalog.create_table(f"sales.{name}", schema=parts[0].schema, **options)
    for part in parts:
        table.append(part)
    return table


def folder_of(table: Any) -> str:
    return str(table.location().removeprefix("file://"))


def ids(rows: pa.Table) -> list[int]:
    return sorted(rows["id"].to_pylist())


def test_a_table_of_a_catalog_and_its_bare_folder_give_the_same_rows(tmp_path, catalog):
    table = table_of(catalog, "orders", companies(0, 6), companies(6, 4))
    table.delete("id < 2")
    source = reads(uri="sales.orders", catalog=properties(tmp_path))
    assert detect_format(source) == "iceberg" and needs_snapshot(source) and not source.stored
    made, rows = copied(tmp_path, "sales.orders", catalog=properties(tmp_path))
    assert ids(rows) == list(range(2, 10)) and made.format == "iceberg"
    assert rows.schema.names == ["id", "Company", "city"]
    assert made.table["id"] == str(table.metadata.table_uuid)
    assert made.table["version"] == str(table.current_snapshot().snapshot_id)
    folder = folder_of(table)
    assert detect_format(reads(uri=folder)) == "iceberg"
    found, same = copied(tmp_path, folder)
    assert same.equals(rows) and found.table["version"] == made.table["version"]
    assert copied(tmp_path, table.metadata_location, format="iceberg")[1].equals(rows)


def test_a_folder_names_no_code_to_load_and_no_place_to_send_keys_to(tmp_path, catalog):
    table = table_of(catalog, "orders", companies(0, 3))
    file = Path(table.metadata_location.removeprefix("file://"))
    value = json.loads(file.read_text())
    value["properties"] |= {"py-io-impl": "os.path", "s3.endpoint": "http://127.0.0.1:9"}
    file.write_text(json.dumps(value))
    assert ids(copied(tmp_path, folder_of(table))[1]) == [0, 1, 2]


def test_a_snapshot_a_tag_or_a_time_of_before_is_read_as_it_was(tmp_path, catalog):
    table = table_of(catalog, "orders", companies(0, 3), companies(3, 3))
    first, second = (entry.snapshot_id for entry in table.history())
    table.manage_snapshots().create_tag(first, "night").commit()
    with table.update_schema() as change:
        change.rename_column("Company", "Firm")
        change.delete_column("city")
    table.append(companies(6, 3).select(["id", "Company"]).rename_columns(["id", "Firm"]))
    how = {"catalog": properties(tmp_path)}
    assert copied(tmp_path, "sales.orders", **how)[1].column_names == ["id", "Firm"]
    for version in (first, "night"):
        made, rows = copied(tmp_path, "sales.orders", version=version, **how)
        assert rows.sort_by("id").equals(companies(0, 3).cast(rows.schema))
        assert made.table["version"] == str(first)
    kept = copied(tmp_path, "sales.orders", version=second, filter="Company > 'Company 3'", **how)
    assert ids(kept[1]) == [4, 5]
    when = datetime.fromtimestamp(table.history()[1].timestamp_ms / 1000, UTC)
    assert copied(tmp_path, "sales.orders", version=when, **how)[0].table["version"] == str(second)
    for wrong in (7, "day", date(2020, 1, 1)):
        refused("sales.orders", "source.version", str(first), "night", version=wrong, **how)


def test_deletes_by_position_are_applied_and_by_equality_refused(tmp_path, catalog):
    table = table_of(catalog, "orders", companies(0, 10), properties={"format-version": "2"})
    delete_positions(table, tmp_path, [2, 3, 5])
    assert ids(copied(tmp_path, folder_of(table))[1]) == [0, 1, 4, 6, 7, 8, 9]
    assert ids(copied(tmp_path, folder_of(table), filter="id >= 3")[1]) == [4, 6, 7, 8, 9]
    before = table.current_snapshot().snapshot_id
    delete_equal(table, tmp_path, "id", [7])
    refused(folder_of(table), "equality deletes", "earlier source.version")
    assert 7 in ids(copied(tmp_path, folder_of(table), version=before)[1])


def test_partitions_columns_filter_and_all_kinds_of_values_come_through(tmp_path, catalog):
    rows = all_kinds()
    table = catalog.create_table("sales.kinds", schema=rows.schema)
    with table.update_spec() as change:
        change.add_identity("day")
    table.append(rows)
    found = copied(tmp_path, folder_of(table))[1].sort_by("id")
    assert str(found.to_pylist()) == str(rows.to_pylist())  # NaN is not equal to itself
    for text, fitting in KINDS_FITTING:
        kept = copied(tmp_path, folder_of(table), filter=text, columns=["who", "id"])[1]
        assert ids(kept) == fitting and kept.column_names == ["who", "id"], text


def test_a_plan_keeps_the_snapshot_and_no_key_of_the_catalog(tmp_path, catalog, capsys):
    table = table_of(catalog, "orders", companies(0, 30))
    how = {**properties(tmp_path), "s3.secret-access-key": "SECRET-1"}
    job = make_job(
        source={"uri": "sales.orders", "format": "iceberg", "catalog": how, "limit": 20},
        output={"uri": str(tmp_path / "out")},
        engine={"model": "demo"},
    )
    assert "SECRET-1" not in f"{job!r} {job.model_dump_json()}"
    seen = dry_run(job)
    assert seen.rows == 20
    show_plan(seen)
    assert "20 rows of an Iceberg source at version" in capsys.readouterr().out
    run = plan_run(job, "one")
    store = open_store(str(tmp_path / "out/one"))
    kept = Ledger(store).load_plan()
    assert kept is not None and kept.table is not None and run.rows == 20
    assert kept.table["id"] == str(table.metadata.table_uuid)
    assert kept.job["source"]["catalog"]["name"] == "lake"
    assert b"SECRET-1" not in kept.to_bytes()
    catalog.drop_table("sales.orders")
    assert plan_run(job, "one").plan_hash == run.plan_hash


def test_what_is_wrong_with_a_table_or_a_catalog_is_told(tmp_path, catalog, monkeypatch):
    how = {"catalog": properties(tmp_path)}
    table = table_of(catalog, "orders", companies(0, 3))
    refused("sales.no", "has no table 'sales.no'", **how)
    refused("orders", "namespace.table", **how)
    missing = {**properties(tmp_path), "uri": f"sqlite:///{tmp_path}/no.db"}
    refused("sales.orders", "no.db does not exist", catalog=missing)
    assert not (tmp_path / "no.db").exists()
    away = {"type": "rest", "uri": "http://127.0.0.1:9"}
    refused("sales.orders", "refused", error=StoreUnavailable, catalog=away)
    refused(str(tmp_path), "no Iceberg table in", format="iceberg")
    catalog.create_table("sales.empty", schema=companies(0, 1).schema)
    refused("sales.empty", "has no rows", **how)
    folder = Path(folder_of(table))
    newest = sorted((folder / "metadata").glob("*.metadata.json"))[-1]
    other = newest.with_name(f"{newest.name.partition('-')[0]}-other.metadata.json")
    shutil.copy(newest, other)
    refused(str(folder), "2 newest metadata files", "source.catalog")
    other.unlink()
    next((folder / "data").rglob("*.parquet")).unlink()
    refused(str(folder), "Iceberg table", "a file is missing")
    monkeypatch.setattr(
        "prefect_raybatch.source.tables.copying.find_spec", lambda name: None, raising=True
    )
    refused(str(folder), 'pip install "prefect-raybatch[iceberg]"', error=ConfigError)


@pytest.mark.timeout(100)  # Arrow's client tries for ten minutes and more
@pytest.mark.parametrize("place", ["gs://lake/t", "abfss://box@acct.dfs.core.windows.net/t"])
def test_a_table_on_google_or_azure_without_credentials_says_so_soon(
    tmp_path, catalog, place, monkeypatch
):
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:9")
    table_of(catalog, "orders", companies(0, 3))
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as database:
        metadata = f"{place}/metadata/00000-x.metadata.json"
        database.execute("UPDATE iceberg_tables SET metadata_location = ?", (metadata,))
        database.commit()
    options = {"msi_endpoint": "http://127.0.0.1:9/token"} if "abfss" in place else {}
    refused(
        "sales.orders",
        "there are no",
        "credentials",
        error=CredentialsUnusable,
        catalog=properties(tmp_path),
        options=options,
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"catalog": {"py-catalog-impl": "os.path"}}, "names Python code"),
        ({"catalog": {"auth": {"type": "custom", "impl": "a.B"}}}, "names Python code"),
        ({"catalog": {"uri": "postgresql://u:p@host/db"}}, "before an @"),
        ({"catalog": {"name": "x"}, "format": "delta"}, "applies only to Iceberg"),
        ({"format": "iceberg", "uri": ["a", "b"]}, "must be the only entry"),
        ({"format": "csv", "version": 3}, "version does not apply"),
    ],
)
def test_a_job_that_cannot_be_meant_is_refused_when_it_is_read(fields, words):
    with pytest.raises(ValueError, match="Source") as caught:
        reads(**{"uri": "sales.orders", **fields})
    assert words in str(caught.value)


def test_a_table_on_s3_is_read_with_the_keys_of_the_job_alone(tmp_path, s3: S3Server, monkeypatch):
    without_keys(monkeypatch)
    options = s3.options
    keys = {
        "s3.endpoint": options["endpoint_url"],
        "s3.access-key-id": options["key"],
        "s3.secret-access-key": options["secret"],
        "s3.region": "us-east-1",
    }
    how = {**properties(tmp_path), "warehouse": "s3://iceberg/warehouse"}
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    catalog = load_catalog(**how, **keys, **{"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO"})
    catalog.create_namespace("sales")
    table = table_of(catalog, "orders", companies(0, 10))
    rows = copied(tmp_path, table.location(), options=options, filter="id > 4")[1]
    assert ids(rows) == [5, 6, 7, 8, 9]
    assert ids(copied(tmp_path, "sales.orders", catalog=how, options=options)[1]) == [*range(10)]
    wrong = {**options, "secret": "not-the-secret-at-all"}
    said = refused("sales.orders", "denied", catalog=how, options=wrong)
    assert "not-the-secret" not in said
    with pytest.raises(SourceError, match="no Iceberg table in"):
        copied(tmp_path, "s3://iceberg/none", options=options, format="iceberg")
