"""Runs whose answers have a schema: what is said at plan, what a plan keeps, and the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.engines import with_answers
from helpers.small import (
    input_rows,
    job_dict,
    make_job,
    receipts,
    small_run,
    success_of,
)
from helpers.specs import check_columns

from prefect_raybatch.api import dry_run
from prefect_raybatch.cli import show
from prefect_raybatch.compile.job import compile_planned, public_job
from prefect_raybatch.compile.resolved import resolve
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.result.finalize import finalize
from prefect_raybatch.result.verify import verify
from prefect_raybatch.stages.block import tag
from prefect_raybatch.storage import open_store

SCHEMA = {
    "type": "object",
    "properties": {
        "zip": {"type": "string"},
        "staff": {"type": "integer"},
        "seat": {
            "type": "object",
            "properties": {"main": {"type": "boolean"}},
            "required": ["main"],
        },
        "by_year": {"type": "object", "additionalProperties": {"type": "number"}},
        "free": {},
    },
    "required": ["zip", "staff", "seat"],
}


def answer(number: int) -> str:
    found: dict[str, Any] = {"zip": str(number), "staff": number, "seat": {"main": True}}
    if number % 2:
        found |= {"by_year": {"1999": 1.5, "2000": 2}, "free": [1]}
    return json.dumps(found)


def output(root: Path, **fields: Any) -> dict[str, Any]:
    return {"uri": str(root), "schema_model": SCHEMA, **fields}


def test_a_run_with_typed_columns_is_finished_and_proved(tmp_path):
    run = small_run(tmp_path, rows=10, per_shard=5, output=output(tmp_path, columns=["id"]))
    for shard in range(run.plan.shards):
        unit = run.whole(shard)
        texts = [answer(5 * shard + i) for i in range(unit.rows)]
        block = with_answers(tag(input_rows(5 * shard, 5), unit), [None] * 5, texts)
        (receipt,) = receipts(run.finish()(block))
        assert receipt.lost is None, receipt.lost
        run.ledger.commit(run.plan, 5, [receipt])
    parts = finalize(run.ledger, run.plan, run.shards, "_row", 1 << 20).parts
    run.ledger.succeed(success_of(run, parts))
    assert verify(open_store(str(tmp_path))).ok
    made = pq.read_table(tmp_path / "data/part-00000.parquet")
    assert made.column_names == ["id", *SCHEMA["properties"], "_row"]
    assert made.schema.field("staff") == pa.field("staff", pa.int64(), nullable=False)
    assert pa.types.is_struct(made.schema.field("seat").type)
    assert made["staff"].to_pylist() == list(range(10))
    assert made["by_year"].to_pylist()[:2] == [None, [("1999", 1.5), ("2000", 2.0)]]
    assert made["free"].to_pylist()[:2] == [None, "[1]"]


def test_the_plan_keeps_the_schema_that_a_file_was_when_it_was_made(tmp_path):
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(SCHEMA))
    job = make_job(output=output(tmp_path, schema_model=str(path)))
    resolved = resolve(job)
    text = resolved.identity.parts["output.schema_model"]
    assert list(json.loads(text)["properties"]) == list(SCHEMA["properties"])
    assert (
        resolved.identity.fingerprint
        == resolve(make_job(output=output(tmp_path))).identity.fingerprint
    )
    plan = small_run(tmp_path / "run", output=output(tmp_path)).plan
    # Records sort the names in them; what a job means by it stays.
    kept = json.dumps(public_job(resolved.job), sort_keys=True)
    again = BatchJob.from_dict(json.loads(kept))
    assert again.output.answer_form == text
    path.write_text(json.dumps({**SCHEMA, "title": "another"}))
    assert resolve(job).identity.fingerprint != resolved.identity.fingerprint
    assert compile_planned(job, plan).finish.schema == plan.parts["output.schema_model"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "zip"),
        ({"columns": ["id"], "row_number": "staff"}, "staff"),
        ({"columns": ["finish"], "extras": ["finish_reason"], "row_number": "finish_reason"}, None),
        ({"columns": ["prompt_tokens"], "extras": ["prompt_tokens"]}, "prompt_tokens"),
    ],
)
def test_columns_that_would_be_written_twice_are_named(tmp_path, fields, name):
    names = ["id", "Company", "zip", "finish", "prompt_tokens"]
    job = make_job(output=output(tmp_path, **fields))
    with pytest.raises(ConfigError) as caught:
        check_columns(job, pa.schema([(name, pa.string()) for name in names]))
    assert f"output: column {name or 'finish_reason'!r}" in str(caught.value)


def test_the_plan_shows_columns_and_types(tmp_path, capsys):
    pq.write_table(input_rows(0, 3), tmp_path / "in.parquet")
    value = job_dict(
        source={"uri": str(tmp_path / "in.parquet")},
        output=output(tmp_path / "out", extras=["output_tokens"]),
    )
    found = dry_run(BatchJob.from_dict(value))
    assert dict(found.result) == {
        "zip": "string not null",
        "staff": "int64 not null",
        "seat": "struct<main: bool not null> not null",
        "by_year": "map<string, double>",
        "free": "string (free as JSON text, since any type is allowed)",
        "output_tokens": "int64",
        "_row": "int64",
    }
    show.show_plan(found)
    assert "staff: int64 not null" in capsys.readouterr().out
    several = {**value, "sampling": {"n": 2, "temperature": 1.0, "logprobs": 1}}
    kinds = dict(dry_run(BatchJob.from_dict(several)).result)
    assert kinds["response"].startswith("list<item: struct<zip: string not null, staff: int64")
    assert kinds["logprobs"].startswith("list<item: list<item: struct<token: string, id: int32")
