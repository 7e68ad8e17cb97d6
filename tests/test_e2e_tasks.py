"""Vectors and answers under LoRA adapters through real Ray and real vLLM: killed, resumed, proved;
and retried, with an engine that is made up. So is the engine of the runs that are killed: what its
shards hold shows that they were kept."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from helpers import targets, tiny_models
from helpers.engines import NoEngine, VectorEngine
from helpers.processes import below
from helpers.ray_head import Head
from pyiceberg.catalog import load_catalog

from prefect_raybatch import BatchJob, demo, warm_engines
from prefect_raybatch.api import finalize_run, infer_run, plan_run, publish_run
from prefect_raybatch.api.retry import Retry, plan_retry
from prefect_raybatch.ledger.family import locate_run
from prefect_raybatch.result.verify_chain import verify_chain
from prefect_raybatch.runs.status import report_of

pytestmark = [pytest.mark.e2e, pytest.mark.whole, pytest.mark.timeout(900)]

ROWS, PER_SHARD = 60, 6
LATER = {40, 55}  # rows of an adapter that the job does not know until they are retried
KILLED = """
import json, os, signal, sys
import ray
from helpers import engines
from prefect_raybatch import BatchJob
from prefect_raybatch.api import infer_run
from prefect_raybatch.api import plan_run

def stop(progress):
    if progress.done:
        os.kill(os.getpid(), signal.SIGKILL)

ray.init(address=sys.argv[2], logging_level="error", log_to_driver=False)
job = BatchJob.from_dict(json.loads(sys.argv[1]))
infer_run(job, plan_run(job, "k"), stop, engine=getattr(engines, sys.argv[3]))
"""


def text(i: int) -> str:
    return f"Company {i} of {'law' if i % 3 else 'health'} in town {i * i}"


def adapter(i: int) -> str:
    return "c" if i in LATER else "ab"[i % 2]


def job_dict(folder: Path, adapters: dict[str, str]) -> dict[str, Any]:
    return {
        "name": "vectors",
        "source": {"uri": str(folder / "in.parquet"), "rows_per_shard": PER_SHARD},
        "prompt": {"template": "{text}", "adapter_column": "adapter"},
        "engine": {
            "model": "demo",
            "task": "embed",
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 128,
            "max_concurrent_batches": 1,  # so that a kill leaves shards to do
            "adapters": adapters,
        },
        "cluster": {"prepare": {"concurrency": 1}},  # each process of Ray imports for itself
        "output": {
            "uri": str(folder / "out"),
            "column": "vector",
            "columns": ["id"],
            "extras": ["prompt_tokens"],
        },
        "limits": {"max_failed_rows": len(LATER)},
    }


def merged(adapter: Path, kind: str = "AutoModel") -> Any:
    """The bundled model with an adapter's change in its weights."""
    import torch
    import transformers
    from safetensors.torch import load_file

    of = getattr(transformers, kind)
    model: Any = of.from_pretrained(demo.demo_model_path(), dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                prefix = "base_model.model." + ("model." if kind == "AutoModel" else "")
                stem = name.removeprefix(prefix).replace(".lora_A", "")
                up = tensors[name.replace("lora_A", "lora_B")]
                weights[stem] += up @ down * (8 / down.shape[0])
    return model.eval()


def cosine(model: Any, words: str, vector: Any) -> float:
    """Between the model's last state of a text and a vector of length 1."""
    import torch
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.demo_model_path())
    ids = tokenizer(words, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        state = model(ids).last_hidden_state[0, -1].numpy()
    return float(state @ np.array(vector) / np.linalg.norm(state))


def adapters(folder: Path, names: str) -> dict[str, Path]:
    config = json.loads((Path(demo.demo_model_path()) / "config.json").read_text())
    return {
        name: tiny_models.lora(folder / name, demo.demo_model_path(), config, seed=seed)
        for seed, name in enumerate(names, 1)
    }


def begun(folder: Path, value: dict[str, Any], head: Head, engine: str) -> dict[str, bytes]:
    """The commits of a run of that job that is killed after the first, on an engine of ours."""
    command = [sys.executable, "-c", KILLED, json.dumps(value), head.address, engine]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # as the head
    killed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -9, killed.stderr[-3000:]
    run_dir = folder / "out" / "k" / "_raybatch"
    asks = run_dir / "asks/_raybatch"  # of a job that keeps answers
    commits = (asks if asks.exists() else run_dir) / "commits"
    return {file.name: file.read_bytes() for file in commits.iterdir()}


def test_vectors_under_adapters_survive_a_kill_and_are_retried(
    imported_vllm: None, ray_head: Head, tmp_path: Path
) -> None:
    folders = adapters(tmp_path, "abc")
    table = pa.table(
        {
            "id": range(ROWS),
            "text": [text(i) for i in range(ROWS)],
            "adapter": [adapter(i) for i in range(ROWS)],
        }
    )
    write_deltalake(str(tmp_path / "rows"), table)
    value = job_dict(tmp_path, {name: str(folders[name]) for name in "ab"})
    value["source"]["uri"] = str(tmp_path / "rows")
    value["output"]["keep_answers"] = 30
    before, run_dir = begun(tmp_path, value, ray_head, "WideVectorEngine"), tmp_path / "out" / "k"
    assert 0 < len(before) < ROWS // PER_SHARD

    job = BatchJob.from_dict(value)
    run = plan_run(job, "k")
    report = finalize_run(job, run, infer_run(job, run))
    assert (report.good, report.failed) == (ROWS - len(LATER), len(LATER))
    asks = run_dir / "_raybatch/asks"
    assert report_of(str(asks)).resumed_shards == len(before)
    for name, data in before.items():
        assert (asks / "_raybatch/commits" / name).read_bytes() == data
    made = pq.read_table(run_dir / "data").to_pylist()
    assert [row["id"] for row in made] == [i for i in range(ROWS) if i not in LATER]
    models = {name: merged(folders[name]) for name in "ab"}
    for row in made[ROWS // 2 :: 9]:
        own, other = ("ab"[(row["id"] + more) % 2] for more in (0, 1))
        assert cosine(models[own], text(row["id"]), row["vector"]) > 0.999
        assert cosine(models[other], text(row["id"]), row["vector"]) < 0.999
        assert row["prompt_tokens"] > 5

    known = {name: str(folder) for name, folder in folders.items()}
    child = plan_retry(str(run_dir), overrides={"engine.adapters": known})
    assert isinstance(child, Retry)
    again = finalize_run(child.job, child.run, infer_run(child.job, child.run, engine=VectorEngine))
    assert (again.good, again.failed) == (len(LATER), 0)
    found = pq.read_table(tmp_path / "out" / "k.r1" / "data").to_pylist()
    assert {row["_row"]: row["vector"][1] for row in found} == dict.fromkeys(LATER, 3.0)
    verdict = verify_chain(*locate_run(str(run_dir)))
    assert verdict.ok and verdict.quarantined == 0, verdict
    _next_nights(value, table, made, tmp_path)


def _next_nights(
    value: dict[str, Any], table: pa.Table, before: list[dict[str, Any]], folder: Path
) -> None:
    """Rows of a database, in another order, and then some of them in an Iceberg table take the
    vectors that are there, and no engine is started; they are published to four kinds of tables."""
    known = [i for i in reversed(range(ROWS)) if i not in LATER]
    with sqlite3.connect(folder / "rows.db") as base:
        base.execute("create table companies (id integer, text text, adapter text)")
        rows = [tuple(row.values()) for row in table.take(known).to_pylist()]
        base.executemany("insert into companies values (?, ?, ?)", rows)
    query = "select id, text, adapter from companies order by id desc"
    database = {"uri": f"sqlite:///{folder}/rows.db", "query": query}
    lake = iceberg_source(folder, table.take(known[:20]))
    vectors = {row["id"]: row["vector"] for row in before}
    made_of = {"delta": targets.delta_rows, "iceberg": targets.iceberg_rows}
    made_of |= {"lance": targets.lance_rows, "sql": targets.sql_rows}
    for key, source, ids in (("sql", database, known), ("lake", lake, known[:20])):
        (folder / key).mkdir()
        publish = [getattr(targets, name)(folder / key) for name in made_of]
        output = {**value["output"], "publish": publish}
        more = {"source": {**source, "rows_per_shard": 20}, "output": output, "reuse": "latest"}
        job = BatchJob.from_dict({**value, **more})
        run = plan_run(job, key)
        report = finalize_run(job, run, infer_run(job, run, engine=NoEngine))
        assert (report.reuse["reused"], report.reuse["asked"]) == (len(ids), 0)
        made = pq.read_table(folder / "out" / key / "data").to_pylist()
        assert [(row["id"], row["vector"]) for row in made] == [(i, vectors[i]) for i in ids]
        assert verify_chain(*locate_run(run.uri)).ok
        publish_run(job, run.uri)
        for read in made_of.values():
            there = {row["id"]: row["vector"] for row in read(folder / key)}
            told = {i: json.loads(v) if isinstance(v, str) else v for i, v in there.items()}
            assert told == {i: vectors[i] for i in ids}


def iceberg_source(folder: Path, table: pa.Table) -> dict[str, Any]:
    """The fields of a source that is a table of a new catalog, with these rows."""
    (folder / "lakehouse").mkdir()
    catalog = load_catalog(None, **targets.catalog(folder / "lakehouse"))
    catalog.create_namespace("db")
    catalog.create_table("db.rows", schema=table.schema).append(table)
    return {"uri": "db.rows", "catalog": targets.catalog(folder / "lakehouse")}


def test_answers_under_adapters_survive_a_kill_and_are_those_of_the_adapter(
    imported_vllm: None, ray_head: Head, tmp_path: Path
) -> None:
    folders = adapters(tmp_path, "abc")
    under = [None if i in LATER else "ab"[i % 2] for i in range(ROWS)]
    table = pa.table({"id": range(ROWS), "text": [text(i) for i in range(ROWS)], "adapter": under})
    source = iceberg_source(tmp_path, table)
    value = job_dict(tmp_path, {name: str(folders[name]) for name in "ab"})
    value["source"] |= source
    value["prompt"]["on_null"] = "empty"  # the model alone, which a CPU cannot do beside adapters
    value["sampling"] = {"temperature": 0, "max_tokens": 6, "min_tokens": 6}
    del value["engine"]["task"]
    value["engine"]["max_num_seqs"] = 16  # not by the number of rows: two jobs share an engine
    value["output"] |= {"column": "answer", "extras": []}
    before = begun(tmp_path, value, ray_head, "FineEngine")
    assert 0 < len(before) < ROWS // PER_SHARD // 2
    catalog = load_catalog(None, **source["catalog"])
    catalog.load_table("db.rows").delete("id < 30")  # the run keeps the snapshot that it began with

    job = BatchJob.from_dict(value)
    with warm_engines():
        run = plan_run(job, "k")
        report = finalize_run(job, run, infer_run(job, run))
        warm = next_job(value, table, {"a": folders["b"], "c": folders["c"]})
    assert (report.good, report.failed) == (ROWS - len(LATER), len(LATER))
    assert report.resumed_shards == len(before)
    kept = pq.read_table(tmp_path / "out" / "k" / "_quarantine").to_pylist()
    assert {row["_row"] for row in kept} == LATER
    assert all("on a CPU vLLM cannot use the base model" in row["message"] for row in kept)

    made = pq.read_table(tmp_path / "out" / "k" / "data").to_pylist()
    assert [row["id"] for row in made] == [i for i in range(ROWS) if i not in LATER]
    models = {name: merged(folder, "AutoModelForCausalLM") for name, folder in folders.items()}
    for row in made[ROWS // 2 :: 9]:
        told = {name: generated(model, text(row["id"])) for name, model in models.items()}
        assert told["a"] != told["b"] != told["c"] != told["a"]
        assert row["answer"] == told["ab"[row["id"] % 2]]
    for row in warm:
        under = {"a": "b", "c": "c"}[row["adapter"]]
        assert row["answer"] == generated(models[under], row["text"])


def next_job(
    value: dict[str, Any], table: pa.Table, given: dict[str, Path]
) -> list[dict[str, Any]]:
    """The rows of a second job, which finds the engine of the first one up and has adapters of its
    own: one by a name that the first job gave to another."""
    folder = Path(value["output"]["uri"]).parent
    rows = table.slice(0, 6).set_column(2, "adapter", pa.array(["a", "c"] * 3))
    pq.write_table(rows, folder / "next.parquet")
    more = {
        "source": {"uri": str(folder / "next.parquet")},
        "engine": {**value["engine"], "adapters": {k: str(v) for k, v in given.items()}},
        "output": {**value["output"], "columns": ["text", "adapter"]},
    }
    job = BatchJob.from_dict({**value, **more})
    run, up = plan_run(job, "next"), below(os.getpid(), "EngineHost")
    report = finalize_run(job, run, infer_run(job, run))
    assert (report.good, report.failed) == (6, 0)
    # A run of six rows may be over before an engine has told of its start.
    assert up and below(os.getpid(), "EngineHost") == up, "an engine was started"
    told = [start.seconds for start in report.starts]
    assert not [seconds for seconds in told if {"imports", "weights"} & set(seconds)]
    return pq.read_table(folder / "out" / "next" / "data").to_pylist()


def generated(model: Any, words: str) -> str:
    """What transformers' own loop answers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.demo_model_path())
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": words}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    made = model.generate(**prompt, do_sample=False, max_new_tokens=6, min_new_tokens=6)
    text: str = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
