"""Delta tables on Google Cloud Storage and Azure: what is read and published there."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from helpers.clouds import CLOUDS, Cloud, cloud_server
from helpers.gcs_server import GcsServer, serving_apart
from helpers.publisher import ROWS
from helpers.table_sources import all_kinds, copied
from helpers.targets import published_rows
from pyiceberg.catalog import load_catalog
from s3server import proxy

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.publish import open_sink
from prefect_raybatch.storage import open_store
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
    place, keys, _ = delta_access(uri, options)
    return sorted(DeltaTable(place, storage_options=keys).to_pyarrow_table()["id"].to_pylist())


def started(uri: str, plan: str, options: dict[str, Any], *kill: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "helpers.publisher", uri, plan, *kill]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(options)}\n")
    process.stdin.flush()
    return process


def run_at_once(*processes: subprocess.Popen[str]) -> list[int]:
    """Let them begin together; return their exit statuses."""
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    return [process.returncode for process in processes]


def test_rows_are_published_once_on_google_and_read_again(gs: GcsServer, tmp_path: Path) -> None:
    uri, rows, options = f"gs://bucket/{uuid.uuid4()}", all_kinds(), gs.account_options
    sink = open_sink(delta(uri), "key", options)
    assert "is created" in sink.check(rows.schema)
    first = sink.publish(published_rows(rows), lambda step: None)
    again = open_sink(delta(uri), "key", options)
    assert "fit" in again.check(rows.schema)
    assert again.publish(published_rows(rows), lambda step: None) == first
    found = copied(tmp_path, uri, format="delta", options=options)[1]
    assert str(found.sort_by("id").to_pylist()) == str(rows.to_pylist())


@pytest.mark.whole
def test_publishers_at_once_and_killed_bring_each_plan_once(gs: GcsServer) -> None:
    uri, options = f"gs://bucket/{uuid.uuid4()}", gs.account_options
    killed = [started(uri, "a", options, step) for step in ("opened", "looked", "committed")]
    others = [started(uri, plan, options) for plan in "aabb"]
    statuses = run_at_once(*killed, *others)
    assert statuses[3:] == [0] * 4
    assert statuses[0] == -9, "it was killed, unless the rows were there before its step"
    assert ids(uri, options) == sorted(ROWS["id"].to_pylist() * 2)


@pytest.mark.whole
@pytest.mark.parametrize("how", ["lose", "reset", "503"])
def test_a_commit_whose_answer_is_lost_is_there_once(gs: GcsServer, how: str) -> None:
    uri, seen = f"gs://bucket/{uuid.uuid4()}", Counter[str]()

    def spoil(method: str, path: str, headers: Any) -> str:
        if method != "PUT" or "log" not in path:
            return "pass"
        seen[path] += 1
        return how if seen[path] == 1 else "pass"

    with proxy(gs, spoil) as between:
        options = {**gs.account_options, "base_url": between.endpoint}
        # deltalake sends no commit again by itself: the task that publishes is retried.
        ends = [run_at_once(started(uri, "a", options))[0] for _ in range(4)]
    assert ends[-1] == 0 and len(seen) >= 2, (ends, seen)
    assert ids(uri, gs.account_options) == ROWS["id"].to_pylist()


@pytest.mark.whole
def test_a_table_on_azure_is_read_at_any_version_and_not_published_to(
    az: Cloud, tmp_path: Path
) -> None:
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
    sink = open_sink(delta(uri), "key", az.options)
    with pytest.raises(ConfigError, match=r"az://bucket.*can be read but not published to"):
        sink.check(pa.schema([("id", pa.int64())]))


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
