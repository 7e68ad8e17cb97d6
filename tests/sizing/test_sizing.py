"""Job, model and cluster to every size of a run: shards, engines, memory, and what does not fit."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.models import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, MIXTRAL
from helpers.small import job_dict, make_job
from hypothesis import given
from hypothesis import strategies as st

from prefect_raybatch.cluster.connect import check_fit
from prefect_raybatch.compile.job import compile_job, row_spec, size_spec
from prefect_raybatch.errors import ConfigError, InsufficientResources
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.model.arguments import USABLE, EngineArguments
from prefect_raybatch.model.memory import Model, describe
from prefect_raybatch.sizing import cost
from prefect_raybatch.sizing import engines as packing
from prefect_raybatch.sizing.cards import CARDS
from prefect_raybatch.sizing.explain import figures
from prefect_raybatch.sizing.fit import Fit, step_tokens
from prefect_raybatch.sizing.shards import (
    MOST_BYTES,
    MOST_ROWS,
    choose_rows_per_shard,
    concurrent_batches,
    row_tokens,
)
from prefect_raybatch.sizing.sizes import Capacity, Sizing, expected_engines, imagined, sizes_of

LLAMA_05B = {
    **LLAMA_8B,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
}
CHOICES = ["Law Firm", "Healthcare", "Manufacturing", "Other"]
SHORT = {"max_tokens": 16, "choice": CHOICES}
LONG = {"max_tokens": 512}
RECORD = {"max_tokens": 96, "structured_outputs": {"regex": "[a-z]{200}"}}
ONE = imagined("H200", 1, 16)  # the machine on which the figures in docs/performance.md were made
NO_GPU = Capacity(16, 0, 1, "here")
ROW = 60.0  # bytes
MOST_OFF, MEAN_OFF = 0.6, 0.11  # of the cost model, from measured rates
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that fits the cost model to results of benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fit")


def sized(
    config: dict[str, Any] | None = LLAMA_8B,
    capacity: Capacity = ONE,
    sampling: dict[str, Any] = SHORT,
    rows: int = 100_000,
    row_bytes: float = ROW,
    prompt: dict[str, Any] | None = None,
    **engine: Any,
) -> Sizing:
    job = make_job(
        sampling=sampling,
        engine=engine,
        prompt=prompt or {"template": "What is {Company}?", "system": "Be short. " * 30},
    )
    model = describe(config, job.engine.model_extra or {}) if config else None
    return sizes_of(size_spec(job), rows, row_bytes, capacity, model)


# --- rows a shard -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "row_bytes", "engines", "engine", "source", "chosen", "why"),
    [
        (10_000, 50, 1, {}, {}, 1250, "10,000 rows / (1 engine * 8 shards)"),
        (40_000, 50, 4, {}, {}, 625, "(4 engines * 16 shards)"),
        (10_000, 50, 10, {}, {}, 256, "at least engine.batch_size 256"),
        (1_000_000, 50, 1, {}, {}, MOST_ROWS, "at most 4,000"),
        (300, 50, 1, {}, {}, 256, "at least engine.batch_size 256"),
        (100, 50, 1, {}, {}, 100, "all rows, fewer than engine.batch_size 256"),
        (1, 50, 8, {}, {}, 1, "all rows, fewer than engine.batch_size 256"),
        (1_000_000, 1 << 20, 1, {}, {}, MOST_BYTES >> 20, "128 MiB / 1,048,576 bytes per row"),
        (1000, 1 << 40, 1, {}, {}, 1, "128 MiB"),
        (1_000_000, 50, 1, {}, {"rows_per_shard": 9000}, 9000, "source.rows_per_shard"),
        (10, 50, 1, {}, {"rows_per_shard": 9000}, 10, "source.rows_per_shard"),
    ],
)
def test_rows_a_shard(rows, row_bytes, engines, engine, source, chosen, why):
    job = make_job(engine=engine, source={"uri": "in", **source})
    found, reason = choose_rows_per_shard(
        size_spec(job), rows=rows, row_bytes=row_bytes, engines=engines
    )
    assert found == chosen
    assert why in reason


@pytest.mark.parametrize(
    ("tokens", "rows", "engines", "chosen", "why"),
    [
        (60, 1000, 4, 256, "at least engine.batch_size 256"),
        (1964, 1000, 4, 34, "at least 34 rows of about 1,964 tokens"),
        (1964, 1000, 1, 125, "(1 engine * 8 shards)"),
        (1964, 40_000, 4, 625, "(4 engines * 16 shards)"),
        (1964, 20, 4, 20, "all rows, fewer than 34 rows of about 1,964 tokens"),
        (1e6, 100, 4, 16, "at least 16 rows of"),
    ],
)
def test_long_rows_make_smaller_shards(tokens, rows, engines, chosen, why):
    spec = size_spec(make_job(sampling={"max_tokens": 16}))
    row_bytes = 4 * (tokens - row_tokens(spec.row, 0))
    found, reason = choose_rows_per_shard(spec, rows=rows, row_bytes=row_bytes, engines=engines)
    assert found == chosen and why in reason


def test_a_short_run_of_long_rows_leaves_no_engine_with_the_last_shard():
    found = sized(LLAMA_8B, imagined("H200", 4, 64), {"max_tokens": 32}, 1000, 7600.0)
    assert found.pool.engines == 4 and found.shards_a_worker > 7
    assert found.saturated and not found.problems


def test_shards_that_their_longest_row_holds_leave_room_for_others():
    assert concurrent_batches(None, 100, 256) == 4
    assert concurrent_batches(None, 100, 256, uneven=True) == 7
    assert sized(sampling=LONG).concurrent_why.startswith("ceil(2 * 1024 / ")
    assert sized(sampling=SHORT).concurrent_why.startswith("ceil(1024 / ")


@given(
    rows=st.integers(1, 20_000_000),
    row_bytes=st.floats(0, 1 << 32),
    engines=st.integers(1, 64),
    batch=st.integers(1, 5000),
)
def test_rows_a_shard_stay_in_bounds(rows, row_bytes, engines, batch):
    job = make_job(engine={"batch_size": batch})
    chosen, _ = choose_rows_per_shard(
        size_spec(job), rows=rows, row_bytes=row_bytes, engines=engines
    )
    assert 1 <= chosen <= min(rows, MOST_ROWS)
    assert chosen == 1 or chosen * row_bytes <= MOST_BYTES


@given(rows=st.integers(1, 5000), seqs=st.integers(1, 2000))
def test_by_default_enough_shards_are_in_flight_to_saturate(rows, seqs):
    job = make_job(engine={"max_num_seqs": seqs})
    calls = concurrent_batches(None, rows, seqs)
    assert calls >= 2
    assert (calls - 1) * rows >= seqs  # one more is being filled
    assert sizes_of(size_spec(job), rows, 1.0, NO_GPU, planned=rows).saturated


def test_starving_and_idle_engines_are_told_with_the_remedy():
    job = make_job(
        engine={"max_num_seqs": 256, "max_concurrent_batches": 2, "replicas": 8},
        source={"uri": "in", "rows_per_shard": 100},
    )
    found = sizes_of(size_spec(job), 1000, 50, NO_GPU)
    assert (found.shards, found.pool.engines, found.shards_a_worker) == (10, 8, 1.25)
    assert not found.saturated
    text = "\n".join(found.problems)
    assert "Set engine.max_concurrent_batches to 3" in text
    assert "Set source.rows_per_shard to 32" in text
    better = job.model_copy(
        update={"engine": job.engine.model_copy(update={"max_concurrent_batches": 3})}
    )
    assert sizes_of(size_spec(better), 1000, 50, NO_GPU).saturated  # the remedy helps


@pytest.mark.parametrize("planned", [None, 1])
@pytest.mark.parametrize("seqs", [1, 256])
def test_a_run_of_one_row_needs_no_advice(seqs, planned):
    job = make_job(engine={"max_num_seqs": seqs, "max_concurrent_batches": 1})
    found = sizes_of(size_spec(job), 1, 50, NO_GPU, planned=planned)
    assert found.saturated and (found.shards, found.rows_per_shard) == (1, 1)
    assert not found.problems


@pytest.mark.parametrize(
    ("rows", "replicas", "per_shard", "advice"),
    [
        (3, 8, None, "3 rows for 8 engines leave most idle. Set engine.replicas to 1"),
        (1, 2, None, "1 row for 2 engines leave most idle. Set engine.replicas to 1"),
        (100, 8, None, "1 shard for 8 engines leave some idle. Set source.rows_per_shard to 4"),
        (8, 8, 1, None),  # smaller shards there are not
        (200, 1, None, None),  # one engine has all there is
    ],
)
def test_advice_for_small_runs_can_be_followed(rows, replicas, per_shard, advice):
    source = {"uri": "in", "rows_per_shard": per_shard}
    job = make_job(engine={"replicas": replicas}, source=source)
    found = sizes_of(size_spec(job), rows, 50, NO_GPU)
    assert list(found.problems) == ([advice] if advice else [])


@pytest.mark.parametrize(
    ("engine", "sampling", "have", "engines"),
    [
        ({}, SHORT, None, 24),  # nothing is known: a large node, and short answers are packed
        ({}, LONG, None, 8),
        ({"tensor_parallel_size": 4}, SHORT, None, 2),
        ({"device": "cpu"}, SHORT, None, 1),
        ({"replicas": 3}, LONG, None, 3),
        ({"replicas": [2, 5]}, LONG, None, 5),
        ({"replicas": 3, "engines_per_gpu": 2}, LONG, None, 6),
        ({}, SHORT, NO_GPU, 1),
        ({"replicas": 3, "engines_per_gpu": 2}, SHORT, NO_GPU, 3),
        ({}, SHORT, ONE, 3),
        ({}, LONG, imagined("L4", 4, 64), 4),
    ],
)
def test_shards_are_cut_for_the_engines_to_be_expected(engine, sampling, have, engines):
    job = make_job(engine=engine, sampling=sampling)
    assert expected_engines(size_spec(job), have) == engines


def test_shards_are_cut_for_the_engines_that_a_known_model_gets():
    """Without the model, a record counts as a long answer, which gets an engine per GPU."""
    have = imagined("H200", 2, 32)
    spec = size_spec(make_job(sampling=RECORD))
    model = describe(LLAMA_05B, {})
    assert expected_engines(spec, have) == 2
    pool = sizes_of(spec, 10_000, 800.0, have, model).pool
    assert pool.engines_per_gpu > 1
    assert expected_engines(spec, have, model, 800.0) == pool.engines
    assert expected_engines(spec, replace(have, accelerators=("Unheard-of",)), model, 800.0) == 2


def test_a_pass_over_few_shards_starts_no_engine_that_would_have_none():
    pool = sized(LLAMA_8B, imagined("H200", 4, 64), replicas=[1, 4], engines_per_gpu=2).pool
    assert [pool.engines_for(n) for n in (100, 8, 5, 1)] == [(2, 8), (2, 8), (2, 5), (1, 1)]


# --- how many engines share a GPU ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "changes", "engines", "why"),
    [
        (LLAMA_8B, {}, 2, "2 engines keep the GPU busy"),
        (LLAMA_05B, {}, 5, "16 CPUs per GPU allow 5"),
        (LLAMA_05B, {"capacity": imagined("H200", 1, 64)}, 6, "at most 6"),
        (LLAMA_05B, {"capacity": imagined("H200", 1, 8)}, 2, "8 CPUs per GPU allow 2"),
        (LLAMA_05B, {"capacity": imagined("H200", 1, 4)}, 1, "4 CPUs per GPU allow 1"),
        (LLAMA_05B, {"capacity": imagined("H200", 8, 128)}, 5, "16 CPUs per GPU allow 5"),
        (
            LLAMA_05B,
            {"capacity": imagined("L4", 1, 16), "early_stop": "off"},
            4,
            "4 engines keep the GPU busy",
        ),
        (
            LLAMA_05B,
            {"capacity": imagined("L4", 1, 16)},
            4,
            "4 engines keep the GPU busy",
        ),  # one token decides
        (LLAMA_05B, {"num_cpus": 8}, 2, "16 CPUs per GPU allow 2"),
        (LLAMA_8B, {"capacity": imagined("H100", 1, 16)}, 2, "2 engines keep the GPU busy"),
        (
            LLAMA_8B,
            {"capacity": imagined("H100", 1, 16), "max_model_len": 262144, "early_stop": "off"},
            1,
            "1 fit in 74.5",
        ),
        (LLAMA_8B, {"capacity": imagined("L4", 1, 16)}, 1, "one engine keeps the GPU busy"),
        (LLAMA_70B, {"quantization": "fp8"}, 1, "one engine keeps the GPU busy"),
        (LLAMA_8B, {"early_stop": "off"}, 2, "2 engines keep the GPU busy"),
        (
            LLAMA_8B,
            {"sampling": {"max_tokens": 24}, "row_bytes": 240},
            1,
            "one engine keeps the GPU busy",
        ),
        (LLAMA_8B, {"sampling": LONG}, 1, "one engine keeps the GPU busy"),
        # Measured: 1.3 to 1.4 of one engine on an H200, 0.95 to 1.0 on an H100.
        (LLAMA_8B, {"sampling": RECORD, "row_bytes": 800}, 2, "2 engines keep the GPU busy"),
        (
            LLAMA_8B,
            {"sampling": RECORD, "row_bytes": 800, "capacity": imagined("H100", 1, 16)},
            1,
            "one engine keeps the GPU busy",
        ),
        (LLAMA_05B, {"sampling": LONG}, 4, "16 CPUs per GPU allow 5"),
        (LLAMA_05B, {"sampling": {"max_tokens": 33}}, 4, "33 output tokens"),
        (LLAMA_05B, {"sampling": {"max_tokens": 32}}, 4, ""),
        (
            LLAMA_05B,
            {"sampling": {"max_tokens": 16, "n": 3, "temperature": 1.0}},
            4,
            "48 output tokens",
        ),
        (LLAMA_05B, {"sampling": {"max_tokens": 512, "choice": CHOICES}}, 5, " 1 out"),
        (LLAMA_05B, {"sampling": {"max_tokens": 512, "choice": ["Yes, a", "Yes, b"]}}, 5, "4 out"),
        (LLAMA_05B, {"sampling": {"max_tokens": 2, "choice": ["Yes, a", "Yes, b"]}}, 5, "2 out"),
        (
            LLAMA_05B,
            {
                "sampling": {
                    "max_tokens": 512,
                    "structured_outputs": {"choice": CHOICES, "disable_any_whitespace": True},
                }
            },
            5,
            "7 out",
        ),
        (
            LLAMA_05B,
            {"sampling": {"choice": ["Yes, a", "Yes, b"]}, "early_stop": "first_token"},
            5,
            "2 out",
        ),
        (
            LLAMA_05B,
            {"sampling": {"choice": ["Yes, a", "Yes, b"], "seed": 1}, "early_stop": "first_token"},
            5,
            "4 out",
        ),
        (LLAMA_05B, {"sampling": {"choice": CHOICES}, "early_stop": "off"}, 5, "7 out"),
        (LLAMA_05B, {"sampling": {"choice": CHOICES, "stop": ["."]}}, 5, "7 out"),
        (LLAMA_05B, {"sampling": {"choice": CHOICES}, "logits_processors": ["a:b"]}, 5, "7 out"),
        (
            LLAMA_05B,
            {"sampling": {"max_tokens": 99, "structured_outputs": {"choice": CHOICES}}},
            5,
            " 1 out",
        ),
        (LLAMA_8B, {"row_bytes": 8000}, 1, "one engine keeps the GPU busy"),
        (LLAMA_8B, {"tensor_parallel_size": 2}, 1, "an engine spans 2 GPUs"),
        (LLAMA_8B, {"engines_per_gpu": 2}, 2, "engine.engines_per_gpu"),
        (LLAMA_8B, {"engines_per_gpu": 1}, 1, "engine.engines_per_gpu"),
        # 64 GiB for a single sequence
        (LLAMA_8B, {"max_model_len": 524288, "early_stop": "off"}, 1, "1 fit"),
        (
            LLAMA_8B,
            {"kv_cache_memory_bytes": 50 << 30, "early_stop": "off"},
            1,
            "1 fit in 131.3 GiB",
        ),
        (LLAMA_8B, {"capacity": imagined("RTX-PRO-6000", 1, 16)}, 1, "are unknown"),
        (LLAMA_8B, {"capacity": Capacity(16, 1, 1, "x", (1,), ("L4", "H200"), 16)}, 1, "unknown"),
        (None, {}, 1, "the size of the model is unknown"),
    ],
)
def test_engines_on_a_gpu(config, changes, engines, why):
    found = sized(config, **changes)
    assert found.pool.engines_per_gpu == engines
    assert why in found.pool.packing_why


def test_free_answers_that_may_be_shorter_do_not_share_a_gpu_for_little() -> None:
    """The model predicts 13 % of two engines for answers of 64 tokens, and a loss for 32."""
    a100 = imagined("A100-80G", 1, 16)
    found = sized(LLAMA_05B, a100, {"max_tokens": 64}, row_bytes=2000)
    assert found.pool.engines_per_gpu == 1
    held = {"max_tokens": 64, "structured_outputs": {"regex": "[a-z]{200}"}}
    assert sized(LLAMA_05B, a100, held, row_bytes=2000).pool.engines_per_gpu > 1


def test_engines_share_a_gpu_for_a_gain_of_those_that_fit() -> None:
    """More would gain over 5 %, but two of 256 sequences, which fit, gain 3 %."""
    record = {"max_tokens": 48, "structured_outputs": {"regex": "[a-z]{200}"}}
    found = sized(
        *(LLAMA_8B, imagined("H100", 1, 16), record),
        row_bytes=600,
        quantization="fp8",
        max_model_len=1024,
    )
    assert found.pool.engines_per_gpu == 1


def test_no_more_sequences_are_tried_than_a_step_has_tokens() -> None:
    step = {"max_num_batched_tokens": 512}
    assert sized(LLAMA_8B, **step, early_stop="off").max_num_seqs <= 512
    packed = sized(LLAMA_8B, early_stop="off")
    assert packed.max_num_seqs == 1024


@pytest.mark.parametrize("rows", [1, 50, 300])
def test_engines_that_share_a_gpu_by_themselves_are_not_called_idle(rows: int) -> None:
    """Only as many start as there are shards, and no setting of the job would help."""
    found = sized(sampling=RECORD, row_bytes=800, rows=rows)
    assert found.pool.engines_per_gpu == 2 and not found.problems


def test_a_small_model_that_embeds_is_not_packed_as_one_that_writes():
    embeds = {"prompt": {"template": "{Company}"}, "task": "embed", "sampling": {}}
    found = sized(LLAMA_05B, **embeds)
    assert found.pool.engines_per_gpu == packing.MOST_ENGINES
    assert sized(LLAMA_8B, **embeds, row_bytes=8000).pool.engines_per_gpu == 1
    job = make_job(engine={"task": "embed"}, prompt={"template": "{Company}"})
    assert expected_engines(size_spec(job), None) == 48


def test_answers_to_prompts_of_a_function_are_as_long_as_the_job_says():
    """It may ask for others, but most do not, and one engine would leave the GPU idle."""
    own = {"function": "helpers.functions:as_text"}
    assert sized(LLAMA_05B, prompt=own, sampling={"max_tokens": 8}).pool.engines_per_gpu == 5
    assert sized(LLAMA_05B, prompt=own, sampling=SHORT).pool.engines_per_gpu == 5


def test_mixed_cards_are_known_once_the_job_names_one():
    both = Capacity(32, 2, 2, "x", (1, 1), ("L4", "H200"), 16)
    assert sized(LLAMA_8B, both, accelerator_type="H200").pool.engines_per_gpu == 2


@given(
    config=st.sampled_from([LLAMA_05B, LLAMA_8B]),
    kind=st.sampled_from(sorted(CARDS)),
    cpus=st.integers(1, 64),
    seqs=st.integers(1, 1024),
    batched=st.sampled_from([2048, 8192, 16384]),
)
def test_packed_engines_fit_in_memory_with_room_for_their_rows(config, kind, cpus, seqs, batched):
    have = imagined(kind, 1, cpus)
    try:
        found = sized(
            config, have, max_num_seqs=seqs, max_num_batched_tokens=batched, max_model_len=4096
        )
    except InsufficientResources:
        return
    count = found.pool.engines_per_gpu
    assert 1 <= count <= packing.MOST_ENGINES
    assert count == 1 or count * packing.CORES <= cpus
    if count == 1:
        assert found.share == {}
        return
    model = describe(config, {})
    cache = found.share["kv_cache_memory_bytes"]
    whole = count * (cache + model.weights + model.working(batched, seqs))
    assert whole <= USABLE * CARDS[kind].memory
    assert cache >= model.kv_bytes(4096)
    assert found.share["gpu_memory_utilization"] * count <= USABLE


def test_a_measured_gpu_counts_more_than_its_data_sheet():
    small = Capacity(16, 1, 1, "here", (1,), ("H200",), 16, gpu_bytes=70 << 30)  # a part of one
    assert sized(LLAMA_8B, small).pool.engines_per_gpu == 2
    large = Capacity(16, 1, 1, "here", (1,), ("H200",), 16, gpu_bytes=140 << 30)
    more = sized(LLAMA_8B, large).share["kv_cache_memory_bytes"]
    assert more > sized(LLAMA_8B).share["kv_cache_memory_bytes"]


def test_more_engines_keep_a_gpu_busier():
    """The closed queue against what is known of it."""
    assert cost.busy(1, 3.0, 1.0) == pytest.approx(0.25)  # one: no waiting
    assert cost.busy(2, 1.0, 1.0) == pytest.approx(0.8)
    assert cost.busy(500, 3.0, 1.0) == pytest.approx(1.0, abs=1e-6)
    rising = [cost.busy(n, 2.0, 1.0) for n in range(1, 9)]
    assert rising == sorted(rising) and rising[-1] < 1


def test_rates_agree_with_what_was_measured(fit: ModuleType) -> None:
    """Each rate that the constants are fitted to, and how far off the model may be."""
    found = [point for point in fit.points(sorted(fit.RESULTS.glob("*.jsonl"))) if point.fitted]
    assert len(found) >= 39
    off = {f"{p.size} {p.kind} {p.arrangement}": p.predicted()[0] / p.rate - 1 for p in found}
    assert {name: error for name, error in off.items() if abs(error) > MOST_OFF} == {}
    assert sum(map(abs, off.values())) / len(off) < MEAN_OFF


def test_a_fixed_number_of_sequences_decides_how_many_engines_pay():
    """Of one engine 1,024 rows share a step's fixed cost, of which few rows leave the GPU idle."""
    drawn = {"sampling": {"max_tokens": 24}, "row_bytes": 240}
    assert sized(**drawn).max_num_seqs == 1024
    few = sized(**drawn, max_num_seqs=8)
    assert (few.pool.engines_per_gpu, few.max_num_seqs) == (3, 8)


# --- replicas -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "have", "replicas", "engines", "gpus"),
    [
        ({}, NO_GPU, (1, 1), (1, 1), (0, 0)),
        ({"replicas": 4, "engines_per_gpu": 3}, NO_GPU, (4, 4), (4, 4), (0, 0)),
        ({}, ONE, (1, 1), (2, 2), (1, 1)),
        ({"replicas": 1}, imagined("H200", 8, 128), (1, 1), (2, 2), (1, 1)),
        ({}, imagined("H200", 8, 128), (8, 8), (16, 16), (8, 8)),
        ({"replicas": [2, 8]}, imagined("H200", 8, 128), (2, 8), (4, 16), (2, 8)),
        ({"engines_per_gpu": 1}, imagined("H200", 8, 128), (8, 8), (8, 8), (8, 8)),
        ({"tensor_parallel_size": 4}, imagined("H200", 8, 128), (2, 2), (2, 2), (8, 8)),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            imagined("H200", 16, 256),  # two nodes of 8: one engine of 6 on each
            (2, 2),
            (2, 2),
            (12, 12),
        ),
        ({"device": "cpu"}, ONE, (1, 1), (1, 1), (0, 0)),
    ],
)
def test_replicas_are_copies_of_the_model_by_gpus(engine, have, replicas, engines, gpus):
    pool = sized(LLAMA_8B, have, **engine).pool
    assert pool.replicas == replicas
    assert (pool.fewest, pool.engines) == engines
    assert pool.gpus == gpus
    job = make_job(engine=engine, sampling=SHORT)
    want = check_fit(size_spec(job), have, pool)
    assert (want.gpus, want.cpus) == (gpus[0], engines[0] + 0.75)


@pytest.mark.parametrize(
    ("engine", "have", "said"),
    [
        (
            {"replicas": 9},
            imagined("H200", 8, 128),
            "9 GPUs (9 replicas * tensor_parallel_size 1 * pipeline_parallel_size 1), but has 8",
        ),
        (
            {"replicas": 2, "tensor_parallel_size": 4, "pipeline_parallel_size": 2},
            imagined("H200", 8, 128),
            "16 GPUs (2 replicas * tensor_parallel_size 4 * pipeline_parallel_size 2), but has 8",
        ),
        ({"replicas": [9, 20]}, imagined("H200", 8, 128), "9 GPUs"),
        (
            {"tensor_parallel_size": 8},
            Capacity(64, 8, 2, "x", (4, 4), ("H200",), 8),
            "8 GPUs on one node for each of 1 replica (tensor_parallel_size 8 * "
            "pipeline_parallel_size 1), but the nodes have 4, 4, and an engine cannot span nodes",
        ),
        ({"accelerator_type": "H100"}, ONE, "accelerator H100, but has H200"),
        ({"engines_per_gpu": 4}, imagined("H200", 1, 4), "4.75 logical CPUs, but has 4; lower"),
        ({"replicas": 99}, NO_GPU, "99.75 logical CPUs, but has 16"),
    ],
)
def test_a_cluster_that_is_too_small_is_named_with_what_is_short(engine, have, said):
    job = make_job(engine=engine, sampling=SHORT)
    with pytest.raises(InsufficientResources) as raised:
        check_fit(size_spec(job), have)
    assert said in str(raised.value)


def test_what_needs_a_range_of_replicas_needs_its_fewest():
    pool = sized(capacity=imagined("H200", 8, 128), replicas=[2, 50]).pool
    assert check_fit(size_spec(make_job()), imagined("H200", 2, 9), pool).gpus == 2
    with pytest.raises(InsufficientResources, match=r"2 GPUs .*, but has 1"):
        check_fit(size_spec(make_job()), ONE, pool)


@pytest.mark.parametrize(
    ("kind", "parallel", "warned"),
    [("L40S", 2, True), ("RTX-PRO-6000", 2, True), ("L40S", 1, False), ("H200", 2, False)],
)
def test_tensor_parallel_over_pcie_is_warned_of(kind, parallel, warned):
    found = sized(LLAMA_8B, imagined(kind, 4, 64), tensor_parallel_size=parallel)
    assert bool(found.warnings) == warned
    assert not warned or f"on {kind}: these cards only communicate over PCIe" in found.warnings[0]


@pytest.mark.parametrize(
    ("engine", "gpus_by_node", "replicas", "warned"),
    [
        ({"tensor_parallel_size": 8}, (8, 8), 2, ""),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, (8, 8), 1, ""),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 3}, (4, 4, 4, 1), 1, ""),
        ({"tensor_parallel_size": 8}, (4, 4), 1, "tensor_parallel_size 4 and pipeline_parallel"),
    ],
)
def test_with_rays_backend_an_engine_may_span_nodes(engine, gpus_by_node, replicas, warned):
    have = Capacity(
        16 * sum(gpus_by_node), sum(gpus_by_node), len(gpus_by_node), "x", gpus_by_node, ("H200",)
    )
    job = make_job(engine={**engine, "distributed_executor_backend": "ray"})
    found = sizes_of(size_spec(job), 10_000, 50, have)
    assert found.pool.replicas == (replicas, replicas)
    check_fit(size_spec(job), have, found.pool)
    assert bool(found.warnings) == bool(warned) and warned in "".join(found.warnings)


@pytest.mark.parametrize(
    ("config", "kind", "engine", "said"),
    [
        (LLAMA_8B, "L4", {"max_num_seqs": 512}, "of about 103 tokens, fewer than max_num_seqs 512"),
        (LLAMA_8B, "L4", {"max_num_batched_tokens": 16384}, "holds 156 rows"),
        (LLAMA_8B, "L4", {"enable_prefix_caching": False}, "holds 134 rows"),
        (LLAMA_8B, "L4", {}, ""),
        (LLAMA_8B, "L4", {"max_num_seqs": 128}, ""),
        (LLAMA_8B, "H200", {}, ""),
    ],
)
def test_a_kv_cache_that_is_too_small_for_the_rows_at_once_is_warned_of(config, kind, engine, said):
    warnings = sized(config, imagined(kind, 1, 16), **engine).warnings
    assert [said in text for text in warnings] == ([True] if said else [])


@pytest.mark.parametrize(
    ("config", "kind", "sampling", "engine", "seqs", "why"),
    [
        (LLAMA_8B, "H200", LONG, {}, 1024, "47% faster than 256: answers of 512 tokens"),
        (LLAMA_8B, "H200", LONG, {"max_num_seqs": 300}, 300, "engine.max_num_seqs"),
        (LLAMA_8B, "H200", LONG, {"max_num_batched_tokens": 90}, 90, "takes a token of a step"),
        (None, "H200", LONG, {"max_num_batched_tokens": 90}, 90, "takes a token of a step"),
        (None, "H200", LONG, {"max_num_batched_tokens": 256}, 256, "default of"),
        (LLAMA_8B, "H200", LONG, {"engines_per_gpu": 2}, 256, "512 rows do not fit"),
        (LLAMA_8B, "H200", SHORT, {}, 1024, "answers of 1 tokens in each of 2 engines"),
        (LLAMA_8B, "H100", SHORT, {}, 1024, "answers of 1 tokens in each of 2 engines"),
        (LLAMA_8B, "H200", SHORT, {"engines_per_gpu": 1}, 1024, "3% faster than 256"),
        (
            LLAMA_8B,
            "H200",
            SHORT,
            {"engines_per_gpu": 1, "early_stop": "off"},
            1024,
            "15% faster than 256",
        ),
        (
            LLAMA_8B,
            "H200",
            {"max_tokens": 1},
            {"engines_per_gpu": 1},
            1024,
            "2% faster than 256",
        ),
        (LLAMA_8B, "A100-40G", LONG, {}, 256, "the KV cache holds 208 rows"),
        (LLAMA_8B, "L4", LONG, {}, 256, "the KV cache holds"),
        (LLAMA_8B, "RTX-PRO-6000", LONG, {}, 256, "default of engine.max_num_seqs"),
        (None, "H200", LONG, {}, 256, "default of engine.max_num_seqs"),
        (LLAMA_8B, "H200", LONG, {"device": "cpu"}, 256, "default of engine.max_num_seqs"),
        (LLAMA_70B, "H200", LONG, {"tensor_parallel_size": 4}, 1024, "31% faster than 256"),
        (LLAMA_70B, "H100", LONG, {"tensor_parallel_size": 2}, 256, "the KV cache holds"),
    ],
)
def test_more_rows_at_once_where_they_pay_and_fit(config, kind, sampling, engine, seqs, why):
    found = sized(config, imagined(kind, 4, 64), sampling, **engine)
    assert found.max_num_seqs == found.arguments.max_num_seqs == seqs
    assert why in found.sequences_why
    assert found.rows_per_shard * (found.concurrent - 1) >= seqs


def test_rows_at_once_count_on_max_tokens_where_a_function_may_ask_for_any_length():
    own = {"function": "helpers.small:make_job"}
    assert sized(sampling=LONG, prompt=own).max_num_seqs == 1024
    assert sized(sampling={"max_tokens": 1}, prompt=own, row_bytes=8000).max_num_seqs == 256


@pytest.mark.parametrize(
    ("kind", "engine", "tokens"),
    [
        ("H200", {}, 16384),
        ("L4", {}, 8192),
        ("L4", {"max_num_seqs": 64}, 16384),
        ("L4", {"max_num_seqs": 128}, 8192),
        ("L4", {"quantization": "fp8", "max_num_seqs": 256}, 16384),
        ("L4", {"quantization": "fp8"}, 8192),  # for 1,024 rows
        ("T4", {"quantization": "fp8", "max_num_seqs": 256}, 4096),
        ("L4", {"max_num_batched_tokens": 9999}, 9999),
        ("RTX-PRO-6000", {}, 16384),
    ],
)
def test_a_step_has_fewer_tokens_where_memory_is_short(kind, engine, tokens):
    found = sized(LLAMA_8B, imagined(kind, 1, 16), **engine)
    assert found.arguments.max_num_batched_tokens == tokens


WHOLE = {"enable_chunked_prefill": False}


@pytest.mark.parametrize(
    ("config", "capacity", "engine", "tokens", "why"),
    [
        (LLAMA_8B, "H200", {"max_num_seqs": 20_000}, 20_000, "engine.max_num_seqs"),
        (None, "H200", {"max_num_seqs": 20_000}, 20_000, "engine.max_num_seqs"),
        (LLAMA_8B, "L4", {"max_num_seqs": 9000}, 9000, "fewer if"),
        (LLAMA_8B, "H200", {"max_num_seqs": 9000, "engines_per_gpu": 2}, 16384, "16384 on a GPU"),
        (None, None, {"max_num_seqs": 5000}, 5000, "engine.max_num_seqs"),
        (LLAMA_8B, "H200", {**WHOLE, "max_model_len": 32_768}, 32_768, "enable_chunked_prefill"),
        (None, None, {**WHOLE, "max_model_len": 8192}, 8192, "enable_chunked_prefill"),
        (None, None, {**WHOLE, "max_model_len": 64}, 4096, "4096 on a CPU"),
        (
            {**LLAMA_8B, "max_position_embeddings": 32_768},
            "H200",
            WHOLE,
            32_768,
            "enable_chunked_prefill",
        ),
    ],
)
def test_a_step_is_never_so_small_that_vllm_refuses_it(config, capacity, engine, tokens, why):
    have = imagined(capacity, 1, 16) if capacity else NO_GPU
    assert sized(config, have, **engine).arguments.max_num_batched_tokens == tokens
    model = describe(config, {}) if config else None
    value, reason = shown(make_job(engine=engine), have, model)["max_num_batched_tokens"]
    assert value == str(tokens) and why in reason


def test_a_step_counts_what_layers_with_a_window_keep_of_long_rows():
    row, steps = cost.Tokens(0, 8000, 0, ""), (16384, 8192)
    arguments = EngineArguments(max_num_seqs=16, max_num_batched_tokens=16384)
    kinds = ["sliding_attention"] * 30 + ["full_attention"] * 2
    windows = {**LLAMA_8B, "layer_types": kinds, "sliding_window": 256}
    for config, tokens in ((LLAMA_8B, 8192), (windows, 16384)):
        fit = Fit(describe(config, {}), arguments, 26 * 10**9, 8192)
        assert step_tokens(fit, row, steps) == tokens


# --- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind", "engine", "remedies"),
    [
        (LLAMA_70B, "H100", {}, ["tensor_parallel_size 2", "quantized to fp8", "B200"]),
        (LLAMA_70B, "L4", {}, ["tensor_parallel_size 8", "B200"]),
        (LLAMA_70B, "H100", {"tensor_parallel_size": 1, "max_model_len": 9}, ["fp8"]),
        (LLAMA_8B, "T4", {}, ["tensor_parallel_size 2", "quantized to fp8", "24 GB"]),
        (MIXTRAL, "H100", {}, ["tensor_parallel_size 2", "141 GB, such as H200"]),
        (DEEPSEEK_V3, "H200", {"tensor_parallel_size": 4}, ["tensor_parallel_size 8"]),
        (
            {**LLAMA_8B, "max_position_embeddings": 131072},
            "L4",
            {},
            ["engine.max_model_len 7424", "tensor_parallel_size 2"],
        ),
        (LLAMA_8B, "H200", {"gpu_memory_utilization": 0.1}, ["tensor_parallel_size 2"]),
    ],
)
def test_what_does_not_fit_is_said_with_what_would(config, kind, engine, remedies):
    with pytest.raises(InsufficientResources) as raised:
        sized(config, imagined(kind, 8, 128), **engine)
    text = str(raised.value)
    assert "does not fit on" in text and "weights" in text and "KV cache" in text
    for remedy in remedies:
        assert remedy in text


@pytest.mark.parametrize(
    ("config", "kind", "engine"),
    [
        (LLAMA_70B, "H100", {"tensor_parallel_size": 2}),
        (LLAMA_70B, "A100", {"tensor_parallel_size": 2}),  # Ray does not say whether of 40 or 80 GB
        (LLAMA_70B, "H200", {"quantization": "fp8"}),
        (LLAMA_70B, "B200", {}),
        (LLAMA_8B, "L4", {"max_model_len": 8192}),
        (LLAMA_8B, "T4", {"quantization": "fp8", "max_model_len": 8192}),
        (LLAMA_8B, "T4", {"cpu_offload_gb": 8}),
        (DEEPSEEK_V3, "H200", {"tensor_parallel_size": 8}),
        (MIXTRAL, "H100", {"tensor_parallel_size": 2}),
    ],
)
def test_a_remedy_fits(config, kind, engine):
    assert sized(config, imagined(kind, 8, 128), **engine).pool.engines_per_gpu == 1


@given(
    config=st.sampled_from([LLAMA_05B, LLAMA_8B, LLAMA_70B, MIXTRAL]),
    kind=st.sampled_from(sorted(CARDS)),
    length=st.integers(1, 1 << 20),
)
def test_the_context_length_that_is_named_fits(config, kind, length):
    have = imagined(kind, 8, 128)
    try:
        sized(config, have, max_model_len=length)
    except InsufficientResources as error:
        mark = "engine.max_model_len "
        if mark in str(error):
            shorter = int(str(error).split(mark)[1].split()[0])
            assert 256 <= shorter < length
            sized(config, have, max_model_len=shorter)


def test_engines_that_the_job_asks_for_and_that_do_not_fit_are_refused_before_they_start():
    with pytest.raises(ConfigError, match=r"7 engines do not fit on a GPU of 131.3 GiB"):
        sized(LLAMA_8B, engines_per_gpu=7)


# --- what is shown ------------------------------------------------------------------------------


def shown(
    job: BatchJob, capacity: Capacity, model: Model | None, rows: int = 100_000
) -> dict[str, tuple[str, str]]:
    spec = compile_job(job)
    size = sizes_of(spec.sizes, rows, ROW, capacity, model)
    least = spec.limits.min_agreement
    found = figures(spec.sizes, spec.engine, spec.cluster, capacity, size, model, least)
    return {figure.name: (figure.value, figure.why) for figure in found}


def test_every_size_is_shown_with_its_reason():
    job = make_job(sampling=SHORT, engine={"max_model_len": 512, "replicas": [1, 2]})
    found = shown(job, imagined("H200", 2, 32), describe(LLAMA_8B, {}))
    values = {name: value for name, (value, _) in found.items()}
    assert values == {
        "device": "gpu",
        "replicas": "1 to 2",
        "GPUs": "1 to 2",
        "engines a GPU": "2",
        "engines": "2 to 4",
        "max_num_seqs": "1024",
        "max_num_batched_tokens": "16384",
        "max_model_len": "512",
        "KV cache an engine": "39.7 GiB",
        "rows a shard": "1,563",
        "batch_size": "256",
        "max_concurrent_batches": "2",
        "tasks in flight an engine": "3",
        "uncommitted shards": "24",
        "prepare tasks": "up to 60",
        "finish tasks": "up to 120",
    }
    assert all(why for _, why in found.values())
    assert "ceil(1024 / 1,563) + 1" in found["max_concurrent_batches"][1]
    assert "(32 CPUs - 2 for engines)" in found["prepare tasks"][1]


def test_a_small_run_shows_no_more_shards_than_it_has():
    found = shown(make_job(), NO_GPU, None, rows=3)
    for name in ("max_concurrent_batches", "tasks in flight an engine", "uncommitted shards"):
        assert found[name] == ("1", "all shards of the run"), name


def test_what_is_shown_follows_the_job():
    job = make_job(
        engine={"max_num_batched_tokens": 99, "max_concurrent_batches": 7, "device": "cpu"},
        cluster={"prepare": {"concurrency": 2}},
    )
    found = shown(job, NO_GPU, None)
    assert found["max_num_batched_tokens"] == ("99", "engine.max_num_batched_tokens")
    assert found["max_concurrent_batches"] == ("7", "engine.max_concurrent_batches")
    assert found["prepare tasks"] == ("up to 2", "cluster.prepare.concurrency")
    assert found["KV cache an engine"][0] == "1 GiB" and "GPUs" not in found
    unknown = shown(make_job(engine={"model": "owner/name"}), ONE, None)
    assert unknown["KV cache an engine"][0] == "unknown"
    single = shown(make_job(sampling=LONG), ONE, describe(LLAMA_8B, {}))
    assert "vLLM measures it" in single["KV cache an engine"][1]


def test_the_kv_cache_shown_counts_weights_that_stay_in_the_nodes_memory():
    """As what is warned of does."""
    model = describe(LLAMA_8B, {})
    job = make_job(sampling=LONG, engine={"cpu_offload_gb": 8})
    whole = shown(make_job(sampling=LONG), ONE, model)["KV cache an engine"]
    value, why = shown(job, ONE, model)["KV cache an engine"]
    assert float(value.split()[0]) == pytest.approx(float(whole[0].split()[0]) + 8, abs=0.11)
    assert "weights 7.0 GiB" in why and "weights 15.0 GiB" in whole[1]


def test_prepared_images_are_counted_as_their_tokens_and_not_as_text():
    """Of 600 KB a row, which as text would be 150,000 tokens."""
    shown = {"template": "Describe it.", "images": {"columns": ["photo"]}}
    text, image = (
        cost.Tokens.of(row_spec(make_job(sampling={"max_tokens": 32}, prompt=prompt)), 600_000)
        for prompt in ({"template": "Describe: {text}"}, shown)
    )
    assert text.own > 150_000
    assert 60 < image.own < 80 and image.typical < 128


def test_answers_with_a_form_are_sized_alike_wherever_the_job_names_the_form(tmp_path):
    """Asking vLLM for a grammar costs the same whoever wrote it, under the same backend."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    path = tmp_path / "missing.json"  # sizes need no look at it
    sampling = {"max_tokens": 20}
    typed = [{"uri": "out", "schema_model": form} for form in (schema, str(path), "no.module:A")]
    jobs = [job_dict(sampling=sampling, output=output) for output in typed]
    asked = {"sampling": {**sampling, "structured_outputs": {"json": schema}}}
    guidance = {"structured_outputs_config": {"backend": "guidance"}}
    jobs.append(job_dict(**asked, engine=guidance))
    xgrammar = row_spec(BatchJob.from_dict(job_dict(**asked)))
    plain = BatchJob.from_dict(job_dict(sampling=sampling))
    have, model = imagined("H100", 1, 16), describe(LLAMA_8B, {})
    sizes, tokens = [], []
    for job in map(BatchJob.from_dict, jobs):
        tokens.append(cost.Tokens.of(row_spec(job), 1000.0))
        size = sizes_of(size_spec(job), 100_000, 1000.0, have, model)
        sizes.append((size.pool, size.max_num_seqs, size.rate))
    assert {one.form for one in tokens} == {"guidance"} and xgrammar.form == "xgrammar"
    assert all(one == tokens[0] for one in tokens)
    assert all(one == sizes[0] for one in sizes)
    assert not row_spec(plain).form and row_spec(plain).expected == 0.0
    choices = [{"choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}]
    one, other = (BatchJob.from_dict(job_dict(sampling=fields)) for fields in choices)
    assert row_spec(one) == row_spec(other)
