"""What workers are sent for the keys of rows and for their answers: no secrets but those they
need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import MODEL, make_job
from ray import cloudpickle

from prefect_raybatch.api import plan_run
from prefect_raybatch.cluster import connect as cluster
from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.pipeline import Pipeline
from prefect_raybatch.compile.job import cluster_spec, compile_job, read_spec, size_spec
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.plan.row_keys import RowKeys, keying_of
from prefect_raybatch.runs.run import load_run, run_store
from prefect_raybatch.source import inventory
from prefect_raybatch.storage import open_store

INPUT = "PLANTEDinput"


def secret_job(folder: Path, kind: str = "parquet", **prompt: Any) -> BatchJob:
    """A job with a secret in each field that may hold one."""
    table = pa.table({"Company": ["a", "b"]})
    if kind == "parquet":
        pq.write_table(table, folder / "in.parquet")
    else:
        (folder / "in.csv").write_text("Company\na\nb\n", encoding="utf-8")
    return make_job(
        source={
            "uri": str(folder / f"in.{kind}"),
            "options": {"secret": INPUT, "client_kwargs": {"aws_session_token": INPUT}},
        },
        prompt={"template": "What is {Company}?", **prompt},
        engine={
            "env": {"OUR_API_KEY": "PLANTEDenv"},
            "hf_token": "PLANTEDhf",
            "hf_overrides": {"token": "PLANTEDargument"},
        },
        output={
            "uri": str(folder / "out"),
            "options": {"secret": "PLANTEDoutput"},
            "credentials_block": "s3-bucket/PLANTEDblock",
            "publish": [
                {"format": "delta", "uri": "s3://b/t", "options": {"secret": "PLANTEDtarget"}},
                {
                    "format": "iceberg",
                    "table": "a.b",
                    "catalog": {"name": "c", "credential": "PLANTEDcatalog"},
                },
            ],
        },
    )


def planted(value: object) -> list[str]:
    """The secrets in what Ray would send."""
    found = re.findall(rb"PLANTED[a-z]+", cloudpickle.dumps(value))
    return sorted({secret.decode() for secret in found})


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_the_keys_of_rows_are_made_without_the_jobs_secrets(tmp_path, kind):
    job = secret_job(tmp_path)
    store = open_store(str(tmp_path)) if kind == "csv" else None  # its rows are a snapshot
    keying, _ = keying_of(compile_job(job), MODEL)
    rows = RowKeys.of(compile_job(job), MODEL, inventory(read_spec(job.source)), store, keying)
    assert planted(rows) == ([INPUT] if store is None else [])
    assert not any(isinstance(value, BatchJob) for value in vars(rows).values())


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_each_stage_is_sent_the_secrets_that_it_needs_alone(tmp_path, kind):
    job = secret_job(tmp_path, kind)
    # A plan would look at the places that the result is published to.
    unpublished = job.output.model_copy(update={"publish": []})
    run = plan_run(job.model_copy(update={"output": unpublished}), "k")
    store = run_store(job.output, "k")
    ledger = Ledger(store)
    plan, shards = load_run(ledger, run)
    size = sized.for_attempt(size_spec(job), plan, cluster.this_machine(cluster_spec(job)))
    pipeline = Pipeline(compile_job(job), plan, shards, store, "a", size)
    prepare, spec, finish = pipeline.stages(False)
    assert planted(prepare) == [] and planted(finish) == []
    assert planted(pipeline.reader) == ([INPUT] if kind == "parquet" else [])
    assert planted(spec) == ["PLANTEDargument", "PLANTEDenv", "PLANTEDhf"]
