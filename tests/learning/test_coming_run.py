"""What is known of a run before it starts: its work, and which arrangements fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.learning import arranged
from helpers.models import LLAMA_8B, MIXTRAL
from helpers.small import make_job

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.learning.coming_run import PlannedRows, coming_run_of
from prefect_raybatch.learning.rules import ComingRun
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.model.memory import Model, describe
from prefect_raybatch.sizing.sizes import Capacity

H100 = Capacity(16.0, 1.0, 1, "local", (1.0,), ("H100",), 16.0)
ROWS = PlannedRows(1_000_000, 400.0, 4000, 250, {"source": "a", "identity": "b"})


def coming(
    capacity: Capacity = H100,
    rows: PlannedRows = ROWS,
    model: Model | None = None,
    **engine: Any,
) -> ComingRun | None:
    labels = {"sampling": {"choice": ["yes", "no"]}}
    spec = compile_job(make_job(engine={"max_model_len": 2048, **engine}, **labels)).sizes
    return coming_run_of(spec, rows, capacity, model or describe(LLAMA_8B, {}), "0.32.0")


def fitting(**more: Any) -> set[str]:
    found = coming(**more)
    assert found is not None and found.fits(found.model)
    tried = [f"{engines}x{seqs}" for engines in range(9) for seqs in (0, 1, 128, 256, 512, 1024)]
    return {text for text in [*tried, "1x65536", "1x300"] if found.fits(arranged(text))}


def test_what_fits_on_a_gpu():
    # More engines or sequences of an 8B model have no room for the KV cache of their rows.
    assert fitting() == {"1x256", "1x300", "1x512", "1x1024", "2x256", "2x512"}
    few_cpus = replace(H100, cpus=5.0, cpus_a_gpu=5.0)
    assert {text[0] for text in fitting(capacity=few_cpus)} == {"1"}  # three cores for each
    experts = describe({**MIXTRAL, "num_hidden_layers": 8}, {})
    assert "1x1024" not in fitting(model=experts) and "1x512" in fitting(model=experts)


def test_what_a_job_sets_stays():
    assert fitting(max_num_seqs=300) <= {f"{n}x300" for n in range(1, 7)}
    assert fitting(engines_per_gpu=2) == {"2x256", "2x512"}
    # vLLM refuses more sequences than tokens in a step.
    assert fitting(max_num_batched_tokens=512) <= {"1x256", "1x300", "1x512", "2x256", "2x512"}


@pytest.mark.parametrize(
    "more",
    [
        {"engines_per_gpu": 1, "max_num_seqs": 256},
        {"replicas": [1, 2]},
        {"device": "cpu"},
        {"capacity": replace(H100, accelerators=("another",))},
        {"capacity": replace(H100, accelerators=("H100", "L4"))},
    ],
)
def test_runs_that_have_nothing_to_learn(more):
    assert coming(**more) is None


def test_an_engine_on_two_gpus_shares_them_with_no_other():
    two = Capacity(32.0, 2.0, 1, "local", (2.0,), ("H100",), 16.0)
    assert {text[0] for text in fitting(capacity=two, tensor_parallel_size=2)} == {"1"}


def test_the_work_follows_from_model_settings_and_lengths():
    first = coming()
    assert first is not None
    work = first.work
    assert (work.card, work.gpus, work.cpus, work.vllm) == ("H100, 74.5 GiB", 1, 16.0, "0.32.0")
    assert len(work.tokens) == 11 and len(set(work.tokens[2:])) == 1
    changed = [
        coming(rows=replace(ROWS, model={"source": "a", "identity": "c"})),
        coming(kv_cache_dtype="fp8"),
        coming(capacity=replace(H100, cpus_a_gpu=8.0)),
    ]
    assert all(one is not None and one.work != work for one in changed)
    moved = coming(rows=replace(ROWS, model={"source": "elsewhere", "identity": "b"}))
    assert moved is not None and moved.work == work


def test_deciles_are_of_the_bytes_per_row_of_shards():
    class Planned:
        rows, row_bytes, rows_per_shard, shards, model = 100, 55.0, 10, 10, ROWS.model

    work = np.arange(10, 110, 10) * 10
    found = PlannedRows.of(Planned, Shards(np.arange(0, 110, 10), work))  # type: ignore[arg-type]
    lengths = np.arange(10, 110, 10)
    assert found.deciles == pytest.approx(np.percentile(lengths, range(10, 100, 10)) / 55)
    assert PlannedRows.of(Planned, Shards(np.arange(0, 110, 10))).deciles == (1.0,) * 9  # type: ignore[arg-type]
