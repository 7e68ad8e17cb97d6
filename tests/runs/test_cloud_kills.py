"""Runs in Google Cloud Storage and on Azure that are killed again and again: each row once."""

from __future__ import annotations

import io
import random
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.azurite import running_azurite
from helpers.gcs_server import GcsServer, serving
from helpers.openai_server import openai_server
from runs.test_endpoint_kills import drivers, lived

from prefect_raybatch import open_run
from prefect_raybatch.api import publish_run
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.result.verify import verify
from prefect_raybatch.storage import open_store

pytestmark = [pytest.mark.whole, pytest.mark.timeout(600)]

ROWS, A_SHARD, KILLS = 200, 20, 6


@pytest.fixture(params=["gs", "az"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A folder in a bucket, and the options of its store."""
    uri = f"{request.param}://bucket/{uuid.uuid4()}"
    if request.param == "gs":
        with serving(GcsServer("secret-token", "bucket")) as google:
            yield uri, google.options
    else:
        (tmp_path / "azurite").mkdir()
        with running_azurite(tmp_path / "azurite", "bucket") as azure:
            yield uri, azure.options


def test_kills_lose_and_double_no_row(place: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    uri, options = place
    companies = [f"Company {n}" for n in range(ROWS)]
    # One is read in place, the other copied first.
    given = "in.parquet" if uri.startswith("gs") else "in.csv"
    write = pq.write_table if uri.startswith("gs") else csv.write_csv
    body = io.BytesIO()
    write(pa.table({"Company": companies}), body)
    open_store(uri, options).put(given, body.getvalue())
    chance, news = random.Random(46), threading.Condition()

    def works(number: int, body: object) -> None:
        with news:
            news.notify_all()
        time.sleep(0.05)  # what it simulates: the model's work

    with openai_server() as server:
        server.fault = works
        job = {
            "name": "cloud",
            "source": {
                "uri": f"{uri}/{given}",
                "rows_per_shard": A_SHARD,
                "options": options,
            },
            "prompt": {"template": "{Company}"},
            "output": {
                "uri": f"{uri}/out",
                "options": options,
                "publish": [{"format": "parquet", "uri": f"{uri}/published"}],
            },
            "engine": {"endpoint": {"url": server.url, "model": "large"}},
        }
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        with drivers(path, "night") as starter:
            for _ in range(KILLS):
                lived(server, starter, chance.randint(1, 60), news)
            while not lived(server, starter, 10 * ROWS, news):
                pass
    store = open_store(f"{uri}/out/night", options)
    assert verify(store).ok
    result = open_run(store.uri, options).dataset().to_table().to_pylist()
    assert sorted(row["Company"] for row in result) == sorted(companies)
    assert all(row["response"] == f"about {row['Company']}" for row in result)
    publish_run(BatchJob.from_yaml(str(path)), store.uri)
    target = open_store(f"{uri}/published", options)
    files = [info.path for info in target.list() if info.path.endswith(".parquet")]
    tables = [pq.read_table(io.BytesIO(target.read(path))) for path in files]
    assert sum(table.num_rows for table in tables) == ROWS
    secret = str(options.get("bearer_token") or options["account_key"]).encode()
    records = [info.path for info in store.list()]
    assert records and all(secret not in store.read(path) for path in records)
