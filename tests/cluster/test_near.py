"""Engines that are up are taken where they are nearly what the run would start."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from helpers.models import LLAMA_8B
from helpers.small import MODEL, make_job

from prefect_raybatch import cpu_limit
from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.cluster.engine_reuse import EngineShape, closest_running, sizes_for_shape
from prefect_raybatch.cluster.pipeline import warm_kind_of
from prefect_raybatch.cluster.prewarm import Guess, PrewarmPlan, plan_prewarm
from prefect_raybatch.cluster.warm import WarmKind
from prefect_raybatch.compile.job import compile_job, size_spec
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.model.memory import describe
from prefect_raybatch.sizing.sizes import Capacity, Sizing, imagined, sizes_of
from prefect_raybatch.spec.sizes import SizeSpec

H200 = imagined("H200", 1, 16)
LONG = {"max_tokens": 512}


def job_of(sampling: dict[str, Any] | None = None, **engine: Any) -> BatchJob:
    return make_job(engine={"model": "demo", **engine}, sampling=sampling or LONG)


def sizes(job: BatchJob, row_bytes: float = 300.0, capacity: Capacity = H200) -> Sizing:
    return sizes_asked(size_spec(job), row_bytes, capacity)


def sizes_asked(spec: SizeSpec, row_bytes: float = 300.0, capacity: Capacity = H200) -> Sizing:
    return sizes_of(spec, 1_000_000, row_bytes, capacity, describe(LLAMA_8B, {}))


def kind_of(job: BatchJob, size: Sizing) -> WarmKind | None:
    return warm_kind_of(compile_job(job), MODEL, size)


def taken(job: BatchJob, up: Sizing, row_bytes: float = 300.0) -> Sizing:
    """The sizes of a run where engines of these are up."""
    waiting = kind_of(job, up)
    assert waiting is not None
    ask, spec = partial(sizes_asked, row_bytes=row_bytes), size_spec(job)
    found, kind = closest_running(spec, ask, ask(spec), partial(kind_of, job), [waiting])
    assert kind == kind_of(job, found)
    return found


def test_engines_that_are_two_per_cent_slower_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    job = job_of({"max_tokens": 8})
    own, up = sizes(job), sizes(job_of({"max_tokens": 8}, max_num_seqs=512))
    assert own.max_num_seqs == 1024 and own.rate > up.rate >= 0.98 * own.rate
    with caplog.at_level(logging.INFO):
        found = taken(job, up)
    assert EngineShape.of(found) == EngineShape.of(up) and found.rate == up.rate
    assert "max_num_seqs 512, not 1024" in caplog.text and "% of the rate" in caplog.text


def test_what_is_slower_than_that_is_not_taken() -> None:
    job, slow = job_of(), sizes(job_of(max_num_seqs=256))
    own = sizes(job)
    assert slow.rate < 0.9 * own.rate
    assert taken(job, slow) == own


def test_what_the_job_names_is_what_it_gets() -> None:
    short = {"max_tokens": 24}
    named = job_of(short, max_num_seqs=512)
    assert taken(named, sizes(job_of(short))) == sizes(named)
    near = sizes_for_shape(
        size_spec(named), sizes_asked, sizes(named), EngineShape.of(sizes(job_of(short)))
    )
    assert near is None


def test_rows_that_their_kv_cache_would_not_hold_keep_engines_of_their_own() -> None:
    job = job_of()
    own = sizes(job, 6000.0)
    assert own.max_num_seqs < 1024 == sizes(job).max_num_seqs
    assert sizes(job_of(max_num_seqs=1024), 6000.0).rate == 0.0, "such rows have no room"
    assert taken(job, sizes(job), 6000.0) == own


def test_where_nothing_is_known_of_the_model_only_the_same_will_do() -> None:
    job = job_of()
    own = sizes_of(size_spec(job), 1000, 300.0, H200, None)
    assert own.rate == 0.0
    up = kind_of(job, sizes(job))
    assert up is not None
    ask = partial(sizes_of, rows=1000, row_bytes=300.0, capacity=H200, model=None)
    assert closest_running(size_spec(job), ask, own, partial(kind_of, job), [up])[0] == own


@pytest.mark.parametrize("kind", ["H200", "L4"])
@pytest.mark.parametrize(
    "sampling", [LONG, {"max_tokens": 24}, {"choice": ["yes", "no", "perhaps"]}]
)
def test_what_starts_beside_the_copy_is_taken_once_the_rows_are_known(
    monkeypatch: pytest.MonkeyPatch, kind: str, sampling: dict[str, Any]
) -> None:
    """Whatever rows the guess allows for."""
    monkeypatch.setattr(sized, "model_sizes", lambda *_: (describe(LLAMA_8B, {}), ""))
    monkeypatch.setattr(cpu_limit, "usable_cpus", lambda: 16)
    job, have, begun = job_of(sampling), imagined(kind, 1, 16), 0
    for usual in (40.0 * 1.3**n for n in range(24)):
        guess = Guess(1_000_000, tuple(usual * part for part in (0.67, 0.82, 1.0, 1.22, 1.5)))
        plan = plan_prewarm(compile_job(job), MODEL, have, guess)
        if not isinstance(plan, PrewarmPlan):
            assert "depend on the length of rows" in plan
            continue
        begun += 1
        for row_bytes in guess.row_bytes:
            ask, spec = partial(sizes_asked, row_bytes=row_bytes, capacity=have), size_spec(job)
            _, its = closest_running(spec, ask, ask(spec), partial(kind_of, job), [plan.kind])
            assert its == plan.kind, (usual, row_bytes)
    assert begun >= 16, "of 24 lengths"
