"""Shards and the fingerprint: what makes a job another job, and what does not."""

from __future__ import annotations

import base64
import io
import json
import math
from dataclasses import fields, replace
from typing import Any, get_args, get_origin

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small import MODEL, job_dict, make_job
from helpers.specs import check_columns, new_plan_of
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from prefect_raybatch.api.sending import sendable
from prefect_raybatch.api.submission import check_recorded_job
from prefect_raybatch.compile.job import public_job
from prefect_raybatch.compile.resolved import Resolved, fingerprint
from prefect_raybatch.errors import ConfigError, CorruptRun, PlanMismatch
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.counted_fields import FINGERPRINTED, FREE, FREE_ENGINE_ARGUMENTS
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
from prefect_raybatch.plan.plan import (
    shard_starts,
    shard_work,
)

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


def test_the_work_of_shards_follows_from_the_bytes_of_their_rows():
    starts = shard_starts(100, 30)
    work = shard_work(starts, ((10, 100), (50, 5000), (40, 40)))
    assert work is not None and work.tolist() == [2100, 3000, 30, 10]
    kept = read_shards(shards_table(starts, work))
    assert kept.work is not None and kept.work.tolist() == work.tolist()
    assert kept.starts.tolist() == starts.tolist()


@pytest.mark.parametrize(
    "weights",
    [(), ((50, 500), (50, 500)), ((50, 500), (50, 600)), ((99, 1), (2, 9999))],
)
def test_shards_that_are_alike_or_not_known_keep_the_order_of_the_input(weights):
    starts = shard_starts(100, 30)
    assert shard_work(starts, weights) is None
    assert read_shards(shards_table(starts)).work is None


@pytest.mark.parametrize("work", [[1, -2], [1.5, 2.0], ["a", "b"]])
def test_work_that_is_no_number_of_bytes_is_corrupt(work):
    data = table_bytes(shard=[0, 1], start=[0, 5], rows=[5, 5], work=work)
    with pytest.raises(CorruptRun, match="column work of the shard table must hold integers"):
        read_shards(data)


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
    for names in (["uri"], [field.name for field in fields(InputFile)][:-1]):
        sink = io.BytesIO()
        pq.write_table(pq.read_table(io.BytesIO(files_table(new))).select(names), sink)
        with pytest.raises(CorruptRun, match="file table"):
            read_files(sink.getvalue())
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
        if get_origin(field.annotation) is list:  # of groups: changed as one
            inner = []
        found += leaves(inner[0], f"{path}{name}.") if inner else [f"{path}{name}"]
    return found


def listed(path: str, table: dict[str, str]) -> bool:
    """Whether the field itself or a group it is in stands in the table."""
    parts = path.split(".")
    return any(".".join(parts[:n]) in table for n in range(1, len(parts) + 1))


POD = {"template": {"spec": {"containers": [{"image": "b"}]}}}
WORKERS = [{**POD, "groupName": "gpu", "replicas": 2}]
ON_KUBERNETES: dict[str, Any] = {
    **{"image": "b", "workers": 2, "gpus_per_worker": 2, "worker_cpu": "2", "shm": "2Gi"},
    **{"worker_memory": "2Gi", "head_cpu": "3", "head_memory": "2Gi", "service_account": "b"},
    **{"env": {"TZ": "UTC"}, "secrets": ["b"], "manifest_file": "b.yaml", "namespace": "b"},
    **{"context": "b", "url": "http://b:1", "ready_within": "1h", "lease": "2h", "keep": "1h"},
    "manifest": {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "spec": {"headGroupSpec": POD, "workerGroupSpecs": WORKERS},
    },
}
# Another value for each field, valid on its own; "extra" stands for what the engine passes on.
CHANGED: dict[str, Any] = {
    "name": "other",
    "source.uri": "data/other.parquet",
    "source.format": "parquet",
    "source.served_as": ["large"],
    "source.limit": 5,
    "source.sample": 5,
    "source.sample_seed": 7,
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
    "prompt.special_tokens_in_rows": "allow",
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
    "engine.learn": False,
    "engine.deduplicate": False,
    "engine.early_stop": "off",
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
    "output.keep_answers": 30.0,
    "reuse": "latest",
    "output.escalate.to": {"model": "demo", "max_num_seqs": 8, "seed": 1},
    "output.escalate.when.probability_below": 0.5,
    "output.escalate.when.logprob_below": -2.0,
    "output.escalate.when.fails_schema": True,
    "output.escalate.check": 20,
    "engine.classifier": __file__,  # any file: its bytes count
    "output.escalate.at_most": 0.1,
    "output.schema_model": {"type": "object", "properties": {"a": {"type": "string"}}},
    "output.compact": False,
    "output.file_mb": 1,
    "output.read_back": True,
    "output.publish": [{"format": "delta", "uri": "table"}],
    "output.options": {"anon": True},
    "output.credentials_block": "aws-credentials/x",
    "source.media_root": "/media",
    "source.version": "7",
    "source.filter": "id > 5",
    "source.catalog": {"name": "lake"},
    "source.query": "SELECT 2",
    "source.types": {"id": "int32"},
    "source.config": "fr",
    "source.split": "test",
    "source.web.max_mb": 7,
    "source.web.allow_private": True,
    "source.csv.delimiter": ";",
    "source.csv.encoding": "cp1252",
    "source.csv.quote": "'",
    "source.csv.escape": "\\",
    "source.csv.header": False,
    "source.csv.names": ["id"],
    "source.csv.skip_rows": 1,
    "source.csv.null_values": ["NULL"],
    "prompt.images.columns": ["a"],
    "prompt.images.resize": [225, 225],
    "prompt.images.per_row": 3,
    "prompt.images.max_pixels": 1000,
    "prompt.images.max_bytes": 1000,
    "prompt.images.fetch_seconds": 3.0,
    "prompt.images.allow_private": True,
    "limits.max_failed_fraction": 0.5,
    "limits.max_failed_rows": 7,
    "limits.min_rows": 3,
    "limits.engine_deaths": 3,
    "limits.warn_failed": 5,
    "limits.stall_seconds": 90.0,
    "limits.stall_start_seconds": 60.0,
    "limits.fail_on_stall": True,
    "limits.deadline": "6h",
    "engine.endpoint.block": "hosted-model/large",
    "engine.endpoint.api": "completions",
    "engine.endpoint.url": "https://other.example.com/v1",
    "engine.endpoint.model": "large",
    "engine.endpoint.key": "${OTHER_KEY}",
    "engine.endpoint.requests_per_minute": 60,
    "engine.endpoint.tokens_per_minute": 60_000,
    "engine.endpoint.max_in_flight": 8,
    "engine.endpoint.timeout": 30.0,
    "engine.endpoint.price_in": 0.5,
    "engine.endpoint.price_out": 1.5,
    "engine.endpoint.batch": True,
    "limits.hang_seconds": 30.0,
    "limits.function_seconds": 30.0,
    "limits.max_cost": 9.0,
    "limits.min_agreement": 0.9,
    "quality.golden": "golden.csv",
    "quality.key": ["Company"],
    "quality.answer": "right",
    "quality.at_least": 0.9,
    "quality.judge.model": "demo",
    "quality.judge.endpoint": {"url": "https://api.example.com/v1", "model": "large"},
    "quality.judge.engine": {"max_num_seqs": 8},
    "quality.judge.prompt": "Is {Company} in {response}?",
    "quality.judge.sample": 50,
    "cluster.address": "auto",
    "cluster.block": "ray-cluster/gpus",
    "cluster.prepare.num_cpus": 2,
    "cluster.prepare.concurrency": 2,
    "cluster.prepare.memory": 2,
    "cluster.finish.num_cpus": 2,
    "cluster.finish.concurrency": 2,
    "cluster.finish.memory": 2,
    "cluster.job_server": "http://head:8265",
    "cluster.on_crash": "stop",
    "cluster.price_per_gpu_hour": 2.0,
    "cluster.price_by_card": {"H100": 2.5},
    "cluster.currency": "EUR",
    **{f"cluster.kubernetes.{name}": value for name, value in ON_KUBERNETES.items()},
}
# What must be there for the changed value to be valid, in both jobs that are compared.
ENDPOINT = {"engine.endpoint.url": "https://api.example.com/v1", "engine.endpoint.model": "small"}
WITH_IMAGES = {"prompt.images.columns": ["image"]}
CASCADE = {"output.escalate.to": {"model": "demo"}, "output.escalate.when.logprob_below": -1.0}
JUDGE = {"quality.judge.model": "someone/judge", "quality.judge.prompt": "Is {response} right?"}
NEEDS: dict[str, dict[str, Any]] = {
    **{f"quality.judge.{name}": JUDGE for name in ("model", "engine", "prompt", "sample")},
    "quality.judge.endpoint": {
        "quality.judge.endpoint": {"url": "https://api.example.com/v1", "model": "small"},
        "quality.judge.prompt": "Is {response} right?",
    },
    "output.escalate.to": CASCADE,
    "output.escalate.when.logprob_below": CASCADE,
    "output.escalate.at_most": CASCADE,
    "output.escalate.check": CASCADE,
    "engine.classifier": {"engine.task": "embed"},
    "output.escalate.when.fails_schema": {
        **CASCADE,
        "output.schema_model": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
    "output.escalate.when.probability_below": {
        "output.escalate.to": {"model": "demo"},
        "output.escalate.when.probability_below": 0.9,
        "sampling.choice": ["a", "b"],
    },
    "source.served_as": {"source.format": "openai_batch", "prompt.template": None},
    "source.sample_seed": {"source.sample": 5},
    "source.media_root": WITH_IMAGES,
    **{
        f"quality.{name}": {"quality.golden": "golden.csv"}
        for name in ("key", "answer", "at_least")
    },
    "limits.max_cost": {"cluster.price_per_gpu_hour": 2.0},
    **{
        f"cluster.kubernetes.{name}": {"cluster.kubernetes.image": "a"}
        for name in ON_KUBERNETES
        if not name.startswith("manifest")
    },
    **{
        path: {**ENDPOINT, "engine.model": "demo"}
        for path in CHANGED
        if path.startswith("engine.endpoint.")
    },
    "source.query": {"source.uri": "sqlite:///a.db", "source.query": "SELECT 1"},
    "source.types": {"source.uri": "sqlite:///a.db", "source.query": "SELECT 1"},
    "source.config": {"source.uri": "hf://datasets/team/rows", "source.config": "de"},
    **{
        f"prompt.images.{name}": WITH_IMAGES
        for name in (
            "resize",
            "per_row",
            "max_pixels",
            "max_bytes",
            "fetch_seconds",
            "allow_private",
        )
    },
    "prompt.continue_final_message": {"prompt.messages": "Chat"},
    "prompt.second": {"engine.task": "score", "prompt.second": "a"},
    "prompt.adapter_column": {
        "engine.adapters": {"a": "owner/adapter"},
        "prompt.adapter_column": "id",
    },
    "engine.adapters": {
        "engine.adapters": {"a": "owner/another"},
        "prompt.adapter_column": "id",
    },
    "output.normalize": {"engine.task": "embed"},
    "output.vector_type": {"engine.task": "embed"},
    "engine.max_model_len_percentile": {"engine.max_model_len": "auto"},
    "output.reasoning_column": {"output.reasoning_parser": "qwen3"},
    "output.tool_calls_column": {"output.tool_parser": "hermes"},
    "output.output_schema": {"output.postprocess": "helpers.functions:shout"},
    "output.probabilities": {"sampling.choice": ["a", "b"]},
}


def job_with(**fields: Any) -> BatchJob:
    value: dict[str, Any] = job_dict()
    for path, new in fields.items():
        *groups, last = path.split(".")
        at = value
        for group in groups:
            at = at.setdefault(group, {})
        at[last] = new
        if path in ("prompt.function", "prompt.messages"):
            del at["template"]
    return BatchJob.from_dict(value)


def test_each_field_is_in_exactly_one_table_with_a_reason():
    for path in leaves(BatchJob):
        assert listed(path, FINGERPRINTED) != listed(path, FREE), path
    known = {*leaves(BatchJob), "engine.(extra)"}
    for table in (FINGERPRINTED, FREE):
        for path, reason in table.items():
            assert reason, path
            assert any(k == path or k.startswith(f"{path}.") for k in known), path


def test_each_field_is_tried_below():
    assert set(leaves(BatchJob)) <= set(CHANGED)


@pytest.mark.parametrize("path", CHANGED)
def test_a_field_changes_the_fingerprint_as_its_table_says(path):
    needs = NEEDS.get(path, {})
    before = fingerprint(job_with(**needs), MODEL).fingerprint
    after = fingerprint(job_with(**{**needs, path: CHANGED[path]}), MODEL).fingerprint
    name = path.removeprefix("engine.")
    if path in leaves(BatchJob):
        free = listed(path, FREE)
    else:  # an extra field of sampling or engine
        free = path.startswith("engine.") and name in FREE_ENGINE_ARGUMENTS
    assert (before == after) is free


def test_only_a_job_that_fails_cut_off_answers_is_another_job_by_it():
    plain = fingerprint(job_with(), MODEL)
    assert fingerprint(job_with(**{"output.on_cut_off": "keep"}), MODEL) == plain
    assert plain.parts["output.on_cut_off"] is None


def test_the_fingerprint_of_the_same_job_is_the_same_in_another_process_and_order():
    value = job_dict(sampling={"seed": 1, "top_p": 0.5}, engine={"dtype": "half", "seed": 2})
    turned = {k: dict(reversed(v.items())) if isinstance(v, dict) else v for k, v in value.items()}
    first = fingerprint(BatchJob.from_dict(value), MODEL)
    second = fingerprint(BatchJob.from_dict(dict(reversed(turned.items()))), dict(MODEL))
    assert first == second
    assert len(first.fingerprint) == 64


def test_one_file_and_a_list_of_it_are_the_same_input():
    one = make_job(source={"uri": "a"})
    assert fingerprint(one) == fingerprint(make_job(source={"uri": ["a"]}))


def test_the_contents_of_a_local_model_count_and_the_commit_of_a_hub_name_does_not():
    job = make_job()
    other = {**MODEL, "identity": "1" * 64}
    assert fingerprint(job, MODEL).fingerprint != fingerprint(job, other).fingerprint
    hub = {"source": "owner/name", "revision": "abc", "identity": "owner/name@abc"}
    later = {"source": "owner/name", "revision": "def", "identity": "owner/name@def"}
    assert (
        fingerprint(job, hub).fingerprint
        == fingerprint(job, later).fingerprint
        == fingerprint(job, None).fingerprint
    )


def test_the_source_of_a_user_function_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "changing_functions.py"
    module.write_text("def ask(row):\n    return helper()\n\ndef helper():\n    return 'a'\n")
    job = make_job(prompt={"function": "changing_functions:ask"})
    before = fingerprint(job)
    files = [InputFile("a", 1, None, 1, 5)]
    plan, _ = new_plan_of(Resolved.of(job, MODEL), "k", files, SCHEMA, 10.0, False)
    module.write_text("def ask(row):\n    return helper()\n\ndef helper():\n    return 'b'\n")
    after = fingerprint(job)
    assert (
        before.fingerprint != after.fingerprint
    )  # a helper beside the function decides answers too
    assert difference(before.parts, after.parts)[0].startswith("prompt.function.source: ")
    with pytest.raises(PlanMismatch) as refused:
        check_same(plan, after, "run", accepts=True)
    assert "prompt.function.source: the code of ask in changing_functions changed" in str(
        refused.value
    )
    assert "--accept prompt.function.source" in str(refused.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        ("helpers.functions:nothing", "helpers.functions has no function 'nothing'"),
        ("helpers.functions:not_callable", "has no function 'not_callable'"),
    ],
)
def test_a_function_that_cannot_be_had_is_a_config_error(function, said):
    with pytest.raises(ConfigError) as caught:
        fingerprint(make_job(prompt={"function": function}))
    assert "prompt.function" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason", "line"),
    [
        ("def ask(row:\n    return 1\n", "SyntaxError", 1),
        ("LABELS = {}\nask = LABELS['missing']\n", "KeyError: 'missing'", 2),
        ("import sys\nsys.exit('not here\\nbut there')\n", "SystemExit: not here", 2),
    ],
)
def test_a_module_that_fails_on_import_is_told_in_a_line(code, reason, line, tmp_path, monkeypatch):
    name = f"fails_on_import_{reason[:3].lower()}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for job in (
        {"prompt": {"function": f"{name}:ask"}},
        {"output": {"uri": "out", "schema_model": f"{name}:Model"}},
    ):
        with pytest.raises(ConfigError) as caught:
            fingerprint(make_job(**job))
        message = str(caught.value)
        assert f"fails with {reason}" in message and f"{name}.py, line {line})" in message
        assert "\n" not in message or "schema_model" in message


# --- another job --------------------------------------------------------------------------------


def test_the_difference_names_each_field_once():
    old = fingerprint(make_job(sampling={"seed": 1}), MODEL).parts
    job = make_job(
        sampling={"max_tokens": 99}, prompt={"template": "x" * 1000}, engine={"dtype": "half"}
    )
    lines = difference(old, fingerprint(job, MODEL).parts)
    assert "sampling.max_tokens: 16 -> 99" in lines
    assert "sampling.seed: 1 -> None" in lines
    assert "engine.dtype: None -> 'half'" in lines
    assert len(lines) == 4
    assert all(len(line) < 300 for line in lines)
    assert difference(old, json.loads(dump(old))) == []  # as it comes back from plan.json


def test_a_mismatch_says_where_what_and_the_remedy():
    job = make_job()
    plan, _ = new_plan_of(
        Resolved.of(job, MODEL), "k", [InputFile("a", 1, None, 1, 5)], SCHEMA, 10.0, False
    )
    check_same(plan, fingerprint(job, MODEL), "/run")
    other = fingerprint(make_job(prompt={"template": "Other {Company}"}), MODEL)
    with pytest.raises(PlanMismatch) as caught:
        check_same(plan, other, "/run")
    text = str(caught.value)
    assert "/run" in text and "--run-key" in text
    assert "prompt.template: 'What is {Company}?' -> 'Other {Company}'" in text


def test_a_difference_in_a_hidden_part_of_a_url_is_refused_by_name():
    """A short hash tells the URLs apart, so another difference can still be accepted."""

    def job(token: str, template: str = "{Company}") -> BatchJob:
        source = {"uri": f"https://h/a.csv?token={token}"}
        return make_job(source=source, prompt={"template": template})

    files = [InputFile("a", 1, None, 1, 5)]
    plan, _ = new_plan_of(Resolved.of(job("s3cret"), MODEL), "k", files, SCHEMA, 10.0, False)
    for other in (job("another"), job("another", "{Company}?")):
        with pytest.raises(PlanMismatch, match=r"source\.uri: .*\.\.\.#\w+'\] -> ") as caught:
            check_same(plan, fingerprint(other, MODEL), "/run", left_out=["prompt.template"])
        assert "prompt.template" not in str(caught.value) and "s3cret" not in str(caught.value)
    changed = fingerprint(job("s3cret", "{Company}?"), MODEL)
    check_same(plan, changed, "/run", left_out=["prompt.template"])


@pytest.mark.parametrize("count", [1, 1_001])
def test_a_recorded_job_without_the_hidden_part_of_a_url_is_the_plans(count):
    """A job server gets the URL without it, and the plan has only the start of a long list."""

    def job(host: str) -> BatchJob:
        return make_job(source={"uri": [f"https://{host}/{n}?token=s3cret" for n in range(count)]})

    files = [InputFile("a", 1, None, 1, 5)]
    plan, _ = new_plan_of(Resolved.of(job("h"), MODEL), "k", files, SCHEMA, 10.0, False)
    check_recorded_job(BatchJob.from_dict(sendable(job("h"))), (), plan, "a record")
    with pytest.raises(CorruptRun, match=r"source\.uri: .*//other/0"):
        check_recorded_job(BatchJob.from_dict(sendable(job("other"))), (), plan, "a record")


def test_a_hidden_argument_of_the_larger_model_may_not_change_beside_an_accepted_difference():
    def job(key: str, template: str = "{Company}") -> BatchJob:
        to = {"model": "demo", "model_loader_extra_config": {"a": key}}
        output = {"uri": "out", "escalate": {"to": to, "when": {"logprob_below": -1}}}
        return make_job(output=output, prompt={"template": template})

    files = [InputFile("a", 1, None, 1, 5)]
    plan, _ = new_plan_of(Resolved.of(job("s3cret"), MODEL), "k", files, SCHEMA, 10.0, False)
    other = fingerprint(job("another", "{Company}?"), MODEL)
    with pytest.raises(PlanMismatch, match=r"output\.escalate\.to\.engine\.\w+\.a: changed"):
        check_same(plan, other, "/run", left_out=["prompt.template"])


@pytest.mark.parametrize(("value", "counts"), [("1", True), ("0", False), ("", False)])
def test_batch_invariant_kernels_make_another_job_where_they_are_on(value, counts):
    plain = fingerprint(job_with(), MODEL)
    found = fingerprint(job_with(**{"engine.env": {"VLLM_BATCH_INVARIANT": value}}), MODEL)
    assert (found.fingerprint != plain.fingerprint) is counts
    assert fingerprint(job_with(**{"engine.env": {"OMP_NUM_THREADS": "2"}}), MODEL) == plain


# --- the plan -----------------------------------------------------------------------------------

SCHEMA = pa.schema([("id", pa.int64()), ("Company", pa.string()), ("Country", pa.string())])


def test_a_plan_names_its_tables_by_their_hash_and_reads_back():
    files = [InputFile("a", 1, None, 1, 7), InputFile("b", 1, None, 1, 0)]
    job = make_job(source={"uri": "in", "rows_per_shard": 3})
    plan, tables = new_plan_of(Resolved.of(job, MODEL), "k", files, SCHEMA, 10.0, snapshot=True)
    assert (plan.rows, plan.rows_per_shard, plan.shards, plan.snapshot) == (7, 3, 3, True)
    assert set(tables) == {plan.shards_table, plan.files_table}
    assert read_shards(tables[plan.shards_table]).starts.tolist() == [0, 3, 6, 7]
    assert read_files(tables[plan.files_table]) == tuple(files)
    assert decode_schema(plan.input_schema).equals(SCHEMA)
    again, same = new_plan_of(Resolved.of(job, MODEL), "k", files, SCHEMA, 10.0, snapshot=True)
    assert same == tables and again.fingerprint == plan.fingerprint


def test_secrets_stay_out_of_the_run_directory():
    job = make_job(
        source={"uri": "s3://b/k", "options": {"key": "SECRET-1", "secret": "SECRET-2"}},
        output={"uri": "s3://b/o", "options": {"token": "SECRET-3"}},
        engine={"env": {"HF_TOKEN": "SECRET-4"}, "hf_token": "SECRET-5"},
    )
    plan, tables = new_plan_of(
        Resolved.of(job, MODEL), "k", [InputFile("a", 1, None, 1, 5)], SCHEMA, 1.0, False
    )
    assert b"SECRET" not in plan.to_bytes() + b"".join(tables.values())
    assert public_job(job)["source"] == {"uri": "s3://b/k"}
    assert job.source.options["key"] == "SECRET-1"  # the job itself is left as it was


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            {"prompt": {"template": "{Compny}"}},
            ["prompt.template", "'Compny'", "did you mean 'Company'", "Country"],
        ),
        ({"prompt": {"template": "{zzz}"}}, ["no column 'zzz' (columns: id, Company, Country)"]),
        (
            {"prompt": {"template": "Hi"}},
            ["prompt.template", "no {Column}", "{id} for the value of a row (columns: id, Company"],
        ),
        (
            {"prompt": {"template": "Hi {{Company}}"}},
            ["{{Company}} is literal text. Write {Company} for the value of a row"],
        ),
        (
            {"prompt": {"template": "Hi"}, "sampling": {"temperature": 1, "seed": 7}},
            ["all rows make the same request and get the same answer"],
        ),
        (
            {"prompt": {"template": "Hi"}, "engine": {"model": "a/b", "task": "embed"}},
            ["all rows make the same request and get the same answer"],
        ),
        ({"output": {"uri": "out", "file_mb": 4097}}, ["output.file_mb: 4097", "than 4096"]),
        (
            {"output": {"uri": "o", "columns": ["id", "country"]}},
            ["output.columns", "'country'", "did you mean 'Country'"],
        ),
        (
            {"output": {"uri": "o", "column": "Company"}},
            ["'Company' is also an input column", "output.column"],
        ),
        ({"output": {"uri": "o", "row_number": "id"}}, ["'id' is also", "output.row_number"]),
        (
            {"output": {"uri": "o", "postprocess": "m:f", "schema": {"id": "string"}}},
            ["'id' is also", "output.schema"],
        ),
        ({"output": {"uri": "o", "column": "_row"}}, ["'_row'", "output.row_number"]),
        (
            {"output": {"uri": "o", "postprocess": "m:f", "schema": {"_row": "string"}}},
            ["'_row'", "output.row_number"],
        ),
        ({"output": {"uri": "o", "columns": ["id", "id"]}}, ["output.columns", "'id'"]),
        *(
            (
                {"output": {"uri": "o", "row_number": name}},
                ["output.row_number", f"'{name}' is a column of the quarantine files"],
            )
            for name in QUARANTINE
        ),
        ({"output": {"uri": "o", "row_number": "__rb_pos"}}, ["'__rb_pos' cannot be written"]),
        (
            {"output": {"uri": "o", "postprocess": "m:f", "schema": {"__rb_pos": "int32"}}},
            ["'__rb_pos' cannot be written", "output.schema"],
        ),
    ],
)
def test_columns_that_do_not_fit_the_input_are_named(groups, said):
    with pytest.raises(ConfigError) as caught:
        check_columns(make_job(**groups), SCHEMA)
    for word in said:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["logprob_token_ids", "flat_logprobs"])
def test_what_no_result_holds_is_refused_for_a_new_run_and_no_job_of_before(name):
    job = make_job(sampling={name: [5]})  # a run that began with it is read and continued
    with pytest.raises(ConfigError, match=rf"sampling\.{name} is not supported"):
        check_columns(job, SCHEMA)


def test_a_budget_of_thinking_needs_to_know_how_a_model_thinks():
    sampling = {"thinking_token_budget": 64}
    with pytest.raises(ConfigError, match=r"sampling\.thinking_token_budget .*reasoning_parser"):
        check_columns(make_job(sampling=sampling), SCHEMA)
    for engine in (
        {"reasoning_parser": "qwen3"},
        {"reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}},
        {"structured_outputs_config": {"reasoning_parser": "qwen3"}},
    ):
        check_columns(make_job(sampling=sampling, engine=engine), SCHEMA)


def test_a_step_that_holds_fewer_tokens_than_there_are_sequences():
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 63}
    with pytest.raises(
        ConfigError, match=r"engine\.max_num_batched_tokens \(63\) must be at least"
    ):
        check_columns(make_job(engine=engine), SCHEMA)
    with pytest.raises(ConfigError, match="must be at least"):
        check_columns(make_job(engine={**engine, "task": "embed"}), SCHEMA)
    check_columns(make_job(engine={**engine, "max_num_seqs": 63}), SCHEMA)
    check_columns(make_job(engine={**engine, "max_num_seqs": "auto"}), SCHEMA)


def test_a_step_that_holds_no_whole_prompt_where_prompts_are_not_processed_in_parts():
    engine = {"max_model_len": 4096, "max_num_batched_tokens": 4095}
    with pytest.raises(ConfigError, match=r"engine\.max_num_batched_tokens \(4,095\) .*\(4,096\)"):
        check_columns(make_job(engine={**engine, "enable_chunked_prefill": False}), SCHEMA)
    check_columns(make_job(engine={**engine, "enable_chunked_prefill": True}), SCHEMA)
    check_columns(make_job(engine=engine), SCHEMA)


@pytest.mark.parametrize(
    "output",
    [
        {"uri": "o"},
        {"uri": "o", "columns": []},
        {"uri": "o", "columns": ["Country"], "column": "Company"},  # the input's is left out
        {"uri": "o", "postprocess": "m:f", "column": "Company"},  # no answer column is written
        {"uri": "o", "column": "error"},  # of the quarantine's files alone
    ],
)
def test_columns_that_fit(output):
    check_columns(make_job(output=output), SCHEMA)


CHATS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@pytest.mark.parametrize(
    ("prompt", "kind", "said"),
    [
        ({"messages": "chat"}, pa.string(), None),
        ({"messages": "chat"}, pa.large_string(), None),
        ({"messages": "chat"}, pa.dictionary(pa.int32(), pa.string()), None),
        ({"messages": "chat"}, CHATS, None),
        ({"messages": "chat"}, pa.large_list(CHATS.value_type), None),
        ({"messages": "chat"}, pa.list_(pa.map_(pa.string(), pa.string())), None),
        ({"messages": "chat"}, pa.int64(), "column 'chat' is of type int64, but must hold lists"),
        ({"messages": "chat"}, pa.list_(pa.string()), "{role, content}, or JSON text"),
        ({"messages": "chat"}, pa.list_(pa.struct([("from", pa.string())])), "(fields: from)"),
        ({"messages": "chats"}, CHATS, "did you mean 'chat'"),
        ({"template": "x", "documents": "chat"}, pa.list_(pa.string()), None),
        ({"template": "x", "documents": "chat"}, pa.list_(pa.int32()), "prompt.documents"),
        ({"template": "x", "documents": "cht"}, CHATS, "prompt.documents: the input has no"),
    ],
)
def test_columns_of_conversations_and_documents_can_hold_such(prompt, kind, said):
    schema = pa.schema([("id", pa.int64()), ("chat", kind)])
    if said is None:
        check_columns(make_job(prompt=prompt), schema)
        return
    with pytest.raises(ConfigError) as caught:
        check_columns(make_job(prompt=prompt), schema)
    assert said in str(caught.value)


def test_the_columns_of_parsers_are_named_where_they_meet_the_inputs():
    schema = pa.schema([("Company", pa.string()), ("reasoning", pa.string())])
    output = {"uri": "o", "reasoning_parser": "qwen3", "tool_parser": "hermes"}
    with pytest.raises(ConfigError, match=r"'reasoning' is also.*output\.reasoning_column"):
        check_columns(make_job(output=output), schema)
    check_columns(make_job(output={**output, "reasoning_column": "thought"}), schema)
    check_columns(make_job(output={"uri": "o"}), schema)
