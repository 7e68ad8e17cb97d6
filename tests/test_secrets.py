"""Keys that a job holds come out nowhere: not in records, logs, errors or Prefect's parameters."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import make_job
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.testing.utilities import prefect_test_harness
from s3server import start_s3

from prefect_raybatch import runs
from prefect_raybatch.errors import ConfigError, RayBatchError
from prefect_raybatch.job import BatchJob
from prefect_raybatch.secrets import MASK

SECRETS = {
    "key": "PLANTEDkey0001",
    "secret": "PLANTEDsecret0002",
    "token": "PLANTEDtoken0003",
    "inner": "PLANTEDinner0004",
    "env": "PLANTEDenv0005",
    "hf": "PLANTEDhf0006",
}


def job_with_secrets(tmp_path: Path, uri: str, **options: Any) -> BatchJob:
    given = {
        "key": SECRETS["key"],
        "secret": SECRETS["secret"],
        "token": SECRETS["token"],
        "client_kwargs": {"aws_session_token": SECRETS["inner"], "region_name": "us-east-1"},
        **options,
    }
    return make_job(
        source={"uri": str(tmp_path / "in.parquet"), "options": given},
        output={"uri": uri, "options": given},
        engine={"env": {"MY_API_KEY": SECRETS["env"], "A": "b"}, "hf_token": SECRETS["hf"]},
    )


def found_in(text: str) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret in text]


def test_a_run_directory_holds_no_key(tmp_path):
    pq.write_table(pa.table({"Company": ["a", "b"]}), tmp_path / "in.parquet")
    job = job_with_secrets(tmp_path, str(tmp_path / "out"))
    runs.plan_run(job, "k")
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert len(files) >= 3
    for path in files:
        data = path.read_bytes()
        if path.suffix == ".parquet":
            data += str(pq.read_table(path).to_pylist()).encode()
        if path.suffix == ".gz":
            data += gzip.decompress(data)
        assert found_in(data.decode("latin-1")) == [], path


@pytest.mark.parametrize("wrong", ["bucket", "credentials", "down"])
def test_errors_and_logs_hold_no_key(tmp_path, wrong, caplog, capfd):
    pq.write_table(pa.table({"Company": ["a"]}), tmp_path / "in.parquet")
    with start_s3(tmp_path / "s3") as server:
        server.create_bucket("there")
        options = {"endpoint_url": server.endpoint}
        if wrong == "bucket":
            options |= {"key": server.key, "secret": server.secret, "token": None}
            options["client_kwargs"] = {}
        if wrong == "down":
            options["endpoint_url"] = "http://127.0.0.1:9"
        bucket = "missing" if wrong == "bucket" else "there"
        job = job_with_secrets(tmp_path, f"s3://{bucket}/out", **options)
        store = runs.run_store(job, "k")
        type(store).retry_seconds, before = 1.0, type(store).retry_seconds
        try:
            with caplog.at_level(logging.DEBUG), pytest.raises(RayBatchError) as caught:
                runs.plan_run(job, "k")
        finally:
            type(store).retry_seconds = before
        known = {**SECRETS, "server": server.secret}
    error = caught.value
    shown = "".join(capfd.readouterr()) + str(error) + repr(error) + repr(error.__cause__)
    shown += str(pickle.dumps(error)) + repr(store)
    ours = "".join(r.getMessage() for r in caplog.records if r.name.startswith("prefect_raybatch"))
    assert [name for name, secret in known.items() if secret in shown + ours] == []


def test_as_json_keys_are_hidden_and_yaml_keeps_them(tmp_path):
    job = job_with_secrets(tmp_path, "s3://b/out", endpoint_url="http://store:9000")
    shown = job.model_dump_json()
    assert found_in(shown) == []
    value = json.loads(shown)
    assert value["output"]["options"]["endpoint_url"] == "http://store:9000"
    assert value["output"]["options"]["client_kwargs"]["region_name"] == "us-east-1"
    assert value["engine"]["env"] == {"MY_API_KEY": MASK, "A": "b"}
    assert BatchJob.from_dict(job.to_dict()) == job
    assert pickle.loads(pickle.dumps(job)) == job
    with pytest.raises(ConfigError, match="credentials_block"):
        BatchJob.from_dict(value)
    plain = make_job(output={"uri": "out", "options": {"anon": True, "endpoint_url": "http://x"}})
    assert BatchJob.from_dict(json.loads(plain.model_dump_json(by_alias=True))) == plain


def test_prefect_keeps_no_key_of_a_flow_called_in_python(tmp_path):
    with prefect_test_harness(server_startup_timeout=120):

        @flow
        def night(job: BatchJob) -> tuple[str, str]:
            return str(flow_run.id), job.output.options["secret"]

        job = job_with_secrets(tmp_path, "s3://b/out")
        run_id, secret = night(job)
        assert secret == SECRETS["secret"]
        with get_client(sync_client=True) as client:
            kept = client.read_flow_run(run_id).parameters
        assert found_in(json.dumps(kept)) == []
        assert kept["job"]["output"]["options"]["secret"] == MASK
