"""What an engine takes of a GPU, from the model's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.stages.memory import (
    USABLE,
    kv_token_bytes,
    packed,
    share,
    weight_bytes,
)

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
H200 = 141 * 10**9
SIZES = {"max_num_batched_tokens": 16384, "max_num_seqs": 256}


def folder_of(tmp_path: Path, **changes: object) -> Path:
    config = {name: value for name, value in {**LLAMA_8B, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_llama_8b_has_its_known_size(tmp_path):
    # 8.03 billion parameters, by its model card; 128 KiB of KV cache a token.
    assert weight_bytes(folder_of(tmp_path)) == pytest.approx(2 * 8.03e9, rel=0.001)
    assert kv_token_bytes(tmp_path) == 128 * 1024


def test_weight_files_count_where_there_are_any(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "a.safetensors").write_bytes(b"x" * 300)
    (folder / "b.safetensors").write_bytes(b"x" * 700)
    (folder / "old.bin").write_bytes(b"x" * 999)  # the same weights in another form
    assert weight_bytes(folder) == 1000


def test_engines_share_a_gpu_and_leave_some_free(tmp_path):
    folder = folder_of(tmp_path)
    for engines in (2, 3, 4):
        one = share(folder, SIZES, H200, engines)
        assert engines * (one.weights + one.working + one.kv_cache) <= USABLE * H200
        arguments = packed(folder, SIZES, H200, engines)
        assert arguments["kv_cache_memory_bytes"] == one.kv_cache
        assert arguments["gpu_memory_utilization"] * engines <= USABLE + 0.01
    assert packed(folder, {**SIZES, "gpu_memory_utilization": 0.2}, H200, 3)[
        "gpu_memory_utilization"
    ] == pytest.approx(0.2)


def test_what_does_not_fit_is_said_with_the_figures(tmp_path):
    with pytest.raises(ConfigError, match=r"7 engines do not fit on a GPU of 131.3 GiB: .*15.0"):
        share(folder_of(tmp_path), SIZES, H200, 7)


def test_a_config_that_says_too_little_is_refused(tmp_path):
    folder = folder_of(tmp_path, intermediate_size=None)
    with pytest.raises(ConfigError, match=r"no intermediate_size.*kv_cache_memory_bytes"):
        weight_bytes(folder)
