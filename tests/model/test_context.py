"""How many tokens a model takes, by its config.json; and that vLLM takes it for as many."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.small import make_job

from prefect_raybatch.compile.job import compile_job
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model.check import check
from prefect_raybatch.model.context import ORIGINAL, ModelConfig, longest_context, own_context
from prefect_raybatch.model.memory import describe

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
GPT2 = {
    **{name: value for name, value in LLAMA.items() if name != "max_position_embeddings"},
    "n_positions": 512,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
VISION = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": {**LLAMA, "model_type": "qwen2_5_vl_text"},
    "vision_config": {"hidden_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 64},
}

CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "as it is": (LLAMA, 512, 512),
    "linear": ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1024, 1024),
    "dynamic": ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1024, 1024),
    "yarn": (
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 128}},
        512,
        512,
    ),
    "llama3": (
        {
            **LLAMA,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        512,
        512,
    ),
    "longrope": (
        {
            **PHI3,
            "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", **FACTORS},
        },
        128,
        512,
    ),
    "rope_parameters": (
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        1024,
        1024,
    ),
    "nested": (VISION, 512, 512),
}


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_that_a_model_takes(name: str) -> None:
    config, own, longest = CASES[name]
    assert (own_context(config), longest_context(config)) == (own, longest)


@pytest.mark.parametrize("original", [64, 256])
def test_of_the_lengths_that_versions_of_vllm_accept_the_shortest_counts(original: int) -> None:
    """vLLM before 0.30 scales the original length, later ones take max_position_embeddings."""
    yarn = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: original}
    assert longest_context({**LLAMA, "rope_scaling": yarn}) == min(512, 4 * original)


def test_gemma_3_holds_its_factor_and_what_says_nothing_is_unknown() -> None:
    scaled = {"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 8.0}}
    assert longest_context({"text_config": {**scaled, "model_type": "gemma3_text"}}) == 512
    assert own_context({}) is None and own_context({"max_position_embeddings": None}) is None
    assert own_context({"n_positions": 1024, "seq_length": 2048}) == 1024
    assert own_context({"max_position_embeddings": 8192, "model_max_length": 131072}) == 131072


@pytest.mark.e2e
@pytest.mark.whole
def test_vllm_takes_them_for_as_many(tmp_path: Path) -> None:
    from vllm.config.model import _get_and_verify_max_len
    from vllm.transformers_utils import model_arch_config_convertor as convertors
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    for name, (config, own, longest) in CASES.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        whole = get_config(str(folder), trust_remote_code=False)
        text = get_hf_text_config(whole)
        known = convertors.ModelArchConfigConvertorBase(whole, text).derive_max_model_len_and_key()
        sizes = SimpleNamespace(derived_max_model_len_and_key=known)

        def taken(length: int | None, text: Any = text, sizes: Any = sizes) -> int:
            return int(_get_and_verify_max_len(text, sizes, None, length, False, None))

        assert (taken(None), taken(longest)) == (own, longest), name
        with pytest.raises(ValueError, match="max_model_len"):
            taken(longest + 1)


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_a_context_that_no_engine_takes_is_refused_by_the_plan(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VISION))
    model = {"source": str(tmp_path), "name": "tiny"}

    def look(**engine: Any) -> None:
        job = make_job(engine={"model": str(tmp_path), "task": task, **engine})
        spec = compile_job(job)
        check(spec.engine.model, spec.prompt, spec.sampling, model, files=False)

    look(max_model_len=512)
    with pytest.raises(ConfigError, match=r"max_model_len: 8,192 is more than the 512 tokens"):
        look(max_model_len=8192)
    look(max_model_len=8192, hf_overrides={"text_config": {"max_position_embeddings": 8192}})
    look(max_model_len=8192, env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})


@pytest.mark.parametrize(
    ("config", "overrides", "length"),
    [
        (LLAMA, {"max_position_embeddings": 64}, 64),
        (LLAMA, {"architectures": ["Other"]}, own_context(LLAMA)),
        ({**LLAMA, "rope_parameters": LINEAR}, {"rope_scaling": {**LINEAR, "factor": 4.0}}, 2048),
        (VISION, {"text_config": {"max_position_embeddings": 64}}, 64),
        (VISION, {"text_config": {"vocab_size": 9}}, own_context(VISION)),
    ],
)
def test_an_overridden_context_length_counts(
    config: ModelConfig, overrides: dict[str, Any], length: int
) -> None:
    arguments = {"hf_overrides": overrides}
    assert own_context(config, arguments) == length
    assert describe({**LLAMA, **config}, arguments).context == length


def test_an_override_counts_in_place_of_the_field_that_a_model_has_for_it() -> None:
    assert own_context(GPT2) == 512
    assert own_context(GPT2, {"hf_overrides": {"max_position_embeddings": 1024}}) == 1024
    assert own_context(GPT2, {"hf_overrides": {"n_positions": 64}}) == 64


@pytest.mark.parametrize("nested", [None, {}, [], "llama", 7])
def test_a_text_config_that_is_none_counts_for_nothing(nested: Any) -> None:
    config = {**LLAMA, "text_config": nested}
    assert own_context(config) == own_context(LLAMA)
    assert describe(config, {}) == describe(LLAMA, {})
