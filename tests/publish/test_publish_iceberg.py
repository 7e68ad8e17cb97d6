"""What a commit to an Iceberg table says, and with which properties its files are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.targets import catalog, iceberg, published_rows
from pyiceberg.catalog import Catalog, load_catalog

from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish import iceberg as tables
from prefect_raybatch.publish.publish import open_sink
from prefect_raybatch.source.tables.iceberg import open_catalog

ROWS = pa.table({"id": [1, 2], "answer": ["a", "b"]})
S3 = {"key": "mine", "secret": "hidden", "endpoint_url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {}),  # pyiceberg looks for keys itself
        ({"account_name": "a", "account_key": "Yg=="}, {}),
        (
            S3,
            {
                "s3.endpoint": "http://127.0.0.1:1",
                "s3.region": "us-east-1",
                "s3.access-key-id": "mine",
                "s3.secret-access-key": "hidden",
            },
        ),
    ],
    ids=["none", "another store", "s3"],
)
def test_files_are_written_with_the_keys_of_the_store_unless_the_catalog_has_some(
    options: dict[str, Any],
    wanted: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the environment")
    opened = list[dict[str, Any]]()

    def recorded(properties: dict[str, Any]) -> Catalog:
        opened.append(properties)
        return open_catalog(properties)

    monkeypatch.setattr(tables, "open_catalog", recorded)
    fields = iceberg(tmp_path)
    for more in ({}, {"s3.region": "eu-north-1"}):
        fields["catalog"] = catalog(tmp_path) | more
        sink = open_sink(PublishTarget.model_validate(fields), "key", options)
        assert not sink.holds("a" * 64, "")
        given = opened.pop()
        assert {name: given[name] for name in given if name.startswith("s3.")} == wanted | more
        assert given.items() >= fields["catalog"].items()


def test_a_commit_names_the_run_and_its_property_the_snapshot(tmp_path: Path) -> None:
    fields = iceberg(tmp_path, mode="merge", key=["id"])
    sink, steps = open_sink(PublishTarget.model_validate(fields), "key", {}), list[str]()
    versions = [
        sink.publish(published_rows(ROWS, plan * 64), steps.append) for plan in ("a", "b", "b")
    ]
    assert steps == ["opened", "looked", "committed"] * 2 + ["opened"]
    assert versions[1] == versions[2]
    table = load_catalog(None, **catalog(tmp_path)).load_table("db.answers")
    found = []
    for snapshot in table.metadata.snapshots:
        assert snapshot.summary is not None
        marks = snapshot.summary.additional_properties
        names = ("raybatch.plan", "raybatch.run_key")
        found.append((snapshot.summary.operation.value, *map(marks.get, names)))
    b = ("b" * 64, "key")
    assert found == [("append", "a" * 64, "key"), ("overwrite", *b), ("append", *b)]
    numbers = [snapshot.sequence_number for snapshot in table.metadata.snapshots]
    assert numbers == [1, 2, 3]
    assert table.properties == {
        f"raybatch.published.{'a' * 64}": f"{versions[0]}:1",
        f"raybatch.published.{'b' * 64}": f"{versions[1]}:3",
    }
