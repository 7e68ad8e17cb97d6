"""Lance datasets as input, with the real library: which rows, and what is said."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from helpers.small import make_job
from helpers.specs import reads
from helpers.table_sources import companies, copied, refused, without_keys
from s3server import S3Server

from prefect_raybatch.api import dry_run, plan_run
from prefect_raybatch.errors import ConfigError, SourceError, StoreUnavailable
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.source import detect_format
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.storage import open_store


def data_set(path: Path, *parts: pa.Table, **options: Any) -> str:
    for number, part in enumerate(parts):
        lance.write_dataset(part, str(path), mode="append" if number else "create", **options)
    return str(path)


def test_a_folder_with_versions_is_opened_at_its_newest_or_another(tmp_path):
    uri = data_set(tmp_path / "d", companies(0, 6), companies(6, 4))
    assert detect_format(reads(uri=uri)) == "lance"
    lance.dataset(uri).delete("id < 2")
    lance.dataset(uri).tags.create("first", 1)
    made, rows = copied(tmp_path, uri)
    assert rows["id"].to_pylist() == list(range(2, 10)) and made.format == "lance"
    assert made.table["version"] == "3" and made.table["uri"] == uri
    made, rows = copied(tmp_path, uri, version=1)
    assert rows.equals(companies(0, 6)) and made.table["version"] == "1"
    assert copied(tmp_path, uri, version="first")[0].table["version"] == "1"
    moments = {v["version"]: v["timestamp"].astimezone(UTC) for v in lance.dataset(uri).versions()}
    between = moments[3] - (moments[3] - moments[2]) / 2
    assert copied(tmp_path, uri, version=between)[0].table["version"] == "2"
    assert copied(tmp_path, uri, version=between.replace(tzinfo=None))[0].table["version"] == "2"
    for wrong in (9, "last", moments[1] - timedelta(days=1)):
        refused(uri, "source.version", "1 to 3", version=wrong)
    lance.dataset(uri).tags.delete("first")
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    refused(uri, "no version or tag 1", "3 to 3", version=1)


def test_columns_filter_and_limit_choose(tmp_path):
    rows = pa.table(
        {
            "id": pa.array([0, 1, 2, 3], pa.int64()),
            'odd "name': ["it's", "", None, "x"],
            "at": pa.array(
                [datetime(2026, 1, d, tzinfo=UTC) for d in (1, 2, 3, 4)], pa.timestamp("us", "UTC")
            ),
            "day": [date(2026, 1, 1), None, date(2026, 1, 3), None],
            "kind": pa.array(["x", "y", None, "x"]).dictionary_encode(),
            "vec": pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)),
            "half": pa.array([1, 2, None, 4], pa.float16()),
        }
    )
    uri = data_set(tmp_path / "d", rows)
    found = copied(tmp_path, uri)[1]
    assert found.to_pylist() == rows.to_pylist()
    assert found.schema.field("vec").type == pa.list_(pa.float32(), 2)
    for text, fitting in (
        ("id > 1", [2, 3]),
        ("\"odd \"\"name\" = 'it''s'", [0]),
        ("at > '2026-01-02T12:00:00Z'", [2, 3]),
        ("day = '2026-01-03' OR id = 3", [2, 3]),
        ("kind = 'x' AND kind LIKE 'x%'", [0, 3]),
        ("NOT kind = 'x'", [1]),
    ):
        kept = copied(tmp_path, uri, filter=text, columns=["id"])[1]
        assert kept.to_pydict() == {"id": fitting}, text
    assert copied(tmp_path, uri, limit=3)[1]["id"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize(
    ("unit", "second"), [("s", "01"), ("ms", "00.001"), ("us", "00.000001"), ("ns", "00.000000001")]
)
def test_a_filter_by_time_keeps_the_same_rows_as_of_a_file(tmp_path, unit, second, zone):
    kind = pa.timestamp(unit, zone)
    begin = pa.scalar("2026-01-01").cast(pa.timestamp(unit)).cast(pa.int64()).as_py()
    moments = pa.array([begin, begin + 1, begin + 2], pa.int64()).cast(kind)
    rows = pa.table({"id": [0, 1, 2], "at": moments})
    uri = data_set(tmp_path / "d", rows)
    texts = [f"at {op} '2026-01-01 00:00:{second}'" for op in ("<", "<=", "=", ">=", ">")]
    if unit != "ns":  # which has no such years
        texts += ["at > '1677-01-01'", "at < '2262-12-31 12:00:00'", "at >= '0001-01-01'"]
        texts += ["at < '9999-12-31 23:59:59'", "at IN ('0999-05-06', '2026-01-01')"]
    for text in texts:
        expected = Filter(text).keep(rows)["id"].to_pylist()
        assert expected
        assert copied(tmp_path, uri, filter=text, columns=["id"])[1]["id"].to_pylist() == expected


def test_a_plan_of_a_data_set_keeps_its_version(tmp_path):
    uri = data_set(tmp_path / "d", companies(0, 30))
    job = make_job(
        source={"uri": uri, "format": "lance", "filter": "id < 20"},
        output={"uri": str(tmp_path / "out")},
        engine={"model": "demo"},
    )
    assert dry_run(job).rows == 20
    run = plan_run(job, "one")
    kept = Ledger(open_store(str(tmp_path / "out/one"))).load_plan()
    assert kept is not None and kept.table is not None and run.rows == 20
    assert (kept.table["format"], kept.table["version"]) == ("lance", "1")
    lance.write_dataset(companies(30, 10), uri, mode="append")
    assert plan_run(job, "one").plan_hash == run.plan_hash


def test_what_is_no_data_set_is_told(tmp_path, monkeypatch):
    refused(str(tmp_path / "no"), "no Lance dataset in", format="lance")
    uri = data_set(tmp_path / "d", companies(0, 3))
    next((tmp_path / "d/data").iterdir()).unlink()
    refused(uri, "Lance dataset", "a file is missing")
    with pytest.raises(SourceError, match="has no rows"):
        copied(tmp_path, data_set(tmp_path / "e", companies(0, 0)))
    monkeypatch.setattr(
        "prefect_raybatch.source.tables.copying.find_spec", lambda name: None, raising=True
    )
    refused(uri, 'pip install "prefect-raybatch[lance]"', error=ConfigError)


@pytest.mark.parametrize("version", [None, 1])
@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_a_store_that_is_away_is_told_as_such_also_at_a_version(
    tmp_path, monkeypatch, kind, version
):
    uri, opened = data_set(tmp_path / "d", companies(0, 3)), lance.dataset

    def away(uri: str, **options: Any) -> lance.LanceDataset:
        if options["version"] == version:
            raise kind("LanceError(IO): Generic S3 error: error sending request: connection reset")
        return opened(uri, **options)

    monkeypatch.setattr(lance, "dataset", away)
    refused(uri, "error sending request", version=version, error=StoreUnavailable, format="lance")


def test_a_data_set_on_s3_is_read_with_the_keys_of_the_job(tmp_path, s3: S3Server, monkeypatch):
    without_keys(monkeypatch)
    options = s3.options
    uri = "s3://lance/sets/companies"
    keys = {
        "endpoint": options["endpoint_url"],
        "access_key_id": options["key"],
        "secret_access_key": options["secret"],
        "region": "us-east-1",
        "allow_http": "true",
    }
    lance.write_dataset(companies(0, 10), uri, storage_options=keys)
    made, rows = copied(tmp_path, uri, options=options, filter="id > 4")
    assert rows["id"].to_pylist() == [5, 6, 7, 8, 9] and made.format == "lance"
    wrong = {**options, "secret": "not-the-secret-at-all"}
    said = refused(uri, "denied", options=wrong, format="lance")
    assert "not-the-secret" not in said
