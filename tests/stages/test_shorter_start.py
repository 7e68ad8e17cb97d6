from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.needs import needs_vllm

from prefect_raybatch.spec.engine import EngineFields
from prefect_raybatch.stages.vllm.shorter_start import (
    DECIDE_GRAPHS,
    KERNEL_CACHE,
    MEASURED_ONCE,
    memory_settings,
    share_kernel_cache,
    with_fewer_graphs,
)

HOPPER, BLACKWELL = 9, 10


@pytest.mark.parametrize(("seqs", "largest", "count"), [(1024, 512, 22), (100, 192, 12), (4, 8, 4)])
def test_graphs_are_few_and_near_enough_to_each_other(seqs: int, largest: int, count: int) -> None:
    arguments = with_fewer_graphs({"max_num_seqs": seqs}, HOPPER)
    sizes = arguments["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert (sizes[-1], len(sizes)) == (largest, count)
    assert max(b - a for a, b in pairwise(sizes)) <= 32, "too much padding"


@pytest.mark.parametrize("name", DECIDE_GRAPHS)
def test_graphs_of_the_job_stay_as_they_are(name: str) -> None:
    arguments = {"max_num_seqs": 256, name: {"mode": 3}}
    assert with_fewer_graphs(arguments, HOPPER) == arguments


def test_graphs_stay_as_they_are_where_vllm_has_more() -> None:
    assert with_fewer_graphs({"max_num_seqs": 256}, BLACKWELL) == {"max_num_seqs": 256}


def test_an_engine_that_pools_has_no_graphs() -> None:
    arguments = {"max_num_seqs": 256, "runner": "pooling"}
    made = with_fewer_graphs(arguments, HOPPER)
    assert made == {**arguments, "compilation_config": {"cudagraph_mode": "NONE"}}


@pytest.mark.whole
@needs_vllm
def test_each_argument_that_decides_about_graphs_is_one_of_vllms() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert set(DECIDE_GRAPHS) <= set(EngineArgs.__dataclass_fields__)


@pytest.mark.parametrize(
    ("given", "more", "kept"),
    [
        ({}, {}, True),
        ({"max_model_len": 512, "quantization": "fp8", "load_format": "dummy"}, {}, True),
        ({"gpu_memory_utilization": 0.5}, {}, False),
        ({"kv_cache_memory_bytes": 1 << 30}, {}, False),
        ({"load_format": "runai_streamer"}, {}, False),
        ({}, {"images": True}, False),
        ({}, {"gpus": 2}, False),
        ({}, {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, False),
    ],
)
def test_memory_is_measured_anew_where_vllm_does_not_tell_engines_apart(
    given: EngineFields, more: dict[str, Any], kept: bool
) -> None:
    request = SimpleNamespace(vllm_arguments=given, env=more.get("env", {}))
    found = memory_settings(cast(Any, request), more.get("gpus", 1), more.get("images", False))
    assert found == ({MEASURED_ONCE: "1"} if kept else {})


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "home/.triton/cache"),
        ({"TRITON_HOME": "t"}, "t/.triton/cache"),
        ({KERNEL_CACHE: "kept", "TRITON_HOME": "t"}, "kept"),
    ],
)
def test_engines_of_all_sizes_find_the_same_kernels(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (KERNEL_CACHE, "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "home", **variables}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    share_kernel_cache()
    assert os.environ[KERNEL_CACHE] == str(tmp_path / folder)
    share_kernel_cache()
    assert os.environ[KERNEL_CACHE] == str(tmp_path / folder)


def test_a_folder_that_cannot_be_made_leaves_the_choice_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(KERNEL_CACHE, raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "file"))
    share_kernel_cache()
    assert KERNEL_CACHE not in os.environ
