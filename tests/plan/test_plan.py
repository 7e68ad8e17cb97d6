"""Shards and the fingerprint: what makes a job another job, and what does not."""

from __future__ import annotations

import base64
import io
import json
import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import MODEL, job_dict, make_job
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from prefect_raybatch.errors import ConfigError, CorruptRun, PlanMismatch
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.plan_tables import (
    Shards,
    decode_schema,
    encode_schema,
    files_table,
    read_files,
    read_shards,
    shards_table,
    to_parquet,
)
from prefect_raybatch.ledger.records import QUARANTINE, InputFile, dump
from prefect_raybatch.ledger.same_job import check_same, difference
from prefect_raybatch.plan.fingerprint import (
    FINGERPRINTED,
    FREE,
    FREE_ENGINE_ARGUMENTS,
    fingerprint,
)
from prefect_raybatch.plan.plan import check_against_schema, make_plan, public_job, shard_starts
from prefect_raybatch.plan.resolved import Resolved

# --- shards -------------------------------------------------------------------------------------


@given(rows=st.integers(1, 3000), size=st.integers(1, 3500))
def test_shards_partition_the_rows_exactly(rows, size):
    shards = read_shards(shards_table(shard_starts(rows, size)))
    assert len(shards) == math.ceil(rows / size)
    at = 0
    for number in range(len(shards)):
        shard = shards[number]
        assert (shard.id, shard.start) == (number, at)
        assert shard.rows == (size if number < len(shards) - 1 else rows - at)
        at += shard.rows
    assert at == rows


def test_a_shard_beyond_the_plan_is_corrupt():
    shards = Shards(np.array([0, 5, 10]))
    for number in (-1, 2):
        with pytest.raises(CorruptRun, match=f"shard {number} is not in the plan"):
            shards[number]


@pytest.mark.parametrize("starts", [[0], [1, 5], [0, 5, 5], [0, 5, 3]])
def test_a_table_that_is_no_partition_is_corrupt(starts):
    with pytest.raises(CorruptRun, match="not a partition"):
        Shards(np.array(starts))


def table_bytes(**columns: Any) -> bytes:
    return to_parquet(pa.table(columns))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PAR1 this is not Parquet PAR1",
        table_bytes(shard=[0]),
        table_bytes(shard=pa.array([], pa.int32()), start=pa.array([], pa.int64()), rows=[]),
        table_bytes(shard=[0, 1], start=[0, 5], rows=[4, 5]),
        table_bytes(shard=[0, 1], start=[0, 5], rows=[6, 5]),
        table_bytes(shard=[0], start=[3], rows=[4]),
        table_bytes(shard=[0, 1], start=["a", "b"], rows=["c", "d"]),
        table_bytes(shard=[0, 1], start=[0, None], rows=[5, 5]),
    ],
)
def test_a_damaged_shard_table_is_a_corrupt_run(data):
    with pytest.raises(CorruptRun, match="shard table"):
        read_shards(data)


def test_the_file_table_round_trips():
    files = (
        InputFile("s3://b/ä.parquet", 10, '"etag"', None, 5),
        InputFile("/x/b.parquet", 1 << 40, None, 1_700_000_000_123_456_789, 0),
    )
    assert read_files(files_table(files)) == files
    new = (*files, replace(files[1], ctime_ns=5, inode=(1 << 64) - 1, footer="0" * 32))
    assert read_files(files_table(new)) == new
    # Those of before have fewer columns, and what has nothing to say is written like them.
    assert pq.read_schema(io.BytesIO(files_table(files))).names == [
        "uri",
        "size",
        "etag",
        "mtime_ns",
        "rows",
    ]
    with pytest.raises(CorruptRun, match="file table"):
        read_files(b"no")


def test_schemas_round_trip_and_damage_is_corrupt():
    schema = pa.schema([("a", pa.list_(pa.int8())), ("ß", pa.struct([("x", pa.string())]))])
    assert decode_schema(encode_schema(schema)).equals(schema)
    for text in ("", "%%%", base64.b64encode(b"nothing of ours").decode(), "ä"):
        with pytest.raises(CorruptRun, match="schema"):
            decode_schema(text)


# --- the fingerprint ----------------------------------------------------------------------------


def leaves(model: type[BaseModel], path: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        inner = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        found += leaves(inner[0], f"{path}{name}.") if inner else [f"{path}{name}"]
    return found


def listed(path: str, table: dict[str, str]) -> bool:
    """Whether the field itself or a group it is in stands in the table."""
    parts = path.split(".")
    return any(".".join(parts[:n]) in table for n in range(1, len(parts) + 1))


# Another value for each field, valid on its own; "extra" stands for what the engine passes on.
CHANGED: dict[str, Any] = {
    "name": "other",
    "source.uri": "data/other.parquet",
    "source.format": "parquet",
    "source.limit": 5,
    "source.columns": ["Company"],
    "source.rows_per_shard": 7,
    "source.options": {"anon": True},
    "source.credentials_block": "aws-credentials/x",
    "prompt.template": "Name {Company}",
    "prompt.system": "Be short.",
    "prompt.function": "helpers.functions:as_text",
    "prompt.on_null": "empty",
    "prompt.on_too_long": "truncate_left",
    "prompt.messages": "Chat",
    "prompt.chat_template": "{{ messages }}",
    "prompt.chat_template_kwargs": {"enable_thinking": False},
    "prompt.prefill": "It is",
    "prompt.continue_final_message": True,
    "prompt.tools": [{"type": "function", "function": {"name": "f"}}],
    "prompt.documents": "Papers",
    "prompt.second": "{Company}",
    "prompt.adapter_column": "Company",
    "sampling.temperature": 0.5,
    "sampling.max_tokens": 17,
    "sampling.choice": ["a"],
    "sampling.top_p": 0.5,
    "sampling.seed": 3,
    "engine.model": "owner/other",
    "engine.revision": "main",
    "engine.device": "cpu",
    "engine.replicas": 2,
    "engine.tensor_parallel_size": 2,
    "engine.pipeline_parallel_size": 2,
    "engine.task": "embed",
    "engine.adapter": "owner/adapter",
    "engine.adapters": {"a": "owner/adapter"},
    "engine.max_model_len": 100,
    "engine.max_model_len_percentile": 0.9,
    "engine.max_num_seqs": 8,
    "engine.max_num_batched_tokens": 99,
    "engine.batch_size": 5,
    "engine.max_concurrent_batches": 5,
    "engine.accelerator_type": "L4",
    "engine.num_cpus": 2,
    "engine.env": {"A": "b"},
    "engine.engines_per_gpu": 2,
    "engine.order": "input",
    "engine.deduplicate": False,
    "engine.stage": "ray.data.llm",
    "engine.dtype": "float16",
    "engine.quantization": "fp8",
    "engine.gpu_memory_utilization": 0.5,
    "engine.enforce_eager": True,
    "engine.hf_token": "secret",
    "output.uri": "elsewhere",
    "output.column": "answer",
    "output.columns": ["id"],
    "output.postprocess": "helpers.functions:shout",
    "output.output_schema": {"loud": "string"},
    "output.row_number": "row",
    "output.on_cut_off": "fail",
    "output.extras": ["finish_reason"],
    "output.probabilities": True,
    "output.reasoning_parser": "qwen3",
    "output.reasoning_column": "thinking",
    "output.tool_parser": "hermes",
    "output.tool_calls_column": "calls",
    "output.normalize": False,
    "output.vector_type": "float16",
    "output.schema_model": {"type": "object", "properties": {"a": {"type": "string"}}},
    "output.compact": False,
    "output.file_mb": 1,
    "output.options": {"anon": True},
    "output.credentials_block": "aws-credentials/x",
    "source.media_root": "/media",
    "source.version": "7",
    "source.filter": "id > 5",
