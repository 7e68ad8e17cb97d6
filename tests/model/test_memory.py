"""What an engine takes of a GPU, from the model's own config."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.models import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, MIXTRAL

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model.arguments import USABLE, EngineArguments
from prefect_raybatch.model.memory import describe, packed, share
from prefect_raybatch.sizing.cards import CARDS, card, without_nvlink

QWEN_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "mlp_only_layers": [],
}
H200 = 141 * 10**9
SIZES = EngineArguments(max_num_batched_tokens=16384, max_num_seqs=256)


@pytest.mark.parametrize(
    ("config", "params", "active"),
    [  # billions, by the model cards
        (LLAMA_8B, 8.03, 7.5),
        (LLAMA_70B, 70.6, 69.5),
        (MIXTRAL, 46.7, 12.7),
        (QWEN_30B_A3B, 30.5, 3.0),
        (DEEPSEEK_V3, 671, 36.6),
    ],
    ids=["llama-8b", "llama-70b", "mixtral", "qwen-moe", "deepseek"],
)
def test_known_models_have_their_known_sizes(config, params, active):
    found = describe(config, {})
    assert found.params == pytest.approx(params * 1e9, rel=0.01)
    assert found.active == pytest.approx(active * 1e9, rel=0.05)


def test_a_text_model_inside_another_is_found():
    assert describe({"text_config": LLAMA_8B}, {}) == describe(LLAMA_8B, {})


def test_kv_cache_a_token():
    llama = describe(LLAMA_8B, {})
    assert llama.kv_bytes(10) == 10 * 128 * 1024
    assert llama.kv_bytes(10, tensor=4) == 10 * 32 * 1024
    assert llama.kv_bytes(10, tensor=16) == 10 * 16 * 1024  # 8 heads: no more than 8 parts
    assert llama.kv_bytes(10, pipeline=2) == 10 * 64 * 1024
    assert describe(LLAMA_8B, {"kv_cache_dtype": "fp8"}).kv_bytes(10) == 10 * 64 * 1024
    latent = describe(DEEPSEEK_V3, {})
    assert latent.kv_bytes(1) == latent.kv_bytes(1, tensor=8) == 61 * (512 + 64) * 2


def test_layers_with_a_window_keep_no_more_than_it():
    kinds = ["sliding_attention"] * 24 + ["full_attention"] * 8
    found = describe({**LLAMA_8B, "layer_types": kinds, "sliding_window": 1024}, {})
    assert found.kv_bytes(1000) == 1000 * 128 * 1024
    assert found.kv_bytes(9000) == (9000 * 8 + 1024 * 24) * 4096


@pytest.mark.parametrize(
    ("changes", "arguments", "stored", "gigabytes"),
    [
        ({}, {}, None, 16.06),
        ({"torch_dtype": "float32"}, {}, None, 16.06),  # vLLM halves it
        ({}, {"dtype": "float32"}, None, 32.12),
        ({"torch_dtype": "float32"}, {}, 32_120_000_000, 16.06),
        ({}, {"dtype": "half"}, 16_000_000_000, 16.0),
        ({}, {"quantization": "fp8"}, 16_060_000_000, 9.08),  # made when it is loaded
        ({"quantization_config": {"quant_method": "fp8"}}, {}, None, 9.08),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, 9_100_000_000, 9.1),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, None, 5.77),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, {}, None, 9.08),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, {}, None, 9.08),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            {},
            None,
            5.77,
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
                }
            },
            {},
            None,
            5.77,
        ),
        ({}, {"quantization": "bitsandbytes"}, None, 5.77),
    ],
)
def test_weights_by_dtype_and_quantization(changes, arguments, stored, gigabytes):
    found = describe({**LLAMA_8B, **changes}, arguments, stored)
    assert found.weights == pytest.approx(gigabytes * 1e9, rel=0.005)


def test_engines_share_a_gpu_and_leave_some_free():
    model = describe(LLAMA_8B, {})
    for engines in (2, 3, 4):
        one = share(model, SIZES, H200, engines)
        assert engines * (one.weights + one.working + one.kv_cache) <= USABLE * H200
        arguments = packed(model, SIZES, H200, engines)
        assert arguments["kv_cache_memory_bytes"] == one.kv_cache
        assert arguments["gpu_memory_utilization"] * engines <= USABLE


def test_what_the_job_says_of_memory_is_for_all_engines_of_a_gpu():
    model = describe(LLAMA_8B, {})
    half = packed(model, replace(SIZES, more={"gpu_memory_utilization": 0.6}), H200, 2)
    assert half["gpu_memory_utilization"] == 0.3
    assert half["kv_cache_memory_bytes"] < packed(model, SIZES, H200, 2)["kv_cache_memory_bytes"]
    own = packed(model, replace(SIZES, more={"kv_cache_memory_bytes": 7}), H200, 3)
    assert own["kv_cache_memory_bytes"] == 7


def test_what_does_not_fit_is_said_with_the_figures():
    with pytest.raises(ConfigError, match=r"7 engines do not fit on a GPU of 131.3 GiB: .*15.0"):
        share(describe(LLAMA_8B, {}), SIZES, H200, 7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"intermediate_size": None}, "no intermediate_size"),
        ({"hidden_size": None, "vocab_size": None}, "no hidden_size, vocab_size"),
        ({"mamba_d_state": 16}, "no plain attention layers"),
    ],
)
def test_a_config_that_says_too_little_is_refused(changes, said):
    with pytest.raises(ConfigError, match=f"{said}.*kv_cache_memory_bytes"):
        describe({**LLAMA_8B, **changes}, {})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("A100-80G", "A100-80G"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", None),
        ("GB200", None),
        ("", None),
    ],
)
def test_cards_are_known_by_rays_and_by_the_makers_name(name, kind):
    found = card(name)
    assert (found.name if found else None) == kind


def test_which_cards_have_no_nvlink():
    assert {name for name in CARDS if without_nvlink(name)} == {"L4", "L40S", "A10G", "A10", "T4"}
    assert without_nvlink("RTX-PRO-6000") and without_nvlink("NVIDIA GeForce RTX 4090")
    assert not without_nvlink("MI300X")


def test_adapters_take_room_on_the_gpu():
    """All linear layers and the embeddings, for each adapter that a step may hold, at one rank."""
    asked = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
    llama = describe(LLAMA_8B, asked)
    layer = 3 * 4096 + 4096 + 2 * 4096 + 14336  # first matrices: qkv, o, gate and up, down
    layer += 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert llama.adapters() == 4 * 16 * 2 * (32 * layer + 2 * (4096 + 128256))
    assert describe(LLAMA_8B, {}).adapters() == 0
    assert 0.5 * llama.adapters() < llama.adapters(tensor=4) < 0.6 * llama.adapters()
    assert llama.adapters(pipeline=2) == llama.adapters() / 2
    plain, room = (share(m, SIZES, H200, 2).kv_cache for m in (describe(LLAMA_8B, {}), llama))
    assert plain - room == llama.adapters()
    many = describe(LLAMA_8B, {**asked, "max_loras": 64, "max_lora_rank": 256})
    with pytest.raises(ConfigError, match="GiB for adapters"):
        share(many, SIZES, H200, 2)
