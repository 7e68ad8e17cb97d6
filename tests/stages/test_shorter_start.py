from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from prefect_raybatch.stages.vllm.shorter_start import (
    MEASURED_ONCE,
    memory_settings,
    with_fewer_graphs,
)


@pytest.mark.parametrize(("seqs", "largest", "count"), [(1024, 512, 22), (100, 192, 12), (4, 8, 4)])
def test_graphs_reach_as_far_as_vllms_own(seqs: int, largest: int, count: int) -> None:
    sizes = with_fewer_graphs({"max_num_seqs": seqs})["compilation_config"][
        "cudagraph_capture_sizes"
    ]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert (sizes[-1], len(sizes)) == (largest, count)
    assert max(b - a for a, b in pairwise(sizes)) <= 32, "too much padding"


@pytest.mark.parametrize(
    "given",
    [
        {"compilation_config": {"mode": 3}},
        {"enforce_eager": True},
        {"speculative_config": {"method": "ngram"}},
    ],
)
def test_graphs_of_the_job_stay_as_they_are(given: dict[str, Any]) -> None:
    arguments = {"max_num_seqs": 256, **given}
    assert with_fewer_graphs(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "images", "kept"),
    [
        ({}, False, True),
        ({"max_model_len": 512, "quantization": "fp8"}, False, True),
        ({"gpu_memory_utilization": 0.5}, False, False),
        ({"kv_cache_memory_bytes": 1 << 30}, False, False),
        ({}, True, False),
    ],
)
def test_memory_is_measured_anew_where_the_key_does_not_tell_it_apart(
    arguments: dict[str, Any], images: bool, kept: bool
) -> None:
    assert memory_settings(arguments, images) == (MEASURED_ONCE if kept else {})
