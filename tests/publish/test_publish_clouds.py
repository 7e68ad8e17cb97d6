"""Delta tables on Google Cloud Storage and Azure: what is read and published there."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from helpers.clouds import CLOUDS, Cloud, cloud_server
from helpers.gcs_server import GcsServer, serving_apart
from helpers.publisher import ROWS, run_at_once, started
from helpers.table_sources import all_kinds, copied
from helpers.targets import published_rows
from pyiceberg.catalog import load_catalog
from s3server import proxy

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.publish import open_sink
from prefect_raybatch.storage import join, open_store
from prefect_raybatch.storage.delta_access import delta_access


@pytest.fixture(scope="module")
def gs() -> Iterator[GcsServer]:
    with serving_apart("bucket") as running:
        yield running


@pytest.fixture(scope="module")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with cloud_server("az", tmp_path_factory.mktemp("az")) as running:
        yield running


def delta(uri: str) -> PublishTarget:
    return PublishTarget.model_validate({"format": "delta", "uri": uri})


def ids(uri: str, options: dict[str, Any]) -> list[int]:
    place, keys, _ = delta_access(join(uri), options)
    return sorted(DeltaTable(place, storage_options=keys).to_pyarrow_table()["id"].to_pylist())


def versions(uri: str, options: dict[str, Any]) -> dict[str, str]:
    """Return the version that wrote the rows of each plan, numbered while nobody writes."""
    place, keys, _ = delta_access(join(uri), options)
    commits = DeltaTable(place, storage_options=keys).history()
    return {
        one["raybatch.plan"][0]: str(one["version"]) for one in commits if "raybatch.plan" in one
    }


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Cloud:
    """A server with credentials that deltalake takes."""
    if request.param == "az":
        return request.getfixturevalue("az")
    server: GcsServer = request.getfixturevalue("gs")
    names = ("service_account_key", "base_url")
    return Cloud("gs", server.endpoint, server.account_options, *names, {})


def test_rows_are_published_once_to_delta_and_read_again(cloud: Cloud, tmp_path: Path) -> None:
    account = "@testaccount.dfs.core.windows.net" if cloud.scheme == "az" else ""
    scheme = "abfss" if account else "gs"
    uri, rows = f"{scheme}://bucket{account}/{uuid.uuid4()}", all_kinds()
    sink = open_sink(delta(uri), "key", cloud.options)
    assert "is created" in sink.check(rows.schema)
    first = sink.publish(published_rows(rows), lambda step: None)
    again = open_sink(delta(uri), "key", cloud.options)
    assert "fit" in again.check(rows.schema)
    assert again.publish(published_rows(rows), lambda step: None) == first
    found = copied(tmp_path, uri, format="delta", options=cloud.options)[1]
    assert str(found.sort_by("id").to_pylist()) == str(rows.to_pylist())
    # Commits after the second need listings that start at a version.
    merged = PublishTarget.model_validate(
        {"format": "delta", "uri": uri, "mode": "merge", "key": ["id"]}
    )
    for plan in "qr":
        sink = open_sink(merged, "key", cloud.options)
        sink.publish(published_rows(rows, plan * 64), lambda step: None)
    assert versions(uri, cloud.options) == {"p": "1", "q": "2", "r": "3"}
    assert ids(uri, cloud.options) == [0, 1, 2]


@pytest.mark.whole
def test_nine_publishers_at_once_of_whom_some_are_killed_bring_each_plan_once(
    cloud: Cloud,
) -> None:
    uri, options = f"{cloud.scheme}://bucket/{uuid.uuid4()}", cloud.options
    killed = [started(uri, "a", options, step) for step in ("opened", "looked", "committed")]
    others = [started(uri, plan, options) for plan in "aabbcc"]
    ends = run_at_once(*killed, *others)
    assert ends[0][0] == -9, "it was killed, unless the rows were there before its step"
    there = versions(uri, options)
    assert ends[3:] == [(0, there[plan]) for plan in "aabbcc"]
    assert ids(uri, options) == sorted(ROWS["id"].to_pylist() * 3)


def test_a_table_that_another_run_creates_meanwhile_keeps_its_schema(cloud: Cloud) -> None:
    """The other run creates it when the first commit of this one is on its way."""
    uri = f"{cloud.scheme}://bucket/{uuid.uuid4()}"
    theirs = ROWS.append_column("more", pa.array(["x", "y", "z"]))
    done: list[str] = []

    def create(method: str, path: str, headers: Any) -> str:
        name = unquote(path.partition("?")[0])
        if method == "PUT" and name.endswith("00000000.json") and not done:
            done.append("")
            sink = open_sink(delta(uri), "key", cloud.options)
            done[0] = sink.publish(published_rows(theirs, "t" * 64), lambda step: None)
        return "pass"

    with proxy(cloud, create) as between:
        options = {**cloud.options, cloud.address: between.endpoint}
        ours = open_sink(delta(uri), "key", options).publish(
            published_rows(ROWS, "o" * 64), lambda step: None
        )
    assert (done, ours) == (["1"], "2")
    place, keys, _ = delta_access(uri, cloud.options)
    table = DeltaTable(place, storage_options=keys)
    assert [one["operation"] for one in table.history()] == ["WRITE", "WRITE", "CREATE TABLE"]
    assert table.to_pyarrow_table()["more"].null_count == len(ROWS)


OTHER_FAULTS = [pytest.param(how, marks=pytest.mark.nightly) for how in ("reset", "503")]


@pytest.mark.whole
@pytest.mark.parametrize("how", ["lose", *OTHER_FAULTS])
def test_a_commit_whose_answer_is_lost_is_there_once(cloud: Cloud, how: str) -> None:
    uri, seen = f"{cloud.scheme}://bucket/{uuid.uuid4()}", Counter[str]()

    def spoil(method: str, path: str, headers: Any) -> str:
        if method != "PUT" or "log" not in path:
            return "pass"
        seen[path] += 1
        return how if seen[path] == 1 else "pass"

    with proxy(cloud, spoil) as between:
        options = {**cloud.options, cloud.address: between.endpoint}
        # deltalake sends no commit again by itself: the task that publishes is retried.
        ends = [run_at_once(started(uri, "a", options))[0] for _ in range(4)]
    assert ends[-1][0] == 0 and len(seen) >= 2, (ends, seen)
    assert ids(uri, cloud.options) == ROWS["id"].to_pylist()


def test_a_server_that_ignores_where_a_listing_starts_is_named() -> None:
    sink = open_sink(delta("abfss://box@acct.dfs.core.windows.net/t"), "key", {})
    remedy = sink.refused(Exception("Invalid table version: 1")) or ""
    assert "ignores startFrom" in remedy and "Azurite 3.37" in remedy
    assert open_sink(delta("/t"), "key", {}).refused(Exception("Invalid table version: 1")) is None


@pytest.mark.whole
def test_a_table_on_azure_is_read_at_any_version(az: Cloud, tmp_path: Path) -> None:
    for number in range(14):
        write_deltalake(str(tmp_path / "t"), pa.table({"id": [number]}), mode="append")
        if number == 10:
            DeltaTable(str(tmp_path / "t")).create_checkpoint()
    uri = f"az://bucket/{uuid.uuid4()}"
    store = open_store(uri, az.options)
    for path in (tmp_path / "t").rglob("*.*"):
        store.put_file(path.relative_to(tmp_path / "t").as_posix(), path)
    more = {"format": "delta", "options": az.options}
    for version, rows in ((None, 14), ("12", 13), ("3", 4)):
        given = {"version": version} if version else {}
        found = copied(tmp_path / f"copy{rows}", uri, **more, **given)[1]
        assert sorted(found["id"].to_pylist()) == list(range(rows))


def of_catalog(root: Path, warehouse: str) -> dict[str, Any]:
    properties = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": warehouse}
    load_catalog(None, **properties).create_namespace_if_not_exists("db")
    return {"format": "iceberg", "table": "db.answers", "catalog": properties}


@pytest.mark.parametrize("scheme", CLOUDS)
def test_an_iceberg_table_is_published_to_once_and_read_again(
    scheme: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue(scheme)
    account = "@testaccount.dfs.core.windows.net" if scheme == "az" else ""
    place = f"{'abfss' if scheme == 'az' else 'gs'}://bucket{account}/{uuid.uuid4()}"
    value, rows = of_catalog(tmp_path, place), all_kinds()
    there = PublishTarget.model_validate(value)

    def published(plan: str, observe: Callable[[str], None] = lambda step: None) -> str:
        sink = open_sink(there, "key", server.options)
        return sink.publish(published_rows(rows, plan * 64), observe)

    class Killed(BaseException):
        """As a signal would, it passes by whatever catches exceptions."""

    seen: set[str] = set()

    def stop(step: str) -> None:
        """Kill at each step once, whichever comes first."""
        if step not in seen:
            seen.add(step)
            raise Killed

    assert "is created" in open_sink(there, "key", server.options).check(rows.schema)
    for _ in range(4):
        with suppress(Killed):
            published("p", stop)
    assert seen == {"opened", "looked", "committed"}
    done: list[str] = []

    def other(step: str) -> None:
        if step == "looked" and not done:
            done.append(published("q"))

    assert published("p") and published("q", other) == done[0]
    read = {"catalog": value["catalog"], "options": server.options}
    found = copied(tmp_path / "copy", "db.answers", **read)[1]
    assert sorted(found["id"].to_pylist()) == [0, 0, 1, 1, 2, 2]
    assert str(found.slice(0, 3).sort_by("id").to_pylist()) == str(rows.to_pylist())
    merged = PublishTarget.model_validate({**value, "mode": "merge", "key": ["id"]})
    open_sink(merged, "key", server.options).publish(
        published_rows(rows.slice(2), "r" * 64), lambda step: None
    )
    store = open_store(place, server.options)
    newest = max(info.path for info in store.list() if info.path.endswith(".metadata.json"))
    folder = copied(
        tmp_path / "folder", f"{place}/{newest}", format="iceberg", options=server.options
    )
    assert sorted(folder[1]["id"].to_pylist()) == [0, 0, 1, 1, 2]


def test_a_bearer_token_is_refused_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"gs://b/t: deltalake takes no bearer_token\. Set serv"):
        delta_access("gs://b/t", {"bearer_token": "hush"})
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "hush")
    with pytest.raises(ConfigError, match="takes no bearer_token") as caught:
        delta_access("gs://b/t", {})
    assert "hush" not in str(caught.value)
    assert delta_access("gs://b/t", {"service_account": "f"}).options is not None
