"""Publishing to tables on S3 (radosgw where it is installed): once, with the keys of the job, and
what wrong keys are told to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.table_sources import all_kinds, copied, without_keys
from helpers.targets import published_rows
from pyiceberg.catalog import load_catalog
from s3server import S3Server

from prefect_raybatch.errors import ConfigError, PublishFailed, is_transient
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.publish import check_publish, open_sink

BUCKET = "publish-s3"
TARGETS = ("delta", "iceberg", "lance")


@pytest.fixture
def store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    without_keys(monkeypatch)
    # pyiceberg writes by pyarrow, whose checksums radosgw does not know.
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    return dict(s3.options)


def catalog(root: Path) -> dict[str, str]:
    base = f"sqlite:///{root}/catalog.db"
    return {"type": "sql", "uri": base, "warehouse": f"s3://{BUCKET}/{root.name}/iceberg"}


def target(format: str, root: Path, **more: Any) -> PublishTarget:
    if format == "iceberg":
        load_catalog(None, **catalog(root)).create_namespace_if_not_exists("db")
        value = {"format": format, "table": "db.answers", "catalog": catalog(root)}
    else:
        value = {"format": format, "uri": f"s3://{BUCKET}/{root.name}/{format}-{{run_key}}"}
    return PublishTarget.model_validate({**value, **more})


def read(format: str, root: Path, store: dict[str, Any]) -> pa.Table:
    """The rows there, as a job would read them."""
    if format == "iceberg":
        return copied(root, "db.answers", catalog=catalog(root), options=store)[1]
    return copied(root, f"s3://{BUCKET}/{root.name}/{format}-key", format=format, options=store)[1]


@pytest.mark.parametrize("format", TARGETS)
def test_rows_are_published_once_with_the_keys_of_the_job_and_read_again(format, store, tmp_path):
    rows, there = all_kinds(), target(format, tmp_path)
    sink = open_sink(there, "key", store)
    assert "is created" in sink.check(rows.schema)
    first = sink.publish(published_rows(rows), lambda step: None)
    again = open_sink(there, "key", store)
    assert "is created" in again.check(rows.schema) or "fit" in again.check(rows.schema)
    assert again.publish(published_rows(rows), lambda step: None) == first
    found = read(format, tmp_path, store)
    assert str(found.sort_by("id").to_pylist()) == str(rows.to_pylist())
    assert check_publish([there.model_copy(update={"options": store})], "key", {}, rows.schema)


@pytest.mark.parametrize("format", TARGETS)
def test_two_publishers_at_once_bring_the_rows_once(format, store, tmp_path):
    rows, there, done = all_kinds(), target(format, tmp_path), []

    def other(step: str) -> None:
        if step == "looked" and not done:
            done.append(step)
            open_sink(there, "key", store).publish(published_rows(rows), lambda step: None)

    open_sink(there, "key", store).publish(published_rows(rows), other)
    assert sorted(read(format, tmp_path, store)["id"].to_pylist()) == [0, 1, 2]


@pytest.mark.parametrize("format", TARGETS)
def test_a_merge_replaces_rows_on_s3(format, store, tmp_path):
    rows, there = all_kinds(), target(format, tmp_path, mode="merge", key=["id"])
    for plan, night in (("p", rows), ("q", rows.slice(1).set_column(5, "price", [[1.0, 2.0]]))):
        open_sink(there, "key", store).publish(published_rows(night, plan * 64), lambda step: None)
    found = read(format, tmp_path, store).sort_by("id")
    assert found["id"].to_pylist() == [0, 1, 2] and found["price"].to_pylist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("format", TARGETS)
@pytest.mark.parametrize("wrong", [{"secret": "not-the-secret-at-all"}, {"key": "NOBODYSKEY"}])
def test_keys_that_the_store_refuses_are_told_and_not_tried_again(format, wrong, store, tmp_path):
    rows, there = all_kinds(), target(format, tmp_path)
    sink = open_sink(there, "key", {**store, **wrong})
    with pytest.raises(ConfigError, match="access denied") as denied:
        sink.check(rows.schema)
        sink.publish(published_rows(rows), lambda step: None)
    assert not is_transient(denied.value)
    assert not set(wrong.values()) & set(str(denied.value).split())
    assert "not-the-secret" not in str(denied.value)


@pytest.mark.parametrize("format", TARGETS)
def test_a_bucket_that_is_not_there_is_told_and_not_tried_again(format, store, tmp_path):
    if format == "iceberg":
        where = {"catalog": {**catalog(tmp_path), "warehouse": "s3://no-such-bucket/x"}}
    else:
        where = {"uri": "s3://no-such-bucket/x-{run_key}"}
    sink = open_sink(target(format, tmp_path, **where), "key", store)
    with pytest.raises(ConfigError, match="no such bucket"):
        sink.check(all_kinds().schema)
        sink.publish(published_rows(all_kinds()), lambda step: None)


@pytest.mark.parametrize("format", TARGETS)
def test_a_store_that_does_not_answer_is_tried_again(format, store, tmp_path):
    away = {**store, "endpoint_url": "http://127.0.0.1:9"}
    sink = open_sink(target(format, tmp_path), "key", away)
    with pytest.raises(PublishFailed) as failed:
        sink.check(all_kinds().schema)
        sink.publish(published_rows(all_kinds()), lambda step: None)
    assert is_transient(failed.value)
