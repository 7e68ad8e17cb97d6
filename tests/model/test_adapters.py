"""LoRA adapters: which fields say them, how they are pinned, and which do not fit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_models
from helpers.small import MODEL, make_job

from prefect_raybatch.compile.job import model_request
from prefect_raybatch.compile.resolved import fingerprint
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.model import adapters

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.lora(tmp_path / "polite", "demo", CONFIG)


def job(**adapter: Any) -> Any:
    return make_job(engine={"model": "demo", **adapter})


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"engine": {"adapters": {"a": "x/y"}}}, "set both or neither"),
        ({"prompt": {"template": "a", "adapter_column": "c"}}, "set both or neither"),
        (
            {"engine": {"adapter": "x/y"}, "prompt": {"template": "a", "adapter_column": "c"}},
            "engine.adapter applies to all rows",
        ),
    ],
)
def test_rows_must_know_their_adapter(groups, said):
    with pytest.raises(ConfigError) as refused:
        make_job(**groups)
    assert said in str(refused.value)


def test_the_content_counts_and_not_the_place(folder, tmp_path):
    same = tiny_models.lora(tmp_path / "copy", "demo", CONFIG)
    other = tiny_models.lora(tmp_path / "other", "demo", CONFIG, seed=2)
    prints = [fingerprint(job(adapter=str(f)), MODEL).fingerprint for f in (folder, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert "engine.adapters" not in fingerprint(job(), MODEL).parts


def test_a_node_keeps_its_own_copy_of_what_was_pinned(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "cache"))
    pinned = adapters.pin_adapters(model_request(job(adapter=str(folder)).engine))[""]
    assert (pinned["source"], pinned["rank"]) == (str(folder), 4)
    own = Path(adapters.adapter_path(pinned))
    before = (own / adapters.ADAPTER_WEIGHTS).read_bytes()
    tiny_models.lora(folder, "demo", CONFIG, seed=2)
    assert (Path(adapters.adapter_path(pinned)) / adapters.ADAPTER_WEIGHTS).read_bytes() == before
    monkeypatch.setenv("RAYBATCH_CACHE", str(tmp_path / "another"))
    with pytest.raises(ConfigError, match="changed after the run was planned"):
        adapters.adapter_path(pinned)


def test_vllm_makes_room_for_them(folder):
    pinned = adapters.pin_adapters(model_request(job(adapter=str(folder)).engine))
    room = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8}
    assert adapters.arguments(pinned, {}) == room
    many = {str(i): {"rank": i} for i in range(1, 41)}
    assert adapters.arguments(many, {"max_loras": 2}) == {
        "enable_lora": True,
        "max_cpu_loras": 32,
        "max_lora_rank": 64,
    }
    assert adapters.arguments({}, {}) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 8}, "weight needs hidden_size 16, but the model has 8"),
        ({"intermediate_size": 8}, "intermediate_size 32, but the model has 8"),
        ({"num_hidden_layers": 1}, "it changes layer 1, but the model has 1 layers"),
    ],
)
def test_an_adapter_of_another_model_is_told_by_its_tensors(folder, change, said):
    engine = job(adapter=str(folder)).engine
    adapters.check_adapters_fit(
        model_request(engine), adapters.pin_adapters(model_request(engine)), CONFIG
    )
    with pytest.raises(ConfigError) as refused:
        adapters.check_adapters_fit(
            model_request(engine),
            adapters.pin_adapters(model_request(engine)),
            {**CONFIG, **change},
        )
    assert "does not fit the model demo" in str(refused.value)
    assert said in str(refused.value)


def test_another_name_of_the_model_is_a_warning(folder, caplog):
    engine = job(adapter=str(tiny_models.lora(folder, "someone/else", CONFIG))).engine
    with caplog.at_level(logging.WARNING):
        adapters.check_adapters_fit(
            model_request(engine), adapters.pin_adapters(model_request(engine)), CONFIG
        )
    assert "was made for someone/else, but engine.model is demo" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "has use_dora, unsupported"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save, unsupported"),
        ({"bias": "all"}, "trains biases"),
        ({"peft_type": "IA3"}, "not describe a LoRA adapter"),
        ({"r": 0}, "rank r must be an integer from 1 to 512"),
    ],
)
def test_what_vllm_does_not_load_is_refused(folder, change, said):
    path = folder / adapters.ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}), encoding="utf-8")
    engine = job(adapter=str(folder)).engine
    with pytest.raises(ConfigError) as refused:
        adapters.check_adapters_fit(
            model_request(engine), adapters.pin_adapters(model_request(engine)), CONFIG
        )
    assert said in str(refused.value)


def test_no_adapter_there(folder, tmp_path):
    with pytest.raises(ConfigError, match="neither a local folder"):
        adapters.pin_adapters(model_request(job(adapter=str(tmp_path / "gone")).engine))
    (folder / adapters.ADAPTER_WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        adapters.pin_adapters(model_request(job(adapter=str(folder)).engine))
    tiny_models.lora(folder, "demo", CONFIG)
    (folder / adapters.ADAPTER_WEIGHTS).write_bytes(b"version https://git-lfs")
    engine = job(adapter=str(folder)).engine
    with pytest.raises(ConfigError, match="not a safetensors file"):
        adapters.check_adapters_fit(
            model_request(engine), adapters.pin_adapters(model_request(engine)), CONFIG
        )
